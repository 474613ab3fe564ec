"""Message passing on several cores and batched across threads, so that a transition matrix is read once for all rows.

A pass with one row is memory-bound: eight rows cost about as much as one. Where several sequences are conditioned, each
in a thread of its own, the threads wait for each other at a barrier, and the last to arrive runs the passes of all of
them. Nothing else is shared: a thread computes on its own numbers as it does alone, and gets the same ones to the bit.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from itertools import pairwise
from threading import Event, Lock
from typing import TypeVar

import torch

from codd.circuits.ops import native
from codd.circuits.ops.native import ChainPass

_Result = TypeVar("_Result")
CORES = 4
"""Threads at most, the calling one included."""
WORTH = 2**21
"""Multiplications from which on another thread is worth its start."""


def run_passes(passes: Sequence[ChainPass]) -> None:
    """Run these passes: at once, or batched with those of the barrier that this thread is a member of."""
    barrier = _BARRIER.get()
    if not passes:
        return
    if barrier is None:
        _run_now(passes)
    else:
        barrier.run_passes(passes)


def _run_now(passes: Sequence[ChainPass]) -> None:
    cost = sum(one.cost for one in passes)
    cores = min(CORES, torch.get_num_threads()) if cost >= 2 * WORTH else 1
    tasks = _tasks(passes, cores)
    if cores == 1 or len(tasks) == 1:
        for task in tasks:
            native.run_passes(task)
        return
    # New threads each time: a kept one would be woken on the core of this one, and stay there for as long as it takes.
    with ThreadPoolExecutor(len(tasks) - 1) as others:
        elsewhere = [others.submit(native.run_passes, task) for task in tasks[1:]]
        native.run_passes(tasks[0])
        for one in elsewhere:
            one.result()


def _tasks(passes: Sequence[ChainPass], cores: int) -> list[list[ChainPass]]:
    """Batches of passes that share a matrix, as many as there are cores for; those of like lengths together."""
    groups: dict[tuple[int, int], list[ChainPass]] = {}
    for one in sorted(passes, key=lambda one: -len(one.values)):
        groups.setdefault((one.matrix.data_ptr(), one.rescale_every), []).append(one)
    tasks = []
    for group in groups.values():
        parts = min(len(group), max(1, cores // len(groups)))
        ends = [len(group) * part // parts for part in range(parts + 1)]
        tasks += [group[begin:end] for begin, end in pairwise(ends)]
    return tasks


class _Arrival:
    """A thread that waits at the barrier until its passes are done."""

    def __init__(self, passes: Sequence[ChainPass]) -> None:
        self.passes = passes
        self.done = Event()
        self.error: BaseException | None = None


class BatchBarrier:
    """Threads of which one at a time computes, and whose passes are run as one batch once all have arrived."""

    def __init__(self, members: int) -> None:
        """Each member has to ``run`` something once, or to ``leave``: the others wait for it."""
        self._working = members
        self._arrived: list[_Arrival] = []
        self._changing, self._baton = Lock(), Lock()

    def run(self, function: Callable[[], _Result]) -> _Result:
        """Call a member's function in the member's own thread, and leave the barrier when it returns or raises."""
        token = _BARRIER.set(self)
        self._baton.acquire()
        try:
            return function()
        finally:
            self.leave()
            self._baton.release()
            _BARRIER.reset(token)

    def leave(self) -> None:
        """Leave for good: the others no longer wait for this member."""
        self._working_changed(-1, None)

    def run_passes(self, passes: Sequence[ChainPass]) -> None:
        """Have a member's passes run with the others'; meanwhile these compute. Raises what the batch raised."""
        mine = _Arrival(passes)
        self._working_changed(0, mine)
        if not mine.done.is_set():
            self._baton.release()
            mine.done.wait()
            self._baton.acquire()
        if mine.error is not None:
            raise mine.error

    def _working_changed(self, by: int, arrival: _Arrival | None) -> None:
        with self._changing:
            self._working += by
            self._arrived += [] if arrival is None else [arrival]
            if len(self._arrived) < self._working:
                return
            due, self._arrived = self._arrived, []
        try:
            _run_now([one for arrived in due for one in arrived.passes])
        except BaseException as error:  # raised in every waiting thread, this one included if it waits
            for arrived in due:
                arrived.error = error
        for arrived in due:
            arrived.done.set()


_BARRIER: ContextVar[BatchBarrier | None] = ContextVar("codd_batch_barrier", default=None)
