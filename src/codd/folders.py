"""The folder that a run writes into: one process at a time, and nothing of a run that failed before it began."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codd.errors import InvalidInput

try:
    import fcntl
except ImportError:  # Windows has no such locks: nobody is kept out there
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""Holds the number of the process that has the folder."""


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if need be; InvalidInput if one is there already.

    The kernel opens the lock when its process ends in whatever way: a run that was killed can go on at once. Where a
    network file system does not pass locks on, processes of other machines are not noticed.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(descriptor)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty, which is to say that the run failed at once


def _lock(folder: Path) -> int:
    """A descriptor of the locked file."""
    while True:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip() or "of an unknown number"
            os.close(descriptor)
            raise InvalidInput(
                f"{folder}: the process {holder} is writing into this folder, and two would spoil each other's files. "
                "Wait until it has ended, or give another folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # whoever had it removed the file after we had opened it


def check_own(folder: Path, mark: str, kind: str) -> None:
    """InvalidInput unless a folder is new, empty but for a lock, or has the file that marks it as one of this kind."""
    if os.path.exists(folder) and not folder.is_dir():
        raise InvalidInput(f"{folder}: is a file; {kind} needs a folder.")
    if folder.is_dir() and not (folder / mark).is_file() and set(os.listdir(folder)) - {LOCK}:
        raise InvalidInput(f"{folder}: holds something else than {kind}; give an empty or new folder with --out.")


def discard_if_bare(folder: Path, mark: str, rows: str) -> None:
    """Remove the file that marks the folder as a run's, if beside it there are at most no rows."""
    with contextlib.suppress(OSError):
        (folder / rows).rmdir()  # if it is empty
    if set(os.listdir(folder)) <= {mark, LOCK}:
        (folder / mark).unlink(missing_ok=True)
