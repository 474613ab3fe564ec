"""``codd pretrain``: train a backbone from a recipe."""

import argparse

from codd.cli import runs
from codd.training.run import Progress
from codd_lab.pretraining.data import prepare
from codd_lab.pretraining.recipe import SHIPPED, Recipe, read_recipe
from codd_lab.pretraining.trainer import train

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
  python -m codd_lab.problems --count 440 --out problems.jsonl
  codd pretrain tiny --out /tmp/tiny --set steps=50 --set optimizer.lr=1e-3
  torchrun --nproc-per-node 8 -m codd pretrain mini --data ../data --out runs/mini"""
    runs.add_arguments(parser, VERB)


def run(args: argparse.Namespace) -> int:
    """Train to the end of the recipe."""
    return runs.run(args, VERB)


def _describe(recipe: Recipe) -> str:
    return f"{recipe.steps} steps of {recipe.batch_rows} x {recipe.row_length} tokens"


def _status(latest: dict[str, float]) -> str:
    loss, rate = latest.get("loss", float("nan")), latest.get("tokens_per_second", 0.0)
    return f"loss {loss:.3f}, {rate / 1e3:,.0f}k tokens/s"


def _line(progress: Progress) -> str | None:
    if not any(name.startswith("validation/") for name in progress.metrics):
        return None
    return f"step {progress.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())


VERB = runs.TrainingVerb(
    tuple(SHIPPED / f"{name}.yaml" for name in ("tiny", "mini", "blocks")),
    read_recipe,
    prepare,
    train,
    "preparing the data",
    _describe,
    _status,
    _line,
    results=("model", "model-int8"),
    leftovers=("tokenizer",),
)
