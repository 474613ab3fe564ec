"""How probable the true continuation of a text is, given more or less of what stands before it.

A continuation is longer than the blocks that circuits are for. It is scored **block by block, as it would be written**:
the true tokens left of a block are given, all tokens of the block are masked together, and what stands right of it, up
to the end of the continuation, is masked. Within a block the masked tokens are scored as in `codd.coupling.gap`, at
mask ratio 1; the log-likelihoods of the blocks add up. So factorized and coupled need one network evaluation a block,
and the dependence between blocks is the network's own under all labels.

Every continuation is scored with all context lengths: the shorter contexts are the ends of the longest. DCD is here the
causal model alone (see `codd_lab.likelihood.copula`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import ProbabilisticCircuit
from codd.coupling.gap import BLOCK_LENGTH, Progress, block_scores
from codd.errors import InvalidInput
from codd_lab.likelihood.causal import CausalModel
from codd_lab.likelihood.copula import dcd_scores

PartProgress = Callable[[str, int, int], None]
"""Called with the part that is measured, the evaluations of it that are done, and the number of all."""

CONTEXTS = (20, 32, 64, 96, 128, 192, 256)
CONTINUATION = 64
SCORING = (
    "block by block: true tokens left of a block are given, its tokens are masked together, the rest of the "
    "continuation is masked; sequential reveals a block in a random order, left_to_right in that of reading; dcd is "
    "the causal model alone, since nothing is observed right of a masked token"
)
"""The method in words, written beside the numbers."""


def continuation_scores(
    backbone: Backbone,
    circuits: Mapping[str, ProbabilisticCircuit],
    causal: Backbone | CausalModel | None,
    ids: Int[Tensor, "B T"],
    *,
    context: int,
    mask_id: int,
    block_length: int = BLOCK_LENGTH,
    sequential: bool = True,
    seed: int = 0,
    progress: PartProgress | None = None,
) -> dict[str, Float[Tensor, " B"]]:
    """Log-likelihoods of what follows the first ``context`` tokens of each text, summed over its tokens.

    Keys: ``factorized``; ``circuit:NAME`` of each circuit; ``dcd`` if there is a causal model; with ``sequential`` also
    that, for which blocks are revealed one token at a time in a random order drawn from the seed, and
    ``left_to_right``, the same in the order of reading.
    """
    count = blocks_of(ids.shape[1] - context, block_length)
    rows = ids.repeat_interleave(count, 0)
    starts = (context + block_length * torch.arange(count)).repeat(len(ids))
    shared: dict[str, Any] = {"mask_id": mask_id, "block_length": block_length, "ratios": (1.0,)}
    report = part(progress, "circuits, sequential" if sequential else "circuits")
    scores = block_scores(backbone, circuits, rows, starts, seed=seed, sequential=sequential, progress=report, **shared)
    once = scores[1.0]
    by_label = {"factorized": once.factorized}
    by_label |= {f"circuit:{name}": values for name, values in once.coupled.items()}
    if sequential:
        by_label["sequential"] = once.sequential
        order = torch.arange(block_length).repeat(len(rows), 1)
        report = part(progress, "left to right")
        again = block_scores(backbone, {}, rows, starts, order=order, progress=report, **shared)
        by_label["left_to_right"] = again[1.0].sequential
    if causal is not None:
        report = part(progress, "dcd")
        by_label["dcd"] = dcd_scores(backbone, causal, rows, starts, seed=seed, progress=report, **shared)[1.0]
    return {name: values.view(-1, count).sum(1) for name, values in by_label.items()}


def blocks_of(continuation: int, block_length: int) -> int:
    """How many blocks a continuation has."""
    if continuation < 1 or continuation % block_length:
        raise InvalidInput(
            f"a continuation of {continuation} tokens is no whole number of blocks of {block_length}; give a multiple."
        )
    return continuation // block_length


def part(progress: PartProgress | None, what: str) -> Progress | None:
    """A progress callback for one part of the work; None if the caller wants none."""
    return None if progress is None else functools.partial(progress, what)
