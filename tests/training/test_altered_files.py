import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from codd import files
from codd.training.circuit.summary import SUMMARY, read_summary
from codd.training.circuit_recipe import read_circuit_recipe
from codd.training.curve import read_panels
from codd.training.run import cut_metrics, read_metrics
from codd_lab.pretraining.recipe import SHIPPED, read_recipe
from tests.support.mutations import failures


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
