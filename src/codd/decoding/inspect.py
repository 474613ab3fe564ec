"""What is known of the masked positions of a window before a step: by the network alone, and under the joint.

The same evaluation that a step of the loop would make, but nothing is committed: it is for people who look.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.pairwise import mutual_information
from codd.decoding.model import Model
from codd.decoding.network import FullRecompute
from codd.decoding.options import Options
from codd.decoding.samplers.ranking import Noise, entropy
from codd.decoding.samplers.window import logits_temperature
from codd.decoding.start import banned_ids, new_sequence
from codd.decoding.state import SequenceState, StepInputs, StepPlan, Window
from codd.decoding.step import (
    circuit_acts,
    fit_window,
    head_rows,
    masked_positions,
    state_requests,
    step_inputs,
    window_inputs,
)
from codd.errors import InvalidInput

LONGEST, MOST = 128, 32
"""Positions of a window, and candidates of a position: the work grows with the square of the one, times the other."""


@dataclass(frozen=True, eq=False)
class Beliefs:
    """The most probable tokens of M positions, each position by itself. Tensors are on the host."""

    tokens: Int[Tensor, "M K"]
    probabilities: Float[Tensor, "M K"]
    """Descending, among all tokens: they sum to less than one."""
    entropies: Float[Tensor, " M"]
    """Of all tokens, in nats."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """What `inspect` finds. Tensors are on the host."""

    window: Window
    positions: Int[Tensor, " M"]
    """The masked positions of the window, counted from the beginning of the sequence."""
    network: Beliefs
    joint: Beliefs
    """With no circuit at work these are the network's."""
    mutual_information: Float[Tensor, "M M"]
    """Of every two of the positions under the joint, in nats: a lower bound, from the joint's top candidates."""
    circuit: bool
    """Whether a circuit had a say."""
    aside: bool
    """Whether the circuit would step aside, because it excludes what is written or all that the network allows."""


@torch.no_grad()
def inspect(
    model: Model,
    ids: Sequence[int],
    window: Sequence[int],
    *,
    options: Options,
    candidates: int = 8,
    written: Sequence[int] = (),
) -> Inspection:
    """Evaluate the network on one sequence, masks included, and look at the masks of a window, [begin, end).

    Guidance, bans, hooks and the circuit's temperature are those of the loop; with ``tempering="paper"`` the joint is
    the one that latents are drawn from. ``written``: the positions that a run has filled, which guidance does not
    hide; all else that is not masked counts as given.
    """
    span = _check(model, ids, window, candidates, written)
    reach = fit_window(span, model.circuit, len(ids))
    inputs = _inputs(model, _sequence(model, ids, written, options), reach or span)
    inside = (inputs.positions >= span[0]) & (inputs.positions < span[1])
    positions, count = inputs.positions[inside], min(candidates, model.backbone.vocab_size)
    network = _beliefs(_log_probabilities(inputs)[inside.to(inputs.logits.device)], count)
    acts = reach is not None and circuit_acts(model.circuit, inputs.state.mask_ratio(span), options)
    joint = _under_joint(inputs, reach, positions, count) if acts and reach is not None else None
    if joint is None:
        nothing = torch.zeros(len(positions), len(positions))
        return Inspection(span, positions, network, network, nothing, circuit=False, aside=acts)
    return Inspection(span, positions, network, *joint, circuit=True, aside=False)


def _sequence(model: Model, ids: Sequence[int], written: Sequence[int], options: Options) -> SequenceState:
    """The sequence as the loop would have it."""
    assert model.mask_id is not None
    state = new_sequence(ids, options.changed(gen_length=0), mask_id=model.mask_id)
    state.given[list(written)] = False
    state.circuit, state.banned = model.circuit, banned_ids(model.backbone, options, model.mask_id)
    state.block_size = model.backbone.block_size
    return state


