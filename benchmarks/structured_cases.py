"""Languages drawn from a seed, and a vocabulary as large as LLaDA's: what `structured.py` and tests are run on.

``random_regex`` gives a pattern and texts that match it, ``random_schema`` a JSON schema.
"""

import random
import re
from collections.abc import Callable
from typing import Any

from codd.constraints import Vocabulary

Sampler = Callable[[], str]
WORDS = ("red", "green", "blue", "Ω", "naïve", "a b", "3rd", "日本", "🙂", "x-y")
SETS = (
    ("[a-f]", "abcdef"),
    (r"\d", "0123456789"),
    (r"\w", "aZ_9"),
    ("[A-Zé]", "AZQé"),
    (r"[^\W\d]", "axZ_"),
    (r"\s", " \t"),
    ("[0-9a-f]", "09af"),
    ("[^,]", "a 7ß"),
    (".", "x 日."),
    (r"[+\-*/]", "+-*/"),
)
PATTERNS = (r"^[A-Z]{2}\d+$", "a|^b", r"\D\d$", r"^[^\s\"]+")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_regex(rng: random.Random, depth: int = 3) -> tuple[str, list[str]]:
    """A pattern, and some texts that it matches."""
    pattern, sample = _regex(rng, depth)
    return pattern, [sample() for _ in range(4)]


def _regex(rng: random.Random, depth: int) -> tuple[str, Sampler]:
    kind = rng.choice(("set", "word", "then", "then", "either", "repeat", "repeat") if depth else ("set", "word"))
    if kind == "set":
        pattern, members = rng.choice(SETS)
        return pattern, lambda: rng.choice(members)
    if kind == "word":
        word = rng.choice(WORDS)
        return re.escape(word), lambda: word
    if kind == "repeat":
        inner, sample = _regex(rng, depth - 1)
        least = rng.randrange(3)
        most = least + 1 + rng.randrange(3)
        mark = rng.choice(("*", "+", "?", f"{{{least},{most}}}", f"{{{most}}}", f"{{{least},}}"))
        low = {"*": 0, "+": 1, "?": 0}.get(mark[0], most if mark == f"{{{most}}}" else least)
        high = 1 if mark[0] == "?" else most
        lazy = rng.choice(("", "?"))
        return f"(?:{inner}){mark}{lazy}", lambda: "".join(sample() for _ in range(rng.randint(low, max(low, high))))
    parts = [_regex(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    if kind == "then":
        return "".join(pattern for pattern, _ in parts), lambda: "".join(sample() for _, sample in parts)
    return f"({'|'.join(pattern for pattern, _ in parts)})", lambda: rng.choice(parts)[1]()


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema with strings, enums, numbers, arrays and nesting."""
    kinds = ("string", "enum", "number", "integer", "boolean", "format", "pattern")
    kind = rng.choice((*kinds, "object", "object", "object", "array", "array", "anyOf", "nullable") if depth else kinds)
    return _SCHEMAS[kind](rng, depth - 1)


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    lengths = {"minLength": rng.randrange(3), "maxLength": rng.randint(3, 12)}
    return {"type": "string", **{name: lengths[name] for name in lengths if rng.random() < 0.5}}


def _number(rng: random.Random, kind: str) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    bounds = {"minimum": low, "maximum": low + rng.randrange(1000)}
    return {"type": kind, **{name: bounds[name] for name in bounds if rng.random() < 0.5}}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample([*WORDS, "name", "age", 'a"b', "tags"], rng.randint(1, 4))
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    closed = {"additionalProperties": False} if rng.random() < 0.5 else {}
    return {"type": "object", "properties": properties, "required": required, **closed}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    counts = {"minItems": rng.randrange(3), "maxItems": rng.randint(2, 4)}
    schema = {"type": "array", "items": random_schema(rng, depth)}
    return schema | {name: counts[name] for name in counts if rng.random() < 0.5}


def _nullable(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"oneOf": [{"type": "null"}, {"type": rng.choice(("string", "integer")), "description": "or null"}]}


_SCHEMAS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "string": _string,
    "enum": lambda rng, _: {"enum": rng.sample([*WORDS, 1, -2.5, True, None, [1, "b"], {"k": 1}], rng.randint(1, 4))},
    "number": lambda rng, _: _number(rng, "number"),
    "integer": lambda rng, _: _number(rng, "integer"),
    "boolean": lambda rng, _: {"type": "boolean"},
    "format": lambda rng, _: {"type": "string", "format": rng.choice(FORMATS)},
    "pattern": lambda rng, _: {"type": "string", "pattern": rng.choice(PATTERNS)},
    "object": _object,
    "array": _array,
    "anyOf": lambda rng, depth: {"anyOf": [random_schema(rng, depth) for _ in range(2)]},
    "nullable": _nullable,
}


def made_vocabulary(size: int, seed: int = 0) -> Vocabulary:
    """Byte-level tokens, all different: every byte, numbers, and made words, which repeat each other's beginnings.

    Lengths and kinds are roughly those of a large BPE vocabulary: most words begin with a space, some are code, some
    are of other scripts, cut anywhere.
    """
    rng = random.Random(seed)
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    tokens |= dict.fromkeys(f"{number:0{width}d}".encode() for width in (2, 3) for number in range(10**width))
    syllables = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s", "st")]
    marks = ['"', "'", "{", "}", "[", "]", "(", ")", ":", ",", ".", "_", "\n", "  ", "=", "/", "\\", "<", ">", "-"]
    while len(tokens) < size:
        kind = rng.random()
        if kind < 0.8:
            word = rng.choice((" ", " ", "")) + "".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 3, 3, 4))))
            token = (word.title() if rng.random() < 0.2 else word).encode()
        elif kind < 0.9:
            token = "".join(rng.choices(marks, k=rng.randint(2, 5))).encode()
        else:
            text = "".join(chr(rng.choice((0x430, 0x3B1, 0x4E00, 0xAC00)) + rng.randrange(24)) for _ in range(3))
            token = text.encode()[rng.randrange(3) :]
        tokens[token] = None
    return Vocabulary(tuple(tokens)[:size])
