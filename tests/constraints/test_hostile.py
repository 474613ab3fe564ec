"""Patterns and schemas that nobody means well with: each one is compiled or refused with an error of our own."""

import random
import resource
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from codd.constraints import After, Choice, JsonSchema, Language, Regex, Template, Vocabulary
from codd.errors import CoddError

COUNTS = (0, 1, 2, 3, 5, 17, 100, 1000, 65_536, 10**6, 2**32 - 2, 2**32, 10**30)
CHARACTERS = ("a", "b", "0", " ", "\n", "é", "ß", "İ", "語", "🙂", "\u0301", "\x00", "\u2028", "\ufeff", "-", "/", '"')
PARTS = r"""
\d \D \w \W \s \S . [^\W\d] [\s\S] [à-ÿ] [一-鿿] [^\x00-\U0010ffff]
( ) [ ] { } * + ? | \ (? (?P< (?P<a> (?P=a) (?<n> [z-a] [a- a{2,1} a{, ** \1 \99 \Q \p{L} \u12 \x \N{x} [[:alpha:]]
(?=a) (?!a) (?<=a) (?<!a+) (?>a) a++ (?(1)a|b) \b \B \A \Z ^ $ (?# (?i) (?i:a) (?a) (?u) (?L) (?x) (?s-i:.) (?au)
(?-u:a) (){99999} ((a*)*)*
"""
CLASSES, BROKEN = PARTS.split()[:12], [*PARTS.split()[12:], "\ud800"]
WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, -1e-300, 10**400, "", "a", "\ud800", [], [[]], {}, {"a": 1}, [None]),
    *(float("nan"), float("inf"), b"a", {1, 2}, {1: 2}, {(1, 2): 3}, object(), 1 << 20_000),
)
REFERENCES = ("#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#a", "#/none", "x#", "http://b/", "#/$defs/a/%zz")
TYPES = ("object", "array", "string", "number", "integer", "null", ["array", "object"], "odd")
COUNTED = [f"{side}{what}" for side in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")]


def pattern(rng: random.Random, depth: int = 3) -> str:
    """A regular expression, often a wrong one."""
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return rng.choice((rng.choice(CHARACTERS), rng.choice(CLASSES), rng.choice(CLASSES)))
    if kind < 0.26:
        return rng.choice(BROKEN)
    inner = pattern(rng, depth - 1)
    if kind < 0.45:
        return inner + pattern(rng, depth - 1)
    if kind < 0.6:
        return f"({inner}|{pattern(rng, depth - 1)}|{pattern(rng, depth - 1)})"
    if kind < 0.75:
        return f"(?:{inner}){rng.choice(('*', '+', '?', '*?', '{2,}'))}"
    if kind < 0.86:
        return f"(?:{inner}){{{rng.choice(COUNTS[:7])},{rng.choice(COUNTS)}}}"
    if kind < 0.92:
        return f"[{rng.choice(('', '^'))}{''.join(rng.choices((*CHARACTERS, *CLASSES[:6]), k=rng.randint(1, 60)))}]"
    if kind < 0.96:
        count = rng.choice((10, 60, 200, 500, 3000))
        opening = rng.choice(("(", "(?:", "(a|", "(?:x*"))
        return opening * count + inner + rng.choice((")", ")*", ")?")) * count
    if kind < 0.98:
        return "|".join(inner[:100] + str(i) for i in range(rng.choice((100, 1000, 4000))))
    return (inner[:100] * rng.choice((50, 1000, 30_000)))[:100_000]


def count(rng: random.Random) -> Any:
    return rng.choice(COUNTS[:7]) if rng.random() < 0.8 else rng.choice((*COUNTS, -1, 2.5, "3", None))


def values(rng: random.Random) -> list[Any]:
    """Constants, at times thousands of them."""
    size = rng.choice((1, 2, 5, 30, 30, 3000))
    if size == 3000:
        return [rng.choice((f"{i}\n", i, i / 7, [i], {"a": i})) for i in range(size)]
    return [
        rng.choice(("a", "é\ud800", 1, 1.0, -0.0, 1e300, None, True, [1, [2]], {"a": {"b": 1}}, i)) for i in range(size)
    ]


def numbers(rng: random.Random) -> Any:
    return rng.choice((0, 1, -1, 7, 0.1, 1e-9, 1e-300, 1e308, 10**30, 3.14159265358979, 12345678901234567890))


def schema(rng: random.Random, depth: int = 3) -> Any:
    """A JSON schema, often a wrong one."""
    if depth == 0:
        return rng.choice((True, False, {}, {"type": "string"}, {"type": "integer"}, {"$ref": rng.choice(REFERENCES)}))

    def inner() -> Any:
        return rng.choice(WRONG) if rng.random() < 0.01 else schema(rng, depth - 1)

    def several() -> list[Any]:
        return [inner() for _ in range(rng.choice((1, 2, 3, 8)))] * rng.choice((1, 1, 1, 30))

    def named() -> dict[str, Any]:
        return {
            rng.choice(("a", "b", "c", "", "é", "a/b~", '"')) + str(i): inner() for i in range(rng.choice((1, 3, 12)))
        }

    makers: dict[str, Callable[[], Any]] = {
        "type": lambda: rng.choice(TYPES),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains", "additionalProperties"), inner),
        **dict.fromkeys(("properties", "$defs", "dependentSchemas"), named),
        **dict.fromkeys(COUNTED, lambda: count(rng)),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMaximum", "multipleOf"), lambda: numbers(rng)),
        "enum": lambda: values(rng),
        "const": lambda: values(rng)[0],
        "pattern": lambda: pattern(rng, 2),
        "patternProperties": lambda: {pattern(rng, 2): inner() for _ in range(rng.choice((1, 2, 5)))},
        "propertyNames": inner,
        "required": lambda: rng.choices(("a0", "b1", "c2", "x"), k=rng.choice((0, 1, 3, 500))),
        "uniqueItems": lambda: True,
        "unevaluatedProperties": lambda: rng.choice((True, False, {})),
        "$ref": lambda: rng.choice(REFERENCES),
        "$id": lambda: rng.choice(("http://b/", "x", "")),
        "$anchor": lambda: "a",
        "format": lambda: rng.choice(("date", "uri", "ipv6", "regex", "odd", 5)),
    }
    chosen = rng.sample(sorted(makers), rng.choice((1, 2, 3, 5, 9)))
    return {word: rng.choice(WRONG) if rng.random() < 0.01 else makers[word]() for word in chosen}


def nested(rng: random.Random) -> Any:
    """A schema that is very deep, or a value within itself."""
    built: Any = {}
    word = rng.choice(("items", "not", "properties", "allOf", "anyOf", "if", "additionalProperties", "const"))
    for _ in range(rng.choice((20, 60, 100, 900, 5000))):
        built = {
            word: {"a": built} if word == "properties" else [built, built] if word in ("allOf", "anyOf") else built
        }
    if rng.random() < 0.2:
        built[word] = built
    return built


def rooted(rng: random.Random) -> Any:
    """A schema with definitions that hold each other."""
    built = schema(rng)
    if isinstance(built, dict) and rng.random() < 0.7:
        built["$defs"] = {name: schema(rng, 2) for name in ("a", "b")}
    return built


def language(number: int) -> Language | Template:
    """The hostile constraint of a number; making it may raise already."""
    rng = random.Random(number)
    kind = rng.random()
    if kind < 0.4:
        return Regex(pattern(rng, 4), unicode=rng.random() < 0.5)
    if kind < 0.85:
        return JsonSchema(rooted(rng), additional=rng.random() < 0.3, strict=rng.random() < 0.1)
    if kind < 0.92:
        return JsonSchema(nested(rng))
    if kind < 0.94:
        return Choice([rng.choice(CHARACTERS) * rng.choice((1, 10, 1000)) for _ in range(rng.choice((1, 10, 2000)))])
    if kind < 0.97:
        return After(rng.choice(CHARACTERS) * rng.choice((1, 10, 1000, 40_000)), Regex(pattern(rng, 2)))
    return Template(f"{pattern(rng, 2)}[MASK:{rng.choice((1, 5, 100, 99_999))}]", [pattern(rng, 2)])


def outcome(number: int, vocabulary: Vocabulary) -> str | None:
    """The error that a hostile constraint was refused with; None: it was compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keywords that are not followed
        try:
            language(number).compile(vocabulary)
        except CoddError as error:
            return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 5000, 250))
def test_hostile_constraints_are_compiled_or_refused(first, mini):
    for number in range(first, first + 250):
        refusal = outcome(number, mini)
        assert refusal is None or refusal, number
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 * 2**20, "KiB: memory"
