"""Files damaged at random, the same way for the same seed: bytes, the values of JSON, values of text."""

import copy
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from codd.errors import CoddError

DEEP, DIGITS = "@deep@", "@digits@"
NUMBERS = (0, 1, -1, 7, 2_000_000, 2**28, 2**31, 2**32, 2**63, 10**30, 0.5, -0.5, 1e308, math.nan, math.inf)
TEXTS = ("", "a", "\0", "\ud800", "🦀", "x" * 5000, "../x", "/etc/passwd", DEEP, DIGITS)
CONTAINERS: tuple[Any, ...] = ([], {}, [[]], [0], ["a"], {"a": 1}, {"content": "a", "id": 3}, list(range(300)))
ODD: tuple[Any, ...] = (None, True, False, *NUMBERS, *TEXTS, *CONTAINERS, {"Regex": "(a+)+$"})
ODD_TEXTS = (
    *("null", "true", "[]", "{}", "-1", "0", "0.5", '""', "NaN", "Infinity", "-Infinity", "1e999", "2024-99-99"),
    *("*a", "!!x", '"\\ud800"', '"\\u0000"', '"../../evil"', '"-1"', '[{"a": [null, 1, "x"]}]'),
    *("1" + "0" * 30, "1" + "0" * 400, "9" * 5000, "0x" + "f" * 5000),
    *("[" * 300 + "]" * 300, "[" * 3000, '{"a":' * 3000, '"' + "x" * 10_000 + '"'),
)
COUNT = max(1, int(os.environ.get("CODD_FUZZ", "100")) // 18)
"""Alterations of each of the eighteen files of runs, caches and recipes."""
_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.e+-]*|[A-Za-z_][\w.-]*|\[[^\[\]]*\]|\{[^{}]*\}')


def flip(content: bytearray, random: Random) -> None:
    """Change a few bits."""
    for _ in range(random.choice((1, 1, 1, 4))):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def truncate(content: bytearray, random: Random) -> None:
    """Leave out the end."""
    del content[random.randrange(len(content)) :]


def clear(content: bytearray, random: Random) -> None:
    """Put zeros in place of a part."""
    part = _part(content, random)
    content[part] = bytes(part.stop - part.start)


def repeat(content: bytearray, random: Random) -> None:
    """Put a part in once more, or in place of another."""
    part, at = _part(content, random), random.randrange(len(content))
    content[at : at + random.choice((0, part.stop - part.start))] = content[part]


def leave_out(content: bytearray, random: Random) -> None:
    """Leave out a part."""
    del content[_part(content, random)]


def _part(content: bytearray, random: Random) -> slice:
    start = random.randrange(len(content))
    return slice(start, min(len(content), start + random.choice((1, 8, 100, 5000))))


BYTES: tuple[Callable[[bytearray, Random], None], ...] = (flip, truncate, clear, repeat, leave_out)


def edit_json(text: bytes, random: Random) -> bytes:
    """Replace, remove or copy values anywhere in a JSON text."""
    content = json.loads(text)
    for _ in range(random.choice((1, 1, 3))):
        node = random.choice([node for node in _containers(content) if node])
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key, other = random.choice(keys), random.choice(keys)
        if random.random() < 0.7:
            node[key] = copy.deepcopy(random.choice(ODD))
        elif random.random() < 0.5:
            node[key] = copy.deepcopy(node[other])
        elif len(node) > 1:
            del node[key]
    depth = random.choice((50, 100, 900, 100_000))
    deep = random.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
    return json.dumps(content).replace(f'"{DEEP}"', deep).replace(f'"{DIGITS}"', "9" * 5000).encode()


def _containers(node: Any) -> Iterator[Any]:
    if isinstance(node, dict | list):
        yield node
        for value in node.values() if isinstance(node, dict) else node:
            yield from _containers(value)


def edit_header(content: bytes, random: Random) -> bytes:
    """Change the values in the header of a safetensors file, and in the configuration that its metadata may hold."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    inner = header.get("__metadata__", {}).get("codd_config")
    if inner and random.random() < 0.5:
        header["__metadata__"]["codd_config"] = edit_json(inner.encode(), random).decode()
        text = json.dumps(header).encode()
    else:
        text = edit_json(json.dumps(header).encode(), random)
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def substitute(content: bytearray, random: Random) -> None:
    """A value of text is another."""
    if found := list(_VALUE.finditer(content[:100_000])):
        begin, end = random.choice(found).span()
        content[begin:end] = random.choice(ODD_TEXTS).encode()


def mutated(path: Path, random: Random) -> bytes:
    """The content of a file, damaged in a way that suits it."""
    whole = path.read_bytes()
    if random.random() < 0.5 and path.suffix in (".json", ".safetensors"):
        return (edit_json if path.suffix == ".json" else edit_header)(whole, random)
    content = bytearray(whole)
    text = [substitute] * len(BYTES) if path.suffix in (".jsonl", ".yaml") else []
    random.choice([*BYTES, *text])(content, random)
    return bytes(content)


def failures(path: Path, named: Path, load: Callable[[], Any], same: Any = None) -> list[str]:
    """Of mutations that are neither refused by an error that names the file nor harmless."""
    whole, found = path.read_bytes(), []
    for number in range(COUNT):
        path.write_bytes(mutated(path, Random(f"{path.name}/{number}")))
        try:
            if load() != same and same is not None:
                found.append(f"number {number}: loads as something else")
        except CoddError as error:
            text = str(error)
            if str(named) not in text or "\n" in text or len(text) > 2000:
                found.append(f"number {number}: {text[:300]}")
        except Exception as error:
            found.append(f"number {number}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            path.write_bytes(whole)
    return found
