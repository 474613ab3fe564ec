"""The run loop of all trainers: resume, step, log, validate, keep checkpoints; its log of metrics and its clock.

A step is a function of the recipe, its number and the parameters: data, noise and learning rate are recomputed, not
remembered. So a run that was killed goes on from its last checkpoint to the same result, bit for bit on a CPU.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from codd import files
from codd.data import text_files
from codd.distributed import DistributedContext
from codd.errors import CoddError, FormatError, InvalidInput, shown
from codd.training.checkpoints import checkpoints, read_checkpoint, read_notes, write_checkpoint
from codd.training.recipe import RunRecipe
from codd.validation import LARGEST

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
VALIDATION_SEED = 20_000
"""The seed of the masks of validation, the same in every run."""


class Progress(NamedTuple):
    """What the run loop yields after a step, and before the first if there are figures of that."""

    step: int
    metrics: dict[str, float]
    """Empty for a step that is not logged."""


@runtime_checkable
class Trainer(Protocol):
    """Parameters in training, as the run loop drives them."""

    unit: str
    """What a step processes ``per_step`` of: tokens or windows."""
    per_step: int

    def step(self, step: int, progress: float) -> None:
        """Update the parameters with batch number ``step``; ``progress`` is the part of the run behind it, 0 to 1."""

    def metrics(self, step: int) -> dict[str, float]:
        """Figures of the steps since the last call; Diverged if they are not numbers."""

    def validate(self, step: int) -> dict[str, float]:
        """Figures of held-out text, the same in all processes; Diverged if they are not numbers. Step 0: before all."""

    def state(self, step: int) -> dict[str, Tensor]:
        """Everything that a checkpoint stores; Diverged if it contains NaN, so that an earlier, better one is kept."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; KeyError and the like if it does not fit."""

    def export(self) -> None:
        """Write the results of the run, once it has ended."""


