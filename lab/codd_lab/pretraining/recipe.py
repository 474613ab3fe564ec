"""The recipe of a network: everything that makes its training what it is, from a short YAML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from codd.data.noise import NoiseRecipe
from codd.data.sources import Source
from codd.training.recipe import Betas, RunRecipe, check_rules, name_rules, read_fields
from codd.validation import BelowOne, Count, List, Natural, NotNegative, Positive, Section

SHIPPED = Path(__file__).parent.parent / "recipes"
"""Recipes of networks and of the circuits for them, each named after its file."""


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


@dataclass(frozen=True, kw_only=True)
class Recipe(RunRecipe):
    """A training run of a backbone."""

    data: Annotated[List[Source], Field(min_length=1)]
    validation: List[Source] = ()
    objective: Literal["diffusion", "causal"] = "diffusion"
    batch_rows: Count = 64
    micro_rows: Count | None = None
    """Rows in one pass of a process; the gradients of several passes are added. None: all at once."""
    row_length: Annotated[Count, Field(ge=2)] = 384
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    compile: bool | None = None
    """Compile the network; None: on a GPU."""
    log_every: Count = 20
    model: ModelRecipe = ModelRecipe()
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    noise: NoiseRecipe = NoiseRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()

    def __post_init__(self) -> None:
        """Check what concerns several sources."""
        check_rules(name_rules(self.data, self.validation))


def read_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a YAML file; ``changes`` like ``optimizer.lr=1e-3`` come on top of it."""
    return read_fields(Recipe, path, changes)
