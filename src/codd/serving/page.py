"""The files of the playground, read once: nothing outside of them can be asked for."""

from dataclasses import dataclass
from functools import cache
from importlib import resources

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class File:
    """A static file."""

    content: bytes
    type: str


@cache
def files() -> dict[str, File]:
    """By name."""
    found = {}
    for entry in (resources.files("codd.serving") / "playground").iterdir():
        kind = TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None and entry.is_file():
            found[entry.name] = File(entry.read_bytes(), f"{kind}; charset=utf-8")
    return found
