"""``codd train``: train a circuit from a recipe."""

import argparse

from codd.cli import runs
from codd.coupling.gap import gap_in_words
from codd.training.circuit.data import prepare
from codd.training.circuit.trainer import ADAPTER, CIRCUIT, CURVE, MODEL, train
from codd.training.circuit_recipe import CircuitRecipe, read_circuit_recipe
from codd.training.recipe import SHIPPED
from codd.training.run import Progress

NAME = "train"
HELP = """\
Trains a circuit for a backbone as a recipe says: data or a cache of `codd cache`, the circuit's size, a head that
listens to the backbone, objective and optimizer. The run writes into OUT_DIR: metrics.jsonl, curve.png, checkpoints,
and circuit/, which codd.load(..., circuit=...) reads. Start it again with the same arguments to go on after an
interruption: the result is the same. Under torchrun, the processes share every batch.

Prints what is trained, a progress bar with the gap closed on held-out text so far, and at the end the last figures."""


def configure(parser: argparse.ArgumentParser) -> None:
    """A recipe, where the data is, where the result goes."""
    parser.epilog = """\
examples:
  codd train docs/tutorials/mine.yaml --data . --out runs/mine
  codd train docs/tutorials/mine.yaml --data . --set circuit.num_states=512 --set seconds=120
  codd train paper-llada --out runs/paper-llada   # the file of the recipe says which cache it needs
  torchrun --nproc-per-node 8 -m codd train paper-llada --out runs/paper-llada"""
    runs.add_arguments(parser, VERB)


def run(args: argparse.Namespace) -> int:
    """Train to the end of the recipe."""
    return runs.run(args, VERB)


def _describe(recipe: CircuitRecipe) -> str:
    size = f"{recipe.circuit.num_states} states" if recipe.start is None else f"on from {recipe.start}"
    kind = "modulated" if recipe.head.wanted else "static" if recipe.start is None else "saved"
    limit = f"{recipe.steps} steps" + ("" if recipe.seconds is None else f" or {recipe.seconds:g} s")
    return f"a {kind} circuit, {size}, {limit} of {recipe.batch_windows} windows"


def _status(latest: dict[str, float]) -> str:
    loss, alone = latest.get("loss", float("nan")), latest.get("factorized", float("nan"))
    return f"loss {loss:.3f} (network {alone:.3f}), gap closed {_gaps(latest) or '-'}"


def _gaps(metrics: dict[str, float]) -> str:
    """The share of the gap that is closed on each held-out text, at the largest ratio."""
    ratios: dict[str, list[str]] = {}
    for name in metrics:
        if name.startswith("held_out/") and name.endswith("/log_likelihood"):
            text, ratio = name.split("/")[1].rsplit("@", 1)
            ratios.setdefault(text, []).append(ratio)
    largest = {text: max(found, key=float) for text, found in ratios.items()}
    shares = {text: metrics.get(f"held_out/{text}@{ratio}/gap_closed") for text, ratio in largest.items()}
    return ", ".join(f"{text}: {gap_in_words(share)}" for text, share in shares.items())


def _line(progress: Progress) -> str | None:
    gaps = _gaps(progress.metrics)
    return f"step {progress.step}: gap closed {gaps}" if gaps else None


RECIPES = ("paper-llada", "paper-dream", "llada-modulated", "dream-modulated", "llada-joint", "dream-joint")
VERB = runs.TrainingVerb(
    tuple(SHIPPED / f"{name}.yaml" for name in RECIPES),
    read_circuit_recipe,
    prepare,
    train,
    "evaluating the backbone",
    _describe,
    _status,
    _line,
    results=(MODEL, ADAPTER, CIRCUIT),
    leftovers=(CURVE,),
)
