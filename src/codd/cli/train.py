"""``codd train``: train a circuit from a recipe."""

import argparse
import shutil
from pathlib import Path

from codd.cli import console, runs
from codd.training.circuit_recipe import CircuitRecipe, as_dict, read_circuit_recipe
from codd.training.fit import ADAPTER, CHECKPOINTS, CIRCUIT, CURVE, MODEL, check_recipe, train
from codd.training.metrics import METRICS, Progress
from codd.training.supplies import prepare
from codd.training.workers import workers

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
  codd train recipes/tiny-circuit.yaml --out /tmp/tiny-circuit
  codd train recipes/circuit.yaml --data ../data --out runs/circuit
  codd train recipes/circuit.yaml --data ../data --set circuit.num_states=512 --set seconds=120
  torchrun --nproc-per-node 8 -m codd train recipes/circuit.yaml --data ../data --out runs/circuit"""
    runs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train to the end of the recipe."""
    recipe = read_circuit_recipe(args.recipe, runs.changes(args))
    out = args.out or Path("runs") / recipe.name
    runs.check_out(out)
    if not args.fresh:
        check_recipe(recipe, out)
    with workers(args.device) as group, runs.claimed(out, group, _clear if args.fresh else None):
        with runs.spinner(group, "asking the backbone"):
            setup = prepare(recipe, args.data, out, group)
        if group.leads:
            runs.say(f"{recipe.name}: {_described(recipe)}, {runs.where(group)}")
        runs.follow(recipe.steps, train(recipe, setup, out, group), group, _shown, _line)
        if group.leads:
            _report(recipe, out, runs.last_figures(out), as_json=args.json)
    return 0


def _described(recipe: CircuitRecipe) -> str:
    size = f"{recipe.circuit.num_states} states" if recipe.start is None else f"on from {recipe.start}"
    kind = "modulated" if recipe.head.wanted else "static" if recipe.start is None else "saved"
    limit = f"{recipe.steps} steps" + ("" if recipe.seconds is None else f" or {recipe.seconds:g} s")
    return f"a {kind} circuit, {size}, {limit} of {recipe.batch_windows} windows"


def _shown(latest: dict[str, float]) -> str:
    loss, alone = latest.get("loss", float("nan")), latest.get("factorized", float("nan"))
    return f"loss {loss:.3f} (network {alone:.3f}), gap closed {_gaps(latest) or '-'}"


def _gaps(metrics: dict[str, float]) -> str:
    """The share of the gap that is closed on each held-out text, at the largest ratio."""
    found: dict[str, tuple[float, float]] = {}
    for name, value in metrics.items():
        if name.startswith("held_out/") and name.endswith("/gap_closed"):
            text, ratio = name.split("/")[1].rsplit("@", 1)
            found[text] = max(found.get(text, (0.0, 0.0)), (float(ratio), value))
    return ", ".join(f"{text} {value:.0%}" for text, (_, value) in found.items())


def _line(progress: Progress) -> str | None:
    gaps = _gaps(progress.metrics)
    return f"step {progress.step}: gap closed {gaps}" if gaps else None


def _clear(out: Path) -> None:
    for name in (CHECKPOINTS, runs.DATA, CIRCUIT, MODEL, ADAPTER):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (METRICS, CURVE):
        (out / name).unlink(missing_ok=True)


def _report(recipe: CircuitRecipe, out: Path, metrics: dict[str, float | int], *, as_json: bool) -> None:
    place = next(out / name for name in (MODEL, ADAPTER, CIRCUIT) if (out / name).is_dir())
    found = {"recipe": recipe.name, "digest": recipe.digest(), "out": str(out), **metrics}
    if as_json:
        console.as_json({**found, "settings": as_dict(recipe)})
    else:
        console.fields(f"trained: {place}", {**found, "next": f"codd info {place}"})