def _inputs(model: Model, state: SequenceState, window: Window) -> StepInputs:
    """The network's logits at all masks of the window, as a step of the loop has them."""
    state.plan = StepPlan(*window, None, last=False)
    positions = masked_positions(state, state.plan)
    runner = FullRecompute(model.backbone)
    states = runner(state_requests(state, positions))
    return step_inputs(state, positions, states, runner.logits(head_rows(state, positions, states), state.mask_id))


def _under_joint(
    inputs: StepInputs, window: Window, positions: Int[Tensor, " M"], count: int
) -> tuple[Beliefs, Float[Tensor, "M M"]] | None:
    """Top candidates and mutual information of some positions; None if network and circuit exclude each other."""
    assert inputs.circuit is not None
    given = window_inputs(inputs, window, Noise.none(len(inputs.state.ids)))
    joint = given.joint(inputs.circuit, logits_temperature(inputs.options))
    conditionals = joint.conditionals()
    if float(conditionals.log_partition[0]) == -torch.inf:
        return None
    log_p = conditionals.dense_log_marginals()
    information = mutual_information(joint.pairwise(log_p.topk(count, dim=-1).indices))[0]
    at = (positions - window[0]).to(log_p.device)
    return _beliefs(log_p[0, at], count), information[at][:, at].float().cpu()


def _log_probabilities(inputs: StepInputs) -> Float[Tensor, "R V"]:
    """Of the network alone, as it weighs tokens without a circuit."""
    log_p = inputs.logits.float().log_softmax(-1)
    wrong = log_p.isnan().any(-1).cpu()
    if bool(wrong.any()):
        raise InvalidInput(
            f"ids: at position {int(inputs.positions[wrong][0])} the logits are NaN, or every token is excluded by "
            "bans and hooks. Check the checkpoint, the precision, and the hooks."
        )
    return log_p


def _beliefs(log_p: Float[Tensor, "M V"], count: int) -> Beliefs:
    top = log_p.topk(count, dim=-1)
    return Beliefs(top.indices.cpu(), top.values.exp().float().cpu(), entropy(log_p).clamp_min(0).float().cpu())


def _check(model: Model, ids: Sequence[int], window: Sequence[int], candidates: int, written: Sequence[int]) -> Window:
    """The window, if all that was given makes sense; the first word of an error is the field at fault."""
    if model.mask_id is None:
        raise InvalidInput("this checkpoint does not say which token is the mask: codd.load(..., mask_id=...).")
    vocab, limit = model.backbone.vocab_size, model.backbone.max_length
    wrong = [token for token in ids if not _whole(token) or not 0 <= token < vocab]
    if wrong:
        raise InvalidInput(f"ids must be whole numbers in 0..{vocab - 1}, found {wrong[0]!r}.")
    if limit is not None and len(ids) > limit:
        raise InvalidInput(f"ids has {len(ids)} tokens, but this model was made for {limit}.")
    if not _whole(candidates) or not 1 <= candidates <= MOST:
        raise InvalidInput(f"candidates must be a whole number from 1 to {MOST}, found {candidates!r}.")
    wrong = [place for place in written if not _whole(place) or not 0 <= place < len(ids)]
    if wrong:
        raise InvalidInput(f"written must hold positions in 0..{len(ids) - 1}, found {wrong[0]!r}.")
    if len(window) != 2 or not all(map(_whole, window)) or not 0 <= window[0] < window[1] <= len(ids):
        raise InvalidInput(f"window must be [begin, end] with 0 <= begin < end <= {len(ids)}, found {list(window)}.")
    begin, end = window
    fixed = None if model.circuit is None else model.circuit.length
    longest = LONGEST if fixed is None else min(fixed, LONGEST)
    if end - begin > longest:
        raise InvalidInput(f"window must be of at most {longest} positions, found {end - begin}.")
    if model.mask_id not in ids[begin:end]:
        raise InvalidInput(f"window [{begin}, {end}] holds no mask: there is nothing to look at.")
    return begin, end


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
