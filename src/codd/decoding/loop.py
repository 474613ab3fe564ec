"""The denoising loop: there is one, and it is a generator of steps.

The network evaluates all sequences that are not finished at once. All else is done for each sequence by itself, so that
its text does not depend on its neighbours.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from codd.decoding.accelerate.cpu_batching import map_sequences
from codd.decoding.network import NetworkRunner
from codd.decoding.state import SequenceState, Step, StepInputs, StepResult
from codd.decoding.step import check_scores, state_requests, step_inputs, without_circuit
from codd.errors import CoddError

Result = TypeVar("Result")


@torch.no_grad()
def denoise(runner: NetworkRunner, sequences: Sequence[SequenceState]) -> Iterator[Step]:
    """Step all unfinished sequences in turn until none is left; an error of any of them is raised."""
    while unfinished := [state for state in sequences if not state.finished]:
        for outcome in advance(runner, unfinished):
            if isinstance(outcome, CoddError):
                raise outcome
            yield outcome


@torch.no_grad()
def advance(runner: NetworkRunner, sequences: Sequence[SequenceState]) -> list[Step | CoddError]:
    """One step of each sequence, none of them finished, of any lengths and options; an error instead ends its own."""
    positions = [_positions(state) for state in sequences]
    requests = [state_requests(*each) for each in zip(sequences, positions, strict=True)]
    outputs = iter(runner([request for each in requests for request in each]))
    inputs = [
        _caught(step_inputs, runner.backbone, state, at, [next(outputs) for _ in each])
        for state, at, each in zip(sequences, positions, requests, strict=True)
    ]
    results = map_sequences(lambda each: each if isinstance(each, CoddError) else _caught(_run, each), inputs)
    # The host waits for the device from here on, when the work of all sequences is on its way.
    outcomes = [_caught(_commit, *each) for each in zip(inputs, results, strict=True)]
    for state, outcome in zip(sequences, outcomes, strict=True):
        if isinstance(outcome, CoddError):
            state.plan = None
    return outcomes


def _caught(function: Callable[..., Result], *arguments: Any) -> Result | CoddError:
    """What a function returns, or the error that it raises: one sequence's, and no other's."""
    try:
        return function(*arguments)
    except CoddError as error:
        return error


def _positions(state: SequenceState) -> Int[Tensor, " R"]:
    assert state.plan is not None, "a finished sequence takes no step"
    return state.algorithm.positions(state, state.plan)


def _run(inputs: StepInputs) -> StepResult:
    return inputs.state.algorithm.step(inputs)


def _commit(inputs: StepInputs | CoddError, result: StepResult | CoddError) -> Step:
    """Write what a step decided; where the circuit excludes the evidence, what the network alone decides."""
    if isinstance(inputs, CoddError):
        raise inputs
    if isinstance(result, CoddError):
        raise result
    state, ranking = inputs.state, result.ranking()
    if result.circuit and not bool(ranking.valid):
        result = _run(without_circuit(inputs))
        ranking = result.ranking()
    chosen = ranking.chosen()
    check_scores(state, chosen)
    state.commit(chosen.rows, chosen.tokens)
    return Step(
        sequence=state.number,
        number=state.evaluations - 1,
        positions=chosen.rows,
        tokens=chosen.tokens,
        scores=chosen.scores.clamp(max=1),  # probabilities, up to rounding
        mask_ratio=result.mask_ratio,
        circuit=result.circuit,
        window=result.window,
        ids=state.ids,
        finished=state.finished,
    )
