"""The command line in this process: what it prints as JSON, what it refuses in one line; and a run that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from codd.cli import main


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The line that says why."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("codd: ")
    assert printed.err.count("\n") == 1
    assert "bug in codd" not in printed.err
    return printed.err


def kill_codd(arguments: list[str], seen: Callable[[], object]) -> None:
    """Start codd in a process of its own, and kill it as soon as this is seen."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "codd", *arguments]
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while not seen() and running.poll() is None:
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    _, printed = running.communicate()
    assert running.returncode == -signal.SIGKILL, printed
