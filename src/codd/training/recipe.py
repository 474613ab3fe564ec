"""A recipe: everything that makes a training run what it is, from a short YAML file.

Relative paths in a recipe begin where the command is run, and those of data and caches in its --data, which is the same
place unless it is given. Where the recipe itself lies does not matter.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from codd import files, validation
from codd.data.sources import Source
from codd.data.yaml_files import parse_yaml, read_yaml
from codd.errors import FormatError, InvalidInput, shown
from codd.validation import BelowOne, Count, FolderName, List, Natural, Section

SHIPPED = Path(__file__).with_name("recipes")
"""Recipes that come with codd, each named after its file."""

Betas = Annotated[List[BelowOne], Field(min_length=2, max_length=2)]


def check_rules(broken: Iterable[str]) -> None:
    """ValueError, which pydantic takes up, with all rules that are broken."""
    if found := list(broken):
        raise ValueError("; ".join(found))


def name_rules(*sets: Sequence[Source]) -> Iterator[str]:
    """What is wrong with the names in sets of sources."""
    for what, sources in zip(("data", "validation"), sets, strict=True):
        if len({source.name for source in sources}) < len(sources):
            yield f"two sources of {what} have the same name"


@dataclass(frozen=True)
class RunRecipe(Section):
    """What the run loop reads of a recipe, whatever it trains."""

    name: FolderName
    seed: Natural = 0
    steps: Count = 1000
    """Updates at most."""
    log_every: Count = 50
    """Steps between two lines of metrics."""
    validate_every: Count = 500
    """Steps between two looks at held-out text."""
    checkpoint_every: Count = 500
    keep: Count = 2
    """How many checkpoints stay."""

    def digest(self) -> str:
        """Names the run: two recipes with the same digest give the same result."""
        return files.sha256_of_json(dataclasses.asdict(self))[:16]


def find_recipe(name: str, shipped: Sequence[Path]) -> Path:
    """The file among ``shipped`` of this name, or the path that ``name`` is; InvalidInput if it is neither."""
    known = {path.stem: path for path in shipped}
    if name in known:
        return known[name]
    path = Path(name)
    if path.suffix or path.name != name or os.path.exists(path):  # whoever opens it says what is wrong with it
        return path
    raise InvalidInput(
        f"{shown(name)}: there is no recipe of this name here; there are {', '.join(known)}. "
        f"A recipe of your own is given by its path, such as {name}.yaml."
    )


Kind = TypeVar("Kind")


def read_fields(kind: type[Kind], path: Path, changes: Sequence[str]) -> Kind:
    """A recipe of some kind from a YAML file; FormatError with everything that is wrong."""
    fields = read_yaml(path)
    if not isinstance(fields, dict):
        raise FormatError(f"{path}: expected fields like `name: mini`, found {type(fields).__name__}.")
    for change in changes:
        _change(fields, change)
    recipe: Kind = validation.build(kind, fields, str(path))
    return recipe


def _change(fields: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals:
        raise FormatError(f"--set {change}: expected NAME=VALUE, such as optimizer.lr=1e-3.")
    *path, last = name.split(".")
    for part in path:
        fields = fields.setdefault(part, {})
        if not isinstance(fields, dict):
            raise FormatError(f"--set {change}: {part} is not a section of the recipe.")
    fields[last] = parse_yaml(text, f"--set {change}: the value is not YAML")
