"""What verbs print with: colour on a terminal only, never a name's control characters, JSON for programs."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def out() -> "Console":
    """For results."""
    return _console(stderr=False)


def err() -> "Console":
    """For errors and progress, so that results can be piped."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console  # here, since it takes longer to import than --help to answer

    # Rich keeps bold and dim under NO_COLOR; whoever sets it wants no escape codes at all.
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(stderr=stderr, color_system=None if plain else "auto", markup=False, highlight=False, emoji=False)


def error(message: str) -> None:
    """One line on stderr, in red."""
    err().print(f"codd: {one_line(message)}", style="red", soft_wrap=True)


def working(message: str) -> AbstractContextManager[Any]:
    """A spinner on a terminal, nothing elsewhere."""
    return err().status(one_line(message))


def one_line(text: object) -> str:
    """Text on one line without control characters: names and messages may come from files that are not trusted."""
    joined = " ".join(line.strip() for line in str(text).splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in joined)


def fields(title: str, values: Mapping[str, object], bad: tuple[str, ...] = ()) -> None:
    """A title and one line for each value; those named in ``bad`` in red. Never wrapped, so that grep can be used."""
    from rich.text import Text

    console = out()
    console.print(Text(one_line(title), style="bold"), soft_wrap=True)
    width = max(map(len, values))
    for name, value in values.items():
        line = Text(f"  {name:<{width}}  ", style="cyan")
        line.append(one_line(value), style="red" if name in bad else "default")
        console.print(line, soft_wrap=True)


def as_json(value: object) -> None:
    """One JSON object on stdout."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def size(count: int) -> str:
    """12_345_678 -> '12.3 MB (12,345,678 bytes)'."""
    scaled, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if scaled < 1000:
            break
        scaled, unit = scaled / 1000, larger
    return f"{count:,} bytes" if unit == "bytes" else f"{scaled:.3g} {unit} ({count:,} bytes)"
