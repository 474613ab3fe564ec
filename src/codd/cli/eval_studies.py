"""The studies of ``codd eval``: what each needs of the command line."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codd.cli import console
from codd.errors import InvalidInput
from codd.evaluation.tasks import cells

if TYPE_CHECKING:
    from codd.decoding import Model

Told = Callable[[str, int, int], None]
"""Of which part so many of so many are done."""


@contextmanager
def parts_bar(study: str) -> Iterator[Told]:
    """A bar on a terminal for each part of a study in turn."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    terminal = console.err()
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(
        *columns, console=terminal, transient=True, redirect_stdout=False, disable=not terminal.is_terminal
    ) as progress:
        task = progress.add_task(study, total=None)

        def told(part: str, done: int, total: int) -> None:
            progress.update(task, description=f"{study}: {part}", completed=done, total=total)

        yield told


def gap(args: argparse.Namespace, model: "Model", told: Told) -> dict[str, Any]:
    """Log-likelihood against mask ratio."""
    from codd.evaluation.likelihood.studies import mask_ratio_study

    return _likelihood(mask_ratio_study, "blocks", args, model, told)


def continuations(args: argparse.Namespace, model: "Model", told: Told) -> dict[str, Any]:
    """Log-likelihood of true continuations by context."""
    from codd.evaluation.likelihood.studies import continuation_study

    return _likelihood(continuation_study, "texts", args, model, told)


def _likelihood(
    study: Callable[..., dict[str, Any]], count: str, args: argparse.Namespace, model: "Model", told: Told
) -> dict[str, Any]:
    parts = _circuits(args, model), _causal(args), _data(args)
    found = study(model, *parts, seed=args.seed, progress=told, **_given(**{count: args.problems}))
    return {**found, "provenance": _provenance(model)}


def cost(args: argparse.Namespace, model: "Model", told: Told) -> dict[str, Any]:
    """Seconds a sample."""
    from codd.evaluation.cost import cost_study
    from codd.evaluation.tasks.grid import circuit_name

    names = [str(circuit_name(name)) for name in args.circuit if name not in cells.CONTROLS]
    chosen = _given(steps=args.steps, gen_length=args.gen_length and args.gen_length[0])
    return cost_study(model, circuits=names, progress=lambda *done: told("rounds", *done), **chosen)


STUDIES = {"gap": gap, "continuations": continuations, "cost": cost}


def _circuits(args: argparse.Namespace, model: "Model") -> dict[str, Any]:
    """Those that were asked for, and the control."""
    from codd.evaluation.tasks.grid import circuit_name

    names = dict.fromkeys([*args.circuit, *([cells.NULL] if args.control else [])])
    return {name: model.with_circuit(circuit_name(name)).circuit for name in names if name != cells.NONE}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _data(args: argparse.Namespace) -> Path:
    if args.data is None:
        raise InvalidInput("likelihood studies read texts from files: give their folder with --data.")
    path: Path = args.data
    return path


def _causal(args: argparse.Namespace) -> Any:
    from codd.backbones import load_checkpoint

    return None if args.causal is None else load_checkpoint(args.causal, device=args.device)[0]


def _provenance(model: "Model") -> dict[str, Any]:
    from codd.evaluation.provenance import provenance

    return provenance(model.backbone.device, model.backbone.precision)
