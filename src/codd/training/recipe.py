"""A recipe: everything that makes a training run what it is, from a short YAML file.

Relative paths in a recipe begin where the command is run, and those of data and caches in its --data, which is the same
place unless it is given. Where the recipe itself lies does not matter.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from codd import validation
from codd.data.noise import NoiseRecipe
from codd.data.sources import Source
from codd.data.yaml_files import parse_yaml, read_yaml
from codd.errors import FormatError, InvalidInput, shown
from codd.validation import BelowOne, Count, FolderName, List, Natural, NotNegative, Positive, Section

SHIPPED = Path(__file__).with_name("recipes")
"""Recipes that come with codd, each named after its file."""

Betas = Annotated[List[BelowOne], Field(min_length=2, max_length=2)]


@dataclass(frozen=True)
class ModelRecipe(Section):
    """The network: fields of mini's config.json."""

    width: Count = 512
    layers: Count = 7
    heads: Count = 8
    mlp_width: Count = 1408
    rope_theta: Positive = 10_000.0
    max_length: Count = 1024
    block_size: Count | None = None
    """Positions of a block of block-causal attention; null: every position sees all."""

    def __post_init__(self) -> None:
        """Each head has an even width, for rotary positions."""
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be an even multiple of heads, found {self.width} and {self.heads}")


@dataclass(frozen=True)
class TokenizerRecipe(Section):
    """A folder with a tokenizer, or the size of one to be trained on the data."""

    path: str | None = None
    """A folder, or ``bundled``: the bundled model's."""
    vocab_size: Count = 8192
    megabytes: Count = 40
    """How much of the data a new tokenizer is trained on."""


@dataclass(frozen=True)
class OptimizerRecipe(Section):
    """AdamW with warm-up and decay, and an average of the weights."""

    lr: Positive = 1e-3
    betas: Betas = (0.9, 0.95)
    weight_decay: NotNegative = 0.1
    clip: Positive = 1.0
    warmup: Natural = 200
    decay: Literal["cosine", "linear"] = "linear"
    final_lr: float = 0.0
    """Relative to ``lr``."""
    ema: BelowOne = 0.999


@dataclass(frozen=True)
class Recipe(Section):
    """A training run of a backbone."""

    name: FolderName
    data: Annotated[List[Source], Field(min_length=1)]
    validation: List[Source] = ()
    objective: Literal["diffusion", "causal"] = "diffusion"
    seed: Natural = 0
    steps: Count = 1000
    batch_rows: Count = 64
    micro_rows: Count | None = None
    """Rows in one pass of a process; the gradients of several passes are added. None: all at once."""
    row_length: Annotated[Count, Field(ge=2)] = 384
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    compile: bool | None = None
    """Compile the network; None: on a GPU."""
    log_every: Count = 20
    validate_every: Count = 500
    checkpoint_every: Count = 500
    keep: Count = 2
    """How many checkpoints stay."""
    model: ModelRecipe = ModelRecipe()
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    noise: NoiseRecipe = NoiseRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()

    def __post_init__(self) -> None:
        """Check what concerns several sources."""
        check_rules(name_rules(self.data, self.validation))

    def digest(self) -> str:
        """Names the run: two recipes with the same digest train the same network."""
        return digest_of(self)


def check_rules(broken: Iterable[str]) -> None:
    """ValueError, which pydantic takes up, with all rules that are broken."""
    if found := list(broken):
        raise ValueError("; ".join(found))


def name_rules(*sets: Sequence[Source]) -> Iterator[str]:
    """What is wrong with the names in sets of sources."""
    for what, sources in zip(("data", "validation"), sets, strict=True):
        if len({source.name for source in sources}) < len(sources):
            yield f"two sources of {what} have the same name"


def digest_of(recipe: Any) -> str:
    """A name for what a recipe's fields say."""
    text = json.dumps(dataclasses.asdict(recipe), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_recipe(name: str, shipped: Sequence[str]) -> Path:
    """The file of one of the ``shipped`` recipes, or the path that ``name`` is; InvalidInput if it is neither."""
    if name in shipped:
        return SHIPPED / f"{name}.yaml"
    path = Path(name)
    if path.suffix or path.name != name or os.path.exists(path):  # whoever opens it says what is wrong with it
        return path
    raise InvalidInput(
        f"{shown(name)}: there is no recipe of this name here; there are {', '.join(shipped)}. "
        f"A recipe of your own is given by its path, such as {name}.yaml."
    )


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a YAML file; ``changes`` like ``optimizer.lr=1e-3`` come on top of it."""
    return read_fields(Recipe, path, changes)


Kind = TypeVar("Kind")


def read_fields(kind: type[Kind], path: Path, changes: Sequence[str]) -> Kind:
    """A recipe of some kind from a YAML file; FormatError with everything that is wrong."""
    fields = read_yaml(path)
    if not isinstance(fields, dict):
        raise FormatError(f"{path}: expected fields like `name: mini`, found {type(fields).__name__}.")
    for change in changes:
        _change(fields, change)
    recipe: Kind = validation.build(kind, fields, str(path))
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
    fields[last] = parse_yaml(text, f"--set {change}: the value is not YAML")
