"""The recipes for LLaDA and Dream, run by the commands in their files on tiny networks in those layouts.

Backbone, data and sizes are other ones; all else is as it is shipped.
"""

import json
from pathlib import Path

import pytest
import torch

import codd
from codd.circuits import Modulated
from codd.cli import main
from codd.training.circuit_recipe import read_circuit_recipe
from codd.training.logit_cache.reader import LogitCache
from codd.training.recipe import SHIPPED
from codd_lab.problems import problems
from tests.support.small_circuits import save_published

MODELS = {"llada": "GSAI-ML/LLaDA-8B-Instruct", "dream": "Dream-org/Dream-v0-Instruct-7B"}
HELD_OUT = "validation=[{kind: qa, name: held-out, path: valid.json, fields: [instruction, output], rows: 4}]"
TRAINED = "data=[{kind: qa, name: train, path: train.json, fields: [instruction, output]}]"
SMALL = [HELD_OUT, "backbone=tiny", "dtype=float32", "steps=4", "batch_windows=8", "row_length=384", "ratios=[0.5]"]
SMALL_CACHE = ["--backbone", "tiny", "--data", "train.json", "--row-length", "384", "--windows", "40", "--top-k", "16"]


@pytest.fixture(params=list(MODELS))
def model(request, tmp_path, monkeypatch) -> str:
    """A folder with a network in the layout of a large one, and data as MathInstruct has it: an array of objects."""
    monkeypatch.chdir(tmp_path)
    save_published(tmp_path / "tiny", request.param)
    entries = [{"source": "codd", "output": p.solution, "instruction": p.question} for p in problems(40)]
    (tmp_path / "train.json").write_text(json.dumps(entries[:30]))
    (tmp_path / "valid.json").write_text(json.dumps(entries[30:]))
    return request.param


def commands(recipe: str) -> list[list[str]]:
    """Those in the head of a recipe's file, from the verb on."""
    lines = (SHIPPED / f"{recipe}.yaml").read_text().splitlines()
    text = "\n".join(line[1:] for line in lines if line.startswith("#  ")).replace("\\\n", " ")
    return [line.replace('"', "").split("codd ", 1)[1].split() for line in text.splitlines()]


def run_cache(recipe: str) -> LogitCache:
    """Run a recipe's first command."""
    command = commands(recipe)[0]
    assert command[:3] == ["cache", "--backbone", read_circuit_recipe(SHIPPED / f"{recipe}.yaml").backbone]
    data = command.index("--data")
    del command[data : data + 2]  # a list grows by a flag that is given again; of other options the last counts
    assert main([*command, *SMALL_CACHE, "--device", "cpu"]) == 0
    return LogitCache.open(read_circuit_recipe(SHIPPED / f"{recipe}.yaml").cache or "")


def run_train(recipe: str, *changes: str) -> Path:
    """Run a recipe's last command; its result."""
    command = commands(recipe)[-1]
    assert command[:2] == ["train", recipe]
    sets = [f"--set={change}" for change in (*SMALL, *changes)]
    assert main([*command, *sets, "--device", "cpu"]) == 0
    return Path("runs") / recipe


def test_a_modulated_circuit_and_lora_along_with_it(model):
    run_cache(f"{model}-modulated")
    small = ["circuit={num_states: 8, emission_rank: 4, transition_rank: 4}", "head={latents: true, hidden: 4}"]
    circuit = run_train(f"{model}-modulated", *small) / "circuit"
    loaded = codd.load("tiny", circuit=circuit, device="cpu")
    assert isinstance(loaded.circuit, Modulated)
    adapter = run_train(f"{model}-joint", TRAINED, "joint.rank=2") / "adapter"
    both = codd.load("tiny", adapter=adapter, circuit=adapter / "circuit", device="cpu")
    assert isinstance(both.circuit, Modulated)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert not torch.allclose(both.backbone(ids), loaded.backbone(ids), atol=1e-6)
