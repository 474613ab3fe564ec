"""Compiles constraints for a server: a program that the system stops where a limit of time or memory is passed.

Python that computes for seconds in a thread would slow down every other thread by as much (each operation of PyTorch
gives up the interpreter's lock, and waits to have it back), and nothing could end it.

Its argument: the bytes of address space that compiling may take. Its input: a line of JSON, the vocabulary
[[token, ...], whether spaces are stripped], tokens as Latin-1; then lines [processor seconds, kind, value, most states,
most entries]. For each it writes a line: {"error": why}, or the arguments of `Automaton.from_classes`.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from codd.constraints import Automaton, Choice, JsonSchema, Language, Regex, Vocabulary
from codd.errors import InvalidConstraint
from codd.files import brief

STARVED = 10
"""Seconds of the wall per second of work, at most: the model comes first, and may leave little."""
KINDS: dict[str, type[Language]] = {"regex": Regex, "json": JsonSchema, "choice": Choice}


def compiled(vocabulary: Vocabulary, kind: str, value: Any, states: int, entries: int) -> Automaton:
    """The automaton; InvalidConstraint where it is too large, or there is none."""
    language: Any = KINDS[kind]
    automaton: Automaton = language(value).compile(vocabulary, max_states=states)
    if automaton.table.numel() > entries:
        raise InvalidConstraint(
            f"the constraint is too large: its {automaton.num_states} states tell {automaton.num_classes} kinds of "
            f"tokens apart, and the product is more than {entries:,}. Leave out some of its texts."
        )
    return automaton


def _answer(request: bytes, vocabulary: Vocabulary) -> dict[str, Any]:
    seconds, *wanted = json.loads(request)
    with _limited(seconds):  # which fails where there is no memory for its watchdog: then this process ends, too
        try:
            found = compiled(vocabulary, *wanted)
            accepting = found.accepting.nonzero()[:, 0].tolist()
            tables = {"table": found.table.tolist(), "classes": found.classes.tolist()}
            return {**tables, "start": found.start, "accepting": accepting}
        except InvalidConstraint as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "the constraint is too large: compiling it takes too much memory. Make it smaller."}
        except Exception as error:  # a fault of the compiler: the next constraint is another one
            return {"error": f"the constraint cannot be compiled ({brief(error)})."}


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End this process after a number of seconds of its processor time, or `STARVED` times as many by the clock.

    The system does so, without Python: one long operation ends, too.
    """
    clock = seconds
    if hasattr(signal, "setitimer"):  # not on Windows
        clock = STARVED * seconds
        signal.setitimer(signal.ITIMER_PROF, seconds)
    faulthandler.dump_traceback_later(clock, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)


def _serve(memory: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    # Windows has no such limits, and those of an administrator may be lower already.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(5)  # the model comes first
        most = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    tokens, strips_space = json.loads(sys.stdin.buffer.readline())
    vocabulary = Vocabulary(tuple(token.encode("latin-1") for token in tokens), strips_space)
    for line in sys.stdin.buffer:
        print(json.dumps(_answer(line, vocabulary)), flush=True)


def _address_space() -> int:
    """Bytes that this process has already; most of it is PyTorch's code."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
