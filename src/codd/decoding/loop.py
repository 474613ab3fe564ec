"""The denoising loop: there is one, and it is a generator of steps.

The network evaluates all unfinished sequences at once; all else is done for each by itself, whatever its neighbours do:
hidden states to logits, through a sampler, to the tokens that are committed.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.protocol import Conditioner, ProbabilisticCircuit
from codd.decoding import published
from codd.decoding.cuda_graphs import sample_captured, sample_eagerly
from codd.decoding.options import Options
from codd.decoding.ranking import Noise, Ranking, temper_conditional
from codd.decoding.runner import NetworkRunner, StateRequest
from codd.decoding.samplers import WindowInputs, logits_temperature, sample_factorized, sample_window, window_inputs
from codd.decoding.schedule import (
    activation_ratio,
    best_window,
    circuit_acts,
    fit_window,
    masked_positions,
    window_length,
)
from codd.decoding.state import (
    Alternatives,
    HiddenStates,
    Revision,
    SequenceState,
    Step,
    StepInputs,
    StepPlan,
    StepResult,
    Window,
    Writes,
)
from codd.errors import CircuitSteppedAside, CoddError, InvalidInput

Result = TypeVar("Result")


@torch.no_grad()
def denoise(runner: NetworkRunner, sequences: Sequence[SequenceState]) -> Iterator[Step]:
    """Step all unfinished sequences in turn until none is left; an error of any of them is raised.

    Where the runner's cache does not hold them all, some wait until others have finished. Raises InvalidInput where
    all of it is held by sequences of another run.
    """
    while unfinished := [state for state in sequences if not state.finished]:
        admitted = [state for state in unfinished if runner.admit(state)]
        if not admitted:
            raise InvalidInput("all of the KV cache is held by sequences of another run: release them first.")
        for state, outcome in zip(admitted, _step_batch(runner, admitted), strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            if state.finished:
                runner.release(state)
            yield outcome


@torch.no_grad()
def advance(runner: NetworkRunner, sequences: Sequence[SequenceState]) -> list[Step | Exception]:
    """One step of each sequence, none of them finished, of any lengths and options; an error instead ends its own.

    After an unforeseen error, which may be a neighbour's, the step is made once more for that sequence alone.
    """
    random_states = [state.generator.get_state() for state in sequences]
    outcomes = _step_batch(runner, sequences)
    for number, (state, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
        if len(sequences) > 1 and isinstance(outcome, Exception) and not isinstance(outcome, CoddError):
            state.generator.set_state(random_states[number])
            outcomes[number] = _step_batch(runner, [state])[0]
        if isinstance(outcomes[number], Exception):
            state.plan = None
    return outcomes


def _step_batch(runner: NetworkRunner, sequences: Sequence[SequenceState]) -> list[Step | Exception]:
    positions = [_caught(_positions, state) for state in sequences]
    requests = [_caught(state_requests, *each) for each in zip(sequences, positions, strict=True)]
    outputs = _caught(runner, [request for each in requests if not isinstance(each, Exception) for request in each])
    if isinstance(outputs, Exception):
        return [outputs] * len(sequences)
    states = iter(outputs)
    hidden = [each if isinstance(each, Exception) else [next(states) for _ in each] for each in requests]
    logits = _head(
        runner, sequences, [_caught(head_rows, *each) for each in zip(sequences, positions, hidden, strict=True)]
    )
    inputs = [_caught(step_inputs, *each) for each in zip(sequences, positions, hidden, logits, strict=True)]
    results = [_caught(_run, each) for each in inputs]
    # The host waits for the device from here on, when the work of all sequences is on its way.
    return [_caught(_commit, *each) for each in zip(inputs, results, strict=True)]


def _head(
    runner: NetworkRunner, sequences: Sequence[SequenceState], rows: Sequence[list[Tensor] | Exception]
) -> list[list[Tensor] | Exception]:
    """The logits of all sequences' rows, or the error that one of them has, or all."""
    wanted = [row for each in rows if not isinstance(each, Exception) for row in each]
    outputs = _caught(runner.logits, wanted, sequences[0].mask_id)
    if isinstance(outputs, Exception):
        return [each if isinstance(each, Exception) else outputs for each in rows]
    logits = iter(outputs)
    return [each if isinstance(each, Exception) else [next(logits) for _ in each] for each in rows]


def _caught(function: Callable[..., Result], *arguments: Any) -> Result | Exception:
    """What a function returns, or the error that it raises; an error among its arguments is the result, too."""
    try:
        wrong = next((argument for argument in arguments if isinstance(argument, Exception)), None)
        return function(*arguments) if wrong is None else wrong
    except Exception as error:
        return error


