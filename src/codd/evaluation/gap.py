"""How much of the gap between one step and many a circuit closes.

Given all that is left of a block, how probable are its masked tokens: if the network writes all of them at once, each
for itself (factorized); if a circuit joins them (coupled); if the network writes one at a time and looks again after
each (sequential)? Sequential is what one step could reach at best, and costs as many steps as there are tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone, MaskedOutput
from codd.circuits import ProbabilisticCircuit
from codd.circuits.parameters import seeded
from codd.coupling import Coupled
from codd.coupling.gap import gap_closed
from codd.decoding.model import Model
from codd.errors import InvalidInput, shown

RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BLOCK_LENGTH = 32
"""Tokens of a block for circuits of any length, and without a circuit."""
NUMBERS = 2**28
"""The most logits that are held at a time: a gigabyte in float32."""

Progress = Callable[[int, int], None]
"""Called with the evaluations done and the number of all; an evaluation is of one sequence."""


class BlockScores(NamedTuple):
    """Log-likelihoods at one mask ratio, of each block the sum over its masked tokens. On the host, in float64."""

    masked: int
    """Tokens that are masked in each block."""
    factorized: Float[Tensor, " B"]
    coupled: Mapping[str, Float[Tensor, " B"]]
    """Log-likelihoods with each circuit, by its name."""
    sequential: Float[Tensor, " B"]
    """Log-likelihood one token at a time; NaN if it was not measured."""


def misspecification(
    model: Model,
    ids: Int[Tensor, "B T"],
    starts: Int[Tensor, " B"],
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    *,
    block_length: int | None = None,
    progress: Progress | None = None,
) -> dict[float, dict[str, float]]:
    """Log-likelihoods per masked token, and the share of the gap that the circuit closes, at several mask ratios.

    ``ids`` are texts, ``starts`` the first position of a block in each; a block has the circuit's length (or
    ``block_length``; by default that of a block-causal network's blocks, else 32). Blocks of a block-causal network
    must begin at multiples of its block size, counted from the text's first token. Everything left of the block is
    given, the ratio says which share of the block is masked (rounded, at least one token), and everything right of it
    is masked, so that padding there has no effect.

    For each ratio: ``factorized``, ``coupled``, ``sequential``; ``gap_closed`` is (coupled - factorized) / (sequential
    - factorized), NaN if there is no gap to close, i.e. less than 0.005 nats a token, and ``gap_closed_error`` its
    standard error over blocks; ``tokens`` is how many were masked in all. Without a circuit, coupled is factorized.
    The seed fixes masks and orders whatever the model, and the masks of a higher ratio contain those of a lower one.
    """
    if model.mask_id is None:
        raise InvalidInput("this checkpoint does not say which token is the mask: codd.load(..., mask_id=...).")
    scores = block_scores(
        model.backbone,
        {} if model.circuit is None else {"": model.circuit},
        ids,
        starts,
        mask_id=model.mask_id,
        block_length=block_length or circuit_length(model.circuit, model.backbone.block_size),
        ratios=ratios,
        seed=seed,
        progress=progress,
    )
    return {ratio: summary(at, at.coupled.get("", at.factorized)) for ratio, at in scores.items()}


def circuit_length(circuit: ProbabilisticCircuit | None, block_size: int | None = None) -> int:
    """The length of the blocks that a circuit is for; where it says nothing, that of the network's blocks, or 32."""
    return (None if circuit is None else circuit.window) or block_size or BLOCK_LENGTH


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
    """`misspecification` block by block, of any number of circuits for the network evaluations of one.

    A ratio masks the tokens that are revealed last. So one sequential run passes through the states of all ratios.
    ``order`` replaces the random one of the seed. Without ``sequential`` there is one evaluation a ratio.
    """
    check_blocks(ids, starts, ratios, block_length, mask_id, backbone.vocab_size)
    check_grid(backbone.block_size, starts, block_length)
    counts = masked_counts(ratios, block_length)
    order = reveal_order(len(ids), block_length, seed) if order is None else order
    size = rows_at_once(backbone, block_length)
    stops = set(counts.values())
    turns = range(max(stops), 0, -1) if sequential else sorted(stops, reverse=True)
    advance, parts = counted(progress, len(ids) * len(turns)), []
    for blocks in batches(backbone, ids, starts, order, size):
        scores = _reveal(backbone, circuits, blocks, stops, turns, mask_id, advance)
        if not sequential:
            scores = {n: x._replace(sequential=torch.full_like(x.factorized, torch.nan)) for n, x in scores.items()}
        parts.append(scores)
    by_ratio = {ratio: joined([part[count] for part in parts]) for ratio, count in counts.items()}
    check_numbers(x.factorized for x in by_ratio.values())
    check_numbers(x.sequential for x in by_ratio.values() if sequential)
    return by_ratio


def masked_counts(ratios: Sequence[float], block_length: int) -> dict[float, int]:
    """How many tokens of a block each ratio masks."""
    return {ratio: max(1, round(ratio * block_length)) for ratio in ratios}


def reveal_order(blocks: int, length: int, seed: int) -> Int[Tensor, "B S"]:
    """The order in which the tokens of each block are revealed: a ratio masks those that come last."""
    return torch.rand(blocks, length, generator=seeded(seed), dtype=torch.float64).argsort(dim=1)