def run(trainer: Trainer, recipe: RunRecipe, out: Path, context: DistributedContext) -> Iterator[Progress]:
    """Run a recipe to its end, from the last checkpoint in ``out`` if there is one; yields after every step."""
    clock = Clock(recipe.steps, getattr(recipe, "seconds", None), context)
    step = resume(trainer, recipe, out, context, clock)
    if context.is_main:
        cut_metrics(out, step)

    def logged(step: int, metrics: dict[str, float]) -> Progress:
        if metrics and context.is_main:
            with (out / METRICS).open("a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        return Progress(step, metrics)

    progress = clock.progress(step)
    if step == 0:
        with clock.paused():
            made = logged(0, trainer.validate(0))
        if made.metrics:
            yield made
    while progress < 1:
        trainer.step(step, progress)
        step += 1
        progress = clock.progress(step)
        last = progress >= 1
        metrics = {}
        if step % recipe.log_every == 0 or last:
            metrics = trainer.metrics(step) | clock.read(step, trainer.unit, trainer.per_step)
        validates, keeps = (step % every == 0 or last for every in (recipe.validate_every, recipe.checkpoint_every))
        with clock.paused() if validates or keeps else nullcontext():
            if validates:
                metrics |= trainer.validate(step)
            made = logged(step, metrics)  # before the checkpoint: a run that goes on from it does not write it again
            if keeps:
                state = trainer.state(step)
                if context.is_main:
                    notes = {"recipe": dataclasses.asdict(recipe), "digest": recipe.digest(), **clock.notes()}
                    write_checkpoint(out / CHECKPOINTS, step, state, notes, keep=recipe.keep)
        yield made
    if context.is_main:
        trainer.export()


def resume(trainer: Trainer, recipe: RunRecipe, out: Path, context: DistributedContext, clock: "Clock") -> int:
    """Restore the last checkpoint, if there is one, and give its step; that of another recipe is InvalidInput."""
    context.barrier()
    kept = checkpoints(out / CHECKPOINTS)
    if not kept:
        return 0
    tensors, notes = read_checkpoint(kept[-1], str(context.device))
    _check_notes(recipe, notes, kept[-1])
    try:
        trainer.restore(tensors)
        clock.restore(notes)
        return int(notes["step"])
    except (KeyError, TypeError, ValueError, RuntimeError, CoddError) as error:
        raise FormatError(
            f"{kept[-1]}: does not fit this recipe ({files.brief(error)}); files of the run were changed. Give another "
            "--out, or --fresh to begin again."
        ) from error


def check_recipe(recipe: RunRecipe, out: Path) -> None:
    """Refuse a run of another recipe, before any work is done for it."""
    for folder in checkpoints(out / CHECKPOINTS)[-1:]:
        _check_notes(recipe, read_notes(folder), folder)


def _check_notes(recipe: RunRecipe, notes: Mapping[str, Any], folder: Path) -> None:
    if notes.get("digest") == recipe.digest():
        return
    old, new = notes.get("recipe", {}), json.loads(json.dumps(dataclasses.asdict(recipe)))
    differing = [name for name in new if not isinstance(old, dict) or old.get(name) != new[name]]
    what = f"{', '.join(differing)} differ" if differing else "of another version of codd"
    raise InvalidInput(f"{folder}: is of another recipe ({what}). Give another --out, or --fresh to begin again.")


def cut_metrics(out: Path, step: int) -> None:
    """Drop the lines of metrics.jsonl that a run which goes on from ``step`` will write again; 0: a new run."""
    lines = read_metrics(out / METRICS) if step and (out / METRICS).exists() else ()
    kept = [line for line in lines if line["step"] <= step]
    with files.replacing(out, METRICS) as (temporary,):
        files.write_text(temporary, "".join(json.dumps(line) + "\n" for line in kept))


def read_metrics(path: Path) -> Iterator[dict[str, float | int]]:
    """The figures of each line, its step among them; half a line at the end is what a killed run was writing."""
    for where, line in text_files.json_lines(path, unfinished=True):
        for name, value in line.items():
            if type(value) not in (int, float) or (type(value) is int and abs(value) >= LARGEST):
                raise FormatError(f"{where}: {name[:100]!r} is {shown(value)}, not a number of a run.")
        if "step" not in line:
            raise FormatError(f"{where}: is not an object with a step.")
        yield line


class Clock:
    """Seconds of training, without those of validation and checkpoints, and how much of a run lies behind it."""

    def __init__(self, steps: int, seconds: float | None, context: DistributedContext):
        """A run ends after these steps, or seconds if they are limited; the clock goes from now on."""
        self.steps, self.seconds, self.context = steps, seconds, context
        self.spent, self.read_at = 0.0, (0, 0.0)
        self.since: float | None = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds of training so far."""
        return self.spent + (0.0 if self.since is None else time.perf_counter() - self.since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for a block, once a GPU has done what it was given so far."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        self.spent, self.since = self.elapsed(), None
        yield
        self.since = time.perf_counter()

    def progress(self, step: int) -> float:
        """The part of the run that is done after ``step`` steps, from 0 to 1; the same in all processes."""
        by_steps = step / self.steps
        if self.seconds is None:
            return by_steps
        return max(by_steps, self.context.broadcast(self.elapsed()) / self.seconds)

    def read(self, step: int, unit: str, per_step: int) -> dict[str, float]:
        """Seconds of training, and units per second over the steps since the last reading."""
        (before, then), now = self.read_at, self.elapsed()
        self.read_at = step, now
        return {f"{unit}_per_second": (step - before) * per_step / max(now - then, 1e-9), "seconds": now}

    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps of the clock."""
        return {"since": self.read_at, "seconds": self.elapsed()}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.spent = float(notes["seconds"])
        step, seconds = notes["since"]
        self.read_at, self.since = (int(step), float(seconds)), time.perf_counter()
