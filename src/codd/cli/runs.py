"""What the verbs pretrain and train share: arguments, the folder of a run, the bar, the last figures."""

import argparse
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codd import folders
from codd.cli import console
from codd.distributed import DistributedContext, distributed
from codd.errors import InvalidInput
from codd.training.recipe import find_recipe
from codd.training.run import CHECKPOINTS, METRICS, Progress, check_recipe, read_metrics

DATA = "data"
"""Where a run keeps the rows that it made of its data."""


@dataclass(frozen=True)
class TrainingVerb:
    """What tells one training verb from another."""

    recipes: tuple[Path, ...]
    """Those that come with the verb, to begin with first."""
    read: Callable[[Path, Sequence[str]], Any]
    """The recipe in a file, with changes."""
    prepare: Callable[[Any, Path, Path, DistributedContext], Any]
    train: Callable[[Any, Any, Path, DistributedContext], Iterable[Progress]]
    preparing: str
    """What is said while data is prepared."""
    describe: Callable[[Any], str]
    """A recipe in some words."""
    status: Callable[[dict[str, float]], str]
    """The latest metrics in some words, beside the bar."""
    line: Callable[[Progress], str | None]
    """A step in one line, for those that are printed where there is no terminal."""
    results: tuple[str, ...]
    """Folders of OUT_DIR, the one to use first among those that are there."""
    leftovers: tuple[str, ...] = ()
    """Other files and folders that --fresh removes."""


def add_arguments(parser: argparse.ArgumentParser, verb: TrainingVerb) -> None:
    """A recipe, where the data is, where the result goes."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help=f"what to train on what: {', '.join(path.stem for path in verb.recipes)}, or the path of a YAML file; its "
        "relative paths begin where this command is run, those of data and caches in --data",
    )
    parser.add_argument(
        "--data", metavar="DIR", type=Path, default=Path(), help="a folder (default: where this is run)"
    )
    parser.add_argument("--out", metavar="OUT_DIR", type=Path, help="default: runs/ and the recipe's name")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="change a field of the recipe")
    parser.add_argument("--seed", type=int, help="of parameters, order and noise (default: the recipe's)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--fresh", action="store_true", help="throw away what OUT_DIR holds of an earlier run")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")


def run(args: argparse.Namespace, verb: TrainingVerb) -> int:
    """Train to the end of the recipe, and print the last figures."""
    seed = [] if args.seed is None else [f"seed={args.seed}"]
    recipe = verb.read(find_recipe(args.recipe, verb.recipes), [*args.set, *seed])
    out = args.out or Path("runs") / recipe.name
    _check_out(out)
    if not args.fresh:
        check_recipe(recipe, out)
    with distributed(args.device) as context, _claimed(out, context, verb, fresh=args.fresh):
        with console.working(verb.preparing, shown=context.is_main), console.one_line_warnings():
            data = verb.prepare(recipe, args.data, out, context)
        if context.is_main:
            processes = f", {context.world_size} processes" if context.world_size > 1 else ""
            console.say(f"{recipe.name}: {verb.describe(recipe)}, on {context.device}{processes}")
        _follow(recipe.steps, verb.train(recipe, data, out, context), context, verb)
        if context.is_main:
            _report(recipe, out, verb, as_json=args.json)
    return 0


def _check_out(out: Path) -> None:
    """Refuse a folder that is not a run's."""
    if os.path.exists(out) and not out.is_dir():
        raise InvalidInput(f"{out}: is a file; --out must be a folder.")
    if folders.is_occupied(out) and not (out / METRICS).is_file():
        raise InvalidInput(f"{out}: holds something else than a run; give an empty or new folder with --out.")


@contextmanager
def _claimed(out: Path, context: DistributedContext, verb: TrainingVerb, *, fresh: bool) -> Iterator[None]:
    """Have the folder to ourselves, and make it recognisable as a run: --fresh throws away nothing that is not one.

    A run that fails before it has done anything leaves nothing behind.
    """
    if not context.is_main:
        yield
        return
    with folders.exclusive(out):
        if fresh:
            for name in (CHECKPOINTS, DATA, *verb.results, *verb.leftovers):
                shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink(missing_ok=True)
            (out / METRICS).unlink(missing_ok=True)
        (out / METRICS).touch()
        for remains in (out / DATA).glob(".*"):  # of processes that were killed
            shutil.rmtree(remains, ignore_errors=True)
        try:
            yield
        except BaseException:
            if not (out / METRICS).stat().st_size:
                folders.discard_if_bare(out, METRICS, DATA)
            raise


def _follow(steps: int, progress: Iterable[Progress], context: DistributedContext, verb: TrainingVerb) -> None:
    """Let a run pass by: a bar on a terminal, elsewhere the lines that there are."""
    latest: dict[str, float] = {}
    with console.bar("loss -", steps, shown=context.is_main, transient=False) as bar:
        for made in progress:
            latest |= made.metrics
            bar.update(made.step, verb.status(latest))
            if context.is_main and not console.err().is_terminal and (text := verb.line(made)):
                console.say(text)


def _report(recipe: Any, out: Path, verb: TrainingVerb, *, as_json: bool) -> None:
    """The last of every figure, also of a run that had ended before."""
    place = next(out / name for name in verb.results if (out / name).is_dir())
    figures: dict[str, Any] = {"recipe": recipe.name, "digest": recipe.digest(), "steps": recipe.steps, "out": str(out)}
    for line in read_metrics(out / METRICS):
        figures |= line
    if as_json:
        console.as_json({**figures, "settings": dataclasses.asdict(recipe)})
    else:
        console.fields(f"trained: {place}", {**figures, "next": f"codd info {place}"})
