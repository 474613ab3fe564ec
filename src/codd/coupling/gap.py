"""The gap between writing the masked tokens of a block at once and one at a time, and the share that a circuit closes.

Given all that is left of a block, how probable are its masked tokens: if the network writes all of them at once, each
for itself (factorized); if a circuit joins them (coupled); if the network writes one at a time and looks again after
each (sequential)? Sequential is the best that one step could reach, and takes as many steps as there are tokens.
Training, evaluation and studies all score blocks of text here.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone, take_positions
from codd.circuits import ProbabilisticCircuit
from codd.circuits.parameters import seeded
from codd.coupling.coupled import Coupled
from codd.errors import InvalidInput, shown

SMALLEST_GAP = 5e-3
"""Nats per masked token. Where one token at a time is no better than that, a share of the difference is noise."""
NO_GAP = "no gap to close"
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BLOCK_LENGTH = 32
"""Tokens of a block for circuits of any length, and without a circuit."""
MOST_LOGITS = 2**28
"""The most logits that are held at a time: a gigabyte in float32."""

Progress = Callable[[int, int], None]
"""Called with the evaluations done and the number of all; an evaluation is of one sequence."""


def gap_closed(factorized: float, coupled: float, sequential: float) -> float:
    """(coupled - factorized) / (sequential - factorized), of mean log-likelihoods in nats per masked token.

    NaN where there is no gap to close: sequential is not better than factorized by `SMALLEST_GAP`.
    """
    gap = sequential - factorized
    return (coupled - factorized) / gap if gap >= SMALLEST_GAP else math.nan


def gap_in_words(share: float | None) -> str:
    """A share in per cent; None and NaN: no gap to close."""
    return NO_GAP if share is None or math.isnan(share) else f"{share:.0%}"


class BlockScores(NamedTuple):
    """Log-likelihoods at one mask ratio, of each block the sum over its masked tokens. On the host, in float64."""

    masked: int
    """Tokens that are masked in each block."""
    factorized: Float[Tensor, " B"]
    coupled: Mapping[str, Float[Tensor, " B"]]
    """Log-likelihoods with each circuit, by its name."""
    sequential: Float[Tensor, " B"]
    """Log-likelihood one token at a time; NaN if it was not measured."""


def summary(scores: BlockScores, coupled: Float[Tensor, " B"]) -> dict[str, float]:
    """The figures of one circuit at one ratio, over all blocks."""
    blocks = len(coupled)
    tokens = blocks * scores.masked
    means = [float(x.sum()) / tokens for x in (scores.factorized, coupled, scores.sequential)]
    closed = gap_closed(*means)
    error = math.nan
    if not math.isnan(closed) and blocks > 1:
        gains, gaps = coupled - scores.factorized, scores.sequential - scores.factorized
        residuals = gains - closed * gaps  # of the linearised ratio
        error = math.sqrt(float(residuals.square().sum()) * blocks / (blocks - 1)) / float(gaps.sum())
    return {
        **dict(zip(("factorized", "coupled", "sequential"), means, strict=True)),
        "gap_closed": closed,
        "gap_closed_error": error,
        "tokens": float(tokens),
    }


class Blocks(NamedTuple):
    """Texts with a block in each, on the network's device."""

    ids: Int[Tensor, "B T"]
    starts: Int[Tensor, " B"]
    order: Int[Tensor, "B S"]
    """The order in which the tokens of a block are revealed: a ratio masks those that come last."""
    valid: Bool[Tensor, "B T"] | None = None
    """False at the padding of shorter texts; None: there is none."""
    given: Bool[Tensor, "B T"] | None = None
    """Which tokens right of the block are not masked; None: all of them are."""

    def window(self) -> Int[Tensor, "B S"]:
        """The positions of each text's block."""
        return self.starts[:, None] + torch.arange(self.order.shape[1], device=self.ids.device)

    def hidden(self, masked: int) -> Bool[Tensor, "B S"]:
        """Which tokens of the block are masked, ``masked`` of each."""
        return self.order.argsort(dim=1) >= self.order.shape[1] - masked

    def shown(self, masked: int, mask_id: int) -> Int[Tensor, "B T"]:
        """What the network sees: masks in the block, and to the right of it wherever nothing is given."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        beyond = places >= self.starts[:, None]
        if self.given is not None:
            beyond &= ~self.given
        hidden = beyond.scatter(1, self.window(), self.hidden(masked))
        return torch.where(hidden, mask_id, self.ids)


class MaskedBlocks(NamedTuple):
    """B blocks at one mask ratio, with what the network says about them: all that is scored without a circuit."""

    tokens: Int[Tensor, "B S"]
    hidden: Bool[Tensor, "B S"]
    states: Float[Tensor, "B S d"]
    """The network's last hidden states in the block."""
    factorized: Float[Tensor, " B"]
    sequential: Float[Tensor, " B"]

    def scores(self, backbone: Backbone, circuits: Mapping[str, ProbabilisticCircuit], mask_id: int) -> BlockScores:
        """The scores of some circuits for one evaluation of the network."""
        seen = torch.where(self.hidden, mask_id, self.tokens)
        logits = backbone.masked_logits_from_states(self.states, seen, mask_id=mask_id)
        coupled = {}
        for name, circuit in circuits.items():
            joint = Coupled(circuit, logits=logits, tokens=self.tokens, masked=self.hidden, features=self.states)
            coupled[name] = joint.log_prob(self.tokens).double()
        return BlockScores(int(self.hidden[0].sum()), self.factorized, coupled, self.sequential)


