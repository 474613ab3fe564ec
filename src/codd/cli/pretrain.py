"""``codd pretrain``: train a backbone from a recipe."""

import argparse
import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codd.cli import console
from codd.errors import InvalidInput
from codd.training.pretrain import METRICS, Data, Progress, prepare, train
from codd.training.recipe import Recipe, read_recipe
from codd.training.workers import Workers, workers

NAME = "pretrain"
HELP = """\
Trains a masked diffusion model (or, with `objective: causal`, a causal one) as a recipe says: data, tokenizer,
network, noise, optimizer. The run writes into OUT_DIR: metrics.jsonl, checkpoints, and at the end model/ (float32)
and model-int8/ (a quarter of the size), which codd.load reads. Start it again with the same arguments to go on after
an interruption: the result is the same. Under torchrun, the processes share every batch.

Prints what is trained, a progress bar, and at the end the last losses."""


def configure(parser: argparse.ArgumentParser) -> None:
    """A recipe, where the data is, where the result goes."""
    parser.epilog = """\
examples:
  codd pretrain recipes/mini.yaml --data ../data --out runs/mini
  codd pretrain recipes/tiny.yaml --out /tmp/tiny --set steps=50 --set optimizer.lr=1e-3
  torchrun --nproc-per-node 8 -m codd pretrain recipes/mini.yaml --data ../data --out runs/mini"""
    parser.add_argument("recipe", metavar="RECIPE.yaml", type=Path, help="what to train on what; see recipes/")
    parser.add_argument("--data", type=Path, default=Path(), help="the folder that paths in the recipe begin from")
    parser.add_argument("--out", metavar="OUT_DIR", type=Path, help="default: runs/ and the recipe's name")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="change a field of the recipe")
    parser.add_argument("--seed", type=int, help="of weights, order and noise (default: the recipe's)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--fresh", action="store_true", help="throw away what OUT_DIR holds of an earlier run")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")


def run(args: argparse.Namespace) -> int:
    """Train to the end of the recipe."""
    changes = args.set + ([f"seed={args.seed}"] if args.seed is not None else [])
    recipe = read_recipe(args.recipe, changes)
    out = args.out or Path("runs") / recipe.name
    _check_out(out)
    with workers(args.device) as group:
        if group.leads:
            if args.fresh:
                _clear(out)
            _claim(out)
        with _spinner(group, "preparing the data"):
            data = prepare(recipe, args.data, out, group)
        metrics = _train(recipe, data, out, group)
        if group.leads:
            _report(recipe, out, metrics, as_json=args.json)
    return 0


def _train(recipe: Recipe, data: Data, out: Path, group: Workers) -> dict[str, float]:
    """Run, with a bar; the last value of every metric."""
    latest: dict[str, float] = {}
    if group.leads:
        _say(
            f"{recipe.name}: {recipe.steps} steps of {recipe.batch_rows} x {recipe.row_length} tokens, {_where(group)}"
        )
    with _bar(recipe, group) as show:
        for progress in train(recipe, data, out, group):
            latest |= progress.metrics
            show(progress, latest)
    return latest


@contextmanager
def _bar(recipe: Recipe, group: Workers) -> Iterator[Any]:
    """A progress bar on a terminal; elsewhere a line for every validation."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    terminal = console.err()
    if not group.leads or not terminal.is_terminal:
        yield lambda progress, latest: _line(progress) if group.leads else None
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Bar(*columns, console=terminal) as bar:
        task = bar.add_task("loss -", total=recipe.steps)

        def show(progress: Progress, latest: dict[str, float]) -> None:
            loss, rate = latest.get("loss", float("nan")), latest.get("tokens_per_second", 0.0)
            bar.update(task, completed=progress.step, description=f"loss {loss:.3f}, {rate / 1e3:,.0f}k tokens/s")

        yield show


def _line(progress: Progress) -> None:
    if any(name.startswith("validation/") for name in progress.metrics):
        _say(f"step {progress.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items()))


def _say(text: str) -> None:
    console.err().print(console.one_line(text), soft_wrap=True)


def _spinner(group: Workers, text: str) -> Any:
    from contextlib import nullcontext

    return console.working(text) if group.leads else nullcontext()


def _where(group: Workers) -> str:
    return f"on {group.device}" + (f", {group.count} processes" if group.count > 1 else "")


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"{out}: is a file; --out must be a folder.")
    if out.is_dir() and os.listdir(out) and not (out / METRICS).is_file():
        raise InvalidInput(f"{out}: holds something else than a run; give an empty or new folder with --out.")


def _claim(out: Path) -> None:
    """Make the folder recognisable as a run, so that --fresh never throws away what is not one."""
    out.mkdir(parents=True, exist_ok=True)
    (out / METRICS).touch()


def _clear(out: Path) -> None:
    for name in ("checkpoints", "data", "tokenizer", "model", "model-int8"):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / METRICS).unlink(missing_ok=True)


def _report(recipe: Recipe, out: Path, metrics: dict[str, float], *, as_json: bool) -> None:
    found = {"recipe": recipe.name, "digest": recipe.digest(), "steps": recipe.steps, "out": str(out), **metrics}
    if as_json:
        console.as_json({**found, "settings": dataclasses.asdict(recipe)})
    else:
        console.fields(f"trained: {out / 'model'}", {**found, "next": f"codd info {out / 'model'}"})
