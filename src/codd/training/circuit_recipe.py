"""The recipe of a circuit: everything that makes it what it is, from a short YAML file."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from codd.training import corpus
from codd.training.objectives import Objective, Weighting
from codd.training.recipe import Source, digest_of, name_problems, read_fields, source_problems
from codd.training.windows import WindowRecipe

STRATA = 8
"""Parts of the data that a batch takes the same number of windows from. Processes share the strata, so that one, two,
four or eight of them see the same batches."""


@dataclass(frozen=True)
class TablesRecipe:
    """The HMM."""

    num_states: int = 256
    transition_rank: int | None = None
    """Of the logits, which then are a product of two thin matrices; None: free ones."""
    emission_rank: int | None = None
    noise: float = 0.5
    """Deviation of the logits at the start."""


@dataclass(frozen=True)
class HeadRecipe:
    """What listens to the network; with neither latents nor steps the circuit is static."""

    latents: bool = False
    """Modulate the latents at each position."""
    inner_states: int = 0
    """Modulate transitions, through a detour of so many inner states."""
    hidden: int = 0
    """Width of a layer between; 0: none."""
    dropout: float = 0.0

    @property
    def wanted(self) -> bool:
        """Whether there is a head at all."""
        return self.latents or self.inner_states > 0


@dataclass(frozen=True)
class RuleRecipe:
    """How parameters move."""

    rule: Literal["adam", "em", "ratio", "baum-welch"] = "adam"
    """adam: on logits. The others are mini-batch EM (anemone) with that update, for static circuits of free logits."""
    lr: float = 1.5e-2
    """Of Adam; EM has a step_size."""
    head_lr: float = 1e-3
    betas: Sequence[float] = (0.9, 0.99)
    weight_decay: float = 0.0
    """Of the head."""
    warmup: int = 50
    step_size: float = 0.4
    momentum: float = 0.9
    pseudocount: float = 1e-6


@dataclass(frozen=True)
class JointRecipe:
    """Training the backbone along."""

    weights: Literal["none", "lora", "all"] = "none"
    lr: float = 1e-4
    rank: int = 8
    """Of LoRA."""


@dataclass(frozen=True)
class BankRecipe:
    """Windows that the network is asked about once, and that stay in memory."""

    windows: int = 20_000
    rows_at_once: int = 128
    """How many rows the network is given at a time."""


@dataclass(frozen=True)
class CircuitRecipe:
    """The training of a circuit."""

    name: str
    backbone: str = "bundled"
    """A checkpoint's folder or hub id."""
    start: str | None = None
    """A circuit to be trained on, instead of a new one; its sizes are then its own."""
    keep_states: int | None = None
    """Of the start circuit: so many, those that the windows use most; None: all."""
    cache: str | None = None
    """A folder that `codd cache` wrote: then there is no data, and the network is not asked."""
    data: Sequence[Source] = ()
    validation: Sequence[Source] = ()
    seed: int = 0
    steps: int = 2000
    seconds: float | None = None
    """End after so much training even if steps are left; the learning rate then falls with the clock."""
    batch_windows: int = 256
    row_length: int = 384
    tails: Sequence[float] = corpus.TAILS
    """How often an answer is followed by no, one, two ... further blocks of end marks, which are masked like the rest:
    when a block is filled, the room behind it may be any."""
    objective: Objective = "conditional"
    weighting: Weighting = "token"
    log_every: int = 50
    validate_every: int = 500
    ratios: Sequence[float] = (0.1, 0.5, 1.0)
    """Shares of masked tokens at which held-out text is scored."""
    patience: int | None = None
    """Stop after so many validations without a better one."""
    checkpoint_every: int = 1000
    keep: int = 2
    half: bool = True
    """Save the circuit in 16 bits."""
    circuit: TablesRecipe = TablesRecipe()
    head: HeadRecipe = HeadRecipe()
    optimizer: RuleRecipe = RuleRecipe()
    joint: JointRecipe = JointRecipe()
    windows: WindowRecipe = field(default_factory=WindowRecipe)
    bank: BankRecipe = BankRecipe()

    def digest(self) -> str:
        """Names the run: two recipes with the same digest train the same circuit."""
        return digest_of(self)

    @property
    def by_flows(self) -> bool:
        """Whether free logits of a static circuit move by flows alone, without a graph."""
        factored = self.circuit.transition_rank is not None or self.circuit.emission_rank is not None
        return not (factored or self.head.wanted or self.joint.weights != "none")


