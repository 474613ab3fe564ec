"""Runs programs that a language model wrote: each in a process of its own that can compute, and little else.

The process has no environment, no descriptors but one pipe, and limits on time and memory; what it prints is dropped.
On Linux it can also not start processes, write, delete, signal others or reach a network. Three layers, each of which
would do against most programs: limits on resources, Landlock where the kernel has it (since 5.13: files outside the
interpreter's folders cannot be read, nor other processes through /proc), and a seccomp filter. The filter names what a
Python program needs to compute, to import and to run threads; all other calls get EPERM rather than death, so that a
library may do without. Whatever a program reads, nothing leaves but one bounded line that says why it failed.

This file is both sides. The child process runs it as a script and never gets past the middle, where `child` is called:
it imports little, because every program pays for its start.
"""

import os
import struct
import sys
from errno import ENOSYS, EPERM

if __name__ != "__main__":
    import contextlib
    import math
    import platform
    import secrets
    import selectors
    import signal
    import subprocess
    import time
    from dataclasses import dataclass
    from functools import cache
    from typing import NamedTuple

    from codd.errors import CoddError

AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The machines that there is a filter for, and how the kernel marks a call that is made in their own convention."""
NONCE_BYTES = 32
READY = b"\0ready\n"
"""What the child writes when it is confined; whatever comes before was printed by an interpreter that is starting."""
EARLY = "ended before the tests were done"
TASKS = 4096
"""Threads that one user may have. Far above what programs need: the kernel counts the user's other processes, too."""
NOBODY = 65534
SIGKILL = 9  # the module that names it takes as long to import as all others of the child

