"""The playground's static files, read once; nothing outside of that folder can be requested."""

from dataclasses import dataclass
from functools import cache
from importlib import resources

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class StaticFile:
    """The content of a file and its media type."""

    content: bytes
    media_type: str


@cache
def static_files() -> dict[str, StaticFile]:
    """The playground's files by name; those of other types are left out."""
    files = {}
    for entry in (resources.files("codd.serving") / "playground").iterdir():
        media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None and entry.is_file():
            files[entry.name] = StaticFile(entry.read_bytes(), f"{media_type}; charset=utf-8")
    return files
