import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from codd.errors import InvalidInput
from codd.folders import LOCK, check_own, discard_if_bare, exclusive

HOLDER = """
import sys, time
from pathlib import Path
from codd.folders import exclusive
with exclusive(Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that has the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "mine\n"
    return other


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_folder_is_kept_from_others_until_its_process_ends(tmp_path, how):
    folder = tmp_path / "a" / "b"
    other = holder(folder)
    with (
        pytest.raises(InvalidInput, match=f"b: the process {other.pid} is writing into this folder") as caught,
        exclusive(folder),
    ):
        pass
    assert "Wait until it has ended, or give another folder" in str(caught.value)
    if how is not None:
        other.send_signal(how)
    other.communicate()
    with exclusive(folder):
        assert (folder / LOCK).read_text() == f"{os.getpid()}\n"
        (folder / "result").touch()
    assert os.listdir(folder) == ["result"]


def test_what_was_made_for_nothing_goes_again(tmp_path):
    (tmp_path / "old").mkdir()
    for name, stays in (("old", True), ("new", False)):
        with contextlib.suppress(KeyboardInterrupt), exclusive(tmp_path / name):
            (tmp_path / name / "mark").touch()
            (tmp_path / name / "rows").mkdir()
            check_own(tmp_path / name, "mark", "a run")
            with pytest.raises(InvalidInput, match="holds something else than a run; give an empty or new folder"):
                check_own(tmp_path / name, "other", "a run")
            discard_if_bare(tmp_path / name, "mark", "rows")
            check_own(tmp_path / name, "other", "a run")
            raise KeyboardInterrupt
        assert (tmp_path / name).is_dir() == stays


def test_what_has_worth_stays(tmp_path):
    with exclusive(tmp_path):
        (tmp_path / "mark").touch()
        (tmp_path / "rows" / "books").mkdir(parents=True)
        discard_if_bare(tmp_path, "mark", "rows")
    assert sorted(os.listdir(tmp_path)) == ["mark", "rows"]