# The numbers of the calls that are allowed whatever their arguments: on x86_64, and on aarch64 where it exists there.
ALLOWED = {
    **{"read": (0, 63), "write": (1, 64), "writev": (20, 66), "pread64": (17, 67), "close": (3, 57), "lseek": (8, 62)},
    **{"stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291)},
    **{"access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "getdents64": (217, 61)},
    **{"readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17)},
    **{"poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72)},
    **{"mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233)},
    **{"brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139)},
    **{"sigaltstack": (131, 132), "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94)},
    **{"futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "gettid": (186, 178), "getpid": (39, 172)},
    **{"sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168), "getppid": (110, 173)},
    **{"getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177)},
    **{"uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165), "times": (100, 153), "getrandom": (318, 278)},
    **{"time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113), "clock_getres": (229, 114)},
    **{"nanosleep": (35, 101), "clock_nanosleep": (230, 115)},
}
CLONE3 = 435
SECCOMP = {"x86_64": 317, "aarch64": 277}

WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_ACCMODE, O_CREAT, O_TRUNC, O_TMPFILE
THREADS = (0x3D0F00, 0x7D0F00)  # the flags with which glibc and musl start a thread; a new process has others
TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONCLEX, FIOCLEX
DESCRIPTOR_FLAGS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; F_SETOWN sends signals


def filter_program(machine: str, pid: int) -> bytes:
    """The seccomp filter for the process ``pid`` as instructions of classic BPF, each of eight bytes.

    Calls in another convention (32-bit on x86_64) are refused by the architecture's mark, those of x32 because their
    numbers, which have bit 30 set, are on no list. clone3 does not exist, so that the C library falls back to clone,
    whose flags a filter can see. Pointers are never followed: what they point at may change after the check.
    """
    load, keep_bits, jump_if_equal, end = 0x20, 0x54, 0x15, 0x06

    def code(operation: int, value: int, equal: int = 0, other: int = 0) -> bytes:
        return struct.pack("<HBBI", operation, equal, other, value)

    def must_be(argument: int, *values: int, bits: int = 0xFFFFFFFF, upper: bool = False) -> list[bytes]:
        """Refuse unless these bits of an argument's lower or upper half have one of the values."""
        tests = [code(jump_if_equal, value, len(values) - place) for place, value in enumerate(values)]
        return [code(load, 16 + 8 * argument + 4 * upper), code(keep_bits, bits), *tests, refuse]

    column = list(AUDIT_ARCHITECTURE).index(machine)
    refuse, allow, absent = (code(end, action) for action in (0x50000 | EPERM, 0x7FFF0000, 0x50000 | ENOSYS))
    guarded = {
        (2, None): must_be(1, 0, bits=WRITING),  # open
        (257, 56): must_be(2, 0, bits=WRITING),  # openat
        (16, 29): must_be(1, *TERMINAL_QUESTIONS),  # ioctl
        (72, 25): must_be(1, *DESCRIPTOR_FLAGS),  # fcntl
        (56, 220): must_be(0, *THREADS),  # clone
        # prlimit64: a process may ask for its own limits, but the pointer to new ones must be null in both halves.
        (302, 261): must_be(0, 0) + must_be(2, 0) + must_be(2, 0, upper=True),
        (62, 129): must_be(0, pid),  # kill: a process may signal itself, as abort() does
        (234, 131): must_be(0, pid),  # tgkill
    }
    program = [code(load, 4), code(jump_if_equal, AUDIT_ARCHITECTURE[machine], 1), refuse, code(load, 0)]
    for numbers in ALLOWED.values():
        if (number := numbers[column]) is not None:
            program += [code(jump_if_equal, number, 0, 1), allow]
    program += [code(jump_if_equal, CLONE3, 0, 1), absent]
    for numbers, conditions in guarded.items():
        if (number := numbers[column]) is not None:
            program += [code(jump_if_equal, number, 0, len(conditions) + 1), *conditions, allow]
    return b"".join([*program, refuse])


def limit_resources(cpu: int, memory: int, strict: bool) -> None:
    """Lower the limits of this process: for good, as what lies below the hard limit cannot be raised again."""
    import resource

    wanted = {"CPU": cpu, "AS": memory, "FSIZE": 0, "CORE": 0, "NOFILE": 64, "NPROC": TASKS}
    for name, value in wanted.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        bound = value + 1 if hard == resource.RLIM_INFINITY else hard
        # A second passes between the signal that says why, which a program may ignore, and the one that kills.
        most = value + 1 if name == "CPU" else value
        try:
            resource.setrlimit(which, (min(value, bound), min(most, bound)))
        except (ValueError, OSError):  # macOS has names for limits that it does not know
            if strict:
                raise


def become_nobody() -> None:
    """If this is root, be nobody from now on.

    Where nobody cannot read the interpreter's own files (a Python below /root), only the real user changes, so that
    the limit on threads, which spares root, holds; ``confine`` then takes root's powers away.
    """
    if not hasattr(os, "setresuid") or os.geteuid() != 0:
        return
    folders = [path for path in sys.path if os.path.isdir(path)]
    try:
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        reachable = all(os.access(path, os.R_OK | os.X_OK, effective_ids=True) for path in folders)
        os.seteuid(0)
        os.setegid(0)
        other = NOBODY if reachable else 0
        os.setresgid(NOBODY, other, other)
        os.setresuid(NOBODY, other, other)
    except PermissionError:
        return  # a container's root may not be allowed to


def confine(parent: int) -> None:
    """Give up everything but computing, reading the interpreter's files and writing to open descriptors."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long

    def must(name: str, result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
        return result

    def prctl(name: str, option: int, argument: int) -> None:
        must(name, libc.prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0))))

    if os.geteuid() == 0:  # root that could not become nobody goes on without capabilities
        must("capset", libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    prctl("PR_SET_DUMPABLE", 4, 0)
    prctl("PR_SET_PDEATHSIG", 1, SIGKILL)
    if os.getppid() != parent:  # it was gone before the signal was asked for
        os._exit(1)
    prctl("PR_SET_NO_NEW_PRIVS", 38, 1)

    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version > 0:
        # All that this version of Landlock knows of files, TCP, and signals to others is refused.
        files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
        rules = struct.pack("<3Q", files, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]
        ruleset = must("landlock_create_ruleset", libc.syscall(444, rules, ctypes.c_size_t(len(rules)), 0))
        for path in filter(os.path.exists, readable_paths()):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            beneath = struct.pack("<Qi", 0b1100 if os.path.isdir(path) else 0b100, opened)  # READ_DIR, READ_FILE
            must("landlock_add_rule", libc.syscall(445, ruleset, 1, beneath, 0))
            os.close(opened)
        must("landlock_restrict_self", libc.syscall(446, ruleset, 0))
        os.close(ruleset)

    machine = os.uname().machine
    instructions = filter_program(machine, os.getpid())
    kept = ctypes.create_string_buffer(instructions)
    record = struct.pack("HP", len(instructions) // 8, ctypes.addressof(kept))
    # For all threads: what runs when an interpreter starts (.pth files) may have started one.
    if must("seccomp", libc.syscall(SECCOMP[machine], 1, 1, record)):
        raise OSError("seccomp: a thread could not be confined")


def readable_paths() -> dict[str, None]:
    """What imports need: the interpreter's folders, shared libraries, time zones."""
    own = [*sys.path, f"{sys.base_prefix}/lib", f"{sys.prefix}/lib"]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/usr/share/zoneinfo"]
    files = ["/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"]
    return dict.fromkeys(own + system + files)


def execute(source: bytes, nonce: bytes) -> bytes:
    """Run the program; the nonce if it came to its end, else why it did not."""
    # Not "__main__": like the reference (code_eval), answers are judged by the asserts, and a main guard stays shut.
    program = type(sys)("program")
    sys.modules["program"] = program
    try:
        # As text: a comment that names an encoding would change what bytes mean.
        exec(compile(source.decode(errors="surrogatepass"), "program.py", "exec"), program.__dict__)
    except SystemExit:
        reason = EARLY
    except MemoryError:
        reason = "out of memory"
    except PermissionError as error:
        reason = f"not permitted: {error}"
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    else:
        return nonce
    return " ".join(reason[:1000].split()).encode(errors="replace")


def child(parent: int, cpu: int, memory: int, confined: int) -> None:
    """Read nonce and program from the standard input, run it, and write what became of it to the standard output.

    What the program itself prints goes nowhere. It may exit, replace builtins or break modules: the nonce is written
    only here. What this does not prevent: code in the same process that looks for the nonce (in this frame, in memory)
    and writes it itself, or an answer whose results are equal to everything. They fool their own problem, and nothing
    else. Does not return.
    """
    write, leave = os.write, os._exit
    job = sys.stdin.buffer.read()
    nonce, source = job[:NONCE_BYTES], job[NONCE_BYTES:]
    report, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    for printed in (1, 2):
        os.dup2(nowhere, printed)
    os.close(nowhere)
    try:
        limit_resources(cpu, memory, strict=bool(confined))
        become_nobody()
        if confined:
            confine(parent)
    except Exception as error:
        write(report, f"{type(error).__name__}: {error}".encode(errors="replace"))
        leave(1)
    sys.argv = ["program.py"]
    write(report, READY)
    try:
        message = execute(source, nonce)
    except BaseException:  # describing it failed: no memory is left, or the error does not want to be described
        message = b"failed with an error that cannot be shown"
    write(report, message + b"\n")
    leave(0)


if __name__ == "__main__":
    child(*map(int, sys.argv[1:]))


START_SECONDS = 60
"""How long the interpreter may take to start; the program's own time begins after that."""
REASON_CHARACTERS = 200
MOST_BYTES = 2**14
"""Bytes of a report; a program that writes more into its pipe is ended."""
TRIAL = "import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    pass\nelse:\n    raise SystemExit"


@dataclass(frozen=True)
class Limits:
    """The limits of a program: time, memory and output."""

    seconds: float = 10.0
    """Seconds by the clock, from when the program begins."""
    cpu_seconds: float = 10.0
    """Processor seconds of all its threads together; rounded up."""
    memory: int = 2**30
    """Bytes of address space, the interpreter's own included: not below 64 MiB."""
    confined: bool = True
    """False leaves limits and time-out only, for machines that cannot confine: a hostile program can then do harm."""


class Verdict(NamedTuple):
    """Whether a program passed, and why not."""

    passed: bool
    """Whether it ran to its last line."""
    reason: str
    """One printable line of at most 200 characters: "passed", or why not."""


def run_program(source: str, limits: Limits = Limits()) -> Verdict:  # noqa: B008 it is frozen
    """Whether a program, usually an answer and the asserts that test it, runs to its end within the limits.

    Its ``__name__`` is "program", so a main guard stays shut; hashes are those of seed 0, so that sets have the same
    order every time. A program that fails in any way gives a verdict; CoddError only if there is no sandbox to be had.
    """
    if limits.confined and (obstacle := unavailable()):
        raise CoddError(
            f"cannot confine programs here: {obstacle}. Run them on another machine, or without confinement "
            "(Limits(confined=False)) if you trust them."
        )
    if os.name != "posix":
        raise CoddError(f"programs can be run on Linux and macOS only, this is {sys.platform}.")
    return _run(source, limits)


@cache
def unavailable() -> str | None:
    """Why this machine cannot confine programs; None if it can, which one run has then shown."""
    if sys.platform != "linux":
        return f"it needs Linux with seccomp, this is {sys.platform}"
    if platform.machine() not in AUDIT_ARCHITECTURE or struct.calcsize("P") != 8:
        known = " or ".join(AUDIT_ARCHITECTURE)
        return f"it needs a 64-bit Python on {known}, this is {8 * struct.calcsize('P')}-bit on {platform.machine()}"
    try:
        verdict = _run(TRIAL, Limits())
    except CoddError as error:
        return str(error).removesuffix(".")
    return None if verdict.passed else f"a trial program was not held ({verdict.reason})"


def _run(source: str, limits: Limits) -> Verdict:
    nonce = secrets.token_hex(NONCE_BYTES // 2).encode()
    numbers = (os.getpid(), math.ceil(limits.cpu_seconds), limits.memory, int(limits.confined))
    environment = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some interpreters do not start without it
        environment["LD_LIBRARY_PATH"] = libraries
    try:
        # As -I would start it, but that the environment is ours, so that it can fix the hash seed.
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-B", "-X", "utf8", os.path.realpath(__file__), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise CoddError(f"the sandbox did not start: {error}.") from None
    with process:
        try:
            assert process.stdin is not None
            # The child reads all of it before anything else, so this does not block. If it did not start, what it
            # printed says why.
            with contextlib.suppress(BrokenPipeError), process.stdin as job:
                job.write(nonce + source.encode(errors="surrogatepass"))
            message, timed_out = _receive(process, limits)
        finally:
            # Not reaped yet, so its number still means it and its group. macOS permits no signal to one that has ended.
            with contextlib.suppress(PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if timed_out:
        return Verdict(False, f"timed out after {limits.seconds:g} s")
    if message == nonce:
        return Verdict(True, "passed")
    return Verdict(False, _line(message) if message else _reason(process.returncode, limits))


def _receive(process: "subprocess.Popen[bytes]", limits: Limits) -> tuple[bytes, bool]:
    """The line that the child wrote, if any, and whether its time was over; CoddError if it did not start."""
    assert process.stdout is not None
    written, ready = b"", False
    deadline = time.monotonic() + START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            chunk = os.read(process.stdout.fileno(), MOST_BYTES)
            written += chunk
            if not ready and READY in written:
                ready, written = True, written.partition(READY)[2]
                deadline = time.monotonic() + limits.seconds
            if not chunk or len(written) > MOST_BYTES or (ready and b"\n" in written):
                if not ready:
                    raise CoddError(f"the sandbox did not start: {_line(written[-500:])}.")
                return written.partition(b"\n")[0], False
    if not ready:
        raise CoddError(f"the sandbox did not start within {START_SECONDS} s: the machine is too busy.")
    return b"", True


def _reason(code: int, limits: Limits) -> str:
    """Why a child ended that wrote nothing, by its exit code."""
    if code == -signal.SIGXCPU:
        return f"timed out after {math.ceil(limits.cpu_seconds)} s of CPU time"
    if code < 0 and code != -signal.SIGKILL:
        names = {known.value: known.name for known in signal.Signals}  # real-time signals have none
        return f"crashed with {names.get(-code, f'signal {-code}')}"
    return EARLY


def _line(text: bytes) -> str:
    words = " ".join(text.decode(errors="replace").split())
    shown = "".join(character for character in words if character.isprintable())
    return shown if len(shown) <= REASON_CHARACTERS else shown[: REASON_CHARACTERS - 3] + "..."