def read_circuit_recipe(path: Path, changes: Sequence[str] = ()) -> CircuitRecipe:
    """Read a YAML file; ``changes`` like ``circuit.num_states=512`` come on top of it."""
    return read_fields(CircuitRecipe, path, changes, problems_of)


def problems_of(recipe: CircuitRecipe) -> Iterator[str]:
    """What no type says."""
    yield from name_problems("name", recipe.name)
    if recipe.cache is None and not recipe.data:
        yield "there is neither data nor a cache"
    if recipe.cache is not None and recipe.data:
        yield "give data or a cache, not both: a cache has been made from data"
    if recipe.keep_states is not None and recipe.start is None:
        yield "keep_states needs start: the circuit whose most used states are kept"
    yield from source_problems((recipe.data, recipe.validation))
    for section, where, names in (
        (recipe, "", ("steps", "seconds", "batch_windows", "log_every", "validate_every", "checkpoint_every", "keep")),
        (recipe, "", ("patience", "row_length", "keep_states")),
        (recipe.circuit, "circuit.", ("num_states", "transition_rank", "emission_rank", "noise")),
        (recipe.optimizer, "optimizer.", ("lr", "head_lr", "step_size", "pseudocount")),
        (recipe.joint, "joint.", ("lr", "rank")),
        (recipe.windows, "windows.", ("length", "per_row", "minimum")),
        (recipe.bank, "bank.", ("windows", "rows_at_once")),
    ):
        for name in names:
            value = getattr(section, name)
            if value is not None and value <= 0:
                yield f"{where}{name} must be above zero"
    if recipe.batch_windows % STRATA or recipe.bank.windows % STRATA:
        yield f"batch_windows and bank.windows must be multiples of {STRATA}"
    if not recipe.tails or min(recipe.tails) < 0 or sum(recipe.tails) <= 0:
        yield "tails must be numbers from 0 on, not all 0"
    if not recipe.ratios or not all(0 < ratio <= 1 for ratio in recipe.ratios):
        yield "ratios must be above 0 and at most 1"
    if recipe.seed < 0 or recipe.optimizer.warmup < 0 or recipe.optimizer.weight_decay < 0:
        yield "seed, optimizer.warmup and optimizer.weight_decay must not be below zero"
    if not 0 <= recipe.optimizer.momentum < 1 or recipe.optimizer.step_size > 1:
        yield "optimizer.momentum must be from 0 to below 1, optimizer.step_size at most 1"
    if not 0 < recipe.windows.minimum < 1 or not 0 <= recipe.windows.block_share <= 1:
        yield "windows.minimum must be between 0 and 1, windows.block_share from 0 to 1"
    if recipe.windows.length > recipe.row_length:
        yield f"rows of {recipe.row_length} tokens hold no window of {recipe.windows.length}: raise row_length"
    if recipe.patience is not None and not recipe.validation:
        yield "patience needs validation: it counts validations without a better one"
    if len(recipe.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in recipe.optimizer.betas):
        yield "optimizer.betas must be two numbers from 0 to below 1"
    if not 0 <= recipe.head.dropout < 1 or recipe.head.hidden < 0 or recipe.head.inner_states < 0:
        yield "head.dropout must be from 0 to below 1, head.hidden and head.inner_states at least 0"
    yield from _combinations(recipe)


def _combinations(recipe: CircuitRecipe) -> Iterator[str]:
    rule, objective = recipe.optimizer.rule, recipe.objective
    if rule != "adam" and not recipe.by_flows:
        yield f"optimizer.rule {rule!r} is for static circuits of free logits: no ranks, no head, no joint training"
    if objective != "conditional" and not recipe.by_flows:
        yield f"objective {objective!r} is for static circuits of free logits: no ranks, no head, no joint training"
    if rule == "em" and objective != "generative":
        yield f"optimizer.rule 'em' is for the generative objective; for {objective!r} take 'ratio' or 'baum-welch'"
    if rule in ("ratio", "baum-welch") and objective == "generative":
        yield f"optimizer.rule {rule!r} needs an objective with negative flows; for 'generative' take 'em'"
    if recipe.joint.weights != "none" and recipe.cache is not None:
        yield "a cache holds what a frozen backbone said: joint training needs data"


def as_dict(recipe: CircuitRecipe) -> dict[str, object]:
    """For notes and cards."""
    return dataclasses.asdict(recipe)
