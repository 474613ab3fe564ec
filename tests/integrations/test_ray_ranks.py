"""``codd cache --ray N``: what several processes of a Ray cluster make is what one makes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codd.cli import main
from codd_lab.problems import problems


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "Hello", "--ray", "2"], "unrecognized arguments: --ray"),
        (["eval", "--out", "run", "--ray", "0"], "argument --ray: must be at least 1, found 0"),
        (["cache", "--out", "run", "--ray", "two"], "argument --ray: invalid whole number value: 'two'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments, message, capsys):
    assert main(arguments) != 0
    assert message in capsys.readouterr().err


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "codd.integrations.ray_ranks", raising=False)
    assert main(["eval", "--out", "run", "--ray", "2"]) == 1
    assert "--ray needs ray: pip install 'codd-lm[ray]'." in capsys.readouterr().err


def codd(folder: Path, *arguments: str) -> str:
    """Run a command with one thread; what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "codd", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("shard-*"))}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
def test_a_cache_is_what_one_process_makes_and_goes_on_after_an_interruption(tmp_path):
    pairs = [{"question": each.question, "answer": each.solution} for each in problems(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sizes = "--window 8 --windows 40 --shard-windows 8 --top-k 16 --row-length 256 --batch-rows 2 --device cpu"
    arguments = ["cache", "--data", "train.jsonl", *sizes.split()]
    codd(tmp_path, *arguments, "--out", "one")
    printed = codd(tmp_path, *arguments, "--out", "two", "--ray", "2")
    assert printed.count("cached: two") == 1
    whole = shards(tmp_path / "one")
    assert len(whole) > 2
    assert shards(tmp_path / "two") == whole
    (tmp_path / "two" / min(whole)).unlink()
    codd(tmp_path, *arguments, "--out", "two", "--ray", "2")
    assert shards(tmp_path / "two") == whole
