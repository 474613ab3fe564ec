import dataclasses
import itertools
import json
import os
import re
import typing
from pathlib import Path

import pytest
from beartype.door import is_bearable
from small_runs import TINY

from codd.errors import FormatError
from codd.training.circuit_recipe import read_circuit_recipe
from codd.training.recipe import ModelRecipe, NoiseRecipe, OptimizerRecipe, Recipe, Source, TokenizerRecipe, read_recipe

SMALLEST = """
name: x
data: [{kind: problems, name: p, count: 5}]
"""


@pytest.fixture
def read(tmp_path):
    def read(text: str, *changes: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return read_recipe(path, changes)

    return read


def test_what_is_left_out_has_its_default(read):
    assert read(SMALLEST) == Recipe(name="x", data=(Source(kind="problems", name="p", count=5),))


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
  - {kind: problems, name: a, split: test, seed: 5, count: 3, rows: 2}
""")
    assert recipe == Recipe(
        "all",
        (
            Source("text", "a", 2.0, "a.txt"),
            Source("qa", "b", path="b.jsonl", fields=("q", "a"), count=9),
        ),
        (Source("problems", "a", split="test", seed=5, count=3, rows=2),),
        *("causal", 3, 7, 6, 2, 100, "bfloat16", False, 1, 2, 3, 4),
        ModelRecipe(64, 1, 4, 8, 500.0, 99),
        TokenizerRecipe("some/where", 300, 2),
        NoiseRecipe(0.01, 1.0, 8, 2.0),
        OptimizerRecipe(0.1, (0.5, 0.6), 0.0, 2.0, 0, "cosine", 0.1, 0.0),
    )


@pytest.mark.parametrize("path", sorted(TINY.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_in_the_repository_are_valid(path):
    read = read_circuit_recipe if "circuit" in path.stem else read_recipe
    assert read(path).name == path.stem


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
        ("steps=many", "steps: must be of type int, found 'many'"),
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
        ("{name: x, data: []}", "data is empty"),
        ("{name: x, data: 5}", "data: must be a list, found 5"),
        ("{name: x, data: [5]}", "data[0]: must be a section with fields, found 5"),
        ("{name: x, data: [{name: p}]}", "data[0]: lacks the field kind"),
        ("{name: x, data: [{kind: prose, name: p}]}", "kind: must be 'text' or 'qa' or 'problems', found 'prose'"),
        ("{name: x, data: [{kind: text, name: p, fields: text}]}", "fields: must be a list, found 'text'"),
        ("{name: x, data: [{kind: problems, name: p}]}", "source p needs a count"),
        ("{name: x, data: [{kind: problems, name: p, count: -1}]}", "count and rows must be above zero"),
        ("{name: x, data: [{kind: text, name: p}]}", "source p needs a path"),
        ("{name: x, data: [{kind: problems, name: p, count: 1, weight: 0}]}", "every weight must be above zero"),
        ("{name: x, data: [{kind: problems, name: a/b, count: 1}]}", "source name 'a/b' must be of letters"),
        ("{name: 5, data: []}", "name: must be of type str, found 5"),
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
        ("steps: 0", "steps must be above zero"),
        ("steps: 1.5", "steps: must be of type int, found 1.5"),
        ("steps: true", "steps: must be of type int, found True"),
        ("batch_rows: 0", "batch_rows must be above zero"),
        ("micro_rows: 0", "micro_rows must be above zero"),
        ("row_length: 1", "row_length must be at least 2"),
        ("log_every: 0", "log_every must be above zero"),
        ("validate_every: 0", "validate_every must be above zero"),
        ("checkpoint_every: 0", "checkpoint_every must be above zero"),
        ("keep: 0", "keep must be above zero"),
        ("seed: -1", "seed, optimizer.warmup and optimizer.weight_decay must not be below zero"),
        ("compile: 1", "compile: must be of type bool, found 1"),
        ("precision: float16", "precision: must be 'auto' or 'float32' or 'bfloat16', found 'float16'"),
        ("objective: [diffusion]", "objective: must be 'diffusion' or 'causal', found ['diffusion']"),
        ("model: 5", "model: must be a section with fields, found 5"),
        ("model:", "model: must be a section with fields, found None"),
        ("model: {heads: 0}", "model.heads must be above zero"),
        ("model: {width: 24, heads: 8}", "model.width must be an even multiple of model.heads"),
        ("noise: {minimum: 0}", "noise.minimum and noise.block_share must be between 0 and 1"),
        ("noise: {block_share: 2}", "noise.minimum and noise.block_share must be between 0 and 1"),
        ("noise: {block_length: 0}", "noise.block_length must be above zero"),
        ("optimizer: {lr: 0}", "optimizer.lr must be above zero"),
        ("optimizer: {lr: high}", "optimizer: lr: must be of type float, found 'high'"),
        ("optimizer: {lr: nan}", "optimizer: lr: must be of type float, found nan"),
        ("optimizer: {lr: .inf}", "optimizer: lr: must be of type float, found inf"),
        ("optimizer: {lr: true}", "optimizer: lr: must be of type float, found True"),
        ("optimizer: {lr: null}", "optimizer: lr: must be of type float, found None"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas must be two numbers"),
        ("optimizer: {betas: [0.9, x]}", "betas[1]: must be of type float, found 'x'"),
        ("optimizer: {ema: 1}", "optimizer.ema from 0 to below 1"),
        ("tokenizer: {path: 5}", "tokenizer: path: must be of type str, found 5"),
        ("validation: [{kind: problems, name: v, count: 1}, {kind: text, name: v, path: x}]", "the same name"),
    ],
)
def test_values_that_are_refused(read, field, message):
    with pytest.raises(FormatError, match=re.escape(message)):
        read(f"{SMALLEST}{field}")


def test_all_that_is_wrong_is_said_at_once(read):
    with pytest.raises(FormatError, match=r"steps must be .*; .*batch_rows must be .*; .*model\.width"):
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
        ("{name: x, data: [], steps: 0x" + "f" * 5000 + "}", "steps: must be below 2^63, found a number of thousands"),
        ("{name: x, data: [], optimizer: {lr: " + "9" * 400 + "}}", "lr: must be below 2^63, found 9999"),
        ("{name: x, data: " + "y" * 5000 + "}", "data: must be a list, found 'yyyy"),
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
    with pytest.raises(FormatError, match=r"name .* must be of letters, digits and"):
        read(f"{{name: {quoted}, data: [{{kind: problems, name: p, count: 1}}]}}")
    with pytest.raises(FormatError, match=r"source name .* must be of letters, digits and"):
        read(f"{{name: x, data: [{{kind: problems, name: {quoted}, count: 1}}]}}")
    (tmp_path / "circuit.yaml").write_text(f"{{name: {quoted}, cache: c}}")
    with pytest.raises(FormatError, match=r"name .* must be of letters, digits and"):
        read_circuit_recipe(tmp_path / "circuit.yaml")


def another(value, kind):
    """A value of the same type."""
    options = [each for part in (kind, *typing.get_args(kind)) for each in typing.get_args(part)]
    options += [True, 77, 0.77, "another", ("c", "d"), (0.3, 0.4)]
    return next(each for each in options if each != value and is_bearable(each, kind))


def variants(section):
    """The section with each of its fields changed, one at a time, and those of its sections."""
    kinds = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            others = variants(value)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            others = [(other, *value[1:]) for other in variants(value[0])]
        else:
            others = [another(value, kinds[field.name])]
        for other in others:
            yield dataclasses.replace(section, **{field.name: other})


def test_the_digest_changes_with_every_field():
    recipe = read_recipe(TINY)
    assert recipe.digest() == read_recipe(TINY).digest()
    changed = list(variants(recipe))
    assert len(changed) > 45
    assert len({recipe.digest(), *(each.digest() for each in changed)}) == len(changed) + 1


def test_the_digest_is_the_same_for_other_spellings(read):
    one = read(f"{SMALLEST}optimizer: {{lr: 1e-3}}\nsteps: 1000")
    assert one.digest() == read(SMALLEST).digest() == read(SMALLEST, "optimizer.lr=0.001").digest()
