"""One cell of a grid: a task, a circuit, and everything that decoding was told."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from codd.decoding.options import CIRCUIT_OPTIONS, DEFAULTS, PACES, Options
from codd.errors import CoddError, FormatError, InvalidInput
from codd.files import brief
from codd.training import typed

NULL, NONE, TRAINED = "null", "none", "trained"
"""The control, the network alone, and the circuit that the checkpoint has."""
CONTROLS = (NULL, NONE)
_FOLDER = re.compile(r"[^-./\\\0\ud800-\udfff][^/\\\0\ud800-\udfff]*")
"""What can stand in a folder's name, and not be taken for an option, a hidden one or a path."""


@dataclass(frozen=True)
class Cell:
    """What one run over one task was told. Two cells that differ in nothing but the circuit can be compared."""

    task: str
    circuit: str = TRAINED
    """ "trained" (the checkpoint's own), "static", "null", "none", or a path."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For `Options`; what is not named has its default."""
    problems: int | None = None
    """How many of the task's; None: all."""
    split: str = "test"
    seed: int = 0
    model: str | None = None
    """A path or hub id; None: the bundled one."""
    dtype: str = "float32"
    device: str = "cpu"
    """cpu or cuda: the two round differently, so that their samples are never mixed in one cell."""

    def __post_init__(self) -> None:
        """Refuse options that decoding would refuse, before anything is computed."""
        for what, name in (("task", self.task), ("split", self.split)):
            if not _FOLDER.fullmatch(name) or len(name.encode()) > 100:
                raise InvalidInput(f"the {what} {name[:100]!r} can be no folder's name, which it becomes part of.")
        _ = self.decoding
        if "seed" in self.options:
            raise InvalidInput("a cell has a seed of its own: give it as seed, not in options.")

    @cached_property
    def decoding(self) -> Options:
        """All options, with the defaults of those that are not named."""
        return Options.of(**self.options)

    @property
    def slug(self) -> str:
        """A name for its folder: readable, and unlike that of any other cell."""
        digest = hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]
        words = [self.task, self.split if self.split != "test" else "", _plain(self.circuit), *self.words()]
        return "-".join([*filter(None, words), digest])

    @property
    def pace(self) -> str:
        """How many tokens a step commits, in words."""
        [(name, value)] = self.decoding.pace.items()
        return f"{value} steps" if name == "steps" else f"{name.replace('_', ' ')} {value:g}"

    def words(self) -> list[str]:
        """What is special about the options, for a slug."""
        found = [_plain(self.pace)]
        for name, value in sorted(self.options.items()):
            if name not in PACES and value is not None and value != getattr(DEFAULTS, name, None):
                found.append(_plain(f"{name}{value}" if not isinstance(value, str) else value))
        return found

    def with_circuit(self, circuit: str) -> "Cell":
        """The same cell with another circuit, to be compared with."""
        return replace(self, circuit=circuit)

    @property
    def family(self) -> "Cell":
        """What two cells share that differ in the circuit only."""
        return self.with_circuit(NULL)

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], where: str = "a cell") -> "Cell":
        """From a file."""
        try:
            cell: Cell = typed.build(cls, found, where)
        except FormatError:
            raise
        except (CoddError, TypeError, ValueError, OverflowError) as error:  # of what the cell was told
            raise FormatError(f"{where}: is not a cell of an evaluation ({brief(error)}).") from error
        return cell

    def __hash__(self) -> int:
        """By what a file would hold: options are a dictionary."""
        return hash(json.dumps(self.as_json(), sort_keys=True))


def _plain(text: str) -> str:
    """Letters, digits, dots: what every file system takes."""
    return "".join(c if c.isalnum() or c == "." else "_" for c in text.rsplit("/", 1)[-1])[:40]


def grid(
    tasks: Sequence[str],
    circuits: Sequence[str],
    axes: Mapping[str, Sequence[Any]],
    paces: Mapping[str, Sequence[Any]],
    *,
    control: bool = True,
    **common: Any,
) -> list[Cell]:
    """Every task with every circuit, every combination of ``axes``, and every pace.

    ``paces`` are alternatives (steps, threshold, entropy_budget), not multiplied with each other; those that the latent
    sampler cannot be told are left out where there are others. A cell names its sampler and its pace, even where they
    are the defaults. ``control`` puts the null circuit beside every trained one, if it was not asked for.
    """
    names = list(dict.fromkeys(circuits))
    if control and NULL not in names and any(name not in CONTROLS for name in names):
        names.append(NULL)
    alternatives = [{name: value} for name, values in paces.items() for value in values] or [{}]
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    told = [{**combined, **pace} for pace, combined in itertools.product(alternatives, combinations)]
    told = [options for options in told if not _latent_by_sureness(options)] or told
    found = [
        Cell(task, circuit, _named(options), **common)
        for task, options, circuit in itertools.product(tasks, told, names)
    ]
    return list(dict.fromkeys(map(_simplified, found)))


def _latent_by_sureness(options: Mapping[str, Any]) -> bool:
    return options.get("sampler") == "latent" and any(name in options for name in ("threshold", "entropy_budget"))


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """With sampler and pace, which have other defaults in other versions."""
    chosen = Options.of(**options)
    return {**options, "sampler": chosen.sampler, **chosen.pace}


def _simplified(cell: Cell) -> Cell:
    """Without a circuit, what only circuits heed says nothing: such cells are one."""
    if cell.circuit != NONE:
        return cell
    return replace(cell, options={name: value for name, value in cell.options.items() if name not in CIRCUIT_OPTIONS})
