"""The denoising loop: there is one, and it is a generator of steps.

A step reads from top to bottom in `denoising_step`. The network evaluates all unfinished sequences at once; all else is
done for each by itself, whatever its neighbours do.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding import published
from codd.decoding.constraint import Window
from codd.decoding.cuda_graphs import sample_captured
from codd.decoding.options import Options
from codd.decoding.runner import HiddenStateRequest, NetworkRunner
from codd.decoding.samplers import (
    Noise,
    Ranking,
    StepInputs,
    StepResult,
    WindowInputs,
    best_window,
    circuit_acts,
    fit_window,
    logits_temperature,
    sample_factorized,
    sample_window,
    temper_conditional,
    window_length,
)
from codd.decoding.sequence import Alternatives, SequenceState, Step, Writes
from codd.errors import CircuitSteppedAside, CoddError, InvalidInput


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
    """One step of each sequence, none of them finished, of any lengths and options.

    A failing sequence gets its exception as its result, and is finished; the others continue. After an unforeseen
    error, which may be a neighbour's, the step is made once more for that sequence alone.
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
    """One step of every sequence: they go on by themselves but where the network, or its head, evaluates them all."""
    steps = [(state.speculation.step if state.speculation else denoising_step)(state) for state in sequences]
    hidden = _together(runner, [_resume(step) for step in steps])
    rows = [_resume(*each) for each in zip(steps, hidden, strict=True)]
    logits = _together(partial(runner.logits, mask_id=sequences[0].mask_id), rows)
    decided = [_resume(*each) for each in zip(steps, logits, strict=True)]
    # The host waits for the device from here on, when the work of all sequences is on its way.
    return [_resume(*each) for each in zip(steps, decided, strict=True)]


def _resume(step: Generator[Any, Any, Step], answer: Any = None) -> Any:
    """What a step asks for next, or returns at its end; in place of that its error, or the one that it is answered."""
    if isinstance(answer, Exception):
        return answer
    try:
        return step.send(answer)
    except StopIteration as end:
        return end.value
    except Exception as error:
        return error


def _together(evaluate: Callable[[list[Any]], Sequence[Any]], asked: Sequence[Any]) -> list[Any]:
    """The answers to what each sequence asks for, evaluated at once; an error is the answer of all that asked."""
    questions = [question for each in asked if not isinstance(each, Exception) for question in each]
    try:
        answers = iter(evaluate(questions) if questions else ())
    except Exception as error:
        return [each if isinstance(each, Exception) else error for each in asked]
    return [each if isinstance(each, Exception) else [next(answers) for _ in each] for each in asked]


def denoising_step(state: SequenceState) -> Generator[Any, Any, Step]:
    """One step of one sequence, which is changed in place: network, sampler, commitment.

    Yields requests that are evaluated for many sequences at once (see `step_inputs`), and None when it waits for the
    device. If the circuit gives the written text probability zero, the network alone decides the step.
    """
    inputs = yield from step_inputs(state)
    result = decide(inputs)
    yield None
    ranking = result.ranking()
    if result.circuit and not bool(ranking.valid):
        inputs = without_circuit(inputs)
        result = decide(inputs)
        ranking = result.ranking()
    if state.constraint is not None and not bool(ranking.valid):
        raise InvalidInput(
            f"sequence {state.number}: no text that the constraint allows is possible any more: the network gives them "
            "probability zero. Check the hooks."
        )
    written, edited = ranking.writes(), inputs.edits().writes() if inputs.edits else Writes.none()
    check_scores(state, written)
    alternatives = find_alternatives(inputs, result, written) if state.alternatives else None
    seen = result.mask_ratio, result.circuit
    return finish_step(state, written, result.window, *seen, edited, alternatives=alternatives)


def finish_step(
    state: SequenceState,
    written: Writes,
    window: Window,
    mask_ratio: float,
    circuit: bool,
    edits: Writes | None = None,
    **more: Any,
) -> Step:
    """Write the tokens and the edits of a step, and report it; ``more``: other fields of `Step`."""
    edits = edits or Writes.none()
    positions, tokens = torch.cat((written.positions, edits.positions)), torch.cat((written.tokens, edits.tokens))
    state.commit(positions, tokens, edits=len(edits.positions))
    return Step(
        sequence=state.number,
        number=state.evaluations - 1,
        positions=written.positions,
        tokens=written.tokens,
        scores=written.scores,
        mask_ratio=mask_ratio,
        circuit=circuit,
        window=window,
        ids=state.ids,
        finished=state.finished,
        settled=state.settled,
        edits=edits,
        computed=state.computed,
        cached=state.cached,
        **more,
    )


