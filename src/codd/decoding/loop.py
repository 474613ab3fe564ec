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
from codd.decoding.any_order import sample_any_order
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
    activation_ratio,
    best_window,
    circuit_acts,
    fit_window,
    logits_temperature,
    sample_factorized,
    sample_latent,
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
    steps = [denoising_step(state) for state in sequences]
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
    """One step of one sequence, which is changed: network, sampler, commitment.

    Yields what is evaluated for many sequences at once (see `step_inputs`), and None when it waits for the device.
    Where the circuit excludes what is written, the step is what the network alone decides.
    """
    inputs = yield from step_inputs(state)
    result, edits = decide(inputs), find_edits(inputs)
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
    written, edited = ranking.writes(), edits().writes() if edits else Writes.none()
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


def step_inputs(state: SequenceState) -> Generator[Any, Any, StepInputs]:
    """Ask the network about the positions of a step, and about those that may be edited.

    Yields requests for hidden states, with guidance also with all that was given hidden, and is sent the states of each
    request's span; then yields rows of these and is sent the head's logits. With guidance a circuit gets the states
    that saw the prompt. Raises InvalidInput if a hook returns anything but logits.
    """
    assert state.plan is not None, "a finished sequence takes no step"
    positions = published.positions(state) if state.options.published else _masked_in_block(state)
    editable = _editable(state)
    wanted = torch.cat((positions, editable))
    begin, _ = span = _needed_span(state, wanted.tolist())
    hidden = yield hidden_state_requests(state, span)
    at = wanted - begin
    logits = yield [states[at.to(states.device, non_blocking=True)] for states in hidden]
    count, conditioned = len(positions), state.circuit is not None and state.circuit.feature_width is not None
    edited = _changed(state, editable, [each[count:] for each in logits]) if len(editable) else None
    changed = _changed(state, positions, [each[:count] for each in logits])
    return StepInputs(
        state, positions, changed, state.circuit, hidden[0] if conditioned else None, begin, editable, edited
    )


