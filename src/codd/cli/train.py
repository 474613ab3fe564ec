"""``codd train``: train a circuit from a recipe."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codd.cli import console, training_command
from codd.cli.tables import Section, show
from codd.coupling.gap import gap_in_words
from codd.training.circuit.data import TrainingData
from codd.training.circuit.summary import (
    CALLS,
    CONTROL,
    SUMMARY,
    TEMPERATURE,
    Summary,
    read_summary,
    summarize,
    warnings,
)
from codd.training.circuit.trainer import ADAPTER, CIRCUIT, CURVE, MODEL, train
from codd.training.circuit_recipe import CircuitRecipe, read_circuit_recipe
from codd.training.recipe import SHIPPED
from codd.training.run import METRICS, read_metrics

NAME = "train"
RESUMES = True
HELP = """\
Trains a circuit for a backbone as a recipe says: data or a cache of `codd cache`, the circuit's size, a head that
listens to the backbone, objective and optimizer. Where the backbone has a circuit and the recipe gives no sizes for a
new one, training goes on from it. The run writes into OUT_DIR: metrics.jsonl, curve.png, checkpoints, summary.json, and
circuit/, which codd.load(..., circuit=...) reads. Start it again with the same arguments to go on after an
interruption: the result is the same. Under torchrun, the processes share every batch.

Prints what is trained, a progress bar with the gap closed on held-out text so far, and at the end what the network
alone, the circuit before and the circuit after the training make of held-out text."""
RECIPES = (
    "sequences",
    "paper-llada",
    "paper-dream",
    "llada-modulated",
    "dream-modulated",
    "llada-joint",
    "dream-joint",
)
TILT = "one state: a control that only tilts how often each token is written; what it gains is no joint distribution"
PATHS = tuple(SHIPPED / f"{name}.yaml" for name in RECIPES)


def configure(parser: argparse.ArgumentParser) -> None:
    """A recipe, where the data is, where the result goes."""
    parser.epilog = """\
examples:
  codd train docs/tutorials/mine.yaml --data . --out runs/mine
  codd train docs/tutorials/mine.yaml --data . --set circuit.num_states=512 --set seconds=120
  codd train paper-llada --out runs/paper-llada   # the file of the recipe says which cache it needs
  torchrun --nproc-per-node 8 -m codd train paper-llada --out runs/paper-llada"""
    training_command.add_arguments(parser, PATHS)


def run(args: argparse.Namespace) -> int:
    """Train to the end of the recipe; a run that has ended says again what it found."""
    recipe = training_command.read_recipe(args, PATHS, read_circuit_recipe)
    out = args.out or Path("runs") / recipe.name
    with training_command.run_folder(args, recipe, out, (MODEL, ADAPTER, CIRCUIT, CONTROL, CURVE, SUMMARY)) as context:
        summary = read_summary(out, recipe.digest())
        if summary is None:
            with console.working("evaluating the backbone", shown=context.is_main), console.one_line_warnings():
                data = TrainingData(recipe, args.data, out, context)
            steps = train(recipe, data, out, context)
            training_command.watch(recipe, _describe(data.recipe), steps, _status, _line, context)
            if context.is_main:
                summary = summarize(data, recipe.digest(), _circuit(out), out)
    if context.is_main and summary is not None:
        _report(recipe, out, summary, as_json=args.json)
    return 0


def _describe(recipe: CircuitRecipe) -> str:
    size = f"{recipe.circuit.num_states} states" if recipe.start is None else f"on from {recipe.start}"
    kind = "modulated" if recipe.head.wanted else "static" if recipe.start is None else "saved"
    limit = f"{recipe.steps} steps" + ("" if recipe.seconds is None else f" or {recipe.seconds:g} s")
    return f"a {kind} circuit, {size}, {limit} of {recipe.batch_windows} windows"


def _circuit(out: Path) -> Path:
    """The folder of the trained circuit: by itself, or in the model or adapter that was trained along."""
    places = (out / MODEL / CIRCUIT, out / ADAPTER / CIRCUIT, out / CIRCUIT)
    return next(place for place in places if place.is_dir())


def _status(latest: Mapping[str, float]) -> str:
    loss, alone = latest.get("loss", float("nan")), latest.get("factorized", float("nan"))
    gaps = gaps_in_words(latest) or "-"
    return f"log-likelihood {-loss:.3f} nats per token (network alone {-alone:.3f}), gap closed {gaps}"


def gaps_in_words(metrics: Mapping[str, float]) -> str:
    """The share of the gap that is closed on each held-out text, at the largest ratio."""
    ratios: dict[str, list[str]] = {}
    for name in metrics:
        if name.startswith("held_out/") and name.endswith("/log_likelihood"):
            text, ratio = name.split("/")[1].rsplit("@", 1)
            ratios.setdefault(text, []).append(ratio)
    said = []
    for text, found in ratios.items():
        at = f"held_out/{text}@{max(found, key=float)}"
        likelihood, share = metrics[f"{at}/log_likelihood"], metrics.get(f"{at}/gap_closed")
        said.append(f"{text}: {gap_in_words(share)} ({likelihood:.3f} nats per token)")
    return ", ".join(said)


def _line(step: int, metrics: Mapping[str, float]) -> str | None:
    gaps = gaps_in_words(metrics)
    return f"step {step}: gap closed on held-out text {gaps}" if gaps else None


def _report(recipe: CircuitRecipe, out: Path, summary: Summary, *, as_json: bool) -> None:
    place = Path(summary["circuit"])
    place = place.parent if place.parent != out else place
    if as_json:
        figures: dict[str, Any] = {"recipe": recipe.name, "steps": recipe.steps, "out": str(out)}
        for line in read_metrics(out / METRICS):
            figures |= line
        console.as_json({**figures, **summary, "settings": dataclasses.asdict(recipe)})
        return
    console.fields(f"trained: {place}", {"recipe": f"{recipe.name} {recipe.digest()}", "next": f"codd info {place}"})
    show(_sections(summary))
    if not summary["scores"]:
        console.say("note: there is no held-out text, so that nothing says what the circuit is worth: see validation.")
    for text in warnings(summary):
        console.say(f"warning: {text}")


def _sections(summary: Summary) -> list[Section]:
    """The table of scores, and the sampled texts."""
    columns = {"network": "network alone", "before": "before", "control": "one state", "after": "trained"}
    columns |= {"one_at_a_time": "one at a time"}
    if not any(row["control"] is not None for row in summary["scores"].values()):
        del columns["control"]
    rows = [[name, *(_cell(row, column) for column in columns)] for name, row in summary["scores"].items()]
    title = "Held-out text: log-likelihood in nats per token (higher is better) and gap closed"
    start = summary["start"]
    before = f"before: {'a new circuit' if start is None else start}; one at a time: the network, one call per token"
    notes = (before, TILT) if "control" in columns else (before,)
    sections = [Section(title, (), ("text@masked", *columns.values()), rows, after=notes)] if rows else []
    if (samples := summary["samples"]) is not None:
        texts = [[columns[name], samples[name]] for name in columns if name in samples]
        title = f"Sampled in {CALLS} calls at temperature {TEMPERATURE:g}, after held-out text"
        sections.append(Section(title, (f"... {samples['prompt'][-200:]}",), ("", "goes on with"), texts, prose=True))
    return sections


def _cell(row: Mapping[str, float | None], column: str) -> str:
    value, share = row[column], row.get(f"gap_closed_{column}")
    shown = "-" if value is None else f"{value:.3f}"
    return f"{shown} ({gap_in_words(share)})" if share is not None else shown
