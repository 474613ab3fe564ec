import itertools
import json
import os
import random
from decimal import Decimal

import jsonschema_rs
import pytest

from codd.constraints import JsonSchema
from codd.constraints.expressions import Repeat
from codd.errors import EmptyLanguage, InvalidConstraint
from structured_cases import random_schema
from tests.support.generators import walk

COUNT = int(os.environ.get("CODD_FUZZ", "30"))
TREE = {
    "$defs": {"tree": {"properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "required": ["of"]}},
    "$ref": "#/$defs/tree",
}


def accepted(schema, vocabulary, *texts):
    automaton = JsonSchema(schema).compile(vocabulary)
    return [automaton.accepts(list(text.encode())) for text in texts]


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_schemas(seed, bundled, mini):
    rng = random.Random(seed)
    schema = random_schema(rng)
    automaton = JsonSchema(schema).compile(mini)
    valid = jsonschema_rs.validator_for(schema, validate_formats=True)
    for _ in range(3):
        text = bundled.decode(walk(automaton, rng, 60))
        valid.validate(json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        *(True, {}, {"type": "object"}, {"type": "array"}, {"type": ["string", "null"]}, TREE),
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": {"type": "string"}},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 1},
        {"type": "string", "pattern": r"[\"\\]\S"},
        {"allOf": [{"const": {"a": [1, {"b": None}]}}]},
        {"type": "number", "minimum": -3, "maximum": 2},
    ],
    ids=json.dumps,
)
def test_walks_are_valid(schema, bundled, mini):
    rng = random.Random(0)
    automaton = JsonSchema(schema).compile(mini)
    valid = jsonschema_rs.validator_for(schema)
    for _ in range(10):
        valid.validate(json.loads(bundled.decode(walk(automaton, rng, 40))))


def test_optional_properties_come_in_order_with_their_commas(single_bytes):
    for required in ([], ["b"], ["c"], ["a", "c"]):
        schema = {"properties": {name: {"const": 1} for name in "abc"}, "required": required}
        automaton = JsonSchema(schema).compile(single_bytes)
        for length in range(4):
            for names in itertools.permutations("abc", length):
                text = json.dumps(dict.fromkeys(names, 1), separators=(",", ":"))
                right = list(names) == sorted(names) and set(required) <= set(names)
                assert automaton.accepts(list(text.encode())) == right, (required, text)
                assert automaton.accepts(list(json.dumps(dict.fromkeys(names, 1)).encode())) == right
        assert not automaton.accepts(list(b'{"a":1,}'))


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-7, 7), (3, 1204), (-350, -9), (99, 101), (-1, 1000), (10, None)])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_numbers(low, high, kind, single_bytes):
    schema = {"type": kind, "minimum": low, **({} if high is None else {"maximum": high})}
    automaton = JsonSchema(schema).compile(single_bytes)
    last = 1200 if high is None else high
    for number in {*range(low - 12, low + 25), *range(last - 25, last + 12), *range(low, last, 17)}:
        for text in (f"{number}", f"{number}.5", f"{number}.0"):
            right = low <= float(text) and (high is None or float(text) <= high)
            took = automaton.accepts(list(text.encode()))
            if text.endswith(".0"):  # a bound itself is written without a fraction
                assert right or not took
            else:
                assert took == (right and (kind == "number" or "." not in text)), text


def parts_of(expression) -> int:
    """The nodes of an expression, each as often as it is repeated."""
    if isinstance(expression, Repeat):
        return 1 + (expression.most or expression.least + 1) * parts_of(expression.part)
    return 1 + sum(map(parts_of, getattr(expression, "parts", ())))


@pytest.mark.parametrize(
    ("low", "high", "states"),
    [(-(2**63), 2**63 - 1, 80), (0, 2**53, 40), (-(2**31), 2**31 - 1, 45), (0, 10**10, 21), (-(10**30), 10**30, 90)],
)
def test_bounds_of_integers_take_work_by_their_digits(low, high, states, single_bytes):
    schema, digits = {"type": "integer", "minimum": low, "maximum": high}, len(str(max(-low, high)))
    assert parts_of(JsonSchema(schema).expression()) < 20 * digits**2
    assert JsonSchema(schema).compile(single_bytes).num_states <= states
    numbers = [low - 1, low, low + 1, high - 1, high, high + 1, 10 * high, 7]
    assert accepted(schema, single_bytes, *map(str, numbers)) == [low <= number <= high for number in numbers]


