"""What ``codd info`` says of a circuit: a folder that codd wrote, or a file of PyJuice."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from codd import files
from codd.circuits import Factors, HeadConfig, load_circuit, storage
from codd.circuits.pyjuice import read_jpc
from codd.cli import console
from codd.errors import CoddError, FormatError, InvalidCircuit

HEAD = "head."
"""How the names of a head's tensors begin."""


@dataclass(frozen=True)
class Report:
    """What was found: the numbers for programs, the lines for people, and which of the lines are bad news."""

    numbers: dict[str, Any]
    lines: dict[str, object]
    bad: tuple[str, ...] = field(default=())
    check: Callable[[], str] | None = None
    """What ``--check`` does: read every value, raise if one is wrong, and say what was read."""


def is_jpc(source: str) -> bool:
    """By its name."""
    return Path(source).suffix == ".jpc" and not Path(source).is_dir()


def jpc(source: str) -> Report:
    """Of a file that PyJuice saved."""
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
    return Report(numbers, lines, check=lambda: "every row is a distribution")  # read_jpc takes no other


def is_circuit(folder: Path) -> bool:
    """Whether a folder's configuration says so; one whose configuration is damaged is known by its weights."""
    if read_json(folder / storage.CONFIG_FILE).get("format") == storage.FORMAT:
        return True
    return (folder / storage.WEIGHTS_FILE).exists()


def circuit(source: str) -> Report:
    """Of a folder or a hub id."""
    folder = storage.local_folder(source)  # the hub's, too, so that its files can be looked at
    config, tensors = storage.read_folder(folder, check=False)  # what does not match is shown
    stated = read_json(folder / storage.CONFIG_FILE)
    weights = folder / storage.WEIGHTS_FILE
    intact = stated.get("sha256") == files.sha256(weights)
    count, size = _count(tensors), sum(f.stat().st_size for f in (weights, folder / storage.CONFIG_FILE))
    kind = _KINDS.get(str(config.get("circuit")))
    numbers, lines = _unknown(config, tensors) if kind is None else kind(weights, config, tensors)
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
        "sha256": sha256_line(stated.get("sha256"), intact),
    }
    check = None if kind is None else (lambda: _check(folder))
    return Report(numbers, lines, bad=() if intact else ("sha256",), check=check)


def _check(folder: Path) -> str:
    try:
        found = load_circuit(folder, check=False)
    except FormatError:  # names the file, and says what to do
        raise
    except CoddError as error:
        raise FormatError(f"{folder / storage.WEIGHTS_FILE}: {error}; save or download the circuit again.") from error
    rows = "every row is a distribution"
    return f"{rows}, every weight of the head is finite" if found.feature_width is not None else rows


def sha256_line(stated: object, intact: bool) -> str:
    """The digest that config.json states, and whether it is that of the weights."""
    return f"{stated} {'(matches)' if intact else '(DOES NOT MATCH the weights: save or download both files again)'}"


def _hmm(
    where: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, object]]:
    """Sizes and layout from the shapes alone: a circuit of many gigabytes is described without being loaded."""
    found = _factored(where, tensors) if "initial_logits" in tensors else _tables(where, tensors)
    window = config.get("window")
    numbers = {
        "kind": "hmm",
        "num_states": found.states,
        "vocab_size": found.tokens,
        "window": window,
        "rank": found.rank,
        "homogeneous": found.homogeneous,
    }
    if found.factors is not None:
        numbers["factors"] = found.factors
    lines: dict[str, object] = {
        "kind": "hidden Markov model",
        "states": f"{found.states:,}",
        "tokens": f"{found.tokens:,}",
        "window": "not stated" if window is None else f"{window} positions",
        "layout": f"{found.kept}, {'shared by all positions' if found.homogeneous else 'parameters for each position'}",
    }
    return numbers, lines


