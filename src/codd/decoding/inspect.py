"""What is known of the masked positions of a window before a step: by the network alone, and under the joint.

The same evaluation that a step of the loop would make, but nothing is committed: it is for people who look.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits import HMM
from codd.circuits.pairwise import mutual_information
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.constraint import SequenceConstraint, Window
from codd.decoding.loop import step_inputs
from codd.decoding.model import Model
from codd.decoding.options import Options
from codd.decoding.runner import FullRecompute
from codd.decoding.samplers import (
    StepInputs,
    circuit_acts,
    entropy,
    fit_window,
    logits_temperature,
    temper_conditional,
)
from codd.decoding.sequence import SequenceState, StepPlan, banned_ids, new_sequence
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
    """The entropy of each position's distribution over all tokens, in nats."""
    allowed: Bool[Tensor, "M K"]
    """Whether the constraint, if there is one, allows each there: some text of the language has it, and what is
    written."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """What `inspect` finds. Tensors are on the host."""

    window: Window
    positions: Int[Tensor, " M"]
    """The masked positions of the window, counted from the beginning of the sequence."""
    network: Beliefs
    joint: Beliefs
    """With no circuit at work these are the network's."""
    mutual_information: Float[Tensor, "M M"] | None
    """Between every two of the positions under the joint, in nats: a lower bound, from the joint's top candidates.

    None under a constraint, where it would take a pass for every class of tokens at every position."""
    circuit: bool
    """Whether the joint distribution of a circuit was used, not the network's alone."""
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

    Guidance, bans, hooks and the circuit's temperature are those of the loop; with ``tempering="paper"`` the joint's
    beliefs are tempered as the any-order sampler does, or those that latents are drawn from. ``written``: the positions
    that a run has filled, which guidance does not hide; all else that is not masked counts as given. A constraint is
    about the masks and what is written, with everything between them; the joint is then the one given that the
    text is in the language.
    """
    span = _check(model, ids, window, candidates, written)
    reach = fit_window(span, model.circuit, len(ids))
    state = _sequence(model, ids, written, options)
    inputs = _inputs(model, state, reach or span)
    inside = (inputs.positions >= span[0]) & (inputs.positions < span[1])
    positions, count = inputs.positions[inside], min(candidates, model.backbone.vocab_size)
    allowed = None if state.constraint is None else _allowed(state.constraint, state.ids.tolist(), positions.tolist())
    network = _beliefs(_log_probabilities(inputs)[inside.to(inputs.logits.device)], count, allowed)
    acts = reach is not None and circuit_acts(model.circuit, state, span)
    for circuit in (model.circuit if acts else None, None if state.constraint is None else state.constraint.alone):
        joint = None if circuit is None else _under_joint(inputs, circuit, reach or span, positions, count, allowed)
        if joint is not None:
            by_circuit = circuit is model.circuit
            return Inspection(span, positions, network, *joint, circuit=by_circuit, aside=acts and not by_circuit)
    nothing = None if state.constraint is not None else torch.zeros(len(positions), len(positions))
    return Inspection(span, positions, network, network, nothing, circuit=False, aside=acts)


def _sequence(model: Model, ids: Sequence[int], written: Sequence[int], options: Options) -> SequenceState:
    """The sequence as the loop would have it."""
    mask = model.known_mask
    state = new_sequence(ids, options.changed(gen_length=0), mask_id=mask)
    state.given[list(written)] = False
    state.circuit, state.banned = model.circuit, banned_ids(model.backbone, options, mask)
    state.block_size = model.backbone.block_size
    if options.constraint is not None:
        automaton = model.automaton(options.constraint).without(state.banned.tolist())
        read = [*written, *state.masked.nonzero()[:, 0].tolist()]
        alone = HMM.neutral(1, model.backbone.vocab_size).to(model.backbone.device)
        state.constraint = SequenceConstraint(automaton, (min(read), max(read) + 1), mask, alone)
        state.constraint.check(state.ids, 0)
    return state


def _allowed(constraint: SequenceConstraint, ids: Sequence[int], positions: Sequence[int]) -> Bool[Tensor, "M V"]:
    """Which tokens can stand at some positions of a text in the language that has all that is written."""
    table, classes, rows = constraint.automaton.table.numpy(), constraint.automaton.classes, []
    for place in positions:
        after = np.append(constraint.after(ids, place + 1, {}), 0)  # the last one stands for -1: no way on
        rows.append((after[table[constraint.before(ids, place, {}) > 0]] > 0).any(0))
    return torch.from_numpy(np.stack(rows))[:, classes]


def _inputs(model: Model, state: SequenceState, window: Window) -> StepInputs:
    """The network's logits at all masks of the window, as a step of the loop has them."""
    state.plan = StepPlan(*window, 1, last=False)
    runner, step = FullRecompute(model.backbone), step_inputs(state)
    rows = step.send(runner(next(step)))
    try:
        step.send(runner.logits(rows, state.mask_id))
    except StopIteration as end:
        inputs: StepInputs = end.value
    return inputs


