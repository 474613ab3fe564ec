"""What the verbs pretrain and train share: arguments, the folder of a run, its progress."""

import argparse
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from codd import folders
from codd.cli import console
from codd.distributed import DistributedContext, distributed
from codd.training.recipe import RunRecipe, find_recipe
from codd.training.run import CHECKPOINTS, METRICS, Progress, check_recipe

DATA = "data"
"""Where a run keeps the rows that it made of its data."""
Recipe = TypeVar("Recipe")


def add_arguments(parser: argparse.ArgumentParser, recipes: Sequence[Path]) -> None:
    """A recipe, where the data is, where the result goes."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help=f"what to train on what: {', '.join(path.stem for path in recipes)}, or the path of a YAML file; its "
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


def read_recipe(
    args: argparse.Namespace, recipes: Sequence[Path], read: Callable[[Path, Sequence[str]], Recipe]
) -> Recipe:
    """The recipe that a command names, with its changes."""
    seed = [] if args.seed is None else [f"seed={args.seed}"]
    return read(find_recipe(args.recipe, recipes), [*args.set, *seed])


@contextmanager
def run_folder(
    args: argparse.Namespace, recipe: RunRecipe, out: Path, results: Sequence[str]
) -> Iterator[DistributedContext]:
    """Have the folder of a run to ourselves; ``results`` are what --fresh removes beside its data and checkpoints.

    --fresh throws away nothing that is not a run, and a run that fails before it has done anything leaves nothing.
    """
    folders.check_own(out, METRICS, "a run")
    if not args.fresh:
        check_recipe(recipe, out)
    with distributed(args.device) as context, folders.exclusive(out) if context.is_main else nullcontext():
        if context.is_main:
            for name in (CHECKPOINTS, DATA, METRICS, *results) if args.fresh else ():
                shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink(missing_ok=True)
            (out / METRICS).touch()
            for remains in (out / DATA).glob(".*"):  # of processes that were killed
                shutil.rmtree(remains, ignore_errors=True)
        try:
            yield context
        except BaseException:
            if context.is_main and not (out / METRICS).stat().st_size:
                folders.discard_if_bare(out, METRICS, DATA)
            raise


def watch(
    recipe: RunRecipe,
    description: str,
    run: Iterable[Progress],
    status: Callable[[Mapping[str, float]], str],
    line: Callable[[int, Mapping[str, float]], str | None],
    context: DistributedContext,
) -> None:
    """Run to the end, and show it: what is trained, and a progress bar with the ``status`` of the latest metrics.

    Without a terminal, a ``line`` for each step that has metrics, unless it is None.
    """
    processes = f", {context.world_size} processes" if context.world_size > 1 else ""
    if context.is_main:
        console.say(f"{recipe.name}: {description}, on {context.device}{processes}")
    latest: dict[str, float] = {}
    with console.bar(recipe.name, recipe.steps, shown=context.is_main, transient=False) as bar:
        for made in run:
            latest |= made.metrics
            bar.update(made.step, status(latest))
            if context.is_main and not console.err().is_terminal and (said := line(made.step, made.metrics)):
                console.say(said)
