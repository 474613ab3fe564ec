import dataclasses
import itertools
import json
import os
import re
import typing
from pathlib import Path

import pytest

from codd.cli import main, train
from codd.data.noise import NoiseRecipe
from codd.data.sources import Source
from codd.errors import FormatError, InvalidInput
from codd.training.circuit_recipe import CircuitRecipe, read_circuit_recipe
from codd.training.recipe import SHIPPED, find_recipe
from codd_lab.pretraining import recipe as lab
from codd_lab.pretraining.recipe import ModelRecipe, OptimizerRecipe, Recipe, TokenizerRecipe, read_recipe
from codd_lab.verbs import pretrain
from tests.support.small_runs import TINY

SMALLEST = """
name: x
data: [{kind: qa, name: p, path: p.jsonl, count: 5}]
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str, *changes: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return read_recipe(path, changes)

    return read


def test_what_is_left_out_has_its_default(read):
    assert read(SMALLEST) == Recipe(name="x", data=(Source(kind="qa", name="p", path="p.jsonl", count=5),))


def test_every_field_is_read(read):
    recipe = read("""
name: all
objective: causal
seed: 3
steps: 7
batch_rows: 6
micro_rows: 2
row_length: 100
precision: bfloat16
compile: false
log_every: 1
validate_every: 2
checkpoint_every: 3
keep: 4
model: {width: 64, layers: 1, heads: 4, mlp_width: 8, rope_theta: 500, max_length: 99}
tokenizer: {path: some/where, vocab_size: 300, megabytes: 2}
noise: {minimum: 0.01, block_share: 1, block_length: 8, block_weight: 2}
optimizer: {lr: 0.1, betas: [0.5, 0.6], weight_decay: 0, clip: 2, warmup: 0, decay: cosine, final_lr: 0.1, ema: 0}
data:
  - {kind: text, name: a, path: a.txt, weight: 2}
  - {kind: qa, name: b, path: b.jsonl, fields: [q, a], count: 9}
validation:
  - {kind: qa, name: a, path: v.jsonl, count: 3, rows: 2}
