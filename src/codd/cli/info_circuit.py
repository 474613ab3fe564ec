"""What ``codd info`` says of a circuit: a folder that codd wrote, or a file of PyJuice."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from codd import files
from codd.circuits import Factors, HeadConfig, load_circuit, storage
from codd.circuits.pyjuice import read_jpc
from codd.cli import console
from codd.errors import CoddError, FormatError, InvalidCircuit

AGAIN = "save or download both files again"


@dataclass
class Report:
    """A description: ``numbers`` for programs and ``lines`` for people. ``bad`` names the lines that tell of damage."""

    numbers: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, object] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    check: Callable[[], str] | None = None
    """What ``--check`` does: read every value, raise if one is wrong, and return a line on what was read."""

    def add(self, label: str, text: object = None, *, bad: bool = False, **numbers: Any) -> None:
        """Add a line with the numbers that it tells; without ``text`` it is the only number."""
        self.numbers |= numbers
        self.lines[label] = f"{next(iter(numbers.values())):,}" if text is None else text
        self.bad += [label] if bad else []

    def add_sha256(self, stated: object, intact: bool) -> None:
        """Add the digest that config.json states; ``intact``: whether it is that of the weights."""
        verdict = "matches" if intact else f"DOES NOT MATCH the weights: {AGAIN}"
        self.add("sha256", f"{stated} ({verdict})", bad=not intact, sha256=stated, sha256_matches=intact)


def jpc(source: str) -> Report:
    """Describe a file that PyJuice saved; FormatError if it is damaged or holds anything but an HMM."""
    found, size = read_jpc(source), Path(source).stat().st_size
    states, tokens = found.emission.shape[-2:]
    report = Report({"kind": "pyjuice-hmm"}, check=lambda: "every row is a distribution")  # read_jpc takes no other
    report.add("kind", "hidden Markov model, saved by PyJuice; nothing of the pickle was run")
    report.add("states", num_states=states)
    report.add("tokens", vocab_size=tokens)
    report.add("window", found.length, window=found.length)
    shared = "yes" if found.homogeneous else "no: positions have parameters of their own"
    report.add("homogeneous", shared, homogeneous=found.homogeneous)
    report.add("leaves", found.leaf_class, leaf_class=found.leaf_class)
    report.add("parameters", parameters=sum(x.numel() for x in (found.initial, found.transition, found.emission)))
    report.add("size", console.size(size), bytes=size)
    report.add("next", "codd convert writes it as a circuit folder")
    return report


def is_circuit(folder: Path) -> bool:
    """Whether config.json is that of a circuit; where it is damaged, whether there are weights of a circuit."""
    with suppress(FormatError):
        if files.read_json_object(folder / storage.CONFIG_FILE).get("format") == storage.FORMAT:
            return True
    return (folder / storage.WEIGHTS_FILE).exists()


def circuit(source: str) -> Report:
    """Describe a circuit in a folder or on the hub, by its shapes alone; FormatError if it is damaged."""
    folder = storage.local_folder(source)
    config, tensors = storage.read_folder(folder, check=False)  # a wrong sha256 is shown, not raised
    stated, weights = files.read_json_object(folder / storage.CONFIG_FILE), folder / storage.WEIGHTS_FILE
    kind, report = str(config.get("circuit")), Report()
    if kind in _KINDS:
        report.check = lambda: _check(folder)
        _KINDS[kind](report, weights, config, tensors)
    else:
        report.add("kind", f"circuit of type {kind!r}, which this codd does not know", kind=kind)
        report.add("tensors", ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()))
    size = sum(path.stat().st_size for path in (weights, folder / storage.CONFIG_FILE))
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    version = stated["format_version"]
    report.add("parameters", parameters=_count(tensors))
    report.add("size", console.size(size), bytes=size)
    report.add("dtype", ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items()), dtypes=dtypes)
    report.add("format", f"{storage.FORMAT}, version {version}", format_version=version)
    report.add_sha256(stated.get("sha256"), stated.get("sha256") == files.sha256(weights))
    return report


def _check(folder: Path) -> str:
    try:
        found = load_circuit(folder, check=False)
    except FormatError:  # names the file, and says what to do
        raise
    except CoddError as error:
        raise FormatError(f"{folder / storage.WEIGHTS_FILE}: {error}; save or download the circuit again.") from error
    rows = "every row is a distribution"
    return f"{rows}, every weight of the head is finite" if found.feature_width is not None else rows


def _hmm(report: Report, where: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    report.add("kind", "hidden Markov model", kind="hmm")
    if "initial_logits" in tensors:
        layout, rank, shared = _factors(report, where, tensors), None, True
    else:
        emission = tensors.get("emission", tensors.get("log_emission"))
        transition = tensors.get("log_transition", tensors.get("log_transition_left"))
        if emission is None or transition is None or emission.ndim < 2 or transition.ndim < 2:
            raise FormatError(f"{where}: lacks the transition or emission table of an HMM; save or download it again")
        report.numbers["num_states"], report.numbers["vocab_size"] = emission.shape[-2:]
        rank = transition.shape[-1] if "log_transition_left" in tensors else None
        layout = "dense transition" if rank is None else f"transition of rank {rank}"
        shared = transition.ndim == emission.ndim == 2
    window = config.get("window")
    report.add("states", f"{report.numbers['num_states']:,}")
    report.add("tokens", f"{report.numbers['vocab_size']:,}")
    report.add("window", "not stated" if window is None else f"{window} positions", window=window)
    positions = "shared by all positions" if shared else "parameters for each position"
    report.add("layout", f"{layout}, {positions}", rank=rank, homogeneous=shared)


def _factors(report: Report, where: Path, tensors: Mapping[str, Tensor]) -> str:
    """The layout of an HMM that is kept as logits, in words."""
    try:
        found = Factors.from_named(tensors, str(where))
    except InvalidCircuit as error:
        raise FormatError(f"{where}: {error}; save or download the circuit again.") from error
    sizes: dict[str, int | None] = {}
    parts = []
    for name, table in (("transition", found.transition), ("emission", found.emission)):
        rank = sizes[f"{name}_rank"] = table[0].shape[-1] if len(table) == 2 else None
        parts.append(f"{name} of rank {rank}" if rank else f"whole {name}")
    inner = sizes["inner_states"] = None if found.detour is None else found.detour.left.shape[-1]
    if inner is not None:
        parts.append(f"detour through {inner} inner states")
    report.numbers |= {"num_states": found.num_states, "vocab_size": found.vocab_size, "factors": sizes}
    return f"logits: {', '.join(parts)}"


def _modulated(report: Report, where: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    try:
        head = HeadConfig(**config["head"])
    except (KeyError, TypeError) as error:
        raise FormatError(f"{where}: its configuration does not describe a head ({error}); save it again") from None
    own = {name: x for name, x in tensors.items() if name.startswith("head.")}
    _hmm(report, where, config, {name: x for name, x in tensors.items() if name not in own})
    report.add("kind", "hidden Markov model, modulated by the network", kind="modulated")
    spaces = {"latents": (head.states, "states"), "steps": (head.inner_states, "inner states")}
    said = {name: f"{name} ({size:,} {what})" for name, (size, what) in spaces.items() if size}
    report.add("modulates", " and ".join(said.values()) or "nothing", modulates=list(said))
    between, count = f", {head.hidden:,} between" if head.hidden else "", _count(own)
    text = f"{head.features:,} features{between}, {count:,} parameters"
    report.add("head", text, head={**dataclasses.asdict(head), "parameters": count})


def _graph(report: Report, where: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    names = {"nodes": "kinds", "edges": "children", "leaves": "leaf_variables", "variables": "variable_sizes"}
    if not all(name in tensors for name in names.values()) or not tensors["variable_sizes"].numel():
        raise FormatError(f"{where}: lacks the structure of a general circuit; save or download it again")
    sizes: dict[str, Any] = {what: tensors[name].numel() for what, name in names.items()}
    window = sizes.pop("variables")
    report.add("kind", "general circuit", kind="graph")
    report.add("tokens", vocab_size=int(tensors["variable_sizes"].max()))
    report.add("window", f"{window} positions", window=window)
    report.add("layout", "{nodes:,} nodes, of which {leaves:,} leaves, and {edges:,} edges".format_map(sizes), **sizes)


_KINDS = {"hmm": _hmm, "modulated": _modulated, "graph": _graph}


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
