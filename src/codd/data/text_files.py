"""Text from files that may be anyone's: regular files only, UTF-8, plain or xz, read bit by bit.

What is in memory at a time is bounded by `LONGEST_LINE`, whatever a file holds and however far it expands.
"""

import io
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from codd import files
from codd.errors import FormatError

LONGEST_LINE = 2**24
"""Characters of a line of JSON: five times the longest book in ours."""
LONGEST_JSON = 2**26
"""Characters of a file that is one JSON value."""
DICTIONARY = 2**28
"""Bytes that a decompressor may take: `xz -9` asks for a quarter of it."""
FREE, EXPANSION = 2**22, 100
"""Beyond so many bytes, text may be at most so many times as long as its xz file. Prose is 4 times as long."""
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
        self._file, self._path = file, path
        self._stream = lzma.LZMADecompressor(memlimit=DICTIONARY)
        self._given, self._read, self._made = b"", 0, 0

    def readable(self) -> bool:
        """True: `io.BufferedReader` asks for it."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` with the next bytes and give their number; 0 at the end."""
        content = b""
        while not content:
            if self._stream.eof and not self._begin_next():
                return 0
            given = self._more() if self._stream.needs_input and not self._given else self._given
            if self._stream.needs_input and not given:
                raise EOFError("the file ends before its stream does")
            self._given = b""
            content = self._stream.decompress(given, len(buffer))
        self._made += len(content)
        if self._made > FREE and self._made > EXPANSION * self._read:
            raise FormatError(
                f"{self._path}: its first {self._read:,} bytes expand to more than {EXPANSION} times as many, which "
                "text does not. If you trust the file, decompress it and give the result."
            )
        buffer[: len(content)] = content
        return len(content)

    def _begin_next(self) -> bool:
        """Whether another stream follows; zeros between two are padding."""
        given = self._stream.unused_data.lstrip(b"\0")
        while not given:
            if not (more := self._more()):
                return False
            given = more.lstrip(b"\0")
        self._given, self._stream = given, lzma.LZMADecompressor(memlimit=DICTIONARY)
        return True

    def _more(self) -> bytes:
        given = self._file.read(_AT_ONCE)
        self._read += len(given)
        return given


def json_lines(path: Path, *, unfinished: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON object of each line, with where it stands.

    With ``unfinished``, a last line that has no end is one that a killed process was writing, and is left out unless it
    is whole.
    """
    with open_text(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            where = f"{path}: line {number}"
            if len(line) > LONGEST_LINE:
                raise FormatError(f"{where} is longer than {LONGEST_LINE:,} characters. Give one JSON object a line.")
            try:
                entry = parse_json(line, where)
            except FormatError:
                if unfinished and not line.endswith("\n"):
                    return
                raise
            if not isinstance(entry, dict):
                raise FormatError(f"{where} is not a JSON object.")
            yield where, entry


def read_json(path: Path) -> Any:
    """The JSON value of a whole file; FormatError if it is none, or too long."""
    with open_text(path) as file:
        text = file.read(LONGEST_JSON + 1)
    if len(text) > LONGEST_JSON:
        raise FormatError(f"{path}: is longer than {LONGEST_JSON:,} characters, which no such file is.")
    return parse_json(text, str(path))


def parse_json(text: str, where: str) -> Any:
    """The JSON value of a text; a FormatError says where it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 4,301 digits is a ValueError
        raise FormatError(f"{where} is not JSON ({files.brief(error)}).") from error
