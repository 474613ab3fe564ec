"""Recipes of circuits and of networks: YAML files, changes on top of them, digests, and what is refused."""

import dataclasses
import itertools
import json
import os
import typing
from pathlib import Path

import pytest

from codd.backbones.loading import BUNDLED
from codd.cli import main, train
from codd.data.datasets import STRATA
from codd.data.sources import Source
from codd.errors import FormatError, InvalidInput
from codd.training.circuit_recipe import CircuitRecipe, RuleRecipe, TablesRecipe, read_circuit_recipe
from codd.training.recipe import SHIPPED, find_recipe
from codd_lab.pretraining import recipe as lab
from codd_lab.pretraining.recipe import ModelRecipe, OptimizerRecipe, Recipe, read_recipe
from tests.support.small_runs import TINY

DATA = "data: [{kind: qa, name: p, path: p.jsonl, count: 20}]"
SMALLEST = f"name: x\n{DATA}\n"
PROSE = {"kind": "text", "name": "a", "path": "a.txt"}


@pytest.fixture
def read(tmp_path):
    def read(text: str = SMALLEST, *changes: str) -> CircuitRecipe:
        (tmp_path / "recipe.yaml").write_text(text)
        return read_circuit_recipe(tmp_path / "recipe.yaml", changes)

    return read


@pytest.fixture
def refused(tmp_path):
    """Both readers give one line that begins with the file's name, or only that of circuits."""

    def refused(text: str, *changes: str, words: str, readers=(read_circuit_recipe,)) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        for reader in readers:
            with pytest.raises(FormatError) as caught:
                reader(path, changes)
            assert words in str(caught.value)
            assert str(caught.value).startswith((f"{path}: ", "--set "))
            assert len(str(caught.value)) < 1000
            assert "\n" not in str(caught.value)

    return refused


def test_fields_have_defaults_values_and_changes(read):
    assert read() == CircuitRecipe("x", data=(Source("qa", "p", path="p.jsonl", count=20),))
    text = (
        f"{SMALLEST}steps: 5\ncircuit: {{num_states: 32, noise: 1}}\noptimizer: {{betas: [0.1, 0.2]}}\nadapter: there"
    )
    found = read(text, "steps=9", "steps=8", "circuit.num_states=64", "head.inner_states=4", "adapter=null")
    assert (found.steps, found.adapter, found.head.wanted) == (8, None, True)
    assert (found.circuit, found.optimizer) == (TablesRecipe(64, noise=1.0), RuleRecipe(betas=(0.1, 0.2)))


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("2", 2.0), ("2.5E+1", 25.0)])
def test_numbers_without_a_point_are_numbers(read, text, value):
    assert read(f"{SMALLEST}optimizer: {{lr: {text}}}").optimizer.lr == value
    assert read(SMALLEST, f"optimizer.lr={text}").optimizer.lr == value


def test_a_name_is_that_of_a_shipped_recipe_and_all_else_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").touch()
    (tmp_path / "own").touch()
    shipped = [SHIPPED / "paper-llada.yaml", SHIPPED / "tiny.yaml"]
    assert find_recipe("tiny", shipped) == SHIPPED / "tiny.yaml"
    for path in ("./tiny", "own", "tiny.yaml", "missing.yaml", "some/where"):
        assert find_recipe(path, shipped) == Path(path)
    for name in ("circuit", "TINY", "a" * 1000, "nul\0"):
        with pytest.raises(InvalidInput, match="there is no recipe of this name here; there are paper-llada, tiny"):
            find_recipe(name, shipped)


