"""The recipe of a circuit: everything that makes it what it is, from a short YAML file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from codd.data.datasets import STRATA
from codd.data.sources import Source
from codd.data.tokenization import TAILS
from codd.data.windows import WindowRecipe
from codd.training.circuit.objectives import Weighting
from codd.training.recipe import Betas, RunRecipe, check_rules, name_rules, read_fields
from codd.validation import BelowOne, Count, List, Natural, NotNegative, Positive, Section

AUTO = "auto"
Strata = Annotated[Count, Field(multiple_of=STRATA)]
Ratio = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class TablesRecipe(Section):
    """The tables of the HMM."""

    num_states: Count = 256
    transition_rank: Count | None = None
    """Rank of the logits, which are then a product of two thin matrices; None: full tables."""
    emission_rank: Count | None = None
    noise: Positive = 0.5
    """Standard deviation of the initial logits."""


@dataclass(frozen=True)
class HeadRecipe(Section):
    """The head that conditions the circuit on hidden states; with neither latents nor inner states it is static."""

    latents: bool = False
    """Modulate the latents at each position."""
    inner_states: Natural = 0
    """The number of inner states through which transitions are modulated as well; 0: they are not."""
    hidden: Natural = 0
    """Width of a hidden layer; 0: none."""
    dropout: BelowOne = 0.0

    @property
    def wanted(self) -> bool:
        """Whether there is a head at all."""
        return self.latents or self.inner_states > 0


@dataclass(frozen=True)
class RuleRecipe(Section):
    """The optimizer: how parameters are updated."""

    rule: Literal["adam", "ratio", "baum-welch"] = "adam"
    """adam: on logits. The others are the two forms of anemone, for static circuits of free logits."""
    lr: Positive | None = None
    """Learning rate of Adam; None: 1.5e-2, and on from another circuit 1.5e-3. Anemone has a step_size."""
    head_lr: Positive | None = None
    """None: 1e-3, and on from another circuit 1e-4."""
    betas: Betas = (0.9, 0.99)
    warmup: Natural = 50
    step_size: Ratio = 0.4
    momentum: BelowOne = 0.0
    """Momentum of anemone's flows; with it (the paper's is 0.9) the rule ratio is unstable."""
    pseudocount: Positive = 1e-6


@dataclass(frozen=True)
class JointRecipe(Section):
    """Training the backbone together with the circuit."""

    weights: Literal["none", "lora", "all"] = "none"
    lr: Positive = 1e-4
    rank: Count = 8
    """The rank of LoRA's matrices."""


@dataclass(frozen=True)
class BankRecipe(Section):
    """Windows on which the network is evaluated once; their hidden states stay in memory."""

    windows: Strata = 20_000
    rows_at_once: Count = 128
    """How many rows the network evaluates at a time."""


@dataclass(frozen=True)
class CircuitRecipe(RunRecipe):
    """A training run of a circuit."""

    backbone: str = "bundled"
    """A checkpoint's folder or hub id."""
    adapter: str | None = None
    """A LoRA adapter of PEFT that is merged into the backbone first: its folder or hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the backbone's weights: bfloat16 takes half the memory, on a GPU."""
    start: str | None = AUTO
    """A circuit to train on from, with the sizes that it has: its folder or hub id. auto: the one in the backbone's
    folder (circuit/), if there is one and the section circuit, the sizes of a new one, is left out. null: a new one."""
    keep_states: Count | None = None
    """How many states of the start circuit are kept, those that the windows use most; None: all."""
    cache: str | None = None
    """A folder that `codd cache` wrote, used instead of data; the network is then not evaluated."""
    data: List[Source] = ()
    validation: List[Source] = ()
    steps: Count = 2000
    seconds: Positive | None = None
    """End after so much training even if steps are left; the learning rate then falls with the clock."""
    batch_windows: Strata = 256
    row_length: Count = 384
    tails: Annotated[List[NotNegative], Field(min_length=1)] = TAILS
    """How often an answer is followed by no, one, two ... further blocks of end marks, which are masked like the rest:
    when a block is filled, the room behind it may be any."""
    weighting: Weighting = "token"
    ratios: Annotated[List[Ratio], Field(min_length=1)] = (0.1, 0.5, 1.0)
    """Shares of masked tokens at which held-out text is scored."""
    checkpoint_every: Count = 1000
    half: bool = True
    """Save the circuit in 16 bits."""
    control: bool = False
    """Train a circuit of one state beside it, which can only tilt how often each token is written: what it gains is no
    joint distribution."""
    circuit: TablesRecipe = TablesRecipe()
    head: HeadRecipe = HeadRecipe()
    optimizer: RuleRecipe = RuleRecipe()
    joint: JointRecipe = JointRecipe()
    windows: WindowRecipe = WindowRecipe()
    bank: BankRecipe = BankRecipe()

    def __post_init__(self) -> None:
        """Check what concerns several fields."""
        check_rules(_broken_rules(self))


def read_circuit_recipe(path: Path, changes: Sequence[str] = ()) -> CircuitRecipe:
    """Read a YAML file; ``changes`` like ``circuit.num_states=512`` come on top of it."""
    return read_fields(CircuitRecipe, path, changes)


def _broken_rules(recipe: CircuitRecipe) -> Iterator[str]:
    """The rules between several fields that a recipe breaks, in words."""
    if recipe.cache is None and not recipe.data:
        yield "there is neither data nor a cache"
    if recipe.cache is not None and recipe.data:
        yield "give data or a cache, not both: a cache has been made from data"
    if recipe.keep_states is not None and recipe.start is None:
        yield "keep_states needs start: the circuit whose most used states are kept"
    yield from name_rules(recipe.data, recipe.validation)
    if not sum(recipe.tails):
        yield "tails must not be all 0"
    if recipe.windows.length > recipe.row_length:
        yield f"rows of {recipe.row_length} tokens hold no window of {recipe.windows.length}: raise row_length"
    rule = recipe.optimizer.rule
    factored = recipe.circuit.transition_rank is not None or recipe.circuit.emission_rank is not None
    if rule != "adam" and (factored or recipe.head.wanted or recipe.joint.weights != "none"):
        yield f"optimizer.rule {rule!r} is for static circuits of free logits: no ranks, no head, no joint training"
    if recipe.joint.weights != "none" and recipe.cache is not None:
        yield "a cache holds what a frozen backbone said: joint training needs data"
    if recipe.joint.weights != "none" and recipe.control:
        yield "a control is trained for a frozen backbone: leave control out of joint training"
    if recipe.joint.weights == "lora" and recipe.adapter is not None:
        yield (
            "joint.weights 'lora' writes an adapter for the backbone as it is, without another one: leave adapter out, "
            "or save the backbone with it merged"
        )
    if recipe.joint.weights == "all" and recipe.dtype != "float32":
        yield f"joint.weights 'all' needs dtype float32: steps of an optimizer are too small for {recipe.dtype}"