def hidden_state_requests(state: SequenceState, span: Window) -> list[HiddenStateRequest]:
    """What a step that needs the hidden states of a span asks the network."""
    size = state.block_size
    seen = slice(state.unseen, None if size is None else -(-span[1] // size) * size)
    views = [state.ids]
    if state.options.cfg_scale > 0:
        views.append(torch.where(state.given, state.mask_id, state.ids))
    return [HiddenStateRequest(state, ids[seen], span) for ids in views]


def _masked_in_block(state: SequenceState) -> Int[Tensor, " R"]:
    """The masked positions of the plan's block, ascending."""
    assert state.plan is not None
    begin, end = state.plan.block
    return state.masked[begin:end].nonzero()[:, 0] + begin


def _editable(state: SequenceState) -> Int[Tensor, " E"]:
    """The positions of the plan's block that the loop has written, ascending; none where nothing is to be edited."""
    assert state.plan is not None
    if state.options.editing_threshold is None:
        return torch.zeros(0, dtype=torch.long)
    begin, end = state.plan.block
    return (~state.given & ~state.masked)[begin:end].nonzero()[:, 0] + begin


def _needed_span(state: SequenceState, positions: Sequence[int]) -> Window:
    """All between the positions of a step and its circuit's window, which in full mode is not known yet."""
    assert state.plan is not None
    if state.options.mode == "full":
        reach = 0 if state.circuit is None else window_length(state.circuit, state.options, len(state.ids))
        return max(0, min(positions, default=0) - reach), len(state.ids)
    begin, end = fit_window(state.plan.block, state.circuit, len(state.ids)) or state.plan.block
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
    """Which tokens to commit."""
    state, plan = inputs.state, inputs.state.plan
    assert plan is not None
    if inputs.options.published:
        return published.step(inputs)
    if plan.count == 0:  # only edits
        none = torch.zeros(0, dtype=torch.long)
        nothing = Ranking(none, none, none.float(), none.bool(), torch.tensor(True))
        return StepResult(lambda: nothing, plan.block, mask_ratio=0.0)
    noise = Noise.drawn(len(state.ids), state.generator)
    return _block_step(inputs, noise) if inputs.options.mode == "block" else _full_step(inputs, noise)


def _block_step(inputs: StepInputs, noise: Noise) -> StepResult:
    """Block diffusion: the circuit covers the block."""
    state, plan, circuit = inputs.state, inputs.state.plan, inputs.circuit
    assert plan is not None
    window = fit_window(plan.block, circuit, len(state.ids))
    acts = window is not None and circuit_acts(circuit, activation_ratio(state, plan.block), inputs.options)
    if state.constraint is not None:
        return _constrained(inputs, plan.block, circuit if acts else None, plan.count, noise)
    mask_ratio = state.mask_ratio(plan.block)
    if circuit is None or window is None or not acts:
        return StepResult(_network_alone(inputs, noise).to_host(), plan.block, mask_ratio)
    ranking, joint = _from_joint(circuit, inputs.window(window, noise), window[0], plan.count, inputs.options)
    return StepResult(ranking, window, mask_ratio, True, joint)


def _full_step(inputs: StepInputs, noise: Noise) -> StepResult:
    """Full diffusion: the circuit covers the window in which most of the tokens that are due stand."""
    state, plan, circuit, options = inputs.state, inputs.state.plan, inputs.circuit, inputs.options
    assert plan is not None
    whole = plan.block
    if state.constraint is not None and (circuit is None or options.sampler == "factorized" or plan.last):
        return _constrained(inputs, whole, None, plan.count, noise)
    waiting = _network_alone(inputs, noise).to_host()
    if circuit is None or options.sampler == "factorized":
        return StepResult(waiting, whole, state.mask_ratio(whole))
    alone = waiting()  # the window depends on it, and with the window whether the circuit acts
    due = torch.zeros(len(state.ids), dtype=torch.bool)
    due[alone.rows[alone.keep]] = True
    size = window_length(circuit, options, len(state.ids))
    begin = int(best_window(due, size))
    window = (begin, begin + size)
    mask_ratio, covered = state.mask_ratio(window), int(due[begin : begin + size].sum())
    acts = covered >= options.activation_targets and circuit_acts(circuit, activation_ratio(state, window), options)
    acts = acts and circuit.length in (None, size)
    count = covered if acts and plan.count is not None else plan.count
    if state.constraint is not None:  # tokens outside of the window are not independent of it: they wait
        return _constrained(inputs, window if acts else whole, circuit if acts else None, count, noise)
    if not acts:
        return StepResult(lambda: alone, window, mask_ratio)
    found, joint = _from_joint(circuit, inputs.window(window, noise), begin, count, options)
    deferred = options.outside == "defer" and not plan.last
    away = (alone.rows < begin) | (alone.rows >= begin + size)
    outside = alone._replace(keep=alone.keep & away & (not deferred))
    coupled = found()
    joined = [torch.cat((a, b.to(a.dtype))) for a, b in zip(coupled[:4], outside[:4], strict=True)]
    ranking = Ranking(*joined, coupled.valid & outside.valid)  # type: ignore[call-arg]
    return StepResult(lambda: ranking, window, mask_ratio, True, joint)


def _constrained(
    inputs: StepInputs, window: Window, circuit: ProbabilisticCircuit | None, count: int | None, noise: Noise
) -> StepResult:
    """What network and circuit (None: the network alone) decide in the part of a window that the constraint reads."""
    state, constraint = inputs.state, inputs.state.constraint
    assert constraint is not None
    begin, end = part = constraint.clipped(window)
    if circuit is not None and circuit.length not in (None, end - begin):
        circuit = None
    weights = constraint.weights(inputs.positions, inputs.logits, part, logits_temperature(inputs.options))
    given = inputs.window(part, noise, constraint.at(state.ids, part, weights))
    ranking, joint = _from_joint(circuit or constraint.alone, given, begin, count, inputs.options)
    return StepResult(ranking, part, state.mask_ratio(part), circuit is not None, joint)


def _network_alone(inputs: StepInputs, noise: Noise) -> Ranking:
    """The factorized sampler on the positions of a step, its rows being positions of the sequence."""
    assert inputs.state.plan is not None
    positions, device = inputs.positions, inputs.logits.device
    ranking = sample_factorized(inputs.logits, inputs.state.plan.count, inputs.options, noise.at(positions).to(device))
    return ranking._replace(rows=positions.to(device, non_blocking=True).index_select(0, ranking.rows))


def _from_joint(
    circuit: ProbabilisticCircuit, window: WindowInputs, begin: int, count: int | None, options: Options
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


def sample_window(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int | None, options: Options, *, dense: bool = False
) -> Ranking:
    """Rank the masked positions of a window; void if the circuit excludes the evidence, or candidates do not suffice.

    On a GPU it can be captured: its shapes are the same whatever is masked. ``dense``: from all tokens instead of the
    most probable candidates of each position.
    """
    joint, noise = window.joint(circuit, logits_temperature(options)), window.noise.to(window.logits.device)
    if options.sampler == "latent":
        assert count is not None, "the latent sampler commits by number"
        return sample_latent(joint, count, options, noise)
    rows = torch.arange(len(window.tokens), device=window.logits.device)
    return sample_any_order(joint, rows, count, options, noise, joint.masked[0], dense=dense)


def find_edits(inputs: StepInputs) -> Callable[[], Ranking] | None:
    """The written tokens that the network, having seen them, would replace with enough certainty.

    It is asked about each by itself and without the circuit, whose tokens they may be.
    """
    threshold, logits, positions = inputs.options.editing_threshold, inputs.editable_logits, inputs.editable
    if threshold is None or logits is None or positions is None:
        return None
    best = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).max(-1)
    present = inputs.state.ids[positions].to(logits.device, non_blocking=True)
    keep = (best.indices != present) & (best.values > threshold)
    rows, valid = positions.to(logits.device, non_blocking=True), torch.ones((), dtype=torch.bool, device=keep.device)
    return Ranking(rows, best.indices, best.values, keep, valid).to_host()


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