def _positions(state: SequenceState) -> Int[Tensor, " R"]:
    assert state.plan is not None, "a finished sequence takes no step"
    return (published.positions if state.options.published else masked_positions)(state, state.plan)


def _run(inputs: StepInputs) -> StepResult:
    step = published.step if inputs.options.published else run_step
    return replace(step(inputs), edits=find_edits(inputs))


def _commit(inputs: StepInputs, result: StepResult) -> Step:
    """Write what a step decided; where the circuit excludes the evidence, what the network alone decides."""
    state = inputs.state
    ranking = result.ranking()
    if result.circuit and not bool(ranking.valid):
        inputs = without_circuit(inputs)
        result = _run(inputs)
        ranking = result.ranking()
    if state.constraint is not None and not bool(ranking.valid):
        raise InvalidInput(
            f"sequence {state.number}: no text that the constraint allows is possible any more: the network gives them "
            "probability zero. Check the hooks."
        )
    written, edited = Writes.of(ranking), result.edited()
    check_scores(state, written)
    alternatives = find_alternatives(inputs, result, written) if state.alternatives else None
    positions, tokens = torch.cat((written.positions, edited.positions)), torch.cat((written.tokens, edited.tokens))
    state.commit(positions, tokens, edits=len(edited.positions))
    return Step(
        sequence=state.number,
        number=state.evaluations - 1,
        positions=written.positions,
        tokens=written.tokens,
        scores=written.scores,
        mask_ratio=result.mask_ratio,
        circuit=result.circuit,
        window=result.window,
        ids=state.ids,
        finished=state.finished,
        settled=state.settled,
        edits=edited,
        computed=state.computed,
        cached=state.cached,
        alternatives=alternatives,
    )


