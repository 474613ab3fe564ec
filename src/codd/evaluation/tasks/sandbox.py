"""Runs programs that a language model wrote: each in a process of its own that can compute, and little else.

The process has no environment, no descriptors but its pipes, and limits on time, memory and output; on Linux it can
also not start processes, write, delete, signal others or reach a network (``seccomp.py``). It can read the
interpreter's own files, and on kernels without Landlock (before 5.13) others as well. Whatever it reads, nothing leaves
but one bounded line that says why it failed.
"""

import contextlib
import math
import os
import platform
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from codd.errors import CoddError, InvalidInput
from codd.evaluation.tasks import seccomp

_START_SECONDS = 60
"""How long the interpreter may take to start; the program's own time begins after that."""
_REASON_CHARACTERS = 200
_TRIAL = "import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    pass\nelse:\n    raise SystemExit"


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 10.0
    """By the clock, from when the program begins."""
    cpu_seconds: float = 10.0
    """Of all its threads together; rounded up."""
    memory: int = 2**30
    """Bytes of address space, the interpreter's own included: not below 64 MiB."""
    output: int = 2**22
    """Bytes that it may print; they are counted and dropped."""
    confined: bool = True
    """False leaves limits and time-out only, for machines that cannot confine: a hostile program can then do harm."""

    def __post_init__(self) -> None:
        """Refuse limits under which no program could run."""
        if not (0 < self.seconds < math.inf and 0 < self.cpu_seconds < math.inf):
            raise InvalidInput(
                f"a program needs a positive number of seconds, found {self.seconds} and {self.cpu_seconds} of CPU."
            )
        if self.memory < 2**26 or self.output < 0:
            raise InvalidInput(
                f"a program needs memory >= {2**26} and output >= 0 bytes, found {self.memory} and {self.output}."
            )


class Verdict(NamedTuple):
    """What became of a program."""

    passed: bool
    """It ran to its last line."""
    reason: str
    """One printable line of at most 200 characters: "passed", or why not."""


def run_program(source: str, limits: Limits = Limits()) -> Verdict:  # noqa: B008 it is frozen
    """Whether a program, usually an answer and the asserts that test it, runs to its end within the limits.

    Its ``__name__`` is "program", so a main guard stays shut; hashes are those of seed 0, so that sets have the same
    order every time. A program that fails in any way gives a verdict; only a sandbox that cannot be had raises.
    """
    if limits.confined and (obstacle := unavailable()):
        raise CoddError(
            f"cannot confine programs here: {obstacle}. Run them on another machine, or without confinement "
            "(Limits(confined=False)) if you trust them."
        )
    if os.name != "posix":
        raise CoddError(f"programs can be run on Linux and macOS only, this is {sys.platform}.")
    return _run(source, limits)


def run_programs(
    sources: Iterable[str],
    limits: Limits = Limits(),  # noqa: B008 it is frozen
    workers: int | None = None,
) -> list[Verdict]:
    """The verdicts of many programs in their order, ``workers`` at a time (one for each core if None)."""
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        return list(pool.map(lambda source: run_program(source, limits), sources))


@cache
def unavailable() -> str | None:
    """Why this machine cannot confine programs; None if it can, which one run has then shown."""
    if sys.platform != "linux":
        return f"it needs Linux with seccomp, this is {sys.platform}"
    if platform.machine() not in seccomp.AUDIT_ARCHITECTURE or struct.calcsize("P") != 8:
        known = " or ".join(seccomp.AUDIT_ARCHITECTURE)
        return f"it needs a 64-bit Python on {known}, this is {8 * struct.calcsize('P')}-bit on {platform.machine()}"
    try:
        verdict = _run(_TRIAL, Limits())
    except CoddError as error:
        return str(error).removesuffix(".")
    return None if verdict.passed else f"a trial program was not held ({verdict.reason})"


