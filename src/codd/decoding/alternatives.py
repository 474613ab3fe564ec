"""What else a step could have written: the most probable tokens of each position, by what its token was taken from."""

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits.protocol import Conditioner
from codd.decoding.samplers.ranking import temper_conditional
from codd.decoding.state import Alternatives, StepInputs, StepResult, Writes


def find_alternatives(inputs: StepInputs, result: StepResult, written: Writes) -> Alternatives:
    """The ``state.alternatives`` most probable tokens of each position that a step wrote.

    In the window of network and circuit (or constraint) each given the tokens that the step took before it, as the
    any-order sampler has it; elsewhere by the network alone.
    """
    joint = None if result.joint is None else result.joint().conditionals()
    begin, end = result.window
    network = dict(zip(inputs.positions.tolist(), range(len(inputs.positions)), strict=True))
    rows = []
    for position, token in zip(written.positions.tolist(), written.tokens, strict=True):
        if joint is not None and begin <= position < end:
            rows.append(temper_conditional(_given_others(joint, position - begin, token), inputs.options))
        else:
            rows.append(inputs.logits[network[position]].float().log_softmax(-1))
    count = min(inputs.state.alternatives, inputs.logits.shape[-1])
    log_p = torch.stack(rows) if rows else inputs.logits.new_zeros(0, inputs.logits.shape[-1])
    top = log_p.topk(count, dim=-1)
    return Alternatives(top.indices.cpu(), top.values.float().cpu())


def _given_others(joint: Conditioner, place: int, token: Tensor) -> Float[Tensor, " V"]:
    """The log-probabilities at one place of the window, where then a token is committed."""
    at = torch.tensor([place], device=joint.log_partition.device)
    log_p = joint.dense_log_marginals(at)[0]
    joint.commit(at, token.to(at.device).reshape(1))
    return log_p
