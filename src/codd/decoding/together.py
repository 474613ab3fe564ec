"""Decisions of several sequences, each in a thread of its own, that share nothing but the reading of the circuit.

One of the threads works at a time, as if the sequences came one after the other; only where a sampler passes
messages along the chain they wait for each other (`codd.circuits.ops.batch_barrier`). So a sequence is decided alike,
to the bit, alone and in a crowd.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

import torch

from codd.circuits import HMM, Modulated
from codd.circuits.ops import native
from codd.circuits.ops.batch_barrier import BatchBarrier
from codd.decoding.decide import Asked

Case = TypeVar("Case")
Result = TypeVar("Result")
MEMBERS = 8
"""Threads at most: the circuit is read for so many rows at once."""
STATES = 256
"""From here on reading the circuit takes longer than waiting for each other."""


def each(function: Callable[[Case], Result], cases: Sequence[Case]) -> list[Result]:
    """The function's result for each case, in order. If it fails for some, the first error, after all are done."""
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}
    left = deque(enumerate(cases))

    def work() -> None:
        while True:
            try:
                number, case = left.popleft()
            except IndexError:
                return
            try:
                results[number] = function(case)
            except Exception as error:
                errors[number] = error

    rounds = -(-len(cases) // MEMBERS)
    if sum(map(_walks, cases)) > 1:
        _gather(work, -(-len(cases) // rounds))
    else:
        work()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(cases))]


def _walks(case: object) -> bool:
    """Whether a decision reads a circuit so large that company pays."""
    if not isinstance(case, Asked) or case.options.sampler == "factorized" or case.logits.device.type != "cpu":
        return False
    hmm = case.circuit.hmm if isinstance(case.circuit, Modulated) else case.circuit
    if not isinstance(hmm, HMM) or hmm.dtype != torch.float32 or hmm.num_states < STATES:
        return False
    return not hmm.transition.low_rank and not hmm.transition.per_position and native.library() is not None


def _gather(work: Callable[[], None], members: int) -> None:
    """The same work in some threads, of which this is one."""
    barrier = BatchBarrier(members)
    cores, inference, grad = torch.get_num_threads(), torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def aside() -> None:
        if torch.get_num_threads() != cores:  # matrix products have other bits with another number
            torch.set_num_threads(cores)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            work()

    started: list[Thread] = []
    try:
        while len(started) < members - 1:
            thread = Thread(target=copy_context().run, args=(barrier.run, aside), name="codd-decision")
            thread.start()
            started.append(thread)
    except RuntimeError:  # the machine has no more threads to give: those that there are do it all
        for _ in range(members - 1 - len(started)):
            barrier.leave()
    try:
        barrier.run(work)
    finally:
        for thread in started:
            thread.join()
