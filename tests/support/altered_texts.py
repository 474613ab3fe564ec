"""The formats of runs, caches and recipes, damaged at random: bytes, and values of text that nobody expects."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from codd.errors import CoddError
from tests.support.mutations import BYTES

COUNT = max(1, int(os.environ.get("CODD_FUZZ", "100")) // 18)
"""Mutations of each of the eighteen files."""
ODD = [
    *(
        "null",
        "true",
        "[]",
        "{}",
        "-1",
        "0",
        "0.5",
        '""',
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "2024-99-99",
        "*a",
        "!!x",
    ),
    *(
        "1" + "0" * 30,
        "1" + "0" * 400,
        "9" * 5000,
        "0x" + "f" * 5000,
        "[" * 300 + "]" * 300,
        "[" * 3000,
        '{"a":' * 3000,
    ),
    *('"' + "x" * 10_000 + '"', '"\\ud800"', '"\\u0000"', '"../../evil"', '"-1"', '[{"a": [null, 1, "x"]}]'),
]
_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.e+-]*|[A-Za-z_][\w.-]*|\[[^\[\]]*\]|\{[^{}]*\}')


def substitute(content: bytearray, random: Random) -> None:
    """A value of text is another."""
    if found := list(_VALUE.finditer(content[:100_000])):
        begin, end = random.choice(found).span()
        content[begin:end] = random.choice(ODD).encode()


def _altered(path: Path) -> Iterator[str]:
    """Change a file several times, each time from what it was; yields how, and puts it back at the end."""
    original = path.read_bytes()
    try:
        for number in range(COUNT):
            random, content = Random(f"{path.name}/{number}"), bytearray(original)
            way = random.choice([*BYTES, *[substitute] * len(BYTES)])
            way(content, random)
            path.write_bytes(content)
            yield f"{path.name}: {way.__name__} {number}"
    finally:
        path.write_bytes(original)


def failures(path: Path, named: Path, load: Callable[[], Any], same: Any = None) -> list[str]:
    """Of mutations that are neither refused by an error that names the file nor harmless."""
    found = []
    for how in _altered(path):
        try:
            if load() != same and same is not None:
                found.append(f"{how}: loads as something else")
        except CoddError as error:
            text = str(error)
            if str(named) not in text or "\n" in text or len(text) > 2000:
                found.append(f"{how}: {text[:300]}")
        except Exception as error:
            found.append(f"{how}: {type(error).__name__}: {str(error)[:300]}")
    return found
