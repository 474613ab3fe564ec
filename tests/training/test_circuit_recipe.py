import dataclasses
import json
from pathlib import Path

import pytest

from codd.backbones.loading import BUNDLED
from codd.data.datasets import STRATA
from codd.errors import FormatError
from codd.training.circuit_recipe import CircuitRecipe, read_circuit_recipe
from codd_lab.pretraining.recipe import SHIPPED

DATA = "data: [{kind: qa, name: problems, path: p.jsonl, count: 20}]"


def read(tmp_path: Path, *changes: str, text: str = DATA) -> CircuitRecipe:
    (tmp_path / "recipe.yaml").write_text(f"name: small\n{text}\n")
    return read_circuit_recipe(tmp_path / "recipe.yaml", changes)


@pytest.mark.parametrize("name", ["tiny-circuit", "circuit"])
def test_shipped_recipes_are_read(name):
    recipe = read_circuit_recipe(SHIPPED / f"{name}.yaml")
    assert recipe.name == name
    assert recipe.head.latents


def test_the_shipped_circuit_is_made_of_the_larger_one():
    large, small = (read_circuit_recipe(SHIPPED / f"{name}.yaml") for name in ("circuit", "circuit-small"))
    shipped = json.loads((BUNDLED / "circuit" / "config.json").read_text())
    assert small.start == f"runs/{large.name}/circuit"
    assert small.keep_states == shipped["num_states"] < large.circuit.num_states
    assert (small.windows, small.validation, small.tails) == (large.windows, large.validation, large.tails)


def test_the_static_circuit_is_the_same_recipe_with_the_changes_that_it_names():
    text = (SHIPPED / "circuit.yaml").read_text()
    changes = [word for line in text.splitlines() if "--set name" in line for word in line.split() if "=" in word]
    assert len(changes) == 3
    recipe = read_circuit_recipe(SHIPPED / "circuit.yaml", changes)
    assert (recipe.name, recipe.head.wanted, recipe.seconds) == ("circuit-static", False, 105)


def test_defaults_and_changes(tmp_path):
    recipe = read(tmp_path, "circuit.num_states=16", "optimizer.lr=1e-3", "head.inner_states=4", "seconds=3")
    assert (recipe.backbone, recipe.cache, recipe.start) == ("bundled", None, None)
    assert (recipe.circuit.num_states, recipe.optimizer.lr, recipe.seconds) == (16, 1e-3, 3.0)
    assert recipe.head.wanted
    assert dataclasses.asdict(recipe)["head"] == {"latents": False, "inner_states": 4, "hidden": 0, "dropout": 0.0}


def test_the_digest_names_the_recipe(tmp_path):
    assert read(tmp_path).digest() == read(tmp_path, "steps=2000").digest()
    assert read(tmp_path).digest() != read(tmp_path, "windows.length=16").digest()


@pytest.mark.parametrize("rule", ["ratio", "baum-welch"])
def test_anemone_is_for_static_circuits_of_free_logits(tmp_path, rule):
    assert read(tmp_path, f"optimizer.rule={rule}").optimizer.rule == rule
    for change in ("head.latents=true", "circuit.emission_rank=4"):
        with pytest.raises(FormatError, match=f"'{rule}' is for static circuits of free logits"):
            read(tmp_path, f"optimizer.rule={rule}", change)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["stepz=1"], "unknown field stepz; there are name, backbone, adapter"),
        (["circuit.states=1"], "circuit: unknown field states; there are num_states"),
        (["steps=many"], "steps must be a whole number, found 'many'"),
        (["weighting=best"], "weighting must be 'token' or 'elbo', found 'best'"),
        (["data=[]"], "there is neither data nor a cache"),
        (["cache=x"], "give data or a cache, not both"),
        (["data=[{kind: text, name: t}]"], "data[0]: lacks the field path"),
        (["keep_states=4"], "keep_states needs start"),
        (["joint.weights=lora", "adapter=x"], "writes an adapter for the backbone as it is, without another one"),
        (["joint.weights=all", "dtype=bfloat16"], "joint.weights 'all' needs dtype float32"),
        (["windows.length=500"], "rows of 384 tokens hold no window of 500: raise row_length"),
        (["windows.block_share=1.5"], "windows.block_share must be at most 1, found 1.5"),
        (["batch_windows=12"], f"batch_windows must be a multiple of {STRATA}, found 12"),
        (["bank.windows=12"], f"bank.windows must be a multiple of {STRATA}, found 12"),
        (["ratios=[]"], "ratios must have a length of at least 1, found []"),
        (["ratios=[0.5, 1.5]"], "ratios[1] must be at most 1, found 1.5"),
        (["tails=[0, 0]"], "tails must not be all 0"),
        (["optimizer.step_size=2"], "optimizer.step_size must be at most 1, found 2"),
        (["optimizer.rule=em"], "optimizer.rule must be 'adam', 'ratio' or 'baum-welch', found 'em'"),
        (["data=[]", "cache=x", "joint.weights=all"], "joint training needs data"),
    ],
)
def test_mistakes_are_named(tmp_path, changes, message):
    with pytest.raises(FormatError) as error:
        read(tmp_path, *changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_all_mistakes_are_named_at_once(tmp_path):
    with pytest.raises(FormatError, match=r"steps must be above 0, found 0; ratios\[0\] must be at most 1, found 2"):
        read(tmp_path, "steps=0", "ratios=[2]")
