"""A recipe: everything that makes a training run what it is, from a short YAML file."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from codd.errors import FormatError, shown
from codd.training import text_files, typed

LONGEST = 2**17
"""Characters of a recipe: fifty times the longest of ours."""
LONGEST_NAME = 100
"""Bytes: a folder's name has a digest behind it, and file systems take 143 or 255."""


@dataclass(frozen=True)
class ModelRecipe:
    """The network: fields of mini's config.json."""

    width: int = 512
    layers: int = 7
    heads: int = 8
    mlp_width: int = 1408
    rope_theta: float = 10_000.0
    max_length: int = 1024
    block_size: int | None = None
    """Positions of a block of block-causal attention; null: every position sees all."""


@dataclass(frozen=True)
class TokenizerRecipe:
    """A folder with a tokenizer, or the size of one to be trained on the data."""

    path: str | None = None
    vocab_size: int = 8192
    megabytes: int = 40
    """How much of the data a new tokenizer is trained on."""


@dataclass(frozen=True)
class Source:
    """One set of data. Paths are relative to the folder given by ``--data``."""

    kind: Literal["text", "qa", "problems"]
    """text: files of prose, packed into full rows. qa: questions and answers. problems: codd's own generator."""
    name: str
    weight: float = 1.0
    """Share of the rows of a batch, relative to the other sources."""
    path: str | None = None
    fields: Sequence[str] = ("question", "answer")
    """Of a JSON object: the question's and the answer's key, or for text the one key."""
    count: int | None = None
    """How many problems to generate, or how many entries of a file to use at most."""
    split: Literal["train", "test"] = "train"
    """Of the problem generator: the two never meet."""
    seed: int = 0
    rows: int | None = None
    """Use at most this many rows: for validation."""


@dataclass(frozen=True)
class NoiseRecipe:
    """How tokens are masked."""

    minimum: float = 1e-3
    """The smallest masking probability; its inverse bounds the weight of a token."""
    block_share: float = 0.4
    """Share of texts with one partly masked block, everything left of it visible and right of it masked."""
    block_length: int = 32
    block_weight: float = 4.0
    """Weight of a token of such a block against one under uniform noise: a block has few."""


@dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW with warm-up and decay, and an average of the weights."""

    lr: float = 1e-3
    betas: Sequence[float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: int = 200
    decay: Literal["cosine", "linear"] = "linear"
    final_lr: float = 0.0
    """Relative to ``lr``."""
    ema: float = 0.999


@dataclass(frozen=True)
class Recipe:
    """A training run."""

    name: str
    data: Sequence[Source]
    validation: Sequence[Source] = ()
    objective: Literal["diffusion", "causal"] = "diffusion"
    seed: int = 0
    steps: int = 1000
    batch_rows: int = 64
    micro_rows: int | None = None
    """Rows in one pass of a process; the gradients of several passes are added. None: all at once."""
    row_length: int = 384
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    compile: bool | None = None
    """Compile the network; None: on a GPU."""
    log_every: int = 20
    validate_every: int = 500
    checkpoint_every: int = 500
    keep: int = 2
    """How many checkpoints stay."""
    model: ModelRecipe = ModelRecipe()
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    noise: NoiseRecipe = NoiseRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()

    def digest(self) -> str:
        """Names the run: two recipes with the same digest train the same network."""
        return digest_of(self)


def digest_of(recipe: Any) -> str:
    """A name for what a recipe's fields say."""
    text = json.dumps(dataclasses.asdict(recipe), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a YAML file; ``changes`` like ``optimizer.lr=1e-3`` come on top of it."""
    return read_fields(Recipe, path, changes, _problems)


Kind = TypeVar("Kind")


def read_fields(
    kind: type[Kind], path: Path, changes: Sequence[str], problems: Callable[[Kind], Iterator[str]]
) -> Kind:
    """A recipe of some kind from a YAML file; ``problems`` are what no type says."""
    with text_files.open_text(path) as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise FormatError(f"{path}: is longer than {LONGEST:,} characters, which no recipe is.")
    fields = _parse(text, f"{path}: is not YAML")
    if not isinstance(fields, dict):
        raise FormatError(f"{path}: expected fields like `name: mini`, found {type(fields).__name__}.")
    for change in changes:
        _change(fields, change)
    recipe: Kind = typed.build(kind, fields, str(path))
    if found := list(problems(recipe)):
        raise FormatError(f"{path}: {'; '.join(found)}.")
    return recipe


def _change(fields: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals:
        raise FormatError(f"--set {change}: expected NAME=VALUE, such as optimizer.lr=1e-3.")
    *path, last = name.split(".")
    for part in path:
        fields = fields.setdefault(part, {})
        if not isinstance(fields, dict):
            raise FormatError(f"--set {change}: {part} is not a section of the recipe.")
    fields[last] = _parse(text, f"--set {change}: the value is not YAML")


class _Loader(yaml.SafeLoader):
    """Plain values alone. With aliases, a few lines stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuses aliases."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases such as *name are not taken: write the value out")
        return super().compose_node(parent, index)


