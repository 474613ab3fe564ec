"""Text from files that may be anyone's: regular files only, UTF-8, plain or xz, read bit by bit.

What is in memory at a time is bounded by `LONGEST_LINE`, whatever a file holds and however far it expands.
"""

import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from codd import files
from codd.errors import FormatError

LONGEST_LINE = 2**24
"""Characters of a line of JSON: five times the longest book in ours."""
DICTIONARY = 2**28
"""Bytes that a decompressor may take: `xz -9` asks for a quarter of it."""
FREE, EXPANSION = 2**22, 100
"""Beyond this many bytes, text may be at most this many times as long as its xz file. Prose is 4 times as long."""
_AT_ONCE = 2**16


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Text of a file, or of what an .xz file holds; what is read of it later may raise the FormatError, too.

    ``newline`` is that of `open`.
    """
    with files.open_regular(path) as raw:
        content: Any = io.BufferedReader(_Xz(raw, path), _AT_ONCE) if path.suffix == ".xz" else raw
        try:
            with io.TextIOWrapper(content, encoding="utf-8", newline=newline) as text:
                yield text
        except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
            raise FormatError(f"{path}: cannot be read as UTF-8 text ({files.brief(error)}).") from error
        except OSError as error:
            raise FormatError(f"{path}: cannot be read ({error.strerror or error}).") from error


class _Xz(io.RawIOBase):
    """What an xz file of one or several streams holds. The standard library's reader sets no limit to its memory."""

    def __init__(self, file: BinaryIO, path: Path):
        """Decompress ``file``, which must be at its beginning; ``path`` is for messages."""
        self._parts, self._rest = _decompressed(file, path), b""

    def readable(self) -> bool:
        """True: `io.BufferedReader` asks for it."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` with the next bytes and give their number; 0 at the end."""
        content = self._rest or next(self._parts, b"")
        count = min(len(buffer), len(content))
        buffer[:count], self._rest = content[:count], content[count:]
        return count


def _decompressed(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The content of the streams of an xz file, part by part; zeros between two streams are padding."""
    given, read, made = b"", 0, 0
    while True:
        while not (given := given.lstrip(b"\0")):
            if not (given := file.read(_AT_ONCE)):
                if not read:
                    raise EOFError("the file is empty")
                return
            read += len(given)
        stream = lzma.LZMADecompressor(memlimit=DICTIONARY)
        while not stream.eof:
            if stream.needs_input and not given:
                given = file.read(_AT_ONCE)
                read += len(given)
                if not given:
                    raise EOFError("the file ends before its stream does")
            content, given = stream.decompress(given, _AT_ONCE), b""
            made += len(content)
            if made > FREE and made > EXPANSION * read:
                raise FormatError(
                    f"{path}: its first {read:,} bytes expand to more than {EXPANSION} times as many, which text does "
                    "not. If you trust the file, decompress it and give the result."
                )
            if content:
                yield content
        given = stream.unused_data


def json_lines(path: Path, *, unfinished: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's file and number, in words, and its JSON object.

    With ``unfinished``, a last line without an end is left out unless it is whole: a process was killed while it wrote
    the line.
    """
    with open_text(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            where = f"{path}: line {number}"
            if len(line) > LONGEST_LINE:
                raise FormatError(f"{where} is longer than {LONGEST_LINE:,} characters. Give one JSON object a line.")
            try:
                entry = files.parse_json(where, line)
            except FormatError:
                if unfinished and not line.endswith("\n"):
                    return
                raise
            if not isinstance(entry, dict):
                raise FormatError(f"{where} is not a JSON object.")
            yield where, entry
