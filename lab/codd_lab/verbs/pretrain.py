"""``codd pretrain``: train a backbone from a recipe."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codd.cli import console, training_command
from codd.training.run import METRICS, read_metrics
from codd_lab.pretraining.data import prepare
from codd_lab.pretraining.recipe import SHIPPED, Recipe, read_recipe
from codd_lab.pretraining.trainer import train

NAME = "pretrain"
RESUMES = True
HELP = """\
Trains a masked diffusion model (or, with `objective: causal`, a causal one) as a recipe says: data, tokenizer,
network, noise, optimizer. The run writes into OUT_DIR: metrics.jsonl, checkpoints, and at the end model/ (float32)
and model-int8/ (a quarter of the size), which codd.load reads. Start it again with the same arguments to go on after
an interruption: the result is the same. Under torchrun, the processes share every batch.

Prints what is trained, a progress bar, and at the end the last losses."""
PATHS = tuple(SHIPPED / f"{name}.yaml" for name in ("tiny", "mini", "blocks"))


def configure(parser: argparse.ArgumentParser) -> None:
    """A recipe, where the data is, where the result goes."""
    parser.epilog = """\
examples:
  python -m codd_lab.problems --count 440 --out problems.jsonl
  codd pretrain tiny --out /tmp/tiny --set steps=50 --set optimizer.lr=1e-3
  torchrun --nproc-per-node 8 -m codd pretrain mini --data ../data --out runs/mini"""
    training_command.add_arguments(parser, PATHS)


def run(args: argparse.Namespace) -> int:
    """Train to the end of the recipe, and print the last figures."""
    recipe = training_command.read_recipe(args, PATHS, read_recipe)
    out = args.out or Path("runs") / recipe.name
    with training_command.run_folder(args, recipe, out, ("model", "model-int8", "tokenizer")) as context:
        with console.working("preparing the data", shown=context.is_main), console.one_line_warnings():
            data = prepare(recipe, args.data, out, context)
        tokens = f"{recipe.steps} steps of {recipe.batch_rows} x {recipe.row_length} tokens"
        training_command.watch(recipe, tokens, train(recipe, data, out, context), _status, _line, context)
    if context.is_main:
        _report(recipe, out, as_json=args.json)
    return 0


def _status(latest: Mapping[str, float]) -> str:
    loss, rate = latest.get("loss", float("nan")), latest.get("tokens_per_second", 0.0)
    return f"loss {loss:.3f}, {rate / 1e3:,.0f}k tokens/s"


def _line(step: int, metrics: Mapping[str, float]) -> str | None:
    if not any(name.startswith("validation/") for name in metrics):
        return None
    return f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _report(recipe: Recipe, out: Path, *, as_json: bool) -> None:
    """The last of every figure, also of a run that had ended before."""
    figures: dict[str, Any] = {"recipe": recipe.name, "digest": recipe.digest(), "steps": recipe.steps, "out": str(out)}
    for line in read_metrics(out / METRICS):
        figures |= line
    if as_json:
        console.as_json({**figures, "settings": dataclasses.asdict(recipe)})
    else:
        console.fields(f"trained: {out / 'model'}", {**figures, "next": f"codd info {out / 'model'}"})
