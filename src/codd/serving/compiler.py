"""From the constraint of a request to an automaton over the model's tokens; hostile ones keep nobody but their sender.

Another process compiles, one constraint at a time, each client's in turn, within limits of size, time and memory.
Nothing is kept on disk.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

from codd.constraints import Automaton
from codd.decoding import Model
from codd.errors import CoddError, InvalidConstraint
from codd.serving import compiler_process
from codd.serving.errors import APIError, refusing
from codd.serving.prompts import Compiled, Limits
from codd.serving.requests import before
from codd.serving.schemas import Constraint

KEPT = 1 << 26
"""Bytes of compiled automata that are kept."""
MOST_ENTRIES = 1 << 18
"""States times kinds of tokens of an automaton: 2 MB, which each sequence holds once."""


class Compiler:
    """Compiles the constraints of requests for one model, and keeps the latest ones."""

    def __init__(self, model: Model, limits: Limits):
        """No process is started before the first constraint comes."""
        self._model, self._limits = model, limits
        self._process: _Process | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="codd-compiler")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._kept: OrderedDict[str, Automaton] = OrderedDict()

    def close(self) -> None:
        """End the process, also one that is just being started."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.stop()

    async def __call__(self, constraint: Constraint | None, client: str, deadline: float) -> Compiled | None:
        """The constraint of a request, compiled; an `APIError` that names its field if it cannot be.

        A client has one constraint compiled at a time, so that others wait for one of its at most.
        """
        if constraint is None:
            return None
        try:
            key = json.dumps([constraint.kind, constraint.value])
        except RecursionError:
            raise APIError(400, f"{constraint.field} is nested too deep.", constraint.field) from None
        size = len(key)
        if size > self._limits.constraint:
            message = f"{constraint.field} has {size} bytes; a constraint has at most {self._limits.constraint}."
            raise APIError(400, message, constraint.field)
        if key in self._kept:
            self._kept.move_to_end(key)
            return Compiled(constraint.field, self._kept[key])
        turn = self._turns.setdefault(client, asyncio.Lock())
        return Compiled(constraint.field, await before(deadline, self._in_turn(turn, key, constraint)))

    async def _in_turn(self, turn: asyncio.Lock, key: str, constraint: Constraint) -> Automaton:
        async with turn:
            if key not in self._kept:
                loop = asyncio.get_running_loop()
                self._kept[key] = await loop.run_in_executor(self._thread, self._compile, constraint)
                while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]

    def _compile(self, constraint: Constraint) -> Automaton:
        """In the compiler's thread, which waits for the process."""
        with refusing(constraint.field):
            if self._process is None or not self._process.alive:
                self._process = _Process(self._model, self._limits)
            if self._closed:
                self._process.stop()
                raise CoddError("the compiler is closed.")
            return self._process.compile(constraint)


def _bytes(automaton: Automaton) -> int:
    return automaton.table.nbytes + automaton.classes.nbytes


class _Process:
    """The process that compiles, for one vocabulary."""

    def __init__(self, model: Model, limits: Limits):
        """Start it; CoddError if the model's tokens write no text, or there is no process to be had."""
        self._limits, vocabulary = limits, model.vocabulary
        path = os.pathsep.join(part for part in sys.path if part)
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", compiler_process.__name__, str(limits.compile_memory)],
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                # A cache folder in which nothing can be written: clients must not fill the disk.
                env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": os.devnull},
            )
        except OSError as error:
            raise CoddError(f"the process that compiles constraints did not start: {error}.") from error
        self._lock = threading.Lock()
        self._send([[token.decode("latin-1") for token in vocabulary.tokens], vocabulary.strips_space])

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        with self._lock:
            self._process.communicate()  # reaps it and closes the pipes

    def compile(self, constraint: Constraint) -> Automaton:
        """The automaton; InvalidConstraint where there is none, or a limit is passed, which ends the process."""
        limits = self._limits
        with self._lock:
            self._send([limits.compile_seconds, constraint.kind, constraint.value, limits.states, MOST_ENTRIES])
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        if not line.endswith(b"\n"):  # it has died
            self.stop()
            raise InvalidConstraint(
                f"the constraint is too large: it takes more than {limits.compile_seconds:g} seconds or "
                f"{limits.compile_memory / 2**20:.0f} MiB of memory to compile. Make it smaller."
            )
        found = json.loads(line)
        if "error" in found:
            raise InvalidConstraint(found["error"])
        return Automaton.from_classes(**found)

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died, which reading its answer tells
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