def _run(source: str, limits: Limits) -> Verdict:
    nonce = secrets.token_hex(seccomp.NONCE_BYTES // 2).encode()
    receiver, sender = os.pipe()
    try:
        process = _start(sender, limits)
    except OSError as error:
        os.close(receiver)
        raise CoddError(f"the sandbox did not start: {error}.") from None
    finally:
        os.close(sender)
    with process:
        try:
            _send(process, nonce + source.encode(errors="surrogatepass"))
            heard, obstacle = _listen(process, receiver, limits)
        finally:
            os.close(receiver)
            # Not reaped yet, so its number still means it and its group. macOS permits no signal to one that has ended.
            with contextlib.suppress(PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Verdict(False, obstacle) if obstacle else _verdict(heard, nonce, process.returncode, limits)


def _start(sender: int, limits: Limits) -> "subprocess.Popen[bytes]":
    """The interpreter as -I would start it, but that the environment is ours, so that it can fix the hash seed."""
    numbers = (sender, os.getpid(), math.ceil(limits.cpu_seconds), limits.memory, int(limits.confined))
    script = str(Path(seccomp.__file__).resolve())
    environment = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some interpreters do not start without it
        environment["LD_LIBRARY_PATH"] = libraries
    return subprocess.Popen(
        [sys.executable, "-s", "-P", "-B", "-X", "utf8", script, *map(str, numbers)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(sender,),
        cwd="/",
        env=environment,
        start_new_session=True,
    )


def _send(process: "subprocess.Popen[bytes]", job: bytes) -> None:
    """The child reads all of it before anything else, so this does not block; and then its standard input has ended."""
    assert process.stdin is not None
    rest = memoryview(job)
    try:
        while rest:
            rest = rest[process.stdin.write(rest) :]
    except BrokenPipeError:
        pass  # it did not start; what it printed says why
    finally:
        process.stdin.close()


def _listen(process: "subprocess.Popen[bytes]", receiver: int, limits: Limits) -> tuple[bytes, str]:
    """What the child reported, and why it was stopped if it was. A child that is not ready did not start."""
    assert process.stdout is not None
    output = process.stdout.fileno()
    heard, printed, last = b"", 0, b""
    deadline = time.monotonic() + _START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(receiver, selectors.EVENT_READ)
        selector.register(output, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            events = selector.select(left)
            for key, _ in sorted(events, key=lambda event: event[0].fd == receiver):
                chunk = os.read(key.fd, 2**16)
                if key.fd == output:
                    printed, last = printed + len(chunk), (last + chunk)[-500:]
                    if not chunk:
                        selector.unregister(output)
                    elif printed > limits.output:
                        return heard, f"printed more than {limits.output} bytes"
                    continue
                if not heard and chunk:
                    deadline = time.monotonic() + limits.seconds
                heard += chunk
                if not heard.startswith(seccomp.READY):
                    raise CoddError(f"the sandbox did not start: {_line(last.decode(errors='replace'))}.")
                if not chunk or len(heard) > 2**13 or heard.count(b"\n") > 1:
                    return heard, ""
    if not heard:
        raise CoddError(f"the sandbox did not start within {_START_SECONDS} s: the machine is too busy.")
    return heard, f"timed out after {limits.seconds:g} s"


def _verdict(heard: bytes, nonce: bytes, code: int, limits: Limits) -> Verdict:
    message = heard.removeprefix(seccomp.READY).partition(b"\n")[0]
    if message == nonce:
        return Verdict(True, "passed")
    if message:
        return Verdict(False, _line(message.decode(errors="replace")))
    if code == -signal.SIGXCPU:
        return Verdict(False, f"timed out after {math.ceil(limits.cpu_seconds)} s of CPU time")
    if code < 0 and code != -signal.SIGKILL:
        names = {known.value: known.name for known in signal.Signals}  # real-time signals have none
        return Verdict(False, f"crashed with {names.get(-code, f'signal {-code}')}")
    return Verdict(False, seccomp.EARLY)


def _line(text: str) -> str:
    shown = "".join(character for character in " ".join(text.split()) if character.isprintable())
    return shown if len(shown) <= _REASON_CHARACTERS else shown[: _REASON_CHARACTERS - 3] + "..."
