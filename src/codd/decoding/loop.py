"""The denoising loop: there is one, and it is a generator of steps.

The network evaluates all unfinished sequences at once; all else is done for each by itself, whatever its neighbours do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from codd.decoding.alternatives import find_alternatives
from codd.decoding.network import NetworkRunner
from codd.decoding.state import SequenceState, Step, StepInputs, StepResult, Writes
from codd.decoding.step import check_scores, find_edits, head_rows, state_requests, step_inputs, without_circuit
from codd.errors import CoddError, InvalidInput

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
    return state.algorithm.positions(state, state.plan)


def _run(inputs: StepInputs) -> StepResult:
    return replace(inputs.state.algorithm.step(inputs), edits=find_edits(inputs))


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
