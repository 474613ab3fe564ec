"""Walks on several cores, and in company: threads wait for each other's walks, so that a matrix is read once for all.

A walk with one row waits for memory nearly all the time: eight rows take hardly longer than one. Where several
sequences are conditioned, each in a thread of its own, these meet at their walks, and who comes last does all of them.
Nothing else is shared: a thread works on its own numbers as it does alone, and gets the same ones to the bit.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from itertools import pairwise
from threading import Event, Lock
from typing import TypeVar

import torch

from codd.circuits.ops import native
from codd.circuits.ops.native import Walk

_Result = TypeVar("_Result")
CORES = 4
"""Threads at most, this one included."""
WORTH = 2**21
"""Multiplications for which a thread is started."""


def walk(walks: Sequence[Walk]) -> None:
    """Do these walks: at once, or with those of the gathering that this thread belongs to."""
    here = _HERE.get()
    if not walks:
        return
    if here is None:
        _perform(walks)
    else:
        here.meet(walks)


def _perform(walks: Sequence[Walk]) -> None:
    cost = sum(one.cost for one in walks)
    cores = min(CORES, torch.get_num_threads()) if cost >= 2 * WORTH else 1
    tasks = _tasks(walks, cores)
    if cores == 1 or len(tasks) == 1:
        for task in tasks:
            native.walk(task)
        return
    # New threads each time: a kept one would be woken on the core of this one, and stay there for as long as it takes.
    with ThreadPoolExecutor(len(tasks) - 1) as others:
        elsewhere = [others.submit(native.walk, task) for task in tasks[1:]]
        native.walk(tasks[0])
        for one in elsewhere:
            one.result()


def _tasks(walks: Sequence[Walk], cores: int) -> list[list[Walk]]:
    """Walks that share a matrix, in as many parts as there are cores for; those of like lengths together."""
    groups: dict[tuple[int, int], list[Walk]] = {}
    for one in sorted(walks, key=lambda one: -len(one.values)):
        groups.setdefault((one.matrix.data_ptr(), one.every), []).append(one)
    tasks = []
    for group in groups.values():
        parts = min(len(group), max(1, cores // len(groups)))
        ends = [len(group) * part // parts for part in range(parts + 1)]
        tasks += [group[begin:end] for begin, end in pairwise(ends)]
    return tasks


class _Waiting:
    """A thread that waits for its walks."""

    def __init__(self, walks: Sequence[Walk]) -> None:
        self.walks = walks
        self.done = Event()
        self.error: BaseException | None = None


class Gathering:
    """Threads of which one at a time works, and whose walks are done when all of them have come to one."""

    def __init__(self, members: int) -> None:
        """Each member has to ``run`` something once, or to ``leave``: the others wait for it."""
        self._working = members
        self._waiting: list[_Waiting] = []
        self._changing, self._baton = Lock(), Lock()

    def run(self, function: Callable[[], _Result]) -> _Result:
        """What a member does, in its own thread."""
        token = _HERE.set(self)
        self._baton.acquire()
        try:
            return function()
        finally:
            self.leave()
            self._baton.release()
            _HERE.reset(token)

    def leave(self) -> None:
        """Wait for one member less."""
        self._working_changed(-1, None)

    def meet(self, walks: Sequence[Walk]) -> None:
        """Have walks done; meanwhile others work."""
        mine = _Waiting(walks)
        self._working_changed(0, mine)
        if not mine.done.is_set():
            self._baton.release()
            mine.done.wait()
            self._baton.acquire()
        if mine.error is not None:
            raise mine.error

    def _working_changed(self, by: int, arrived: _Waiting | None) -> None:
        with self._changing:
            self._working += by
            self._waiting += [] if arrived is None else [arrived]
            if len(self._waiting) < self._working:
                return
            due, self._waiting = self._waiting, []
        try:
            _perform([one for waiting in due for one in waiting.walks])
        except BaseException as error:  # theirs as well as mine, if I wait
            for waiting in due:
                waiting.error = error
        for waiting in due:
            waiting.done.set()


_HERE: ContextVar[Gathering | None] = ContextVar("codd_gathering", default=None)