def _parse(text: str, wrong: str) -> Any:
    """The value of a YAML text; ``wrong`` begins the message of an error."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # of a value that is no date, number or base64 this parser raises whatever it met
        message = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise FormatError(f"{wrong}: {message[:300]}") from error


def _problems(recipe: Recipe) -> Iterator[str]:
    """What no type says."""
    yield from name_problems("name", recipe.name)
    if not recipe.data:
        yield "data is empty"
    yield from source_problems((recipe.data, recipe.validation))
    yield from _number_problems(recipe)


def name_problems(what: str, name: str) -> Iterator[str]:
    """What is wrong with a name that becomes a folder's, or part of one."""
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name.encode()) > LONGEST_NAME:
        yield (
            f"{what} {shown(name)} must be of letters, digits and . _ -, begin with a letter or digit, and have "
            f"at most {LONGEST_NAME} bytes: a folder is named after it"
        )


def source_problems(sets: Sequence[Sequence[Source]]) -> Iterator[str]:
    """What is wrong with sets of data, the first of which is to be trained on."""
    for source in (source for sources in sets for source in sources):
        yield from name_problems("source name", source.name)
        if source.kind == "problems" and not source.count:
            yield f"source {source.name} needs a count"
        if source.kind != "problems" and not source.path:
            yield f"source {source.name} needs a path"
        if any(number is not None and number < 1 for number in (source.count, source.rows)):
            yield f"source {source.name}: count and rows must be above zero"
    if any(source.weight <= 0 for source in sets[0]):
        yield "every weight must be above zero"
    for sources in sets:
        if len({source.name for source in sources}) < len(sources):
            yield "two sources have the same name"


def _number_problems(recipe: Recipe) -> Iterator[str]:
    for section, where, names in (
        (recipe, "", ("steps", "batch_rows", "micro_rows", "log_every", "validate_every", "checkpoint_every", "keep")),
        (recipe.model, "model.", ("width", "layers", "heads", "mlp_width", "rope_theta", "max_length", "block_size")),
        (recipe.noise, "noise.", ("block_length", "block_weight")),
        (recipe.optimizer, "optimizer.", ("lr", "clip")),
    ):
        for name in names:
            value = getattr(section, name)
            if value is not None and value <= 0:
                yield f"{where}{name} must be above zero"
    if recipe.row_length < 2:
        yield "row_length must be at least 2"
    if recipe.seed < 0 or recipe.optimizer.warmup < 0 or recipe.optimizer.weight_decay < 0:
        yield "seed, optimizer.warmup and optimizer.weight_decay must not be below zero"
    if not 0 < recipe.noise.minimum < 1 or not 0 <= recipe.noise.block_share <= 1:
        yield "noise.minimum and noise.block_share must be between 0 and 1"
    if len(recipe.optimizer.betas) != 2 or not all(
        0 <= beta < 1 for beta in (*recipe.optimizer.betas, recipe.optimizer.ema)
    ):
        yield "optimizer.betas must be two numbers, and they and optimizer.ema from 0 to below 1"
    if recipe.model.heads > 0 and recipe.model.width % (2 * recipe.model.heads):
        yield "model.width must be an even multiple of model.heads"