def _under_joint(
    inputs: StepInputs,
    circuit: ProbabilisticCircuit,
    window: Window,
    positions: Int[Tensor, " M"],
    count: int,
    allowed: Bool[Tensor, "M V"] | None,
) -> tuple[Beliefs, Float[Tensor, "M M"] | None] | None:
    """Top candidates and mutual information of some positions; None if network and circuit exclude each other."""
    state, constraint = inputs.state, None
    if state.constraint is not None:
        window = state.constraint.clipped(window)
        constraint = state.constraint.at(state.ids, window, {})
        if circuit.length not in (None, window[1] - window[0]):
            return None
    joint = inputs.window(window, constraint=constraint).joint(circuit, logits_temperature(inputs.options))
    conditionals = joint.conditionals()
    if float(conditionals.log_partition[0]) == -torch.inf:
        return None
    log_p = conditionals.dense_log_marginals()
    at = (positions - window[0]).to(log_p.device)
    beliefs = _beliefs(temper_conditional(log_p[0, at], inputs.options), count, allowed)
    if constraint is not None:
        return beliefs, None
    information = mutual_information(joint.pairwise(log_p.topk(count, dim=-1).indices))[0]
    return beliefs, information[at][:, at].float().cpu()


def _log_probabilities(inputs: StepInputs) -> Float[Tensor, "R V"]:
    """Log-probabilities of all tokens under the network alone; InvalidInput if the logits leave no token possible."""
    log_p = inputs.logits.float().log_softmax(-1)
    wrong = log_p.isnan().any(-1).cpu()
    if bool(wrong.any()):
        raise InvalidInput(
            f"ids: at position {int(inputs.positions[wrong][0])} the logits are NaN, or every token is excluded by "
            "bans and hooks. Check the checkpoint, the precision, and the hooks."
        )
    return log_p


def _beliefs(log_p: Float[Tensor, "M V"], count: int, allowed: Bool[Tensor, "M V"] | None) -> Beliefs:
    top = log_p.topk(count, dim=-1)
    tokens, entropies = top.indices.cpu(), entropy(log_p).clamp_min(0).float().cpu()
    fine = torch.ones_like(tokens, dtype=torch.bool) if allowed is None else allowed.gather(1, tokens)
    return Beliefs(tokens, top.values.exp().float().cpu(), entropies, fine)


def _check(model: Model, ids: Sequence[int], window: Sequence[int], candidates: int, written: Sequence[int]) -> Window:
    """Check the arguments and return the window; the first word of an error message is the field at fault."""
    mask = model.known_mask
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
    if mask not in ids[begin:end]:
        raise InvalidInput(f"window [{begin}, {end}] holds no mask: there is nothing to look at.")
    return begin, end


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