""")
    assert recipe == Recipe(
        "all",
        (
            Source("text", "a", "a.txt", 2.0),
            Source("qa", "b", path="b.jsonl", fields=("q", "a"), count=9),
        ),
        (Source("qa", "a", path="v.jsonl", count=3, rows=2),),
        *("causal", 3, 7, 6, 2, 100, "bfloat16", False, 1, 2, 3, 4),
        ModelRecipe(64, 1, 4, 8, 500.0, 99),
        TokenizerRecipe("some/where", 300, 2),
        NoiseRecipe(0.01, 1.0, 8, 2.0),
        OptimizerRecipe(0.1, (0.5, 0.6), 0.0, 2.0, 0, "cosine", 0.1, 0.0),
    )


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
    for verb in (pretrain.VERB, train.VERB):
        assert [verb.read(path, ()).name for path in verb.recipes] == [path.stem for path in verb.recipes]
    assert {*train.VERB.recipes} == {*SHIPPED.glob("*.yaml")}
    for path in {*lab.SHIPPED.glob("*.yaml")} - {*pretrain.VERB.recipes}:
        assert read_circuit_recipe(path).name == path.stem


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("2", 2.0), ("2.5E+1", 25.0)])
def test_numbers_without_a_point_are_numbers(read, text, value):
    assert read(f"{SMALLEST}optimizer: {{lr: {text}}}").optimizer.lr == value
    assert read(SMALLEST, f"optimizer.lr={text}").optimizer.lr == value


def test_changes_come_on_top(read):
    text = f"{SMALLEST}steps: 5\nmodel: {{width: 32, heads: 2}}"
    changed = read(text, "steps=9", "model.width=64", "noise.block_length=8", "optimizer.betas=[0.1, 0.2]", "keep=1")
    assert (changed.steps, changed.model.width, changed.model.heads) == (9, 64, 2)
    assert (changed.noise.block_length, changed.optimizer.betas, changed.keep) == (8, (0.1, 0.2), 1)
    assert read(text, "steps=9", "steps=8").steps == 8
    assert read(f"{text}\nmicro_rows: 2", "micro_rows=null").micro_rows is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps", "--set steps: expected NAME=VALUE"),
        ("steps=many", "steps must be a whole number, found 'many'"),
        ("stepz=1", "unknown field stepz; there are name, data,"),
        ("model.depth=1", "model: unknown field depth; there are width, layers"),
        ("name.x=1", "--set name.x=1: name is not a section"),
        ("data.0.count=1", "--set data.0.count=1: data is not a section"),
        ("steps=[1", "--set steps=[1: the value is not YAML"),
        ("=1", "unknown field"),
    ],
)
def test_changes_that_are_refused(read, change, message):
    with pytest.raises(FormatError, match=re.escape(message)):
        read(SMALLEST, change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected fields like `name: mini`, found NoneType"),
        ("- a", "found list"),
        ("name: [", "is not YAML"),
        ("a: \x07", "is not YAML"),
        ("name: x", "lacks the field data"),
        ("data: []", "lacks the field name"),
        ("{name: x, data: []}", "data must have a length of at least 1, found []"),
        ("{name: x, data: 5}", "data must be a list, found 5"),
        ("{name: x, data: [5]}", "data[0] must be a section with fields, found 5"),
        ("{name: x, data: [{name: p}]}", "data[0]: lacks the field kind"),
        ("{name: x, data: [{kind: prose, name: p}]}", "data[0].kind must be 'text' or 'qa', found 'prose'"),
        ("{name: x, data: [{kind: text, name: p, fields: text}]}", "data[0].fields must be a list, found 'text'"),
        ("{name: x, data: [{kind: qa, name: p, path: p.jsonl, count: -1}]}", "data[0].count must be above 0, found -1"),
        ("{name: x, data: [{kind: text, name: p}]}", "data[0]: lacks the field path"),
        (
            "{name: x, data: [{kind: qa, name: p, path: p.jsonl, count: 1, weight: 0}]}",
            "data[0].weight must be above 0, found 0",
        ),
        ("{name: x, data: [{kind: qa, name: a/b, path: p.jsonl, count: 1}]}", "data[0].name must be of letters"),
        ("{name: 5, data: []}", "name must be a text, found 5"),
    ],
)
def test_what_is_refused(read, text, message):
    with pytest.raises(FormatError, match=re.escape(message)) as caught:
        read(text)
    assert "recipe.yaml: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("steps: 0", "steps must be above 0, found 0"),
        ("steps: true", "steps must be a whole number, found True"),
        ("row_length: 1", "row_length must be at least 2, found 1"),
        ("seed: -1", "seed must be at least 0, found -1"),
        ("compile: 1", "compile must be true or false, found 1"),
        ("precision: float16", "precision must be 'auto', 'float32' or 'bfloat16', found 'float16'"),
        ("objective: [diffusion]", "objective must be 'diffusion' or 'causal', found ['diffusion']"),
        ("model: 5", "model must be a section with fields, found 5"),
        ("model: {width: 24, heads: 8}", "model: width must be an even multiple of heads, found 24 and 8"),
        ("noise: {block_share: 2}", "noise.block_share must be at most 1, found 2"),
        ("optimizer: {lr: .nan}", "optimizer.lr must be a finite number, found nan"),
        ("optimizer: {lr: true}", "optimizer.lr must be a number, found True"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas must have a length of at least 2, found [0.9]"),
        ("optimizer: {betas: [0.9, x]}", "optimizer.betas[1] must be a number, found 'x'"),
        ("optimizer: {ema: 1}", "optimizer.ema must be below 1, found 1"),
        (
            "validation: [{kind: qa, name: v, path: p.jsonl, count: 1}, {kind: text, name: v, path: x}]",
            "two sources of validation have the same name",
        ),
    ],
)
def test_values_that_are_refused(read, field, message):
    with pytest.raises(FormatError, match=re.escape(message)):
        read(f"{SMALLEST}{field}")


def test_all_that_is_wrong_is_said_at_once(read):
    with pytest.raises(FormatError, match=r"steps must be .*; batch_rows must be .*; model: width"):
        read(f"{SMALLEST}steps: 0\nbatch_rows: 0\nmodel: {{width: 7}}")


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(FormatError, match=r"recipe\.yaml: cannot be read as UTF-8 text"):
        read_recipe(path)


def test_a_missing_file_keeps_its_name(tmp_path):
    with pytest.raises(FormatError, match=r"no\.yaml: cannot be read \(No such file or directory\)"):
        read_recipe(tmp_path / "no.yaml")


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefgh")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 1000, "is not YAML: it is nested too deeply"),
        ("a: " * 5000, "is not YAML"),
        (LAUGHS, "is not YAML: aliases such as *name are not taken"),
        (LAUGHS + "name: *h\ndata: []", "aliases"),
        ("&a [*a]", "aliases"),
        ("name: x\n" * 100_000, "is longer than 131,072 characters"),
        ("{name: x, data: 2024-99-99}", "is not YAML: month must be in 1..12"),
        ("{name: x, data: !!timestamp y}", "is not YAML"),
        ("{name: x, data: !!python/object/apply:os.system [ls]}", "is not YAML: could not determine a constructor"),
        ("{name: x, data: [], steps: " + "9" * 5000 + "}", "is not YAML"),
        ("{name: x, data: [], steps: 0x" + "f" * 5000 + "}", "steps must be below 2^63, found a number of thousands"),
        ("{name: x, data: [], optimizer: {lr: " + "9" * 400 + "}}", "lr must be a number below 1e308, found 9999"),
        ("{name: x, data: " + "y" * 5000 + "}", "data must be a list, found 'yyyy"),
        ("? " + "y" * 5000 + "\n: x", "unknown field yyyy"),
        ("? 0x" + "f" * 5000 + "\n: x", "unknown field a number of thousands"),
    ],
)
@pytest.mark.parametrize("read_one", [read_recipe, read_circuit_recipe])
def test_hostile_yaml_is_an_error_of_a_line(tmp_path, read_one, text, message):
    path = tmp_path / "hostile.yaml"
    path.write_text(text)
    with pytest.raises(FormatError) as caught:
        read_one(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_pipes_folders_and_devices_are_no_recipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/full")):
        with pytest.raises(FormatError, match=f"{path}: cannot be read: it is no regular file"):
            read_recipe(path)
    for name in ("a\0b", "n" * 5000):
        with pytest.raises(FormatError, match="cannot be read"):
            read_recipe(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["../../evil", "/evil", "a/b", "..", ".", "", ".hidden", "-rf", "a\0b", "a b", "n" * 5000]
)
def test_a_name_that_is_no_folder_of_its_own_is_refused(read, tmp_path, name):
    quoted = json.dumps(name)
    with pytest.raises(FormatError, match=r": name must be of letters, digits and"):
        read(f"{{name: {quoted}, data: [{{kind: qa, name: p, path: p.jsonl, count: 1}}]}}")
    with pytest.raises(FormatError, match=r"data\[0\]\.name must be of letters, digits and"):
        read(f"{{name: x, data: [{{kind: qa, name: {quoted}, path: p.jsonl, count: 1}}]}}")
    (tmp_path / "circuit.yaml").write_text(f"{{name: {quoted}, cache: c}}")
    with pytest.raises(FormatError, match=r": name must be of letters, digits and"):
        read_circuit_recipe(tmp_path / "circuit.yaml")


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
            choices = [
                each
                for part in (kinds[field.name], *typing.get_args(kinds[field.name]))
                for each in typing.get_args(part)
            ]
            others = [
                each for each in (*choices, True, 1, 77, 0.77, 96, "another", ("c", "d"), (0.3, 0.4)) if each != value
            ]
            yield next(filter(None, (changed(section, field.name, other) for other in others)))
            continue
        for other in others:
            yield dataclasses.replace(section, **{field.name: other})


def changed(section, name, value):
    """The section with another value in a field; None if that is not valid."""
    try:
        return dataclasses.replace(section, **{name: value})
    except InvalidInput:
        return None


PROSE = {"kind": "text", "name": "a", "path": "a.txt"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelRecipe(widht=3), "ModelRecipe: unknown field widht; there are width, layers, heads"),
        (lambda: ModelRecipe("3"), "ModelRecipe: width must be a whole number, found '3'."),
        (lambda: ModelRecipe(width=7), "ModelRecipe: width must be an even multiple of heads, found 7 and 8."),
        (lambda: Source("text"), "Source: lacks the field name, path."),
        (lambda: Source("text", "a"), "Source: lacks the field path."),
        (lambda: Recipe("x", [{**PROSE, "paht": 1}]), "Recipe: data[0]: unknown field paht; there are kind, name"),
        (lambda: Recipe("x", [PROSE, PROSE]), "Recipe: two sources of data have the same name."),
        (lambda: dataclasses.replace(ModelRecipe(), heads=-1), "ModelRecipe: heads must be above 0, found -1."),
        (lambda: CircuitRecipe("x"), "CircuitRecipe: there is neither data nor a cache."),
    ],
)
def test_recipes_made_in_python_have_our_errors_in_the_words_of_a_file(make, message):
    with pytest.raises(InvalidInput) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_the_digest_changes_with_every_field():
    source = "[{kind: qa, name: a, path: a.jsonl, count: 3}]"  # with what every kind needs
    recipe = read_recipe(TINY, [f"data={source}", f"validation={source}"])
    others = list(variants(recipe))
    assert len(others) > 45
    assert len({recipe.digest(), *(each.digest() for each in others)}) == len(others) + 1


def test_equal_fields_have_equal_digests_however_they_were_given(tmp_path):
    read = read_recipe(TINY)
    again = Recipe(**{field.name: getattr(read, field.name) for field in dataclasses.fields(read)})
    lists = dataclasses.replace(
        read, data=list(read.data), optimizer=OptimizerRecipe(2e-2, [0.9, 0.95], warmup=5, ema=0.95)
    )
    whole = dataclasses.replace(read, noise=dataclasses.replace(read.noise, block_weight=4))
    (tmp_path / "written.yaml").write_text(json.dumps(dataclasses.asdict(read)))
    written = read_recipe(tmp_path / "written.yaml")
    assert read == again == lists == whole == written
    assert len({each.digest() for each in (read, read_recipe(TINY), again, lists, whole, written)}) == 1


def test_the_digest_is_the_same_for_other_spellings(read):
    one = read(f"{SMALLEST}optimizer: {{lr: 1e-3}}\nsteps: 1000")
    assert one.digest() == read(SMALLEST).digest() == read(SMALLEST, "optimizer.lr=0.001").digest()


CIRCUIT = "{name: x, data: [{kind: qa, name: p, path: p.jsonl, count: 9}], "


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("{name: x, data: [{kind: text, name: t, path: there}]}", "data"),
        ("{name: x, tokenizer: {path: there}, data: [{kind: qa, name: p, path: p.jsonl, count: 9}]}", "."),
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
