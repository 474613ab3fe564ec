"""Every script of benchmarks/ runs on a CPU, on tiny sizes, and says what it measures. No time is judged here."""

import json
import lzma
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from codd.backbones.loading import BUNDLED
from codd_lab.problems import problems
from tests.support import ROOT

SCRIPTS = ROOT / "benchmarks"
PARTS = {"structured_cases", "timing"}
"""Modules that scripts import; not run by themselves."""
NO_GPU = "circuits_gpu.py: measures CUDA kernels, and PyTorch finds no CUDA device on this machine\n"
COMMANDS = {
    "circuits_cpu": ["--states 3 --tokens 9 --length 4 --batch 2 --threads 1 --rounds 1 --burst 1 --kept 4 --json OUT"],
    "circuits_gpu": ["--states 64 --tokens 500 --json OUT"],
    "decoding": [
        "mini --blocks 1 --tokens 32 --rounds 1 --warmup 0 --batch 2 --threads 1 --json OUT",
        "llada --device cpu --layers 1 --width 128 --states 4 --length 40 --blocks 1 --tokens 32 --rounds 1 --warmup 0",
    ],
    "speculative": ["--count 1 --lengths 4 2 --passages DATA/books/test.jsonl.xz --out OUT"],
    "fixed_ids": ["--settings 1 --questions 1 --gen-length 32 --out OUT --compare OUT"],
    "seconds": [
        "--problems 2 --batch 2 --ways none:gen_length=2,steps=1 trained:any_order,gen_length=2,threshold=0 "
        "--out OUT --plot OUT.png"
    ],
    "decision_cpu": ["--rounds 1 --tokens 16 --masks 32"],
    "rows_cpu": ["--threads 1 --rounds 1 --sizes 2x8 1x4"],
    "backbones": [f"--data DATA --model {BUNDLED} --problems 2 --gen-length 4 --draws 1 --row-length 96 --device cpu"],
    "anemone": [
        "--vocab 200 --states 2 --planted 4 --length 4 --candidates 8 --windows 8 --held-out 8 --batch 4 "
        "--seconds 0.01 --readings 1 --out OUT"
    ],
    "circuit_training": [
        "--windows 16 --epochs 1 --window 4 --vocab 50 --states 2 --top-k 4 --batch 8 --steps 1 --device cpu --out OUT"
    ],
    "cache_cost": ["--tiny --device cpu --out OUT"],
    "serving": [
        "load --caches --clients 4 --seconds 0.5 --leave 0.25 --mixed 0.5 --requests 2 --shorter 16 --slots 2 "
        "--plot OUT.png --json OUT",
        "throughput --clients 1 --rounds 1 --requests 3 --shorter 16 --slots 2 --json OUT",
    ],
    "ray_replicas": ["load --clients 2 --seconds 0.5 --requests 2 --shorter 16 --slots 2 --json OUT"],
    "serving_gpu": ["mini --device cpu --slots 1 2 --requests 2 --rounds 1 --gen-length 2 --steps 1 --json OUT"],
    "families": ["--tiny --rounds 1 --shards 3 --out OUT"],
    "kv_cache": ["--tiny --samplers any_order --out OUT"],
    "int8": ["--tiny --device cpu --out OUT"],
    "json_schemas": ["tests/fixtures/json_schemas.jsonl --every 20"],
    "structured": ["--tiny --seed 2 --out OUT"],
    "nemotron": ["--seconds 0.01 --count 1 --states 2 --updates 2 --out OUT"],
    "curves": ["docs/runs/mini.jsonl docs/runs/causal.jsonl docs/runs/anemone.json --out SVG"],
}
"""The arguments of each script; DATA and OUT stand for paths."""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Scripts are run in this process, which saves seconds for each: put back what they set."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the servers that they start
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder as `--data` wants it, with a few words in it."""
    folder = tmp_path_factory.mktemp("data")
    some = list(problems(6, seed=3))
    (folder / "books").mkdir()
    text = json.dumps({"text": " ".join(problem.question for problem in some)}) + "\n"
    for split in ("valid", "test"):
        (folder / "books" / f"{split}.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (folder / "gsm8k").mkdir()
    pairs = [{"question": problem.question[:60], "answer": f"It is {problem.answer}."} for problem in some]
    (folder / "gsm8k" / "test.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def run(script: str, arguments: str, monkeypatch) -> int:
    """The exit code of a script."""
    path = SCRIPTS / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments.split()])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)  # which fails on a message: scripts end with 0 or 2
    return 0


def test_every_script_is_run_here_and_named_in_the_readme():
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    assert scripts == set(COMMANDS) | PARTS
    text = (SCRIPTS / "README.md").read_text()
    assert set(re.findall(r"`(\w+)\.py`", text)) >= scripts


@pytest.mark.filterwarnings("ignore::codd.errors.TextsLeftOut")  # short rows, to be quick
@pytest.mark.parametrize("script", COMMANDS)
def test_it_runs(script, data, tmp_path, monkeypatch, capsys, request):
    if script == "ray_replicas":
        pytest.importorskip("ray", reason="the extra ray is not installed")
    if script.startswith("serving"):
        pytest.importorskip("fastapi", reason="the extra serve is not installed")
        pytest.importorskip("httpx")
    if script == "int8":
        request.getfixturevalue("int8_cpu")
    for number, command in enumerate(COMMANDS[script]):
        out = tmp_path / f"{number}.json"
        code = run(
            script,
            command.replace("DATA", str(data)).replace("OUT", str(out)).replace("SVG", f"{out}.svg"),
            monkeypatch,
        )
        printed = capsys.readouterr()
        if script == "circuits_gpu" and not torch.cuda.is_available():
            assert code == 2
            assert (
                printed.err
                == "circuits_gpu.py: measures CUDA kernels, and PyTorch finds no CUDA device on this machine\n"
            )
            continue
        assert code == 0
        assert printed.out.strip()
        assert "OUT" not in command or json.loads(out.read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["decoding", "serving_gpu"])
def test_without_a_gpu_it_says_how_to_run_a_tiny_one(script, monkeypatch, capsys):
    assert run(script, "llada", monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{script}.py: needs a CUDA device, and PyTorch finds none; for a tiny run: --device cpu")
    assert said.count("\n") == 1