def step_inputs(state: SequenceState) -> Generator[Any, Any, StepInputs]:
    """Ask the network about the positions of a step, and about those that may be edited.

    Yields requests for hidden states, with guidance also with all that was given hidden, and is sent the states of each
    request's span; then yields rows of these and is sent the head's logits. With guidance a circuit gets the states
    that saw the prompt. Raises InvalidInput if a hook returns anything but logits.
    """
    assert state.plan is not None, "a finished sequence takes no step"
    begin, end = state.plan.block
    own = state.options.published
    positions = published.loop_of(state).positions(state) if own else state.masked_in(state.plan.block)
    editable = (~state.given & ~state.masked)[begin:end].nonzero()[:, 0] + begin
    wanted = positions if state.options.editing_threshold is None else torch.cat((positions, editable))
    span = _needed_span(state, wanted.tolist())
    hidden = yield hidden_state_requests(state, span)
    at = wanted - span[0]
    logits = yield [states[at.to(states.device, non_blocking=True)] for states in hidden]
    count = len(positions)
    edits = _edits(state, editable, [each[count:] for each in logits]) if len(wanted) > count else None
    changed = _changed(state, positions, [each[:count] for each in logits])
    circuit = None if state.plan.causal else state.circuit
    conditioned = circuit is not None and circuit.feature_width is not None
    return StepInputs(state, positions, changed, circuit, hidden[0] if conditioned else None, span[0], edits)