def test_shipped_recipes_are_valid():
    assert {SHIPPED / f"{name}.yaml" for name in train.RECIPES} == {*SHIPPED.glob("*.yaml")}
    for path in (*SHIPPED.glob("*.yaml"), *lab.SHIPPED.glob("*circuit*.yaml")):
        assert read_circuit_recipe(path).name == path.stem
    large, small = (read_circuit_recipe(lab.SHIPPED / f"{name}.yaml") for name in ("circuit", "circuit-small"))
    bundled = json.loads((BUNDLED / "circuit" / "config.json").read_text())
    assert small.start == f"runs/{large.name}/circuit"
    assert small.keep_states == bundled["num_states"] < large.circuit.num_states
    assert (small.windows, small.validation, small.tails) == (large.windows, large.validation, large.tails)
    for name, backbone in (("llada", "GSAI-ML/LLaDA-8B-Instruct"), ("dream", "Dream-org/Dream-v0-Instruct-7B")):
        paper = read_circuit_recipe(SHIPPED / f"paper-{name}.yaml")
        assert (paper.backbone, paper.circuit.num_states, paper.windows.length) == (backbone, 1024, 32)
        assert (paper.weighting, paper.optimizer.rule) == ("elbo", "baum-welch")
    lines = (lab.SHIPPED / "circuit.yaml").read_text().splitlines()
    changes = [word for line in lines if "--set name" in line for word in line.split() if "=" in word]
    static = read_circuit_recipe(lab.SHIPPED / "circuit.yaml", changes)
    assert (static.name, static.head.wanted, static.seconds) == ("circuit-static", False, 105)


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected fields like `name: mini`, found NoneType"),
        ("- a", "found list"),
        ("name: [", "is not YAML"),
        ("a: \x07", "is not YAML"),
        ("data: []", "lacks the field name"),
        ("{name: x, data: 5}", "data must be a list, found 5"),
        ("{name: x, data: [5]}", "data[0] must be a section with fields, found 5"),
        ("{name: x, data: [{name: p}]}", "data[0]: lacks the field kind"),
        (
            "{name: x, data: [{kind: prose, name: p}]}",
            "data[0].kind must be 'text', 'qa' or 'sequences', found 'prose'",
        ),
        ("{name: x, data: [{kind: text, name: p, fields: text}]}", "data[0].fields must be a list, found 'text'"),
        ("{name: x, data: [{kind: qa, name: p, path: p, count: -1}]}", "data[0].count must be above 0, found -1"),
        ("{name: x, data: [{kind: qa, name: p, path: p, weight: 0}]}", "data[0].weight must be above 0, found 0"),
        ("{name: 5, data: []}", "name must be a text, found 5"),
        ("[" * 1000, "is not YAML: it is nested too deeply"),
        ("a: " * 5000, "is not YAML"),
        (LAUGHS + "name: *h\ndata: []", "is not YAML: aliases such as *name are not taken"),
        ("&a [*a]", "aliases"),
        ("name: x\n" * 100_000, "has 800,000 bytes, more than the 131,072"),
        ("{name: x, data: 2024-99-99}", "is not YAML: month must be in 1..12"),
        ("{name: x, data: !!timestamp y}", "is not YAML"),
        ("{name: x, data: !!python/object/apply:os.system [ls]}", "is not YAML: could not determine a constructor"),
        ("{name: x, data: [], steps: " + "9" * 5000 + "}", "is not YAML"),
        ("{name: x, data: [], steps: 0x" + "f" * 5000 + "}", "steps must be below 2^63, found a number of thousands"),
        ("{name: x, data: [], optimizer: {lr: " + "9" * 400 + "}}", "lr must be a number below 1e308, found 9999"),
        ("{name: x, data: " + "y" * 5000 + "}", "data must be a list, found 'yyyy"),
        ("? " + "y" * 5000 + "\n: x", "unknown field yyyy"),
        ("? 0x" + "f" * 5000 + "\n: x", "unknown field a number of thousands"),
        (
            f"{SMALLEST}validation: [{{kind: qa, name: v, path: p}}, {{kind: text, name: v, path: x}}]",
            "two sources of validation have the same name",
        ),
    ],
)
def test_files_that_are_refused(refused, text, words):
    refused(text, words=words, readers=(read_circuit_recipe, read_recipe))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("steps", "--set steps: expected NAME=VALUE"),
        ("name.x=1", "--set name.x=1: name is not a section"),
        ("data.0.count=1", "--set data.0.count=1: data is not a section"),
        ("steps=[1", "--set steps=[1: the value is not YAML"),
        ("=1", "unknown field"),
        ("stepz=1", "unknown field stepz; there are name, seed, steps"),
        ("circuit.states=1", "circuit: unknown field states; there are num_states"),
        ("steps=many", "steps must be a whole number, found 'many'"),
        ("steps=0 ratios=[2]", "steps must be above 0, found 0; ratios[0] must be at most 1, found 2"),
        ("steps=true", "steps must be a whole number, found True"),
        ("seed=-1", "seed must be at least 0, found -1"),
        ("half=1", "half must be true or false, found 1"),
        ("circuit=5", "circuit must be a section with fields, found 5"),
        ("weighting=best", "weighting must be 'token' or 'elbo', found 'best'"),
        ("optimizer.lr=.nan", "optimizer.lr must be a finite number, found nan"),
        ("optimizer.lr=true", "optimizer.lr must be a number, found True"),
        ("optimizer.betas=[0.9]", "optimizer.betas must have a length of at least 2, found [0.9]"),
        ("optimizer.betas=[0.9,x]", "optimizer.betas[1] must be a number, found 'x'"),
        ("optimizer.momentum=1", "optimizer.momentum must be below 1, found 1"),
        ("optimizer.step_size=2", "optimizer.step_size must be at most 1, found 2"),
        ("optimizer.rule=em", "optimizer.rule must be 'adam', 'ratio' or 'baum-welch', found 'em'"),
        ("data=[]", "there is neither data nor a cache"),
        ("cache=x", "give data or a cache, not both"),
        ("keep_states=4 start=null", "keep_states needs start"),
        ("joint.weights=lora adapter=x", "writes an adapter for the backbone as it is, without another one"),
        ("joint.weights=all dtype=bfloat16", "joint.weights 'all' needs dtype float32"),
        ("data=[] cache=x joint.weights=all", "joint training needs data"),
        ("windows.length=500", "rows of 384 tokens hold no window of 500: raise row_length"),
        ("windows.block_share=1.5", "windows.block_share must be at most 1, found 1.5"),
        ("batch_windows=12", f"batch_windows must be a multiple of {STRATA}, found 12"),
        ("bank.windows=12", f"bank.windows must be a multiple of {STRATA}, found 12"),
        ("ratios=[]", "ratios must have a length of at least 1, found []"),
        ("tails=[0,0]", "tails must not be all 0"),
        *(
            (f"optimizer.rule={rule} {change}", f"'{rule}' is for static circuits of free logits")
            for rule, change in (
                ("ratio", "head.latents=true"),
                ("baum-welch", "circuit.emission_rank=4"),
                ("ratio", "joint.weights=all"),
            )
        ),
    ],
)
def test_values_that_are_refused(refused, change, words):
    refused(SMALLEST, *change.split(), words=words)


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a/b", "..", "", ".hidden", "-rf", "a\0b", "a b", "n" * 5000])
def test_a_name_that_is_no_folder_of_its_own_is_refused(refused, name):
    quoted, readers = json.dumps(name), (read_circuit_recipe, read_recipe)
    refused(f"{{name: {quoted}, {DATA}}}", words=": name must be of letters, digits and", readers=readers)
    text = f"{{name: x, data: [{{kind: qa, name: {quoted}, path: p.jsonl}}]}}"
    refused(text, words="data[0].name must be of letters, digits and", readers=readers)


