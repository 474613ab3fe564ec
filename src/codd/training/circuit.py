"""Training a circuit for a frozen backbone: the exact conditional objective, by Adam on free logits.

For a window x with masked positions M and observed ones O, and the network's answer phi, what is maximised is

    log p(x_M | x_O, phi) = log F(all of x hard) - log F(x_O hard, phi soft on M) + log phi(x_M)

So the circuit learns what the factorized answer misses, not the text again. It starts near the neutral circuit, for
which the product is the factorized answer itself.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import HMM
from codd.coupling import Coupled
from codd.errors import Diverged, InvalidInput
from codd.training.noise import add_noise, positions_in
from codd.training.objective import to_tensors
from codd.training.recipe import NoiseRecipe
from codd.training.rows import PADDING, Rows

RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Shares of a block that are masked when a circuit is measured."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CircuitSettings:
    """Everything that makes a circuit what it is, beside the backbone and the rows."""

    num_states: int = 256
    window: int = 32
    steps: int = 3000
    windows: int = 2
    """At most so many of each row: a step sees this many times its rows."""
    lr: float = 1.5e-2
    betas: tuple[float, float] = (0.9, 0.99)
    warmup: int = 50
    init_noise: float = 0.5
    """Deviation of the logits at the start."""
    block_share: float = 0.5
    """Share of rows with one partly masked block a text, given what is left of it; the others are masked anywhere."""
    seed: int = 0
    report_every: int = 50


class Windows(NamedTuple):
    """Some windows as the circuit meets them."""

    logits: Float[Tensor, "W S V"]
    """The network's, with the mask excluded."""
    tokens: Int[Tensor, "W S"]
    """The truth, masked or not."""
    masked: Bool[Tensor, "W S"]
    """A window that is there only to fill the batch has none."""


class FreeLogits(NamedTuple):
    """The parameters: any numbers will do."""

    initial: Float[Tensor, " N"]
    transition: Float[Tensor, "N N"]
    emission: Float[Tensor, "N V"]

    @classmethod
    def near_neutral(cls, settings: CircuitSettings, vocab_size: int, device: torch.device) -> "FreeLogits":
        """Drawn on the CPU, so that every device starts alike."""
        generator = torch.Generator().manual_seed(settings.seed)
        states = settings.num_states

        def draw(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * settings.init_noise).to(device).requires_grad_()

        return cls(draw(states), draw(states, states), draw(states, vocab_size))

    def circuit(self, window: int) -> HMM:
        """The circuit that they stand for; its queries are differentiable in them."""
        initial, transition, emission = (logits.log_softmax(-1) for logits in self)
        return HMM(initial, transition, emission, window=window, validate=False)


def conditional_loss(circuit: HMM, windows: Windows) -> Float[Tensor, ""]:
    """The negative log-probability of what is masked, per masked token."""
    joint = Coupled(circuit, logits=windows.logits, tokens=windows.tokens, masked=windows.masked)
    return -joint.log_prob(windows.tokens).sum() / windows.masked.sum().clamp(min=1)


def factorized_loss(windows: Windows) -> Float[Tensor, ""]:
    """The same of the network by itself: what the neutral circuit would have."""
    truth = windows.logits.gather(-1, windows.tokens[..., None])[..., 0] - windows.logits.logsumexp(-1)
    return -torch.where(windows.masked, truth, 0).sum() / windows.masked.sum().clamp(min=1)


