"""A progress bar for files that take long to read."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 2.0
"""Seconds before a progress bar is worth looking at."""


@contextmanager
def lasting_bar(message: str, total: int, *, always: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if that is a terminal, once it has lasted, gone when done; gives what advances it.

    ``always``: at once, and whatever stderr is.
    """
    begun, done = time.monotonic(), 0
    bar: Progress | None = _started(message, total) if always else None

    def advance(count: int) -> None:
        nonlocal bar, done
        done += count
        if bar is None and time.monotonic() - begun >= PATIENCE and sys.stderr and sys.stderr.isatty():
            bar = _started(message, total)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def _started(message: str, total: int) -> "Progress":
    from rich.console import Console  # here, since it takes longer to import than a small model to load
    from rich.progress import Progress

    plain = bool(os.environ.get("NO_COLOR"))
    terminal = Console(stderr=True, color_system=None if plain else "auto", markup=False)
    bar = Progress(console=terminal, transient=True, redirect_stdout=False)
    bar.add_task(message, total=total)
    bar.start()
    return bar
