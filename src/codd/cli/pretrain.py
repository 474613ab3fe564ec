"""``codd pretrain``: train a backbone from a recipe."""

import argparse
import dataclasses
import shutil
from pathlib import Path

from codd.cli import console, runs
from codd.training.metrics import METRICS, Progress
from codd.training.pretrain import Data, prepare, train
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
    runs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train to the end of the recipe."""
    recipe = read_recipe(args.recipe, runs.changes(args))
    out = args.out or Path("runs") / recipe.name
    runs.check_out(out)
    with workers(args.device) as group, runs.claimed(out, group, _clear if args.fresh else None):
        with runs.spinner(group, "preparing the data"):
            data = prepare(recipe, args.data, out, group)
        metrics = _train(recipe, data, out, group)
        if group.leads:
            _report(recipe, out, metrics, as_json=args.json)
    return 0


def _train(recipe: Recipe, data: Data, out: Path, group: Workers) -> dict[str, float]:
    """Run, with a bar; the last value of every metric."""
    if group.leads:
        size = f"{recipe.batch_rows} x {recipe.row_length} tokens"
        runs.say(f"{recipe.name}: {recipe.steps} steps of {size}, {runs.where(group)}")
    return runs.follow(recipe.steps, train(recipe, data, out, group), group, _shown, _line)


def _shown(latest: dict[str, float]) -> str:
    loss, rate = latest.get("loss", float("nan")), latest.get("tokens_per_second", 0.0)
    return f"loss {loss:.3f}, {rate / 1e3:,.0f}k tokens/s"


def _line(progress: Progress) -> str | None:
    if not any(name.startswith("validation/") for name in progress.metrics):
        return None
    return f"step {progress.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())


def _clear(out: Path) -> None:
    for name in ("checkpoints", runs.DATA, "tokenizer", "model", "model-int8"):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / METRICS).unlink(missing_ok=True)


def _report(recipe: Recipe, out: Path, metrics: dict[str, float], *, as_json: bool) -> None:
    found = {"recipe": recipe.name, "digest": recipe.digest(), "steps": recipe.steps, "out": str(out), **metrics}
    if as_json:
        console.as_json({**found, "settings": dataclasses.asdict(recipe)})
    else:
        console.fields(f"trained: {out / 'model'}", {**found, "next": f"codd info {out / 'model'}"})
