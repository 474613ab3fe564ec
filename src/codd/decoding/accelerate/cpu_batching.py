"""Steps of several sequences on a CPU, each in a thread of its own, that share the reading of the circuit's tables.

One thread works at a time, as if the sequences came one after the other; only at the message passing along the chain
do they wait for each other (`codd.circuits.ops.batch_barrier`), and one pass serves all. So a sequence is decoded
alike, to the bit, alone and in a batch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

import torch

from codd.circuits.ops.batch_barrier import BatchBarrier
from codd.decoding.state import StepInputs

Case = TypeVar("Case")
Result = TypeVar("Result")
MAX_THREADS = 8
"""Threads at most: the circuit's tables are read for so many sequences at once."""


def map_sequences(function: Callable[[Case], Result], cases: Sequence[Case]) -> list[Result]:
    """The function's result for each case, in order; of several errors the first is raised, after all are done."""
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}
    queue = deque(enumerate(cases))

    def work() -> None:
        while True:
            try:
                number, case = queue.popleft()
            except IndexError:
                return
            try:
                results[number] = function(case)
            except Exception as error:
                errors[number] = error

    if sum(map(_pays_off, cases)) > 1:
        rounds = -(-len(cases) // MAX_THREADS)
        _run_in_threads(work, -(-len(cases) // rounds))
    else:
        work()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(cases))]


def _pays_off(case: object) -> bool:
    """Whether a step reads a circuit on a CPU that is large enough for batching across sequences to pay off."""
    if not isinstance(case, StepInputs) or case.circuit is None:
        return False
    return case.options.sampler != "factorized" and case.logits.device.type == "cpu" and case.circuit.memory_bound


def _run_in_threads(work: Callable[[], None], count: int) -> None:
    """Do the same work in ``count`` threads, of which this is one."""
    barrier = BatchBarrier(count)
    cores, inference, grad = torch.get_num_threads(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def aside() -> None:
        if torch.get_num_threads() != cores:  # matrix products have other bits with another number
            torch.set_num_threads(cores)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            work()

    started: list[Thread] = []
    try:
        while len(started) < count - 1:
            thread = Thread(target=copy_context().run, args=(barrier.run, aside), name="codd-step")
            thread.start()
            started.append(thread)
    except RuntimeError:  # the machine has no more threads to give: those that there are do it all
        for _ in range(count - 1 - len(started)):
            barrier.leave()
    try:
        barrier.run(work)
    finally:
        for thread in started:
            thread.join()
