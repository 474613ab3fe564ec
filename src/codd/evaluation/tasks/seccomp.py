"""The inner side of the sandbox: a script that gives up what it could do to the machine, then runs one program.

``sandbox.py`` starts this file by its path in a fresh interpreter. It imports the standard library only, and little of
it, because every answer pays for the start. Three layers, each of which would do against most programs: limits on
resources, Landlock where the kernel has it (files outside the interpreter's folders cannot be read, nor other processes
through /proc), and a seccomp filter. The filter names what a Python program needs to compute, to import and to run
threads. Everything else gets EPERM rather than death, so that a library may do without.
"""

import os
import struct
import sys
from collections.abc import Iterable
from errno import ENOSYS, EPERM

AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The machines that there is a filter for, and how the kernel marks a call that is made in their own convention."""
NONCE_BYTES = 32
READY = b"ready\n"
EARLY = "ended before the tests were done"
TASKS = 4096
"""Threads that one user may have. Far above what programs need: the kernel counts the user's other processes, too."""
NOBODY = 65534
SIGKILL = 9  # the module that names it takes as long to import as all others here

# The numbers of the calls that are allowed whatever their arguments: on x86_64, and on aarch64 where it exists there.
PLAIN = {
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
# Those whose arguments are looked at. Pointers are never followed: what they point at may change after the check.
GUARDED = {
    **{"open": (2, None), "openat": (257, 56), "ioctl": (16, 29), "fcntl": (72, 25), "clone": (56, 220)},
    **{"prlimit64": (302, 261), "kill": (62, 129), "tgkill": (234, 131)},
}
CLONE3 = 435
SECCOMP = {"x86_64": 317, "aarch64": 277}

Check = tuple[int, int, tuple[int, ...]]
"""The offset of a 32-bit word of the call's record, a mask, and the values that the masked word may have."""
ALL = 0xFFFFFFFF
WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_ACCMODE, O_CREAT, O_TRUNC, O_TMPFILE
THREADS = (0x3D0F00, 0x7D0F00)  # the flags with which glibc and musl start a thread; a new process has others
TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONCLEX, FIOCLEX
DESCRIPTOR_FLAGS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; F_SETOWN sends signals


def low(argument: int) -> int:
    """Where the lower half of an argument lies in the record that the filter sees."""
    return 16 + 8 * argument


def checks(pid: int) -> dict[str, tuple[Check, ...]]:
    """What must hold of the arguments of each guarded call. A process may signal itself, as abort() does."""
    itself: Check = (low(0), ALL, (pid,))
    return {
        "open": ((low(1), WRITING, (0,)),),
        "openat": ((low(2), WRITING, (0,)),),
        "ioctl": ((low(1), ALL, TERMINAL_QUESTIONS),),
        "fcntl": ((low(1), ALL, DESCRIPTOR_FLAGS),),
        "clone": ((low(0), ALL, THREADS),),
        # It may ask for its own limits, but the pointer to new ones must be null in both halves.
        "prlimit64": ((low(0), ALL, (0,)), (low(2), ALL, (0,)), (low(2) + 4, ALL, (0,))),
        "kill": (itself,),
        "tgkill": (itself,),
    }


def filter_program(machine: str, pid: int) -> bytes:
    """The filter for the process ``pid`` as instructions of classic BPF, each of eight bytes.

    Calls in another convention (32-bit on x86_64) are refused by the architecture's mark, those of x32 because their
    numbers, which have bit 30 set, are on no list. clone3 does not exist, so that the C library falls back to clone,
    whose flags a filter can see.
    """
    column = list(AUDIT_ARCHITECTURE).index(machine)
    refuse, allow = _return(0x50000 | EPERM), _return(0x7FFF0000)
    program = [_load(4), _jump_if(AUDIT_ARCHITECTURE[machine], 1, 0), refuse, _load(0)]
    for numbers in PLAIN.values():
        if (number := numbers[column]) is not None:
            program += [_jump_if(number, 0, 1), allow]
    program += [_jump_if(CLONE3, 0, 1), _return(0x50000 | ENOSYS)]
    for name, conditions in checks(pid).items():
        if (number := GUARDED[name][column]) is not None:
            body = [part for condition in conditions for part in _must_hold(condition, refuse)]
            program += [_jump_if(number, 0, len(body) + 1), *body, allow]
    return b"".join([*program, refuse])


def _must_hold(check: Check, refuse: bytes) -> list[bytes]:
    offset, mask, values = check
    tests = [_jump_if(value, len(values) - place, 0) for place, value in enumerate(values)]
    return [_load(offset), struct.pack("<HBBI", 0x54, 0, 0, mask), *tests, refuse]


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", 0x20, 0, 0, offset)


def _jump_if(value: int, equal: int, other: int) -> bytes:
    return struct.pack("<HBBI", 0x15, equal, other, value)


def _return(action: int) -> bytes:
    return struct.pack("<HBBI", 0x06, 0, 0, action)


def limit(cpu: int, memory: int, strict: bool) -> None:
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

    def prctl(name: str, option: int, *arguments: int) -> None:
        words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
        must(name, libc.prctl(option, *words))

    if os.geteuid() == 0:  # root that could not become nobody goes on without capabilities
        must("capset", libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))
    prctl("PR_SET_DUMPABLE", 4, 0)
    prctl("PR_SET_PDEATHSIG", 1, SIGKILL)
    if os.getppid() != parent:  # it was gone before the signal was asked for
        os._exit(1)
    prctl("PR_SET_NO_NEW_PRIVS", 38, 1)

    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version > 0:
        rules = landlock_rules(version)
        ruleset = must("landlock_create_ruleset", libc.syscall(444, rules, ctypes.c_size_t(len(rules)), 0))
        for path in readable():
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


def landlock_rules(version: int) -> bytes:
    """Handle, and so refuse, all that this version of Landlock knows of files, TCP, and signals to others."""
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    return struct.pack("<3Q", files, 0b11, 0b11)[: 8 if version < 4 else 16 if version < 6 else 24]


def readable() -> Iterable[str]:
    """What imports need: the interpreter's folders, shared libraries, time zones."""
    own = [*sys.path, f"{sys.base_prefix}/lib", f"{sys.prefix}/lib"]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/usr/share/zoneinfo"]
    files = ["/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"]
    return filter(os.path.exists, dict.fromkeys(own + system + files))


def attempt(source: bytes, nonce: bytes) -> bytes:
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


def main(descriptor: int, parent: int, cpu: int, memory: int, confined: int) -> None:
    """Read nonce and program from the standard input, run it, and write what became of it to the descriptor.

    The program may exit, replace builtins or break modules as it likes: the nonce is written only here. What this does
    not prevent: code in the same process that looks for the nonce (in this frame, in memory) and writes it itself, or
    an answer whose results are equal to everything. They fool their own problem, and nothing else.
    """
    write, leave = os.write, os._exit
    job = sys.stdin.buffer.read()
    nonce, source = job[:NONCE_BYTES], job[NONCE_BYTES:]
    limit(cpu, memory, strict=bool(confined))
    become_nobody()
    if confined:
        confine(parent)
    sys.argv = ["program.py"]
    write(descriptor, READY)
    try:
        message = attempt(source, nonce)
    except BaseException:  # describing it failed: no memory is left, or the error does not want to be described
        message = b"failed with an error that cannot be shown"
    write(descriptor, message + b"\n")
    leave(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
