"""Random combinations of keywords against another validator, both ways, on all values of a small set."""

import itertools
import json
import os
import random
import warnings
from typing import Any

import jsonschema_rs
import pytest

from codd.constraints import JsonSchema
from codd.errors import EmptyLanguage

COUNT = int(os.environ.get("CODD_FUZZ", "20"))
SCALARS = [None, True, False, 0, 1, 2, 3, -1, 1.5, 0.25, 12, "", "a", "ab", "b1"]
SMALL = [1, 1.5, "a", None, [], [1], {"a": 1}]
ARRAYS = [[], *([item] for item in SMALL), *map(list, itertools.product(SMALL[:5], repeat=2)), [1, 1, "a"], [2, 1, 2]]
OBJECTS = [
    *({name: value} for name in ("a", "b", "cc") for value in SMALL),
    *(
        {one: v, other: w}
        for one, other in itertools.permutations(("a", "b", "cc"), 2)
        for v in SMALL[:4]
        for w in (1, "a")
    ),
    {},
    {"a": 1, "b": 1, "cc": 1},
    {"a": 1, "b": "a", "cc": None},
]
VALUES = [*SCALARS, *ARRAYS, *OBJECTS]
NAMED = {"properties": {"a": {}, "b": {}, "cc": {}}}  # all names have a place, so that each valid object has an order


def random_schema(rng: random.Random, depth: int = 2) -> Any:
    if rng.random() < 0.05:
        return rng.random() < 0.8
    schema: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        schema |= rng.choice(KEYWORDS if depth else PLAIN)(rng, depth - 1)
    return schema


def several(rng: random.Random, depth: int) -> list[Any]:
    return [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]


def names(rng: random.Random) -> list[str]:
    return rng.sample(("a", "b", "cc"), rng.randint(1, 2))


PLAIN = [
    lambda rng, _: {"type": rng.sample(("string", "number", "integer", "array", "object", "null", "boolean"), 2)},
    lambda rng, _: {"type": rng.choice(("string", "number", "integer", "array", "object"))},
    lambda rng, _: {"enum": rng.sample(VALUES, 4)},
    lambda rng, _: {"const": rng.choice(VALUES)},
    lambda rng, _: {rng.choice(("minimum", "exclusiveMinimum", "maximum")): rng.choice((0, 1, 1.5, -0.5, 0.25, 2))},
    lambda rng, _: {"maximum": rng.choice((2, 1.5, 11.9)), "exclusiveMaximum": rng.choice((3, 2, 1.5))},
    lambda rng, _: {"multipleOf": rng.choice((1, 2, 3, 0.5, 0.25))},
    lambda rng, _: {"minLength": rng.randint(0, 2)},
    lambda rng, _: {"maxLength": rng.randint(0, 2)},
    lambda rng, _: {"pattern": rng.choice(("a", "^a", "b.$", "^(?!a)", "^(?=.b)"))},
    lambda rng, _: {"minItems": rng.randint(0, 2)},
    lambda rng, _: {"maxItems": rng.randint(0, 2)},
    lambda rng, _: {"minProperties": rng.randint(0, 2)},
    lambda rng, _: {"maxProperties": rng.randint(0, 2)},
    lambda rng, _: {"required": names(rng)},
    lambda rng, _: {"dependentRequired": {rng.choice(("a", "b")): names(rng)}},
    lambda rng, _: {"uniqueItems": True, "items": {"enum": [1, "a", None]}},
]
KEYWORDS = [
    *PLAIN,
    *[lambda rng, depth: {"properties": {name: random_schema(rng, depth) for name in names(rng)}}] * 4,
    lambda rng, depth: {"additionalProperties": random_schema(rng, depth), "properties": {"a": True}},
    lambda rng, depth: {"patternProperties": {rng.choice(("^[ab]$", "c", "b")): random_schema(rng, depth)}},
    lambda rng, _: {"propertyNames": rng.choice(({"maxLength": 1}, {"enum": ["a", "cc"]}, {"not": {"const": "b"}}))},
    lambda rng, depth: {"dependentSchemas": {rng.choice(("a", "b")): random_schema(rng, depth)}},
    lambda rng, depth: {"items": random_schema(rng, depth)},
    lambda rng, depth: {"prefixItems": several(rng, depth)},
    lambda rng, depth: {"contains": random_schema(rng, depth), "minContains": rng.randint(0, 2)},
    lambda rng, depth: {"contains": random_schema(rng, depth), "maxContains": rng.randint(1, 2)},
    *(lambda rng, depth, word=word: {word: several(rng, depth)} for word in ("allOf", "anyOf", "oneOf", "oneOf")),
    *[lambda rng, depth: {"not": random_schema(rng, depth)}] * 2,
    lambda rng, depth: dict(zip(("if", "then", "else"), (random_schema(rng, depth) for _ in range(3)), strict=True)),
]


def orders(value: Any) -> list[str]:
    """An object's texts, one for each order of its properties."""
    if not isinstance(value, dict):
        return [json.dumps(value)]
    return [json.dumps(dict(order)) for order in itertools.permutations(value.items())]


@pytest.mark.parametrize("seed", range(COUNT))
def test_what_is_accepted_is_what_is_valid(seed, single_bytes):
    rng = random.Random(seed)
    schema = {**NAMED, "allOf": [random_schema(rng)]}
    valid = jsonschema_rs.Draft202012Validator(schema)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unique items in a branch that says nothing of them
        language = JsonSchema(schema, additional=True)
    narrowed = "uniqueItems" in language.source
    try:
        automaton = language.compile(single_bytes)
    except EmptyLanguage:
        assert not any(map(valid.is_valid, VALUES)), schema
        return
    for value in VALUES:
        right = valid.is_valid(value)
        took = [automaton.accepts(list(text.encode())) for text in orders(value)]
        assert right or not any(took), (schema, value)
        assert any(took) or not right or (narrowed and isinstance(value, list)), (schema, value)