def test_small_ranges_of_integers_are_exact(single_bytes):
    rng = random.Random(0)
    for size in (3, 30, 200, 1100):
        for _ in range(6):
            low, high = sorted(rng.randint(-size, size) for _ in range(2))
            schema, numbers = {"type": "integer", "minimum": low, "maximum": high}, range(-size - 2, size + 3)
            assert accepted(schema, single_bytes, *map(str, numbers)) == [low <= n <= high for n in numbers]


def test_exclusive_bounds_of_integers(single_bytes):
    schema = {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 5}
    assert accepted(schema, single_bytes, "2", "3", "4", "5") == [False, True, True, False]


@pytest.mark.parametrize("step", ["1", "3", "7", "0.5", "0.25", "1.5", "0.07"])
def test_multiples(step, single_bytes):
    texts = [str(n) for n in range(-30, 31)] + [
        f"{n}.{end}" for n in (0, 1, 12) for end in ("0", "5", "50", "25", "05", "07")
    ]
    right = [Decimal(text) % Decimal(step) == 0 for text in texts]
    assert accepted({"type": "number", "multipleOf": float(step)}, single_bytes, *texts) == right
    assert 0 < sum(right) < len(right)


def test_what_is_no_json_is_refused(single_bytes):
    wrong = [
        "01",
        "+1",
        "1.",
        ".5",
        "1e999",
        "NaN",
        "True",
        '"\n"',
        '"\\x"',
        '"',
        "[1,]",
        '{"a" :1}',
        "[1,  2]",
        " 1",
        "",
    ]
    assert not any(accepted(True, single_bytes, *wrong))
    right = ['"a\\n\\"\\\\é🙂"', "-0.5e+10", '[1, {"a":[]}]', "null", '{"a":1, "a":2}']
    assert all(accepted(True, single_bytes, *right))


def test_a_property_may_have_an_empty_name(single_bytes):
    schema = {"properties": {"": {"const": 1}}, "patternProperties": {"a": {"const": 2}}}
    assert accepted(schema, single_bytes, '{"":1,"a":2}', '{"":2}', '{"b":2}') == [True, False, False]


def test_lengths_count_characters_not_bytes(single_bytes):
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    assert accepted(schema, single_bytes, '"é"', '"é日"', '"🙂\\n\\""', '"abcd"') == [False, True, True, False]


def test_patterns_are_looked_for_within_the_string(single_bytes):
    assert accepted({"pattern": "b"}, single_bytes, '"abc"', '"ac"') == [True, False]
    assert accepted({"pattern": "^b|c$"}, single_bytes, '"bx"', '"xc"', '"xbx"') == [True, True, False]
    assert accepted({"pattern": r"^(\d+)?$|^$"}, single_bytes, '""', '"12"', '"1x"') == [True, True, False]
    assert accepted({"pattern": "(^[^5]*$)|7"}, single_bytes, '"12"', '"57"', '"5"') == [True, True, False]
    assert accepted({"pattern": "^(?!b$)(?=.c|b).*$"}, single_bytes, '"b"', '"bc"', '"ac"', '"a"') == [
        False,
        True,
        True,
        False,
    ]
    assert accepted({"pattern": r"^\d$"}, single_bytes, '"1"', '"٣"', '"1\\n"') == [True, False, False]


@pytest.mark.parametrize("form", ["date", "time", "date-time", "uuid", "ipv4", "email"])
def test_formats_are_valid(form, bundled, mini):
    schema = {"type": "string", "format": form}
    automaton, rng = JsonSchema(schema).compile(mini), random.Random(0)
    valid = jsonschema_rs.validator_for(schema, validate_formats=True)
    for _ in range(20):
        valid.validate(json.loads(bundled.decode(walk(automaton, rng))))


