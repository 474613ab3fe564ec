"""``codd info``: what is at a path or hub id."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from codd import files
from codd.circuits import storage
from codd.circuits.pyjuice import read_jpc
from codd.cli import console
from codd.errors import FormatError

NAME = "info"
HELP = """\
Describes what is at PATH: a circuit folder (or the hub id of one), or a .jpc file of PyJuice. Of a
circuit it prints states, tokens, layout, number of parameters, bytes, types, the version of the format,
and whether the weights are the ones that config.json was written for (sha256). A .jpc is read without
running anything of it.

The exit code is 0 only if PATH is something that codd knows, whole and unchanged."""

WANTED = "expected a circuit folder (config.json and circuit.safetensors), the hub id of one, or a .jpc file"


@dataclass(frozen=True)
class Report:
    """What was found: the numbers for programs, the lines for people, and which of the lines are bad news."""

    numbers: dict[str, Any]
    lines: dict[str, object]
    bad: tuple[str, ...] = field(default=())


def configure(parser: argparse.ArgumentParser) -> None:
    """One path."""
    parser.epilog = """\
examples:
  codd info circuit/
  codd info user/circuit-on-the-hub --json
  codd info model.jpc"""
    parser.add_argument("path", metavar="PATH", help="a folder, a hub id (user/name) or a .jpc file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Describe it; 1 if something is wrong with it."""
    with console.working(f"reading {args.path}"):
        report = describe(args.path)
    if args.json:
        console.as_json({"path": args.path, **report.numbers})
    else:
        console.fields(args.path, report.lines, report.bad)
    return 1 if report.bad else 0


def describe(source: str) -> Report:
    """The report of the first kind that recognises the source."""
    for recognises, report in KINDS:
        if recognises(source):
            return report(source)
    raise FormatError(_what_else(Path(source)))


def _is_jpc(source: str) -> bool:
    return Path(source).suffix == ".jpc" and not Path(source).is_dir()


def _jpc(source: str) -> Report:
    found = read_jpc(source)
    states, tokens = found.emission.shape[-2:]
    count = _count({"initial": found.initial, "transition": found.transition, "emission": found.emission})
    size = Path(source).stat().st_size
    numbers = {
        "kind": "pyjuice-hmm",
        "num_states": states,
        "vocab_size": tokens,
        "window": found.length,
        "homogeneous": found.homogeneous,
        "leaf_class": found.leaf_class,
        "parameters": count,
        "bytes": size,
    }
    lines = {
        "kind": "hidden Markov model, saved by PyJuice; nothing of the pickle was run",
        "states": f"{states:,}",
        "tokens": f"{tokens:,}",
        "window": found.length,
        "homogeneous": "yes" if found.homogeneous else "no: positions have parameters of their own",
        "leaves": found.leaf_class,
        "parameters": f"{count:,}",
        "size": console.size(size),
        "next": "codd convert writes it as a circuit folder",
    }
    return Report(numbers, lines)


def _is_circuit(source: str) -> bool:
    """A folder whose configuration says so, or a name that is not here and may be on the hub."""
    path = Path(source)
    if not path.exists():
        return True
    config = _json(path / storage.CONFIG_FILE)
    return path.is_dir() and (config.get("format") == storage.FORMAT or (path / storage.WEIGHTS_FILE).exists())


def _circuit(source: str) -> Report:
    folder = storage.local_folder(source)  # the hub's, too, so that its files can be looked at
    config, tensors = storage.read_folder(folder)
    stated = _json(folder / storage.CONFIG_FILE)
    weights = folder / storage.WEIGHTS_FILE
    intact = stated.get("sha256") == files.sha256(weights)
    count, size = _count(tensors), sum(f.stat().st_size for f in (weights, folder / storage.CONFIG_FILE))
    numbers, lines = _hmm(config, tensors) if config.get("circuit") == "hmm" else _unknown(config, tensors)
    dtypes = {name: _dtype(tensor) for name, tensor in tensors.items()}
    numbers |= {
        "parameters": count,
        "bytes": size,
        "dtypes": dtypes,
        "format_version": stated["format_version"],
        "sha256": stated.get("sha256"),
        "sha256_matches": intact,
    }
    lines |= {
        "parameters": f"{count:,}",
        "size": console.size(size),
        "dtype": ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items()),
        "format": f"{storage.FORMAT}, version {stated['format_version']}",
        "sha256": f"{stated.get('sha256')} {'(matches)' if intact else '(DOES NOT MATCH the weights: save it again)'}",
    }
    return Report(numbers, lines, bad=() if intact else ("sha256",))


def _hmm(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, object]]:
    """Sizes and layout from the shapes alone: a circuit of many gigabytes is described without being loaded."""
    emission = tensors.get("emission", tensors.get("log_emission"))
    transition = tensors.get("log_transition", tensors.get("log_transition_left"))
    if emission is None or transition is None or emission.ndim < 2 or transition.ndim < 2:
        raise FormatError("the circuit lacks the transition or emission table of an HMM; save or download it again")
    states, tokens = emission.shape[-2:]
    rank = transition.shape[-1] if "log_transition_left" in tensors else None
    window = config.get("window")
    homogeneous = transition.ndim == 2 and emission.ndim == 2
    numbers = {
        "kind": "hmm",
        "num_states": states,
        "vocab_size": tokens,
        "window": window,
        "rank": rank,
        "homogeneous": homogeneous,
    }
    kept = "dense transition" if rank is None else f"transition of rank {rank}"
    lines: dict[str, object] = {
        "kind": "hidden Markov model",
        "states": f"{states:,}",
        "tokens": f"{tokens:,}",
        "window": "not stated" if window is None else f"{window} positions",
        "layout": f"{kept}, {'shared by all positions' if homogeneous else 'parameters for each position'}",
    }
    return numbers, lines


def _unknown(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, object]]:
    kind = str(config.get("circuit"))
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    return {"kind": kind}, {"kind": f"circuit of type {kind!r}, which this codd does not know", "tensors": shapes}


# A kind of checkpoint: how it is recognised, and what is said of it. The first that recognises a source describes it.
KINDS: tuple[tuple[Callable[[str], bool], Callable[[str], Report]], ...] = (
    (_is_jpc, _jpc),
    (_is_circuit, _circuit),
)


def _what_else(path: Path) -> str:
    """Why a path that exists is none of the kinds."""
    if path.is_dir():
        config = _json(path / storage.CONFIG_FILE)
        model = config.get("model_type") or config.get("architectures")
        if model:
            return f"{path}: holds a model ({model}), not a circuit; {WANTED}"
        return f"{path}: is a folder, but not of a circuit; {WANTED}"
    if path.name in (storage.CONFIG_FILE, storage.WEIGHTS_FILE):
        return f"{path}: is one file of a circuit; give the folder: codd info {path.parent}"
    return f"{path}: is a file of another kind; {WANTED}"


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or nothing: what is wrong with it is said by whoever needs it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