@torch.no_grad()
def block_scores(
    backbone: Backbone,
    circuits: Mapping[str, ProbabilisticCircuit],
    ids: Int[Tensor, "B T"],
    starts: Int[Tensor, " B"],
    *,
    mask_id: int,
    block_length: int = BLOCK_LENGTH,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    order: Int[Tensor, "B S"] | None = None,
    sequential: bool = True,
    progress: Progress | None = None,
) -> dict[float, BlockScores]:
    """Score the blocks of some texts at several mask ratios, with any number of circuits.

    ``order`` replaces the random one of the seed. Without ``sequential`` there is one evaluation per ratio, and with it
    one per token of the block: the tokens that a ratio masks are revealed last, so that one run serves all ratios.
    """
    check_blocks(ids, starts, ratios, block_length, mask_id, backbone.vocab_size)
    check_grid(backbone.block_size, starts, block_length)
    counts = masked_counts(ratios, block_length)
    order = reveal_order(len(ids), block_length, seed) if order is None else order
    parts = evaluate_blocks(backbone, Blocks(ids, starts, order), set(counts.values()), mask_id, sequential, progress)
    scored = [{n: x.scores(backbone, circuits, mask_id) for n, x in part.items()} for part in parts]
    by_ratio = {ratio: joined([part[count] for part in scored]) for ratio, count in counts.items()}
    check_numbers(x.factorized for x in by_ratio.values())
    check_numbers(x.sequential for x in by_ratio.values() if sequential)
    return by_ratio


@torch.no_grad()
def evaluate_blocks(
    backbone: Backbone,
    blocks: Blocks,
    counts: set[int],
    mask_id: int,
    sequential: bool = True,
    progress: Progress | None = None,
) -> Iterator[dict[int, MaskedBlocks]]:
    """Evaluate the network on blocks with each of these numbers of masked tokens, a batch of blocks at a time.

    With ``sequential`` the tokens are revealed one by one from the largest number down, else that score is NaN.
    """
    turns = range(max(counts), 0, -1) if sequential else sorted(counts, reverse=True)
    advance = counted(progress, len(blocks.ids) * len(turns))
    for some in batches(backbone, blocks):
        window, steps, found = some.window(), [], {}
        truth = some.ids.gather(1, window)
        for masked in turns:
            shown, turn = some.shown(masked, mask_id), some.order.shape[1] - masked
            now = some.order[:, turn : turn + 1]
            positions = window if masked in counts else window.gather(1, now)
            states = take_positions(backbone.states(shown, some.valid), positions)
            seen, tokens = shown.gather(1, positions), some.ids.gather(1, positions)
            logits = backbone.masked_logits_from_states(states, seen, mask_id=mask_id)
            log_probs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].double()
            steps.append(log_probs.gather(1, now)[:, 0] if masked in counts else log_probs[:, 0])
            if masked in counts:
                hidden = some.hidden(masked)
                factorized = torch.where(hidden, log_probs, 0).sum(1)
                found[masked] = MaskedBlocks(truth, hidden, states, factorized, torch.full_like(factorized, math.nan))
            advance(len(truth))
        if sequential:
            found = {n: x._replace(sequential=torch.stack(steps[-n:]).sum(0)) for n, x in found.items()}
        yield found


def masked_counts(ratios: Sequence[float], block_length: int) -> dict[float, int]:
    """How many tokens of a block each ratio masks: at least one."""
    return {ratio: max(1, round(ratio * block_length)) for ratio in ratios}


