"""What verbs print with: colour on a terminal only, never a name's control characters, JSON for programs."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from codd.errors import CircuitSteppedAside, TextsLeftOut

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


def out() -> "Console":
    """The console for results: stdout."""
    return _console(stderr=False)


def err() -> "Console":
    """The console for errors and progress: stderr, so that results can be piped."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console  # here, since it takes longer to import than --help to answer

    # Rich keeps bold and dim under NO_COLOR; whoever sets it wants no escape codes at all.
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(stderr=stderr, color_system=None if plain else "auto", markup=False, highlight=False, emoji=False)


def error(message: str) -> None:
    """One line on stderr, in red."""
    err().print(f"codd: {one_line(message)}", style="red", soft_wrap=True)


def say(text: str) -> None:
    """One line on stderr, beside the result."""
    err().print(one_line(text), soft_wrap=True)


def working(message: str, *, shown: bool = True) -> AbstractContextManager[Any]:
    """Show a spinner during the work, on a terminal only, and not unless ``shown``."""
    return err().status(one_line(message)) if shown else nullcontext()


@contextmanager
def bar(description: str, total: int | None = None, *, shown: bool = True, transient: bool = True) -> Iterator["Bar"]:
    """A progress bar on stderr, if that is a terminal; if ``transient``, it is gone when it is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    terminal = err()
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    # Results go to stdout, which may be a file: rich must not take it over.
    options: dict[str, Any] = {"transient": transient, "redirect_stdout": False}
    with Progress(*columns, console=terminal, disable=not (shown and terminal.is_terminal), **options) as progress:
        yield Bar(progress, progress.add_task(description, total=total))


@dataclass(frozen=True)
class Bar:
    """A progress bar, shown or not."""

    progress: "Progress"
    task: "TaskID"

    def advance(self, count: int = 1) -> None:
        """Move on by ``count``."""
        self.progress.advance(self.task, count)

    def update(self, done: int, description: str | None = None, total: int | None = None) -> None:
        """Set how many are done, and another description or total if given."""
        self.progress.update(self.task, completed=done, description=description, total=total)


def one_line(text: object) -> str:
    """Text on one line without control characters: names and messages may come from files that are not trusted."""
    joined = " ".join(line.strip() for line in str(text).splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in joined)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Show warnings in one line each, without the source line that Python puts below it."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        err().print(f"codd: {one_line(message)}", style="yellow", soft_wrap=True)

    with warnings.catch_warnings():
        for category in (CircuitSteppedAside, TextsLeftOut):
            warnings.simplefilter("always", category)
        warnings.showwarning = show
        yield


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


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type for argparse: whole numbers from ``low`` to ``high``, both included."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, found {value}")
        return value

    parse.__name__ = "whole number"  # argparse names it where the text is no number
    return parse


seed = whole_number(0, 2**63 - 1)
"""A type for argparse: the seeds that every generator takes, and that the files of a run can hold."""


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
