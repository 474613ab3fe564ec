"""What the verbs that train share: their arguments, the folder of a run, and who speaks."""

import argparse
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codd.cli import console
from codd.errors import InvalidInput
from codd.training import outputs
from codd.training.metrics import METRICS, Progress, read_metrics
from codd.training.workers import Workers

DATA = "data"
"""Where a run keeps the rows that it made of its data."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe, where the data is, where the result goes."""
    parser.add_argument("recipe", metavar="RECIPE.yaml", type=Path, help="what to train on what; see recipes/")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder that paths in the recipe begin from")
    parser.add_argument("--out", metavar="OUT_DIR", type=Path, help="default: runs/ and the recipe's name")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="change a field of the recipe")
    parser.add_argument("--seed", type=int, help="of parameters, order and noise (default: the recipe's)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--fresh", action="store_true", help="throw away what OUT_DIR holds of an earlier run")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")


def changes(args: argparse.Namespace) -> list[str]:
    """What the command line changes in the recipe."""
    return [*args.set, *([f"seed={args.seed}"] if args.seed is not None else [])]


def say(text: str) -> None:
    """One line beside the result."""
    console.err().print(console.one_line(text), soft_wrap=True)


def spinner(group: Workers, text: str) -> Any:
    """While something takes long."""
    from contextlib import nullcontext

    return console.working(text) if group.leads else nullcontext()


def where(group: Workers) -> str:
    """The device, and how many processes."""
    return f"on {group.device}" + (f", {group.count} processes" if group.count > 1 else "")


def check_out(out: Path) -> None:
    """Refuse a folder that is not a run's."""
    if os.path.exists(out) and not out.is_dir():
        raise InvalidInput(f"{out}: is a file; --out must be a folder.")
    if outputs.holds_something(out) and not (out / METRICS).is_file():
        raise InvalidInput(f"{out}: holds something else than a run; give an empty or new folder with --out.")


@contextmanager
def claimed(out: Path, group: Workers, clear: Callable[[Path], None] | None) -> Iterator[None]:
    """Have the folder to ourselves, and make it recognisable as a run: --fresh throws away nothing that is not one.

    ``clear`` removes what an earlier run left. A run that fails before it has done anything leaves nothing behind.
    """
    if not group.leads:
        yield
        return
    with outputs.alone_in(out):
        if clear:
            clear(out)
        (out / METRICS).touch()
        for remains in (out / DATA).glob(".*"):  # of processes that were killed
            shutil.rmtree(remains, ignore_errors=True)
        try:
            yield
        except BaseException:
            if not (out / METRICS).stat().st_size:
                outputs.discard_if_bare(out, METRICS, DATA)
            raise


def last_figures(out: Path) -> dict[str, float | int]:
    """Of every figure of a run the last, also of a run that had ended before."""
    found: dict[str, float | int] = {}
    for line in read_metrics(out / METRICS):
        found |= line
    return found


def follow(
    steps: int,
    progress: Iterable[Progress],
    group: Workers,
    describe: Callable[[dict[str, float]], str],
    line: Callable[[Progress], str | None],
) -> dict[str, float]:
    """Let a run pass by: a bar on a terminal, elsewhere the lines that there are. The last value of every metric."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    latest: dict[str, float] = {}
    terminal = console.err()
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Bar(*columns, console=terminal, disable=not (group.leads and terminal.is_terminal)) as bar:
        task = bar.add_task("loss -", total=steps)
        for made in progress:
            latest |= made.metrics
            bar.update(task, completed=made.step, description=describe(latest))
            if group.leads and bar.disable and (text := line(made)):
                say(text)
    return latest