def state_requests(state: SequenceState, positions: Int[Tensor, " R"]) -> list[StateRequest]:
    """What a step at these positions needs of the network; with guidance also with all that was given hidden."""
    span = _needed_span(state, positions)
    size = state.block_size
    seen = slice(state.unseen, None if size is None else -(-span[1] // size) * size)
    views = [state.ids]
    if state.options.cfg_scale > 0:
        views.append(torch.where(state.given, state.mask_id, state.ids))
    return [StateRequest(state, ids[seen], span, state.unseen) for ids in views]


def _needed_span(state: SequenceState, positions: Int[Tensor, " R"]) -> Window:
    """The positions of a step and of the window that its circuit covers; in full mode the window is not known yet."""
    assert state.plan is not None
    if state.options.mode == "full":
        reach = 0 if state.circuit is None else window_length(state.circuit, state.options, len(state.ids))
        return max(0, min(positions.tolist(), default=0) - reach), len(state.ids)
    block = (state.plan.begin, state.plan.end)
    begin, end = fit_window(block, state.circuit, len(state.ids)) or block
    outer = [*positions[:1].tolist(), *positions[-1:].tolist()]
    return min([begin, *outer]), max([end, *(position + 1 for position in outer)])


def head_rows(
    state: SequenceState, positions: Int[Tensor, " R"], states: Sequence[HiddenStates]
) -> list[Float[Tensor, "n d"]]:
    """What the head is to read: the hidden states at the step's positions, then at those that may be edited.

    ``states`` answer `state_requests`.
    """
    assert state.plan is not None
    wanted = torch.cat((positions, _editable(state, state.plan)))
    return [each.values[(wanted - each.begin).to(each.values.device, non_blocking=True)] for each in states]


def step_inputs(
    state: SequenceState,
    positions: Int[Tensor, " R"],
    states: Sequence[HiddenStates],
    logits: Sequence[Float[Tensor, "n V"]],
) -> StepInputs:
    """The logits of a step after guidance, hooks and bans, and hidden states if the circuit is conditioned on them.

    ``logits`` are what the head makes of `head_rows`; with guidance the circuit gets the states that saw the prompt.
    Raises InvalidInput if a hook returns anything but logits.
    """
    assert state.plan is not None
    count, written = len(positions), _editable(state, state.plan)
    conditioned = state.circuit is not None and state.circuit.feature_width is not None
    features = states[0] if conditioned else None
    revision = None
    if len(written):
        revision = Revision(written, _changed(state, written, [each[count:] for each in logits]))
    changed = _changed(state, positions, [each[:count] for each in logits])
    return StepInputs(state, state.plan, positions, changed, features, state.circuit, revision)


def _editable(state: SequenceState, plan: StepPlan) -> Int[Tensor, " E"]:
    """The positions of a plan's block that the loop has written, ascending; none where nothing is to be edited."""
    if state.options.editing_threshold is None:
        return torch.zeros(0, dtype=torch.long)
    written = ~state.given & ~state.masked
    return written[plan.begin : plan.end].nonzero()[:, 0] + plan.begin


def find_edits(inputs: StepInputs) -> Float[Tensor, "4 more"] | None:
    """A packed `Ranking` of the written tokens that the network, having seen them, would replace with enough certainty.

    It is asked about each by itself and without the circuit, whose tokens they may be.
    """
    threshold = inputs.options.editing_threshold
    if inputs.revision is None or threshold is None:
        return None
    positions, logits = inputs.revision
    best = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).max(-1)
    present = inputs.state.ids[positions].to(logits.device, non_blocking=True)
    keep = (best.indices != present) & (best.values > threshold)
    rows, valid = positions.to(logits.device, non_blocking=True), torch.ones((), dtype=torch.bool, device=keep.device)
    return Ranking(rows, best.indices, best.values, keep, valid).packed()


def _changed(
    state: SequenceState, positions: Int[Tensor, " R"], given: Sequence[Float[Tensor, "R V"]]
) -> Float[Tensor, "R V"]:
    """The logits at some positions after guidance, hooks and bans."""
    options = state.options
    logits = given[0] if len(given) == 1 else given[1] + (options.cfg_scale + 1) * (given[0] - given[1])
    for hook in options.hooks:
        logits = _hooked(hook(logits, positions, state.ids.clone()), logits)
    if state.banned is None or not len(state.banned):
        return logits
    state.banned = state.banned.to(logits.device, non_blocking=True)
    fill = logits.index_fill if options.hooks else logits.index_fill_  # a hook may have kept its logits
    return fill(1, state.banned, -torch.inf)


def _hooked(logits: object, given: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    shape = tuple(given.shape)
    if not isinstance(logits, Tensor):
        raise InvalidInput(f"a hook returned {type(logits).__name__}, expected logits of shape {shape}.")
    if logits.shape != shape:
        raise InvalidInput(f"a hook returned logits of shape {tuple(logits.shape)}, expected {shape}.")
    if not logits.is_floating_point() or logits.device != given.device or logits.layout != given.layout:
        raise InvalidInput(
            f"a hook returned logits of {logits.dtype} on {logits.device} ({logits.layout}), expected floating point "
            f"numbers on {given.device} ({given.layout})."
        )
    return logits


def run_step(inputs: StepInputs) -> StepResult:
    """Which tokens to commit, by our own algorithm."""
    if inputs.plan.count == 0:  # only edits: the ranking is empty
        nothing = torch.ones(4, 1, dtype=torch.float64)
        return StepResult(nothing, 0, (inputs.plan.begin, inputs.plan.end), 0.0, False)
    return _block_step(inputs) if inputs.options.mode == "block" else _full_step(inputs)


def _block_step(inputs: StepInputs) -> StepResult:
    """Block diffusion: the circuit covers the block."""
    state, plan, circuit = inputs.state, inputs.plan, inputs.circuit
    block = (plan.begin, plan.end)
    mask_ratio = state.mask_ratio(block)
    window = fit_window(block, circuit, len(state.ids))
    noise = Noise.drawn(len(state.ids), state.generator)
    if state.constraint is not None:
        acts = window is not None and circuit_acts(circuit, activation_ratio(state, block), inputs.options)
        return _constrained(inputs, block, circuit if acts else None, plan.count, noise)
    acts = circuit_acts(circuit, activation_ratio(state, block), inputs.options)
    if circuit is not None and window is not None and acts:
        given = window_inputs(inputs, window, noise)
        return _coupled(circuit, given, plan.count, inputs.options, window, mask_ratio)
    return StepResult(_network_alone(inputs, noise).packed(), 0, block, mask_ratio, False)


def _full_step(inputs: StepInputs) -> StepResult:
    """Full diffusion: the circuit covers the window in which most of the tokens that are due stand."""
    state, plan, circuit, options = inputs.state, inputs.plan, inputs.circuit, inputs.options
    length = len(state.ids)
    noise = Noise.drawn(length, state.generator)
    constrained = None if state.constraint is None else partial(_constrained, inputs, noise=noise)
    if constrained is not None and (circuit is None or options.sampler == "factorized" or plan.last):
        return constrained((0, length), None, plan.count)
    packed = _network_alone(inputs, noise).packed()
    if circuit is None or options.sampler == "factorized":
        return StepResult(packed, 0, (0, length), state.mask_ratio((0, length)), False)
    packed = packed.cpu()  # the window depends on it, and with the window whether the circuit acts
    alone = Ranking.unpacked(packed)
    due = torch.zeros(length, dtype=torch.bool)
    due[alone.rows[alone.keep]] = True
    size = window_length(circuit, options, length)
    begin = int(best_window(due, size))
    window = (begin, begin + size)
    mask_ratio, covered = state.mask_ratio(window), int(due[begin : begin + size].sum())
    acts = covered >= options.activation_targets and circuit_acts(circuit, activation_ratio(state, window), options)
    if not acts or (circuit.length is not None and circuit.length != size):
        return (
            constrained((0, length), None, plan.count)
            if constrained
            else StepResult(packed, 0, window, mask_ratio, False)
        )
    count = None if plan.count is None else covered
    if constrained is not None:  # tokens outside of the window are not independent of it: they wait
        return constrained(window, circuit, count)
    coupled = _coupled(circuit, window_inputs(inputs, window, noise), count, options, window, mask_ratio)
    deferred = options.outside == "defer" and not plan.last
    away = (alone.rows < begin) | (alone.rows >= begin + size)
    outside = alone._replace(keep=alone.keep & away & (not deferred))
    joined = Ranking.joined([coupled.ranking(), outside]).packed()
    return StepResult(joined, 0, window, mask_ratio, True, joint=coupled.joint)


def _constrained(
    inputs: StepInputs, window: Window, circuit: ProbabilisticCircuit | None, count: int | None, noise: Noise
) -> StepResult:
    """What network and circuit (None: the network alone) decide in the part of a window that the constraint reads."""
    state, options = inputs.state, inputs.options
    assert state.constraint is not None
    begin, end = part = state.constraint.clipped(window)
    if circuit is not None and circuit.length not in (None, end - begin):
        circuit = None
    weights = state.constraint.weights(inputs.positions, inputs.logits, part, logits_temperature(options))
    given = window_inputs(inputs, part, noise, state.constraint.at(state.ids, part, weights))
    packed = sample_window(circuit or state.constraint.alone, given, count, options)
    joint = partial(given.joint, circuit or state.constraint.alone, logits_temperature(options))
    return StepResult(packed, begin, part, state.mask_ratio(part), circuit is not None, joint=joint)


def _coupled(
    circuit: ProbabilisticCircuit,
    given: WindowInputs,
    count: int | None,
    options: Options,
    window: Window,
    mask_ratio: float,
) -> StepResult:
    """What network and circuit decide together in a window."""
    joint = partial(given.joint, circuit, logits_temperature(options))
    if given.logits.device.type != "cuda" or not circuit.supports_cuda_graphs:
        packed = sample_window(circuit, given, count, options)
        return StepResult(packed, window[0], window, mask_ratio, True, joint=joint)
    packed, again = sample_captured(circuit, given, count, options), None
    if options.sampler == "any_order":
        again = partial(sample_eagerly, circuit, given, count, options, dense=True)
    return StepResult(packed, window[0], window, mask_ratio, True, again, joint=joint)


def _network_alone(inputs: StepInputs, noise: Noise) -> Ranking:
    """The factorized sampler on the positions of a step, its rows being positions of the sequence."""
    positions, logits = inputs.positions, inputs.logits
    ranking = sample_factorized(logits, inputs.plan.count, inputs.options, noise.at(positions).to(logits.device))
    return ranking._replace(rows=positions.to(logits.device, non_blocking=True).index_select(0, ranking.rows))


def without_circuit(inputs: StepInputs) -> StepInputs:
    """The same step for the network alone, with a warning, once a sequence: the circuit excludes what is written."""
    if not inputs.state.circuit_warned:
        warnings.warn(
            f"sequence {inputs.state.number}: what is written has probability zero under the circuit (or excludes all "
            "that it allows), so the circuit steps aside for this step. Further steps of this sequence are not "
            "reported.",
            CircuitSteppedAside,
            stacklevel=2,
        )
    inputs.state.circuit_warned = True
    return replace(inputs, circuit=None)


def check_scores(state: SequenceState, written: Writes) -> None:
    """Raise InvalidInput where the logits were NaN, or nothing but -inf: they have no probabilities."""
    wrong = written.positions[written.scores.isnan()].tolist()
    if wrong:
        raise InvalidInput(
            f"sequence {state.number}, position {wrong[0]}: the logits are NaN, or every token is excluded by bans and "
            "hooks. Check the checkpoint, the precision, and the hooks."
        )


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