def test_what_is_no_text_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/full")):
        with pytest.raises(FormatError, match=f"{path}: cannot be read: it is no regular file"):
            read_circuit_recipe(path)
    for name in ("a\0b", "n" * 5000, "no.yaml"):
        with pytest.raises(FormatError, match="cannot be read"):
            read_circuit_recipe(tmp_path / name)
    (tmp_path / "bytes").write_bytes(b"name: \xff\xfe")
    with pytest.raises(FormatError, match="bytes: is not UTF-8 text"):
        read_circuit_recipe(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ModelRecipe(widht=3), "ModelRecipe: unknown field widht; there are width, layers, heads"),
        (lambda: ModelRecipe("3"), "ModelRecipe: width must be a whole number, found '3'."),
        (lambda: ModelRecipe(width=7), "ModelRecipe: width must be an even multiple of heads, found 7 and 8."),
        (lambda: Source("text"), "Source: lacks the field name, path."),
        (lambda: Recipe(name="x", data=[{**PROSE, "paht": 1}]), "Recipe: data[0]: unknown field paht; there are kind"),
        (lambda: Recipe(name="x", data=[PROSE, PROSE]), "Recipe: two sources of data have the same name."),
        (lambda: dataclasses.replace(ModelRecipe(), heads=-1), "ModelRecipe: heads must be above 0, found -1."),
        (lambda: CircuitRecipe("x"), "CircuitRecipe: there is neither data nor a cache."),
    ],
)
def test_recipes_made_in_python_have_our_errors_in_the_words_of_a_file(make, words):
    with pytest.raises(InvalidInput) as caught:
        make()
    assert str(caught.value).startswith(words)