def train_circuit(
    backbone: Backbone,
    mask_id: int,
    rows_at: Callable[[int], Rows],
    settings: CircuitSettings,
    *,
    report: Callable[[int, dict[str, float], HMM], None] = lambda step, metrics, circuit: None,
    done: Callable[[int], float] | None = None,
) -> HMM:
    """Train on the rows of step 0, 1, ... and give the circuit, on the backbone's device.

    ``done`` says which part of the run lies behind a step, by default its share of the steps: the learning rate falls
    to zero, and the run ends, as it comes to one. A run by the clock gives its own. ``report`` gets the step, the
    losses per masked token since the last time, and the circuit as it is.
    """
    device, passed = backbone.device, done or (lambda step: step / settings.steps)
    logits = FreeLogits.near_neutral(settings, backbone.vocab_size, device)
    optimizer = torch.optim.Adam(logits, lr=settings.lr, betas=settings.betas, fused=device.type == "cuda")
    losses, since, step = torch.zeros(2, device=device), 0, 0
    while (part := passed(step)) < 1:
        generator = torch.Generator(device).manual_seed((settings.seed * 1_000_003 + step) % 2**63)
        windows = draw_windows(backbone, mask_id, rows_at(step), settings, generator)
        loss = conditional_loss(logits.circuit(settings.window), windows)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        rate = _learning_rate(step, part, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses += torch.stack((loss.detach(), factorized_loss(windows)))
        step += 1
        if step % settings.report_every == 0:  # only then is the device waited for
            report(step, _metrics(losses / (step - since), step, rate), _finished(logits, settings))
            losses, since = torch.zeros_like(losses), step
    return _finished(logits, settings)


def _learning_rate(step: int, part: float, settings: CircuitSettings) -> float:
    """Linear warm-up over the first steps, under a cosine that ends with the run."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup))
    return settings.lr * warm * 0.5 * (1 + math.cos(math.pi * part))


def _metrics(losses: Float[Tensor, " 2"], step: int, rate: float) -> dict[str, float]:
    loss, factorized = losses.tolist()
    if not math.isfinite(loss):
        raise Diverged(f"the loss is {loss} after step {step}: the training has diverged. Lower lr or raise warmup.")
    return {"loss": loss, "factorized": factorized, "lr": rate}


def _finished(logits: FreeLogits, settings: CircuitSettings) -> HMM:
    with torch.no_grad():
        return logits.circuit(settings.window)


class Shown(NamedTuple):
    """Rows, and what of them is hidden from the network."""

    tokens: Int[Tensor, "B L"]
    segments: Int[Tensor, "B L"]
    hidden: Bool[Tensor, "B L"]


@torch.no_grad()
def draw_windows(
    backbone: Backbone, mask_id: int, rows: Rows, settings: CircuitSettings, generator: torch.Generator
) -> Windows:
    """Mask the rows, choose windows, ask the network. Nothing here waits for the device."""
    tokens, segments, scored = to_tensors(rows, _CPU)
    if generator.device.type == "cuda":  # a copy from memory that is not pinned may wait
        tokens, segments, scored = (
            x.pin_memory().to(generator.device, non_blocking=True) for x in (tokens, segments, scored)
        )
    hidden, may_begin = mask_rows(segments, scored, int(rows.segments.max()) + 1, settings, generator)
    return look(
        backbone,
        mask_id,
        Shown(tokens, segments, hidden),
        pick(may_begin, settings.windows, generator),
        settings.window,
    )


def mask_rows(
    segments: Int[Tensor, "B L"],
    scored: Bool[Tensor, "B L"],
    texts: int,
    settings: CircuitSettings,
    generator: torch.Generator,
) -> tuple[Bool[Tensor, "B L"], Bool[Tensor, "B n"]]:
    """What is hidden, and where windows may begin: in some rows on a grid, in others at the noised block of a text."""
    size = settings.window
    anywhere, in_block = (
        add_noise(segments, scored, texts, NoiseRecipe(block_share=share, block_length=size), generator)
        for share in (0.0, 1.0)
    )
    blockwise = torch.rand(len(segments), 1, generator=generator, device=segments.device) < settings.block_share
    hidden = torch.where(blockwise, in_block.hidden, anywhere.hidden)
    asked = torch.where(blockwise, in_block.weights, anywhere.weights) > 0
    blocks, grid = _block_ends(segments, hidden & ~asked)[:, size - 1 :], _grid(segments, scored, size, generator)
    return hidden, torch.where(blockwise, blocks, grid) & _inside(segments, scored, asked, size)


def _inside(
    segments: Int[Tensor, "B L"], scored: Bool[Tensor, "B L"], asked: Bool[Tensor, "B L"], size: int
) -> Bool[Tensor, "B n"]:
    """Where a window may begin so that it lies inside the scored tokens of one text and something in it is asked."""
    length = segments.shape[1]
    if length < size:
        raise InvalidInput(f"rows of {length} tokens hold no window of {size}. Use longer rows.")
    one_text = segments[:, : length - size + 1] == segments[:, size - 1 :]
    whole = (scored & (segments != PADDING)).unfold(1, size, 1).all(-1)
    return one_text & whole & asked.unfold(1, size, 1).any(-1)


def _grid(
    segments: Int[Tensor, "B L"], scored: Bool[Tensor, "B L"], size: int, generator: torch.Generator
) -> Bool[Tensor, "B n"]:
    """Beginnings side by side: an answer's from where it begins, those of a prose from anywhere."""
    rank = positions_in(2 * segments + scored)  # of a scored token among those of its text
    prose = rank == positions_in(segments)
    phase = torch.randint(size, (len(segments), 1), generator=generator, device=segments.device)
    return ((rank + phase * prose) % size == 0)[:, : segments.shape[1] - size + 1]


def _block_ends(segments: Int[Tensor, "B L"], beyond: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """The last token of the noised block: what follows is hidden without being asked, or another text.

    The first block of a prose, cut by the row's beginning, is so without a window.
    """
    ends = ~beyond
    ends[:, :-1] &= beyond[:, 1:] | (segments[:, 1:] != segments[:, :-1])
    return ends


def pick(
    may_begin: Bool[Tensor, "B n"], most: int, generator: torch.Generator
) -> tuple[Int[Tensor, "B k"], Bool[Tensor, "B k"]]:
    """Windows of each row by chance, and which of them count: a row with fewer is filled up."""
    keys = torch.rand(may_begin.shape, generator=generator, device=may_begin.device)
    best = torch.where(may_begin, keys, -1.0).topk(min(most, may_begin.shape[1]), dim=1)
    return best.indices, best.values >= 0


def look(
    backbone: Backbone,
    mask_id: int,
    rows: Shown,
    picked: tuple[Int[Tensor, "B k"], Bool[Tensor, "B k"]],
    size: int,
) -> Windows:
    """What the network says there. On a GPU its layers compute in bfloat16; its head, in these places alone, does not.

    The numbers of texts go straight to the network, which keeps those that share a row apart.
    """
    tokens, segments, hidden = rows
    starts, useful = picked
    shown, device = torch.where(hidden, mask_id, tokens), tokens.device
    places = (starts[..., None] + torch.arange(size, device=device)).flatten(1)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        states = backbone.network.states(shown, positions_in(segments), segments=segments)
    states = states.gather(1, places[..., None].expand(-1, -1, states.shape[-1])).to(backbone.dtype)
    logits = backbone.logits(states, shown.gather(1, places)).float()
    logits[..., mask_id] = -torch.inf
    masked = hidden.gather(1, places) & useful.repeat_interleave(size, dim=1)
    return Windows(*(x.reshape(-1, size, *x.shape[2:]) for x in (logits, tokens.gather(1, places), masked)))


class Scores(NamedTuple):
    """Log-likelihoods per masked token."""

    factorized: float
    coupled: float
    tokens: int


@torch.no_grad()
def held_out(
    backbone: Backbone,
    mask_id: int,
    circuit: HMM,
    rows: Rows,
    *,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    at_once: int = 128,
) -> dict[float, Scores]:
    """Of one block a row, given what is left of it, with all to its right masked, at each share of masked tokens.

    The block and the order in which its tokens are masked are the seed's: every circuit is asked the same.
    """
    size, sums = circuit.window or 32, torch.zeros(len(ratios), 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for begin in range(0, len(rows.tokens), at_once):
        part = slice(begin, begin + at_once)
        tokens, segments, scored = to_tensors(Rows(rows.tokens[part], rows.segments[part], rows.scored[part]), _CPU)
        blocks = _grid(segments, scored, size, generator) & _inside(segments, scored, scored, size)
        starts, useful = pick(blocks, 1, generator)
        order = torch.rand(len(tokens), size, generator=generator).argsort(dim=1)
        for i, ratio in enumerate(ratios):
            hidden = _mask_block(segments, scored, starts, order < max(1, round(ratio * size)))
            shown = Shown(*(x.to(backbone.device) for x in (tokens, segments, hidden)))
            windows = look(backbone, mask_id, shown, (starts.to(backbone.device), useful.to(backbone.device)), size)
            count = windows.masked.sum()
            found = (factorized_loss(windows) * count, conditional_loss(circuit, windows) * count, count)
            sums[i] += torch.stack(found).double().cpu()
    return {
        ratio: Scores(-lost / max(count, 1), -joint / max(count, 1), int(count))
        for ratio, (lost, joint, count) in zip(ratios, sums.tolist(), strict=True)
    }


def _mask_block(
    segments: Int[Tensor, "B L"], scored: Bool[Tensor, "B L"], starts: Int[Tensor, "B 1"], chosen: Bool[Tensor, "B S"]
) -> Bool[Tensor, "B L"]:
    """Hide the chosen tokens of a block and all of its text to its right."""
    places = torch.arange(segments.shape[1])
    right = (places >= starts + chosen.shape[1]) & (segments == segments.gather(1, starts)) & scored
    return right.scatter(1, starts + torch.arange(chosen.shape[1]), chosen)
