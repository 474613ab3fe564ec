import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from codd import files
from codd.data.sources import Source
from codd.data.tokenization import DIGESTS, PackingConfig, load_source
from codd.training.checkpoints import read_checkpoint, write_checkpoint
from codd.training.circuit.summary import SUMMARY, read_summary
from codd.training.circuit_recipe import read_circuit_recipe
from codd.training.curve import read_panels
from codd.training.logit_cache.reader import LogitCache
from codd.training.run import cut_metrics, read_metrics
from codd_lab.pretraining.recipe import SHIPPED, read_recipe
from tests.support.mutations import failures
from tests.support.small_caches import made
from tests.support.small_runs import small_tokenizer


def cache_of(folder: Path) -> list[Any]:
    cache = LogitCache.open(folder)
    entries = cache.load()
    tensors = [entries.tokens, entries.masked, entries.level, entries.begins, *entries.lists, entries.features]
    return [cache.index, *(x.tolist() for x in tensors)]


def checkpoint_of(folder: Path) -> list[Any]:
    tensors, notes = read_checkpoint(folder, "cpu")
    return [{name: x.tolist() for name, x in tensors.items()}, notes]


@pytest.mark.parametrize("name", ["index.json", "shard-00001.safetensors"])
def test_a_cache_is_what_was_written_or_refused(tmp_path, name):
    folder = made(tmp_path).folder
    assert failures(folder / name, folder, lambda: cache_of(folder), cache_of(folder)) == []


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_a_checkpoint_is_what_was_written_or_refused(tmp_path, name):
    notes = {"digest": "d", "recipe": {"steps": 4, "name": "x"}, "best": -float("inf"), "seconds": 1.5}
    folder = write_checkpoint(tmp_path, 10, {"a": torch.arange(12.0), "b": torch.tensor(3)}, notes, keep=2)
    assert failures(folder / name, folder, lambda: checkpoint_of(folder), checkpoint_of(folder)) == []


@pytest.mark.parametrize("name", ["tokens.npy", "segments.npy", DIGESTS])
def test_kept_rows_are_what_was_written(tmp_path, name):
    (tmp_path / "a.jsonl").write_text('{"question": "How many?", "answer": "Four."}\n' * 3)
    source, config = Source("qa", "a", path="a.jsonl"), PackingConfig(row_length=64, block_length=8, seed=0)

    def load() -> list[Any]:
        rows = load_source(source, tmp_path, small_tokenizer(), config, tmp_path / "cache").take(0, 2)
        return [column.tolist() for column in rows]

    same = load()
    (folder,) = (tmp_path / "cache").iterdir()
    assert failures(folder / name, folder, load, same) == []


def test_a_summary_is_what_was_written_or_made_again(tmp_path):
    same = {"digest": "d", "scores": {"books@0.5": {"network": -3.25, "after": None}}, "samples": {"prompt": "é"}}
    files.write_sealed(tmp_path / SUMMARY, same)
    assert read_summary(tmp_path, "d") == same
    assert read_summary(tmp_path, "another") is None
    assert failures(tmp_path / SUMMARY, tmp_path, lambda: read_summary(tmp_path, "d") or same, same) == []
    (tmp_path / SUMMARY).unlink()
    os.mkfifo(tmp_path / SUMMARY)
    assert read_summary(tmp_path, "d") is None


@pytest.mark.parametrize("name", ["tiny.yaml", "tiny-circuit.yaml"])
def test_a_recipe_is_built_or_refused(tmp_path, name):
    path = Path(shutil.copy(SHIPPED / name, tmp_path))
    read = read_recipe if name == "tiny.yaml" else read_circuit_recipe

    def load() -> None:
        recipe = read(path)
        assert recipe.digest()
        assert json.loads(json.dumps(dataclasses.asdict(recipe), allow_nan=False))
        assert "/" not in recipe.name

    assert failures(path, path, load) == []


def test_metrics_are_read_or_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": n, "loss": 3.5 / n, "held_out/a@0.5/gap_closed": 0.1, "rate": 1e-3} for n in range(1, 6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def load() -> None:
        assert read_panels(path)
        before = len(list(read_metrics(path)))
        cut_metrics(tmp_path, 3)
        assert len(list(read_metrics(path))) <= before

    assert failures(path, path, load) == []
