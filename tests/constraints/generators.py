"""Regular expressions and JSON schemas drawn from a seed, with walks through the automata made of them.

``random_regex`` gives a pattern and texts that match it, ``random_schema`` a schema; a study draws more of the same.
"""

import random
import re
from collections.abc import Callable
from typing import Any

import torch

from codd.constraints import Automaton

Sampler = Callable[[], str]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
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
    "format": lambda rng, _: {
        "type": "string",
        "format": rng.choice(("date", "time", "date-time", "uuid", "ipv4", "email")),
    },
    "pattern": lambda rng, _: {
        "type": "string",
        "pattern": rng.choice((r"^[A-Z]{2}\d+$", "a|^b", r"\D\d$", r"^[^\s\"]+")),
    },
    "object": _object,
    "array": _array,
    "anyOf": lambda rng, depth: {"anyOf": [random_schema(rng, depth) for _ in range(2)]},
    "nullable": _nullable,
}


def walk(automaton: Automaton, rng: random.Random, most: int = 60) -> list[int]:
    """Random tokens that the automaton accepts, ``most`` of them at most unless the shortest text has more."""
    possible = automaton.possible(most)[:, automaton.start]
    while not possible.any():
        most *= 2
        possible = automaton.possible(most)[:, automaton.start]
    count = rng.choice(torch.nonzero(possible).flatten().tolist())
    rows, state, tokens = automaton.possible(count), automaton.start, []
    for left in reversed(range(count)):
        following = automaton.table[state]
        fitting = torch.nonzero((following >= 0) & rows[left][following.clamp(min=0)]).flatten().tolist()
        column = rng.choice(fitting)
        members = torch.nonzero(automaton.classes == column).flatten().tolist()
        tokens.append(rng.choice(members))
        state = int(following[column])
    return tokens
