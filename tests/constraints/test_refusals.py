"""What the room refuses, in one table of (call, words): the error says what was wrong, and where."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from codd.constraints import After, Automaton, Choice, JsonSchema, Regex, Template
from codd.errors import InvalidConstraint

PATTERNS = [
    ("a(?=b)", "lookahead"),
    ("(?<!a)b", "negative lookahead or lookbehind"),
    (r"(a)\1", "backreference"),
    ("(a)(?(1)b|c)", "conditional group"),
    ("(?>a)b", "atomic group"),
    ("a++", "possessive"),
    (r"a\bb", "word boundary"),
    ("a^b", "\\^ after the beginning"),
    ("a$b", "\\$ before the end"),
    ("(a", "missing \\)"),
    ("[z-a]", "bad character range"),
    ("(" * 5000 + ")" * 5000, "no regular expression"),
    ("(" * 350 + "a" + ")" * 350, "nested too deep"),
    (b"a", "a pattern is a str"),
]
SCHEMAS = [
    ({"properties": {"a/b": {"unevaluatedItems": False}}}, "#/properties/a~1b/unevaluatedItems: this keyword"),
    ({"type": "strnig"}, "#/type: known are"),
    ({"type": []}, "#/type: expected a list that is not empty"),
    ({"enum": []}, "#/enum: expected a list"),
    ({"properties": []}, "#/properties: expected an object"),
    ({"properties": {"a": 3}}, "#/properties/a: expected a schema"),
    ({"not": 3}, "#/not: expected a schema"),
    ({"allOf": [{}, {"anyOf": []}]}, "#/allOf/1/anyOf: expected a list that is not empty"),
    ({"properties": {"a": {}}, "required": [{}]}, "#/required: expected names of properties"),
    ({"dependentRequired": {"a": [1]}}, "#/dependentRequired/a: expected names"),
    ({"minLength": -1}, "#/minLength: expected a whole number"),
    ({"maxItems": 1.5}, "#/maxItems: expected a whole number"),
    ({"minimum": "1"}, "#/minimum: expected a number"),
    ({"multipleOf": 0}, "#/multipleOf: expected a number above 0"),
    ({"type": "number", "minimum": 1e-300}, "too large: it needs more than 40 digits"),
    ({"type": "number", "multipleOf": 7919}, "too large: it needs more than 2,000 remainders"),
    ({"pattern": "a(?=a)"}, "#/pattern: .*lookahead"),
    ({"patternProperties": {"(?<=a)": {}}}, "#/patternProperties/.*lookbehind"),
    ({"pattern": "(?i)a"}, "#/pattern: .*flags"),
    ({"pattern": 3}, "#/pattern: a pattern is a str"),
    ({"$ref": "https://example.com/a.json"}, r"#/\$ref: only references within"),
    ({"$ref": "#/$defs/a"}, r"#/\$ref: .* is not in the schema"),
    ({"$ref": 3}, r"#/\$ref: expected a text"),
    ("{", "no JSON"),
    ({"const": float("nan")}, "no JSON"),
]
TEMPLATES = [
    ("no slots", [], "a template has slots"),
    ("[MASK:0]", [], "a template has slots"),
    ("[MASK:2]", [None, Regex("a")], "a pattern for slot 1, but the template has 1"),
    ("[MASK:2]", {"name": Regex("a")}, "a pattern for slot 'name'"),
    ("[MASK:2]", [5], "a language or a regex, found 5"),
    ("[MASK:2]", 5, "a list of languages, found .*5"),
    (5, [], "a template is a text"),
    ("\ud800[MASK:2]", [], "half a surrogate pair"),
]
AUTOMATA = [
    (([[0, 1]],), "next states are from -1 to 0, found 1"),
    (([[-2]],), "from -1 to 0, found -2"),
    (([[0.5]],), "whole numbers, found shape"),
    (([0, 1],), "2 dimension"),
    (([[0], [0, 1]],), "next_states"),
    ((np.zeros((0, 3), int),), "a state and a token, found 0"),
    ((np.zeros((1, 0), int),), "a state and a token, found 1 and 0"),
    (([[0]], 1), "start are from 0 to 0, found 1"),
    (([[0]], "a"), "start is a whole number"),
    (([[0]], 0, [3]), "accepting states are from 0 to 0, found 3"),
]
ONE = Automaton([[0]], accepting=[0])


def refused() -> Iterator[tuple[Callable[[], object], str]]:
    yield from ((lambda pattern=pattern: Regex(pattern), words) for pattern, words in PATTERNS)
    yield from ((lambda schema=schema: JsonSchema(schema), words) for schema, words in SCHEMAS)
    yield from ((lambda given=given: Template(*given), words) for *given, words in TEMPLATES)
    yield from ((lambda given=given: Automaton(*given), words) for given, words in AUTOMATA)
    yield from ((lambda texts=texts: Choice(texts), "a list of texts") for texts in ([], "yes", [1], None, 5))
    yield lambda: After("", Regex("a")), "trigger is a text that is not empty"
    yield lambda: After("a", Regex("a"), until=""), "until is a text that is not empty"
    yield lambda: After("a", "b"), "after a trigger: a Regex, JsonSchema or Choice, found 'b'"
    yield lambda: ONE.accepts([1]), "tokens are from 0 to 0, found 1"
    yield lambda: ONE.with_end([]), "end_ids is empty"
    yield lambda: ONE.with_end([0], [7]), "pad_ids are from 0 to 0, found 7"
    yield lambda: Automaton.from_classes([[0]], [2]), "classes of tokens are from 0 to 0, found 2"


REFUSED = list(refused())


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_refused_says_why(call, words):
    with pytest.raises(InvalidConstraint, match=words):
        call()
