import ctypes
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from codd.errors import CoddError
from codd_lab.tasks import sandbox
from codd_lab.tasks.sandbox import Limits, run_program, unavailable

SMALL = Limits(seconds=5.0, cpu_seconds=2.0, memory=2**28)
confinement = pytest.mark.skipif(unavailable() is not None, reason=f"no confinement here: {unavailable()}")


def alive() -> set[int]:
    """The processes that run the sandbox's script for this test process, or are left of it."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (folder / "cmdline").read_bytes().split(b"\0"), (folder / "stat").read_text()
        except OSError:
            continue
        if sandbox.__file__.encode() in command and str(os.getpid()).encode() in command and ") Z" not in status:
            found.add(int(folder.name))
    return found


@confinement
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("assert 1 == 2, 'a\\n\\x1b[31mb\\u202e'", "AssertionError: a [31mb"),
        ("assert 0, 'x' * 10**6", "AssertionError: " + "x" * 181 + "..."),
        ("def f(:", "SyntaxError: invalid syntax (program.py, line 1)"),
        ("x = '\0'", "source code string cannot contain null bytes"),
        ("x = '\ud800'", "UnicodeEncodeError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("input()", "EOFError"),
        ("import sys\nassert sys.stdin.read() == 'something'", "AssertionError"),
        ("def f(): f()\nf()", "RecursionError"),
        (
            "class E(Exception):\n    def __str__(self): raise self\nraise E",
            "failed with an error that cannot be shown",
        ),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import ctypes\nctypes.string_at(0)", "crashed with SIGSEGV"),
        ("import os\nos.abort()", "crashed with SIGABRT"),
        ("import os\nos.kill(os.getpid(), 40)", "crashed with signal 40"),
    ],
)
def test_a_program_that_fails_says_why_in_one_line(source, reason):
    passed, found = run_program(source, SMALL)
    assert not passed
    assert reason in found
    assert found.isprintable()
    assert len(found) <= 200


@confinement
@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit()",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "quit()",
        "import os\nos._exit(0)",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nfor n in range(3, 60):\n    try:\n        os.close(n)\n    except OSError:\n        pass",
        "import builtins, os\nbuiltins.SystemExit = builtins.BaseException = None\nos._exit(0)",
    ],
)
def test_a_program_that_ends_before_its_asserts_does_not_pass(source):
    assert run_program(source + "\nassert False", SMALL) == (False, "ended before the tests were done")


@confinement
def test_claiming_success_does_not_help():
    claims = "import os\nfor n in range(3, 60):\n    try: os.write(n, b'passed\\n')\n    except OSError: pass"
    assert not run_program(claims + "\nassert False", SMALL).passed
    assert not run_program("import builtins\nbuiltins.AssertionError = Warning\nassert False", SMALL).passed


@confinement
@pytest.mark.parametrize(
    "source",
    [
        "def double(x):\n    return 2 * x\nassert double(2) == 4",
        "import math, re, itertools, collections, heapq, random, datetime, json, decimal, fractions, cmath, bisect",
        "from typing import List\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: List[int]\nA([1])",
        "import builtins\nbuiltins.print = builtins.exec = builtins.len = None",
        "import os, sys\nos.write = os._exit = None\nsys.modules.clear()",
        "import sys\nsys.stdout = sys.stderr = None",
        "import os\nos.close(1)\nos.close(2)",
        "if __name__ == '__main__':\n    input()",
        "print('é' * 10**7)",
        "import os\nos.write(2, bytes(10**6))",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
        "    assert list(pool.map(abs, range(-9, 0))) == list(range(9, 0, -1))",
        "import os, sys\nassert sys.argv == ['program.py'] and set(os.environ) <= "
        "{'PYTHONHASHSEED', 'OPENBLAS_NUM_THREADS', 'LD_LIBRARY_PATH', 'LC_CTYPE'}",
        "#" * 10**6,
        "# -*- coding: latin-1 -*-\nassert len('é') == 1",
    ],
)
def test_harmless_programs_are_not_disturbed(source):
    assert run_program(source, SMALL) == (True, "passed")


@confinement
def test_sets_have_the_same_order_in_every_run():
    orders = {run_program("assert 0, list(set('abcdefghij'))", SMALL).reason for _ in range(3)}
    assert len(orders) == 1


@confinement
@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(60)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    ],
)
def test_a_program_without_end_is_ended(source):
    assert run_program(source, Limits(seconds=0.5, memory=2**28)) == (False, "timed out after 0.5 s")
    assert not alive()


@confinement
@pytest.mark.parametrize("source", ["bytearray(50 * 2**30)", "x = [0]\nwhile True:\n    x += x"])
def test_greed_ends_at_the_limit(source):
    assert run_program(source, SMALL) == (False, "out of memory")


@confinement
def test_threads_share_the_cpu_seconds():
    spin = (
        "import threading\ndef f():\n    while True: pass\nfor _ in range(4): threading.Thread(target=f).start()\nf()"
    )
    verdict = run_program(spin, Limits(seconds=30.0, cpu_seconds=0.5, memory=2**28))
    assert verdict == (False, "timed out after 1 s of CPU time")


@confinement
@pytest.mark.parametrize(
    "source",
    [
        "import os\nwhile True:\n    os.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(-1, 0)",
        "import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, 1)",
        "import socket\nsocket.socketpair()",
        "import os\nos.memfd_create('x')",
    ],
)
def test_no_processes_and_no_signals(source):
    passed, reason = run_program(source, SMALL)
    assert not passed
    assert reason.startswith("not permitted: [Errno 1]")
    assert not alive()


@confinement
def test_limits_cannot_be_raised():
    source = (
        "import resource as r\nnow = r.getrlimit(r.RLIMIT_AS)\nassert now == (2**28,) * 2\nr.setrlimit(r.RLIMIT_AS, {})"
    )
    assert "not allowed" in run_program(source.format("(2**30, 2**30)"), SMALL).reason
    assert "not allowed" in run_program(source.format("now"), SMALL).reason  # the filter does not look at the value


@confinement
@pytest.mark.parametrize(
    "deed",
    [
        "os.remove('{0}/kept')",
        "os.truncate('{0}/kept', 0)",
        "os.rename('{0}/kept', '{0}/other')",
        "os.chmod('{0}/kept', 0)",
        "open('{0}/kept', 'a')",
        "open('{0}/kept', 'r+')",
        "open('{0}/new', 'w')",
        "os.open('{0}', os.O_TMPFILE | os.O_RDWR)",
        "os.mkdir('{0}/new')",
        "os.symlink('{0}/kept', '{0}/new')",
        "open('/proc/self/mem', 'r+b')",
    ],
)
def test_files_stay_as_they_are(deed, tmp_path):
    tmp_path.chmod(0o777)
    kept = tmp_path / "kept"
    kept.write_text("precious")
    kept.chmod(0o666)
    passed, reason = run_program("import os\n" + deed.format(tmp_path), SMALL)
    assert not passed
    assert reason.startswith("not permitted")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "precious"
    assert kept.stat().st_mode & 0o777 == 0o666


@confinement
def test_landlock_hides_files_and_other_processes(tmp_path):
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no Landlock")
    tmp_path.chmod(0o777)
    (tmp_path / "secret").write_text("secret")
    for path in (tmp_path / "secret", "/proc/self/environ", f"/proc/{os.getpid()}/environ"):
        assert run_program(f"open('{path}')", SMALL).reason.startswith("not permitted: [Errno 13]")


@confinement
def test_no_connection_arrives():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        port = server.getsockname()[1]
        passed, reason = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)", SMALL)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not passed
    assert reason.startswith("not permitted: [Errno 1]")


@confinement
def test_a_report_without_end_is_cut_off():
    """The pipe is the only way out, and nothing that a program writes into it passes for the verdict."""
    source = "import os\nfor _ in range(1000):\n    os.write({0}, b'x' * 1000)"
    [channel] = [n for n in range(3, 8) if run_program(source.format(n), SMALL).reason.startswith("xxx")]
    verdict = run_program(f"import os\nos.write({channel}, b'passed\\n')\nassert False", SMALL)
    assert verdict == (False, "passed")


@confinement
def test_hostile_programs_fail_alone():
    hostile = ["import os\nwhile True:\n    os.fork()", "bytearray(50 * 2**30)", "import os\nos._exit(0)"]
    with ThreadPoolExecutor(3) as pool:
        sources = [source for bad in hostile for source in ("assert True", bad)]
        verdicts = pool.map(lambda source: run_program(source, SMALL).passed, sources)
        assert list(verdicts) == [True, False] * 3
    assert not alive()


def test_without_confinement_limits_and_time_out_are_left(tmp_path):
    free = Limits(seconds=2.0, cpu_seconds=2.0, memory=2**28, confined=False)
    assert run_program("assert True", free) == (True, "passed")
    assert run_program("bytearray(50 * 2**30)", free) == (False, "out of memory")
    assert not run_program(f"open('{tmp_path}/new', 'w').write('x' * 10**6)", free).passed


def test_a_child_process_of_an_unconfined_program_does_not_outlive_it():
    free = Limits(seconds=1.0, cpu_seconds=1.0, memory=2**28, confined=False)
    with ThreadPoolExecutor() as pool:
        verdict = pool.submit(run_program, "import os, time\nos.fork()\ntime.sleep(60)", free)
        most = 0
        while not verdict.done():
            most = max(most, len(alive()))
    assert not verdict.result().passed
    assert most == 2
    for _ in range(100):  # it is killed by now, but the kernel may still be busy with it
        if not alive():
            break
        time.sleep(0.02)
    assert not alive()


def test_a_machine_that_cannot_confine_refuses(monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sandbox.sys, "platform", "darwin")
        assert "needs Linux" in unavailable.__wrapped__()
    monkeypatch.setattr(sandbox, "unavailable", lambda: "it is made of wood")
    with pytest.raises(CoddError, match="made of wood"):
        run_program("assert True")
    assert run_program("assert True", Limits(confined=False)).passed


@pytest.mark.parametrize("executable", ["/bin/false", "/nowhere/python"])
def test_a_sandbox_that_does_not_start_is_no_verdict(monkeypatch, executable):
    monkeypatch.setattr(sandbox.sys, "executable", executable)
    with pytest.raises(CoddError, match="did not start"):
        run_program("assert True", Limits(confined=False))


def decision(program: bytes, machine: str, number: int, *arguments: int) -> str:
    """What a filter says of a call, by the four instructions that ours are made of."""
    record = struct.pack("<iIQ6Q", number, sandbox.AUDIT_ARCHITECTURE[machine], 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    word, place = 0, 0
    while True:
        code, equal, other, value = struct.unpack_from("<HBBI", program, 8 * place)
        place += 1
        match code:
            case 0x20:
                (word,) = struct.unpack_from("<I", record, value)
            case 0x54:
                word &= value
            case 0x15:
                place += equal if word == value else other
            case 0x06:
                return {0x7FFF0000: "allow", 0x50001: "EPERM", 0x50026: "ENOSYS"}[value]
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.parametrize(
    ("call", "numbers", "arguments", "wanted"),
    [
        ("read", (0, 63), (), "allow"),
        ("openat for reading", (257, 56), (0, 0, os.O_RDONLY | os.O_CLOEXEC), "allow"),
        ("openat for writing", (257, 56), (0, 0, os.O_WRONLY), "EPERM"),
        ("openat that creates", (257, 56), (0, 0, os.O_CREAT), "EPERM"),
        ("clone of a thread", (56, 220), (0x3D0F00,), "allow"),
        ("clone of a process", (56, 220), (0x1200011,), "EPERM"),
        ("clone of a thread elsewhere", (56, 220), (0x3D0F00 | 0x40000000,), "EPERM"),
        ("clone3", (435, 435), (), "ENOSYS"),
        ("prlimit64 that asks", (302, 261), (0, 7, 0, 4096), "allow"),
        ("prlimit64 that sets", (302, 261), (0, 7, 4096), "EPERM"),
        ("prlimit64 that sets from high memory", (302, 261), (0, 7, 1 << 32), "EPERM"),
        ("prlimit64 of another", (302, 261), (8, 7, 0), "EPERM"),
        ("kill of itself", (62, 129), (77, 9), "allow"),
        ("kill of another", (62, 129), (78, 9), "EPERM"),
        ("fcntl F_SETOWN", (72, 25), (1, 8), "EPERM"),
        ("ioctl TIOCSTI", (16, 29), (0, 0x5412), "EPERM"),
        ("execve", (59, 221), (), "EPERM"),
        ("socket", (41, 198), (), "EPERM"),
        ("unlinkat", (263, 35), (), "EPERM"),
        ("ptrace", (101, 117), (), "EPERM"),
        ("process_vm_writev", (311, 271), (), "EPERM"),
        ("bpf", (321, 280), (), "EPERM"),
        ("io_uring_setup", (425, 425), (), "EPERM"),
        ("x32 read", (0x40000000, 0x40000000), (), "EPERM"),
    ],
)
def test_the_filter_decides_alike_on_both_machines(call, numbers, arguments, wanted):
    for machine, number in zip(sandbox.AUDIT_ARCHITECTURE, numbers, strict=True):
        assert decision(sandbox.filter_program(machine, 77), machine, number, *arguments) == wanted, (call, machine)


def test_calls_of_another_architecture_are_refused():
    assert decision(sandbox.filter_program("x86_64", 77), "aarch64", 0) == "EPERM"