def variants(section):
    """The section with each of its fields changed, one at a time, and those of its sections; each is valid."""
    kinds = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            others = variants(value)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            others = [(other, *value[1:]) for other in variants(value[0])]
        else:
            hints = (kinds[field.name], *typing.get_args(kinds[field.name]))
            choices = [each for part in hints for each in typing.get_args(part)]
            tried = (*choices, True, 1, 77, 0.77, 96, "another", ("c", "d"), (0.3, 0.4))
            others = (changed(section, field.name, each) for each in tried if each != value)
            yield next(filter(None, others))
            continue
        for other in others:
            yield dataclasses.replace(section, **{field.name: other})


def changed(section, name, value):
    """The section with another value in a field; None if that is not valid."""
    try:
        return dataclasses.replace(section, **{name: value})
    except InvalidInput:
        return None


def test_the_digest_changes_with_every_field_and_with_nothing_else(tmp_path):
    source = "[{kind: qa, name: a, path: a.jsonl, count: 3}]"  # with what every kind needs
    recipe = read_recipe(TINY, [f"data={source}", f"validation={source}"])
    others = list(variants(recipe))
    assert len(others) > 45
    assert len({recipe.digest(), *(each.digest() for each in others)}) == len(others) + 1
    again = Recipe(**{field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)})
    lists = dataclasses.replace(
        recipe, data=list(recipe.data), optimizer=OptimizerRecipe(2e-2, [0.9, 0.95], warmup=5, ema=0.95)
    )
    whole = dataclasses.replace(recipe, noise=dataclasses.replace(recipe.noise, block_weight=4))
    (tmp_path / "written.yaml").write_text(json.dumps(dataclasses.asdict(recipe)))
    written = read_recipe(tmp_path / "written.yaml", ["optimizer.lr=0.02"])
    assert recipe == again == lists == whole == written
    assert len({each.digest() for each in (recipe, again, lists, whole, written)}) == 1


CIRCUIT = f"{{name: x, {DATA}, "


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("{name: x, data: [{kind: text, name: t, path: there}]}", "data"),
        (f"{{name: x, tokenizer: {{path: there}}, {DATA}}}", "."),
        ("{name: x, cache: there}", "data"),
        (f"{CIRCUIT} backbone: ./there}}", "."),
        (f"{CIRCUIT} start: ./there}}", "."),
    ],
)
def test_relative_paths_begin_where_the_command_is_run_and_those_of_data_and_caches_in_its_data(
    tmp_path, monkeypatch, capsys, text, begins
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.yaml").write_text(text)
    verb = "train" if "cache" in text or CIRCUIT in text else "pretrain"
    small = ["--set=bank.windows=8", "--set=bank.rows_at_once=2"] if CIRCUIT in text else []
    assert main([verb, "elsewhere/x.yaml", "--data=data", "--out=out", "--device=cpu", *small]) == 1
    message = capsys.readouterr().err
    assert f"{Path(begins, 'there')}" in message
    assert ("data/there" in message) == (begins == "data")
    assert "elsewhere" not in message