def hidden_state_requests(state: SequenceState, span: Window) -> list[HiddenStateRequest]:
    """What a step that needs the hidden states of a span asks the network."""
    size, plan = state.block_size, state.plan
    beyond = span[1] if state.speculation else None  # what follows a draft is not yet begun
    seen = slice(state.unseen, beyond if size is None else -(-(span[1] + state.phase) // size) * size - state.phase)
    if state.causal_context and plan is not None:
        seen = slice(0, max(span[1], plan.end))
    views = [state.ids]
    if state.options.cfg_scale > 0:
        views.append(torch.where(state.given, state.mask_id, state.ids))
    return [HiddenStateRequest(state, ids[seen], span) for ids in views]


def _needed_span(state: SequenceState, positions: Sequence[int]) -> Window:
    """All that the plan may write, and the window of a circuit that is conditioned on hidden states.

    A circuit that is not asks the network for no more than it is asked alone, so that caches hold the same.
    """
    assert state.plan is not None
    (begin, end), circuit, length = state.plan.block, None if state.plan.causal else state.circuit, len(state.ids)
    full, conditioned = state.options.mode == "full", circuit is not None and circuit.feature_width is not None
    if full:
        begin = int(state.given.logical_not().long().argmax())
    if full and conditioned:  # which window that will be is not known yet
        begin = min(begin, max(0, min(positions, default=0) - window_length(circuit, state.options, length)))
    elif conditioned:
        begin, end = fit_window((begin, end), circuit, length) or (begin, end)
    return min([begin, *positions]), max([end, *(position + 1 for position in positions)])


def _changed(
    state: SequenceState, positions: Int[Tensor, " R"], given: Sequence[Float[Tensor, "R V"]]
) -> Float[Tensor, "R V"]:
    """The logits at some positions after guidance, hooks and bans."""
    options = state.options
    logits = given[0] if len(given) == 1 else given[1] + (options.cfg_scale + 1) * (given[0] - given[1])
    for hook in options.hooks:
        logits = _check_hook_output(hook(logits, positions, state.ids.clone()), logits)
    if state.banned is None or not len(state.banned):
        return logits
    state.banned = state.banned.to(logits.device, non_blocking=True)
    fill = logits.index_fill if options.hooks else logits.index_fill_  # a hook may have kept its logits
    return fill(1, state.banned, -torch.inf)


def _check_hook_output(logits: object, given: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
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


def decide(inputs: StepInputs) -> StepResult:
    """Which tokens to commit: by network and circuit together in a window, elsewhere by the network alone.

    Block mode: the window is the block. Full mode: it is where most of the tokens that are due stand. A constraint
    holds tokens together as a circuit does, so those outside of its window wait, with and without a circuit.
    """
    state, plan, options = inputs.state, inputs.plan, inputs.options
    circuit, constraint = None if plan.causal else inputs.circuit, state.constraint
    if options.published:
        return published.loop_of(state).step(inputs)
    if plan.count == 0:  # only edits
        none = torch.zeros(0, dtype=torch.long)
        nothing = Ranking(none, none, none.float(), none.bool(), torch.tensor(True))
        return StepResult(lambda: nothing, plan.block, mask_ratio=0.0)
    noise = Noise.drawn(len(state.ids), state.generator)
    window, count, acts, alone = plan.block, plan.count, options.mode != "full", None
    if not acts and (constraint is None or not plan.last):
        alone = _network_alone(inputs, noise).to_host()
        if constraint is not None or (circuit is not None and options.sampler != "factorized"):
            window, covered = _due_window(inputs, alone())
            acts, count = covered >= options.activation_targets, min(count, covered)
    acts = acts and circuit_acts(circuit, state, window)
    if constraint is not None:
        begin, end = window = constraint.clipped(window)
        joint_prior = circuit if acts and circuit is not None and circuit.length in (None, end - begin) else None
        weights = constraint.weights(inputs.positions, inputs.logits, window, logits_temperature(options))
        given = inputs.window(window, noise, constraint.at(state.ids, window, weights))
        ranking, joint = _from_joint(joint_prior or constraint.alone, given, begin, count, options)
        return StepResult(ranking, window, state.mask_ratio(window), joint_prior is not None, joint)
    mask_ratio, fitted = state.mask_ratio(window), fit_window(window, circuit, len(state.ids))
    if circuit is None or fitted is None or not acts:
        return StepResult(alone or _network_alone(inputs, noise).to_host(), window, mask_ratio)
    ranking, joint = _from_joint(circuit, inputs.window(fitted, noise), fitted[0], count, options)
    if alone is not None and (options.outside == "factorized" or plan.last):
        ranking = partial(_with_outside, ranking(), alone(), window)
    return StepResult(ranking, fitted, mask_ratio, True, joint)


def _due_window(inputs: StepInputs, alone: Ranking) -> tuple[Window, int]:
    """The window in which most of the tokens stand that the network alone would commit, and how many do."""
    length = len(inputs.state.ids)
    due = torch.zeros(length, dtype=torch.bool)
    due[alone.rows[alone.keep]] = True
    size = window_length(inputs.circuit, inputs.options, length)
    begin = best_window(due, size)
    return (begin, begin + size), int(due[begin : begin + size].sum())


def _with_outside(found: Ranking, alone: Ranking, window: Window) -> Ranking:
    """What network and circuit decide in a window, and what the network alone commits outside of it."""
    outside = alone._replace(keep=alone.keep & ((alone.rows < window[0]) | (alone.rows >= window[1])))
    joined = [torch.cat((a, b.to(a.dtype))) for a, b in zip(found[:4], outside[:4], strict=True)]
    return Ranking(*joined, found.valid)  # type: ignore[call-arg]


def _network_alone(inputs: StepInputs, noise: Noise) -> Ranking:
    """The factorized sampler on the positions of a step, its rows being positions of the sequence."""
    positions, device = inputs.positions, inputs.logits.device
    due_end, of_rows = inputs.plan.due_end, noise.at(positions).to(device)
    due = None if due_end is None else (positions < due_end).to(device, non_blocking=True)
    ranking = sample_factorized(inputs.logits, inputs.plan.count, inputs.options, of_rows, due=due)
    return ranking._replace(rows=positions.to(device, non_blocking=True).index_select(0, ranking.rows))


def _from_joint(
    circuit: ProbabilisticCircuit, window: WindowInputs, begin: int, count: int, options: Options
) -> tuple[Callable[[], Ranking], Callable[[], Any]]:
    """What network and circuit decide together in a window that begins at a position; and their joint distribution."""
    on_host = window.logits.device.type == "cpu"
    if on_host or window.constraint is not None or not circuit.supports_cuda_graphs:
        waiting = sample_window(circuit, window, count, options).to_host()
    else:
        packed = sample_captured(sample_window, circuit, window, count, options)
        waiting = lambda: Ranking.unpacked(packed.cpu())  # noqa: E731 it waits

    def ranking() -> Ranking:
        found = waiting()
        if not (on_host or options.sampler == "latent" or bool(found.valid)):  # a few candidates did not suffice
            found = sample_window(circuit, window, count, options, dense=True).to_host()()
        return found._replace(rows=found.rows + begin)

    return ranking, partial(window.joint, circuit, logits_temperature(options))


def _edits(
    state: SequenceState, editable: Int[Tensor, " E"], given: Sequence[Float[Tensor, "E V"]]
) -> Callable[[], Ranking]:
    """The written tokens that the network, having seen them, would replace with enough certainty.

    It is asked about each by itself and without the circuit, whose tokens they may be.
    """
    logits = _changed(state, editable, given)
    best = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).max(-1)
    present = state.ids[editable].to(logits.device, non_blocking=True)
    threshold = state.options.editing_threshold
    assert threshold is not None  # otherwise nothing is editable
    keep = (best.indices != present) & (best.values > threshold)
    rows, valid = editable.to(logits.device, non_blocking=True), torch.ones((), dtype=torch.bool, device=keep.device)
    return Ranking(rows, best.indices, best.values, keep, valid).to_host()


def without_circuit(inputs: StepInputs) -> StepInputs:
    """The same step for the network alone, with a warning, once per sequence: the circuit excludes what is written."""
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
        if joint is None or not begin <= position < end:
            rows.append(inputs.logits[network[position]].float().log_softmax(-1))
            continue
        at = torch.tensor([position - begin], device=joint.log_partition.device)
        rows.append(temper_conditional(joint.dense_log_marginals(at)[0], inputs.options))
        joint.commit(at, token.to(at.device).reshape(1))
    count = min(inputs.state.alternatives, inputs.logits.shape[-1])
    log_p = torch.stack(rows) if rows else inputs.logits.new_zeros(0, inputs.logits.shape[-1])
    top = log_p.topk(count, dim=-1)
    return Alternatives(top.indices.cpu(), top.values.float().cpu())
