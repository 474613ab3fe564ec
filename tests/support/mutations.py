"""Files damaged at random, the same way for the same seed: bytes, and the values of JSON."""

import copy
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

DEEP, DIGITS = "@deep@", "@digits@"
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        2_000_000,
        2**28,
        2**31,
        2**32,
        2**63,
        10**30,
        0.5,
        -0.5,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *("", "a", "\0", "\ud800", "🦀", "x" * 5000, "../x", "/etc/passwd", DEEP, DIGITS),
    *([], {}, [[]], [0], ["a"], {"a": 1}, {"content": "a", "id": 3}, list(range(300)), {"Regex": "(a+)+$"}),
)


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


def mutated(path: Path, random: Random) -> bytes:
    """The content of a file, damaged in a way that suits it."""
    whole = path.read_bytes()
    if random.random() < 0.5 and path.suffix in (".json", ".safetensors"):
        return (edit_json if path.suffix == ".json" else edit_header)(whole, random)
    content = bytearray(whole)
    random.choice(BYTES)(content, random)
    return bytes(content)