def test_leap_days(single_bytes):
    dates = ["2024-02-29", "2023-02-29", "2000-02-29", "1900-02-29", "2023-04-31", "2023-12-31"]
    right = [True, False, True, False, False, True]
    assert accepted({"format": "date"}, single_bytes, *(f'"{date}"' for date in dates)) == right


def test_definitions_that_contain_themselves_end(single_bytes):
    deep = ['{"of":[]}', '{"of":[{"of":[]}]}', '{"of":[{"of":[{"of":[]}]}]}', '{"of":[{"of":[{"of":[{"of":[]}]}]}]}']
    assert accepted(TREE, single_bytes, *deep) == [True, True, True, False]
    with pytest.raises(EmptyLanguage, match="no sequence"):
        JsonSchema({"$ref": "#"}).compile(single_bytes)


def test_one_of_takes_what_is_plainly_apart(single_bytes):
    kinds = [{"properties": {"kind": {"const": kind}}, "required": ["kind"], "type": "object"} for kind in "ab"]
    assert accepted({"oneOf": kinds}, single_bytes, '{"kind":"a"}', '{"kind":"b"}', "{}") == [True, True, False]
    schema = {"$defs": {"n": {"type": "number"}}, "oneOf": [{"enum": ["x", None]}, {"$ref": "#/$defs/n"}]}
    assert accepted(schema, single_bytes, '"x"', "1.5", "null", "true") == [True, True, True, False]


def test_annotations_are_ignored_and_named_in_one_warning(single_bytes):
    schema = {"x-order": 1, "properties": {"a": {"type": "string", "format": "color", "self": {}}}, "title": "T"}
    with pytest.warns(UserWarning, match="JSON schema: not followed are #/x-order, .*format 'color', .*self") as caught:
        language = JsonSchema(schema)
    assert len(caught) == 1
    assert language.compile(single_bytes).accepts(list(b'{"a":"x"}'))
    with pytest.raises(InvalidConstraint, match="strict"):
        JsonSchema(schema, strict=True)
    assert JsonSchema({"title": "T", "type": "null"}, strict=True) != JsonSchema({"title": "T", "type": "null"})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"minItems": 3, "maxItems": 2},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": ["a", "b"], "not": {"enum": ["b", "a"]}},
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [{"const": [1]}, {"const": [1.0]}]},
        {"required": ["a"], "properties": {"a": False}},
    ],
    ids=str,
)
def test_schemas_without_values_are_named(schema, single_bytes):
    with pytest.raises(EmptyLanguage, match="no sequence"):
        JsonSchema(schema).compile(single_bytes)


def test_deep_and_wide_schemas_end_in_an_error(mini):
    nested: dict = {"type": "integer"}
    for _ in range(300):
        nested = {"type": "array", "items": nested}
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(500)} | {"d500": True}
    many = {f"p{i}": {"$ref": "#"} for i in range(30)}
    for schema in (nested, {"$defs": chain, "$ref": "#/$defs/d0"}):
        with pytest.raises(InvalidConstraint, match="nested"):
            JsonSchema(schema)
    with pytest.raises(InvalidConstraint, match="too large"):
        JsonSchema(
            {"properties": {f"p{i}": {"type": "array", "minItems": 300, "items": {"$ref": "#"}} for i in range(9)}}
        )
    with pytest.raises(InvalidConstraint, match="alternatives"):
        JsonSchema(
            {"pattern": f"(a|{'|'.join(f'^{i}' for i in range(50))})b({'|'.join(f'{i}$' for i in range(50))}|a)"}
        )
    assert JsonSchema({"pattern": "(" * 100 + "^a" + ")" * 100}).compile(mini).num_states < 20
    assert JsonSchema({"properties": many}).compile(mini).num_states > 30


def test_a_schema_can_be_text_and_a_key():
    assert JsonSchema('{"type": "null"}') == JsonSchema({"type": "null"})
    assert len({JsonSchema(True), JsonSchema(True), JsonSchema(False)}) == 2
    assert JsonSchema(True).schema is True