def rows_at_once(backbone: Backbone, block_length: int) -> int:
    """How many sequences the network is given at a time."""
    most = 128 if backbone.device.type == "cuda" else 16
    return max(1, min(most, NUMBERS // (block_length * backbone.vocab_size)))


def counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    """A function that adds up evaluations and reports them to ``progress``."""
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        if progress is not None:
            progress(done, total)

    return advance


class Blocks(NamedTuple):
    """Some texts with a block in each, on the network's device."""

    ids: Int[Tensor, "B T"]
    starts: Int[Tensor, " B"]
    order: Int[Tensor, "B S"]

    def window(self) -> Int[Tensor, "B S"]:
        """The positions of each text's block."""
        return self.starts[:, None] + torch.arange(self.order.shape[1], device=self.ids.device)

    def turns(self) -> Int[Tensor, "B T"]:
        """When each token of the text is revealed: -1 before all, S never."""
        length = self.order.shape[1]
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        outside = torch.where(places < self.starts[:, None], -1, length)
        return outside.scatter(1, self.window(), self.order.argsort(dim=1))


def batches(
    backbone: Backbone, ids: Int[Tensor, "B T"], starts: Int[Tensor, " B"], order: Int[Tensor, "B S"], size: int
) -> Iterator[Blocks]:
    """Batches of ``size`` texts, on the network's device."""
    for begin in range(0, len(ids), size):
        some = slice(begin, begin + size)
        yield Blocks(*(x[some].to(backbone.device, torch.long) for x in (ids, starts, order)))


def _reveal(
    backbone: Backbone,
    circuits: Mapping[str, ProbabilisticCircuit],
    blocks: Blocks,
    counts: set[int],
    numbers: Sequence[int],
    mask_id: int,
    advance: Callable[[int], None],
) -> dict[int, BlockScores]:
    """Reveal the blocks token by token, and score them whenever the number of masked tokens is one of ``counts``.

    ``numbers`` are the numbers of masked tokens to visit, descending; the sequential score means something only if all
    from the highest down to 1 are among them.
    """
    window, turns = blocks.window(), blocks.turns()
    truth, rank = blocks.ids.gather(1, window), turns.gather(1, window)
    stops: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
    steps = []
    for masked in numbers:
        turn = rank.shape[1] - masked
        shown = torch.where(turns >= turn, mask_id, blocks.ids)
        now = blocks.order[:, turn : turn + 1]
        if masked in counts:
            output = backbone.masked_logits(shown, window, mask_id=mask_id)
            hidden, log_probs = rank >= turn, _log_probs(output.logits, truth)
            joint = {name: _joint(circuit, output, truth, hidden) for name, circuit in circuits.items()}
            stops[masked] = torch.where(hidden, log_probs, 0).sum(1), joint
            steps.append(log_probs.gather(1, now)[:, 0])
        else:
            output = backbone.masked_logits(shown, window.gather(1, now), mask_id=mask_id)
            steps.append(_log_probs(output.logits, truth.gather(1, now))[:, 0])
        advance(len(truth))
    return {
        masked: BlockScores(masked, single, joint, torch.stack(steps[-masked:]).sum(0))
        for masked, (single, joint) in stops.items()
    }


def _log_probs(logits: Float[Tensor, "B n V"], tokens: Int[Tensor, "B n"]) -> Float[Tensor, "B n"]:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].double()


def _joint(
    circuit: ProbabilisticCircuit, output: MaskedOutput, truth: Int[Tensor, "B S"], hidden: Bool[Tensor, "B S"]
) -> Float[Tensor, " B"]:
    joint = Coupled(circuit, logits=output.logits, tokens=truth, masked=hidden, features=output.states)
    return joint.log_prob(truth).double()


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
    """Refuse texts and blocks that cannot be scored."""
    _check(ids, starts, ratios, block_length)
    _check_tokens(ids, starts + block_length, mask_id, vocab_size)


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


def _check(ids: Tensor, starts: Tensor, ratios: Sequence[float], block_length: int) -> None:
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


def _check_tokens(ids: Int[Tensor, "B T"], ends: Int[Tensor, " B"], mask_id: int, vocab_size: int) -> None:
    """Refuse masks and unknown ids; tokens right of the block are not validated."""
    used = torch.arange(ids.shape[1], device=ids.device) < ends.to(ids.device)[:, None]
    if len(masks := (used & (ids == mask_id)).nonzero()):
        where = f"text {int(masks[0, 0])}, position {int(masks[0, 1])}"
        raise InvalidInput(f"{where}: the mask ({mask_id}) stands in or before the block. Give the text itself.")
    if len(wrong := (used & ((ids < 0) | (ids >= vocab_size))).nonzero()):
        where = f"text {int(wrong[0, 0])}, position {int(wrong[0, 1])}"
        raise InvalidInput(f"{where}: id {int(ids[*wrong[0]])} is not in the vocabulary of {vocab_size} tokens.")


def check_numbers(scores: Iterable[Float[Tensor, " B"]]) -> None:
    """Refuse scores that are NaN."""
    for values in scores:
        if len(wrong := values.isnan().nonzero()):
            raise InvalidInput(
                f"text {int(wrong[0])}: the network's logits are NaN. Check the checkpoint and the precision."
            )