def _modulated(
    where: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, object]]:
    """An HMM, and the head on the network that modulates it."""
    try:
        head = HeadConfig(**config["head"])
    except (KeyError, TypeError) as error:
        raise FormatError(f"{where}: its configuration does not describe a head ({error}); save it again") from None
    numbers, lines = _hmm(where, config, {name: x for name, x in tensors.items() if not name.startswith(HEAD)})
    spaces = {"latents": (head.states, "states"), "steps": (head.inner_states, "inner states")}
    count = _count({name: x for name, x in tensors.items() if name.startswith(HEAD)})
    between = f", {head.hidden:,} between" if head.hidden else ""
    numbers |= {
        "kind": "modulated",
        "modulates": [name for name, (size, _) in spaces.items() if size],
        "head": {**dataclasses.asdict(head), "parameters": count},
    }
    said = " and ".join(f"{name} ({size:,} {what})" for name, (size, what) in spaces.items() if size)
    lines |= {
        "kind": "hidden Markov model, modulated by the network",
        "modulates": said or "nothing",
        "head": f"{head.features:,} features{between}, {count:,} parameters",
    }
    return numbers, lines


def _graph(
    where: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, object]]:
    """A general circuit: the sizes of its graph."""
    nodes, edges, leaves, sizes = (
        tensors.get(name) for name in ("kinds", "children", "leaf_variables", "variable_sizes")
    )
    if nodes is None or edges is None or leaves is None or sizes is None or not sizes.numel():
        raise FormatError(f"{where}: lacks the structure of a general circuit; save or download it again")
    numbers = {
        "kind": "graph",
        "vocab_size": int(sizes.max()),
        "window": sizes.numel(),
        "nodes": nodes.numel(),
        "edges": edges.numel(),
        "leaves": leaves.numel(),
    }
    lines: dict[str, object] = {
        "kind": "general circuit",
        "tokens": f"{numbers['vocab_size']:,}",
        "window": f"{numbers['window']} positions",
        "layout": "{nodes:,} nodes, of which {leaves:,} leaves, and {edges:,} edges".format_map(numbers),
    }
    return numbers, lines


_KINDS = {"hmm": _hmm, "modulated": _modulated, "graph": _graph}


class _Layout(NamedTuple):
    """What the shapes of an HMM's tensors say."""

    states: int
    tokens: int
    homogeneous: bool
    rank: int | None
    """Of a transition that is kept as a pair of stochastic matrices."""
    kept: str
    factors: dict[str, int | None] | None = None
    """The sizes of what the tables are made from, where that is kept instead of them."""


def _tables(where: Path, tensors: Mapping[str, Tensor]) -> _Layout:
    emission = tensors.get("emission", tensors.get("log_emission"))
    transition = tensors.get("log_transition", tensors.get("log_transition_left"))
    if emission is None or transition is None or emission.ndim < 2 or transition.ndim < 2:
        raise FormatError(f"{where}: lacks the transition or emission table of an HMM; save or download it again")
    states, tokens = emission.shape[-2:]
    rank = transition.shape[-1] if "log_transition_left" in tensors else None
    kept = "dense transition" if rank is None else f"transition of rank {rank}"
    return _Layout(states, tokens, transition.ndim == 2 and emission.ndim == 2, rank, kept)


def _factored(where: Path, tensors: Mapping[str, Tensor]) -> _Layout:
    try:
        found = Factors.from_named(tensors, str(where))
    except InvalidCircuit as error:
        raise FormatError(f"{where}: {error}; save or download the circuit again.") from error
    tables = {"transition": found.transition, "emission": found.emission}
    ranks = {name: table[0].shape[-1] if len(table) == 2 else None for name, table in tables.items()}
    parts = [f"{name} of rank {rank}" if rank else f"whole {name}" for name, rank in ranks.items()]
    inner = None if found.detour is None else found.detour.left.shape[-1]
    if inner is not None:
        parts.append(f"detour through {inner} inner states")
    sizes = {"transition_rank": ranks["transition"], "emission_rank": ranks["emission"], "inner_states": inner}
    return _Layout(found.num_states, found.vocab_size, True, None, f"logits: {', '.join(parts)}", sizes)


def _unknown(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, object]]:
    kind = str(config.get("circuit"))
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    return {"kind": kind}, {"kind": f"circuit of type {kind!r}, which this codd does not know", "tensors": shapes}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or nothing: what is wrong with it is said by whoever needs it."""
    try:
        return files.read_json_object(path)
    except FormatError:
        return {}


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
