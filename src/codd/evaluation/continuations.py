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


@torch.no_grad()
def score_continuations(
    model: Model,
    requests: Sequence[ScoringRequest],
    options: Options = Options(),  # noqa: B008 frozen
) -> list[Score]:
    """Score several continuations in batches; a score does not depend on the others of its batch."""
    backbone, mask_id = model.backbone, model.known_mask
    size = min(options.block_length, circuit_length(model.circuit))
    pad = backbone.special.pad if backbone.special.pad is not None else 0
    blocks = [(i, start) for i, each in enumerate(requests) for start in range(0, len(each.continuation), size)]
    scores = [Score(0.0, True)] * len(requests)
    for begin in range(0, len(blocks), max(1, len(requests))):
        some = blocks[begin : begin + len(requests)]
        left = [[*requests[i].context, *requests[i].continuation[:start]] for i, start in some]
        masks = [len(requests[i].continuation) - start for i, start in some]
        shown = [row + [mask_id] * count for row, count in zip(left, masks, strict=True)]
        ids, valid = pad_left(shown, pad, backbone.device)
        states = backbone.states(ids, valid)
        for row, (i, start) in enumerate(some):
            truth = torch.tensor([requests[i].continuation[start : start + size]], device=ids.device)
            at = ids.shape[1] - masks[row]
            own = states[row : row + 1, at : at + truth.shape[1]]
            score = _score(model, backbone.masked_logits_from_states(own, mask_id=mask_id), own, truth, options)
            scores[i] = Score(scores[i].log_prob + score.log_prob, scores[i].greedy and score.greedy)
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
