"""How probable a continuation is under the joint of network and circuit.

A continuation is scored block by block, as block decoding would write it: a block is as long as the circuit's window,
all of its tokens are masked together, everything left of it is given, and the rest of the continuation is masked too.
The probability of a continuation of one block is exact for one step of decoding; that of a longer one is the product
over its blocks. Without a circuit, and with the null circuit, tokens of a block are independent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.coupling import Coupled
from codd.decoding import Model, Options
from codd.decoding.runner import pad_left
from codd.evaluation.gap import circuit_length


class ScoringRequest(NamedTuple):
    """The ids of a context and of the continuation that is to be scored."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """How probable a continuation is, in nats."""

    log_prob: float
    greedy: bool
    """Whether each token is the most probable one at its position while its block is masked."""


class _Block(NamedTuple):
    request: int
    shown: list[int]
    begin: int
    truth: list[int]


@torch.no_grad()
def score_continuations(
    model: Model,
    requests: Sequence[ScoringRequest],
    options: Options = Options(),  # noqa: B008 frozen
) -> list[Score]:
    """Score several continuations in batches; a score does not depend on the others of its batch."""
    size = min(options.block_length, circuit_length(model.circuit))
    blocks = [block for i, request in enumerate(requests) for block in _blocks(i, request, size, model.known_mask)]
    totals, greedy = [0.0] * len(requests), [True] * len(requests)
    at_once = max(1, len(requests))
    for begin in range(0, len(blocks), at_once):
        some = blocks[begin : begin + at_once]
        for block, score in zip(some, _scored(model, some, options), strict=True):
            totals[block.request] += score.log_prob
            greedy[block.request] &= score.greedy
    return [Score(total, sure) for total, sure in zip(totals, greedy, strict=True)]


def _blocks(number: int, request: ScoringRequest, size: int, mask_id: int) -> list[_Block]:
    context, continuation = list(request.context), list(request.continuation)
    blocks = []
    for start in range(0, len(continuation), size):
        left = context + continuation[:start]
        shown = left + [mask_id] * (len(continuation) - start)
        blocks.append(_Block(number, shown, len(left), continuation[start : start + size]))
    return blocks


def _scored(model: Model, blocks: Sequence[_Block], options: Options) -> list[Score]:
    backbone, mask_id = model.backbone, model.known_mask
    pad = backbone.special.pad if backbone.special.pad is not None else 0
    ids, valid = pad_left([block.shown for block in blocks], pad, backbone.device)
    states = backbone.states(ids, valid)
    scores = []
    for row, block in enumerate(blocks):
        at = ids.shape[1] - len(block.shown) + block.begin
        own = states[row : row + 1, at : at + len(block.truth)]
        logits = backbone.masked_logits_from_states(own, mask_id=mask_id)
        scores.append(_score(model, logits, own, torch.tensor([block.truth], device=ids.device), options))
    return scores


def _score(
    model: Model,
    logits: Float[Tensor, "1 n V"],
    states: Float[Tensor, "1 n d"],
    truth: Int[Tensor, "1 n"],
    options: Options,
) -> Score:
    if model.circuit is None or options.sampler == "factorized":
        single = logits.log_softmax(-1)
        total = single.gather(-1, truth[..., None]).double().sum()
        return Score(float(total), bool((single.argmax(-1) == truth).all()))
    hidden = torch.ones_like(truth, dtype=torch.bool)
    joint = Coupled(
        model.circuit,
        logits=logits,
        tokens=truth,
        masked=hidden,
        temperature=options.circuit_temperature,
        features=states,
    )
    sure = bool((joint.marginals().argmax(-1) == truth).all())
    return Score(float(joint.log_prob(truth)[0]), sure)
