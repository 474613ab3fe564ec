"""The studies of ``codd eval``: what each needs of the command line."""

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from codd.decoding.options import OPTIONS, PACES
from codd.errors import InvalidInput
from codd_lab.tasks import configs

if TYPE_CHECKING:
    from codd.decoding import Model

Progress = Callable[[str, int, int], None]
"""Called with a part of the study, and how many of how many evaluations of it are done."""


def likelihood(name: str, args: argparse.Namespace, model: "Model", progress: Progress) -> dict[str, Any]:
    """Log-likelihood against mask ratio (gap), or of true continuations by context."""
    import torch

    from codd.backbones.causal import load_causal
    from codd.distributed import choose_device
    from codd_lab.likelihood import studies
    from codd_lab.provenance import provenance

    causal = None if args.causal is None else load_causal(args.causal, choose_device(args.device), torch.float32)
    kinds: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
        "gap": (studies.mask_ratio_study, "blocks"),
        "continuations": (studies.continuation_study, "texts"),
    }
    study, count = kinds[name]
    chosen = _given(**{count: args.problems, "corpora": args.text})
    figures = study(model, _circuits(args, model), causal, args.data, seed=args.seed, progress=progress, **chosen)
    return {**figures, "provenance": provenance(model.backbone.device, model.backbone.precision)}


def cost(args: argparse.Namespace, model: "Model", progress: Progress) -> dict[str, Any]:
    """Seconds a sample, with the options of the loop that were given; one value of each."""
    from codd_lab.cost import OWN_OPTIONS, cost_study
    from codd_lab.tasks.runner import circuit_name

    for name in ("threshold", "entropy_budget"):
        if getattr(args, name) is not None:
            raise InvalidInput(f"the study cost compares at equal network calls: give --steps, not --{_flag(name)}.")
    names = [str(circuit_name(name)) for name in args.circuit if name not in configs.CONTROLS]
    axes = _given(**{name: getattr(args, name) for name in OPTIONS if name in vars(args) and name not in PACES})
    options = {name: values[0] for name, values in axes.items() if isinstance(values, list)}
    for name in options:
        if len(axes[name]) > 1 and name != "sampler":
            raise InvalidInput(f"the study cost takes one value of --{_flag(name)}, found {len(axes[name])}.")
    chosen = _given(steps=args.steps, gen_length=options.pop("gen_length", None), samplers=axes.get("sampler"))
    options = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    told = functools.partial(progress, "rounds")
    return cost_study(model, circuits=names, options=options, seed=args.seed, progress=told, **chosen)


def _flag(name: str) -> str:
    return name.replace("_", "-")


STUDIES: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: functools.partial(likelihood, name) for name in ("gap", "continuations")},
    "cost": cost,
}


def _circuits(args: argparse.Namespace, model: "Model") -> dict[str, Any]:
    """The circuits of the command line, and the control, by name."""
    from codd_lab.tasks.runner import circuit_name

    names = dict.fromkeys([*args.circuit, *([configs.NULL] if args.control else [])])
    return {name: model.with_circuit(circuit_name(name)).circuit for name in names if name != configs.NONE}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
