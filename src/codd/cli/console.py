"""What verbs print with: colour on a terminal only, never a name's control characters, JSON for programs."""

import argparse
import json
import math
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


def fields(title: str, values: Mapping[str, object], wrong: Mapping[str, str] | None = None) -> None:
    """A title and a line per value, in red with what is ``wrong`` with it. Never wrapped, so that grep can be used."""
    from rich.text import Text

    console, wrong = out(), wrong or {}
    console.print(Text(one_line(title), style="bold"), soft_wrap=True)
    width = max(map(len, values))
    for name, value in values.items():
        line = Text(f"  {name:<{width}}  ", style="cyan")
        shown = one_line(in_words(name, value) + wrong.get(name, ""))
        console.print(line.append(shown, style="red" if name in wrong else "default"), soft_wrap=True)


def in_words(name: str, value: object) -> str:
    """A value as one line; nested mappings within a mapping are left out."""
    if isinstance(value, Mapping):
        return ", ".join(f"{each} {in_words(each, x)}" for each, x in value.items() if not isinstance(x, Mapping))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return size(value) if name in ("bytes", "bytes_in", "bytes_out") else f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def number(
    kind: type[int | float], low: int | float, high: int | float = math.inf, *, above: bool = False
) -> Callable[[str], Any]:
    """A type for argparse: numbers from ``low`` (or ``above`` it) to ``high``."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not (low < value if above else low <= value) or not value <= high:
            least = f"{'above' if above else 'at least' if high == math.inf else 'from'} {low}"
            most = "" if high == math.inf else f" and at most {high}" if above else f" to {high}"
            raise argparse.ArgumentTypeError(f"must be {least}{most}, found {text}")
        return value

    parse.__name__ = "whole number" if kind is int else "number"  # argparse names it where the text is not one
    return parse


seed = number(int, 0, 2**63 - 1)
"""A type for argparse: seeds that every generator takes."""


def as_json(value: object) -> None:
    """One JSON object on stdout."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def size(count: int) -> str:
    """12_345_678 -> '12.3 MB (12,345,678 bytes)'."""
    from rich.filesize import decimal

    return decimal(count) if count < 1000 else f"{decimal(count)} ({count:,} bytes)"