def reveal_order(blocks: int, length: int, seed: int) -> Int[Tensor, "B S"]:
    """A random order in which the tokens of each block are revealed."""
    return torch.rand(blocks, length, generator=seeded(seed), dtype=torch.float64).argsort(dim=1)


def rows_at_once(backbone: Backbone, block_length: int) -> int:
    """How many sequences the network is given at a time."""
    most = 128 if backbone.device.type == "cuda" else 16
    return max(1, min(most, MOST_LOGITS // (block_length * backbone.vocab_size)))


def batches(backbone: Backbone, blocks: Blocks) -> Iterator[Blocks]:
    """Batches of texts, on the network's device."""
    size = rows_at_once(backbone, blocks.order.shape[1])
    for begin in range(0, len(blocks.ids), size):
        ids, starts, order = (x[begin : begin + size].to(backbone.device, torch.long) for x in blocks[:3])
        shown = (None if x is None else x[begin : begin + size].to(backbone.device) for x in blocks[3:])
        yield Blocks(ids, starts, order, *shown)


def counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    """A function that adds up evaluations and reports them to ``progress``."""
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    return advance


def joined(parts: Sequence[BlockScores]) -> BlockScores:
    """The scores of all blocks together, on the host."""
    return BlockScores(
        parts[0].masked,
        torch.cat([part.factorized for part in parts]).cpu(),
        {name: torch.cat([part.coupled[name] for part in parts]).cpu() for name in parts[0].coupled},
        torch.cat([part.sequential for part in parts]).cpu(),
    )


def check_blocks(
    ids: Tensor, starts: Tensor, ratios: Sequence[float], block_length: int, mask_id: int, vocab_size: int
) -> None:
    """Refuse texts and blocks that cannot be scored; tokens right of a block may be anything."""
    if not isinstance(ids, Tensor) or not isinstance(starts, Tensor):
        raise InvalidInput(f"ids and starts must be torch tensors, found {shown(ids)} and {shown(starts)}.")
    floating = ids.is_floating_point() or starts.is_floating_point()
    if ids.ndim != 2 or floating or not len(ids) or starts.shape != ids.shape[:1]:
        raise InvalidInput(
            "ids must be whole numbers of shape (B, T) and starts (B,), with at least one text, found "
            f"{tuple(ids.shape)} and {tuple(starts.shape)} of {ids.dtype} and {starts.dtype}."
        )
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise InvalidInput(f"ratios must be above 0 and at most 1, found {list(ratios)}.")
    length, first, last = ids.shape[1], int(starts.min()), int(starts.max())
    if length < block_length:
        raise InvalidInput(f"texts of {length} tokens hold no block of {block_length}: give longer ones.")
    if first < 0 or last > length - block_length:
        raise InvalidInput(
            f"a block of {block_length} tokens starts at {first if first < 0 else last} of a text of {length}: starts "
            f"must be from 0 to {length - block_length}."
        )
    used = torch.arange(length, device=ids.device) < (starts + block_length).to(ids.device)[:, None]
    if len(masks := (used & (ids == mask_id)).nonzero()):
        where = f"text {int(masks[0, 0])}, position {int(masks[0, 1])}"
        raise InvalidInput(f"{where}: the mask ({mask_id}) stands in or before the block. Give the text itself.")
    if len(wrong := (used & ((ids < 0) | (ids >= vocab_size))).nonzero()):
        where = f"text {int(wrong[0, 0])}, position {int(wrong[0, 1])}"
        raise InvalidInput(f"{where}: id {int(ids[*wrong[0]])} is not in the vocabulary of {vocab_size} tokens.")


def check_grid(block_size: int | None, starts: Int[Tensor, " B"], block_length: int) -> None:
    """Refuse blocks that a block-causal network would not write together; others have no grid."""
    if block_size is None:
        return
    if block_size % block_length:
        raise InvalidInput(
            f"this network reads blocks of {block_size} tokens, of which one of {block_length} is no part: give a "
            f"circuit for {block_size} tokens, or for a divisor."
        )
    if len(off := starts[starts % block_length != 0]):
        raise InvalidInput(
            f"a block starts at {int(off[0])}, off the grid of this network, which reads blocks of {block_size} tokens "
            f"from the text's first one: give multiples of {block_length}."
        )


def check_numbers(scores: Iterable[Float[Tensor, " B"]]) -> None:
    """Refuse scores that are NaN."""
    for values in scores:
        if len(wrong := values.isnan().nonzero()):
            raise InvalidInput(
                f"text {int(wrong[0])}: the network's logits are NaN. Check the checkpoint and the precision."
            )
