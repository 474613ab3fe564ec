"""JSON schemas as regular expressions: the texts of the values that are valid, one way to write each kind of them.

What is written is compact, with at most one space after a comma or colon. Objects have the properties that the schema
names, in its order, and no others. A keyword that is not followed exactly is an error, never ignored.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from codd.constraints.determinism import too_large
from codd.constraints.expressions import (
    ANY,
    EMPTY,
    NOTHING,
    Chars,
    Either,
    Expression,
    Ranges,
    Repeat,
    Then,
    chars,
    complement,
    intersection,
    optional,
    text,
    then,
)
from codd.constraints.syntax import parse, parse_search
from codd.errors import InvalidConstraint, shown

ANY_DEPTH = 3
"""How deep arrays and objects may nest in a value that the schema leaves open."""
REF_DEPTH = 3
"""How often a definition may contain itself."""

_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
_TYPED = set().union(*_OF_TYPE.values())
_WHOLE = {"enum", "const", "anyOf", "oneOf", "allOf", "$ref"}  # each says all, and stands with `type` at most

_SPACE = optional(text(" "))
_COMMA, _COLON = then(",", _SPACE), then(":", _SPACE)
_DIGIT = chars("0123456789")
_DIGITS = Repeat(_DIGIT, 1, None)
_NATURAL = Either((text("0"), then(chars("123456789"), Repeat(_DIGIT, 0, None))))
_INTEGER = then(optional(text("-")), _NATURAL)
_EXPONENT = then(chars("eE"), optional(chars("+-")), Repeat(_DIGIT, 1, 2))  # more would not fit a double
_NUMBER = then(_INTEGER, optional(then(".", _DIGITS)), optional(_EXPONENT))
_DATE = (
    r"\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"([A-Za-z0-9][._+-]?){0,15}[A-Za-z0-9]@([A-Za-z0-9]-?){0,15}[A-Za-z0-9](\.[A-Za-z]{2,6}){1,2}",
}
_ESCAPES = {c: json.dumps(c)[1:-1] for c in '"\\\b\f\n\r\t'}
_PLAIN = complement([(0, 0x1F), *((ord(c), ord(c)) for c in _ESCAPES)])
_MAX_BOUND = 10**30
_MAX_DEPTH = 64
_MAX_PARTS = 10_000


def expression(schema: Any) -> Expression:
    """The texts of the values that a schema (a dict or bool) allows; InvalidConstraint names the part that is wrong."""
    return _Schemas(schema).of(schema, "#")


class _Schemas:
    """Translates the parts of one schema; a path says where a part stands ("#/properties/name")."""

    def __init__(self, root: Any):
        self._root = root
        self._open: dict[str, int] = {}
        self._known: dict[tuple[Any, ...], Expression] = {}
        self._parts = 0

    def of(self, schema: Any, path: str) -> Expression:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise too_large("parts of a schema", _MAX_PARTS)
        if schema is True:
            return _any_value(ANY_DEPTH)
        if schema is False:
            return NOTHING
        if not isinstance(schema, dict):
            raise _wrong(path, f"expected a schema (an object or a boolean), found {shown(schema)}")
        if path.count("/") > 2 * _MAX_DEPTH:
            raise _wrong("#", f"nested more than {_MAX_DEPTH} deep")
        if unknown := schema.keys() - _ANNOTATIONS - _TYPED - _WHOLE - {"type"}:
            raise _wrong(f"{path}/{min(unknown)}", "this keyword is not supported")
        whole = sorted(schema.keys() & _WHOLE)
        if not whole:
            return Either(tuple(self._of_type(kind, schema, path) for kind in _types(schema, path)))
        beside = schema.keys() - _ANNOTATIONS - {whole[0]}
        if beside - ({"type"} if whole[0] in ("enum", "const") else set()):
            raise _wrong(f"{path}/{whole[0]}", f"not supported beside {', '.join(sorted(beside))}")
        return self._of_whole(whole[0], schema, path)

    def _of_whole(self, keyword: str, schema: dict[str, Any], path: str) -> Expression:
        where = f"{path}/{keyword}"
        if keyword == "$ref":
            return self._of_reference(schema["$ref"], where)
        if keyword in ("enum", "const"):
            values = _list(schema["enum"], where) if keyword == "enum" else [schema["const"]]
            kinds = _types(schema, path) if "type" in schema else list(_OF_TYPE)
            return Either(tuple(_literal(value) for value in values if any(_is(value, kind) for kind in kinds)))
        branches = _list(schema[keyword], where)
        if keyword == "allOf" and len(branches) > 1:
            raise _wrong(where, "allOf is supported with one schema only")
        read = Either(tuple(self.of(branch, f"{where}/{i}") for i, branch in enumerate(branches)))
        if keyword == "oneOf" and not _plainly_apart(branches):
            for i, one in enumerate(branches):
                for j, other in enumerate(branches[:i]):
                    if not self._disjoint(one, other):
                        raise _wrong(where, f"a value might be valid for both {j} and {i}: use anyOf if it may")
        return read

    def _of_reference(self, reference: Any, path: str) -> Expression:
        target = self._resolved(reference, path)
        if self._open.get(reference, 0) >= REF_DEPTH:
            return NOTHING
        if sum(self._open.values()) > _MAX_DEPTH:
            raise _wrong(path, f"more than {_MAX_DEPTH} references within each other")
        key = (reference, *sorted(self._open.items()))
        if key not in self._known:
            self._open[reference] = self._open.get(reference, 0) + 1
            self._known[key] = self.of(target, reference)
            self._open[reference] -= 1
        return self._known[key]

    def _resolved(self, reference: Any, path: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _wrong(path, f"only references within the schema (#/...) are supported, found {shown(reference)}")
        target = self._root
        for step in reference.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or step not in target:
                raise _wrong(path, f"{shown(reference)} is not in the schema")
            target = target[step]
        return target

    def _disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether it is plain that no value is valid for both: other types, other constants, or such a property."""
        if not isinstance(one, dict) or not isinstance(other, dict) or depth > _MAX_DEPTH:
            return False
        if "$ref" in one:
            return self._disjoint(self._resolved(one["$ref"], "#"), other, depth + 1)
        if "$ref" in other:
            return self._disjoint(other, one, depth + 1)
        values, others = _constants(one), _constants(other)
        if values is not None and others is not None:
            return values.isdisjoint(others)
        if all("type" in s or _constants(s) is not None for s in (one, other)):
            kinds, rest = (_kinds(s) for s in (one, other))
            if kinds.isdisjoint(rest):
                return True
        properties = [s.get("properties", {}) if s.get("type") == "object" else {} for s in (one, other)]
        shared = set(one.get("required", ())) & set(other.get("required", ())) & set(properties[0]) & set(properties[1])
        return any(self._disjoint(properties[0][name], properties[1][name], depth + 1) for name in shared)

    def _of_type(self, kind: str, schema: dict[str, Any], path: str) -> Expression:
        if kind == "object":
            return self._object(schema, path)
        if kind == "array":
            return self._array(schema, path)
        if kind == "string":
            return _string(schema, path)
        if kind in ("number", "integer"):
            return _number(kind, schema, path)
        return text("null") if kind == "null" else Either((text("true"), text("false")))

    def _object(self, schema: dict[str, Any], path: str) -> Expression:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise _wrong(f"{path}/properties", f"expected an object, found {shown(properties)}")
        if lacking := [name for name in _list(required, f"{path}/required", 0) if name not in list(properties)]:
            raise _wrong(f"{path}/required", f"properties says nothing of {shown(lacking[0])}")
        others = schema.get("additionalProperties", True)
        if not properties:
            if others is False:
                return text("{}")
            inner = _any_value(ANY_DEPTH - 1) if others is True else self.of(others, f"{path}/additionalProperties")
            return _enclosed("{", then(_STRING, _COLON, inner), "}")
        members = []
        for name, inner in properties.items():
            value = self.of(inner, f"{path}/properties/{name.replace('/', '~1')}")
            members.append((then(_literal(name), _COLON, value), name in required))
        return then("{", _members(members), "}")

    def _array(self, schema: dict[str, Any], path: str) -> Expression:
        if schema.get("uniqueItems", False) is not False:
            raise _wrong(f"{path}/uniqueItems", "not supported: an automaton cannot remember all items")
        least, most = _counts(schema, path, "minItems", "maxItems")
        each = self.of(schema["items"], f"{path}/items") if "items" in schema else _any_value(ANY_DEPTH - 1)
        leading = _list(schema["prefixItems"], f"{path}/prefixItems") if "prefixItems" in schema else []
        items = [self.of(inner, f"{path}/prefixItems/{i}") for i, inner in enumerate(leading)] or [each]
        if most is not None:
            items = items[:most]
        count = len(items)
        rest: Expression = Repeat(then(_COMMA, each), max(least - count, 0), None if most is None else most - count)
        for i in reversed(range(count)):
            rest = then(_COMMA if i else "", items[i], rest)
            rest = rest if i < least else optional(rest)
        return then("[", rest if count else EMPTY, "]")


def _members(members: Sequence[tuple[Expression, bool]]) -> Expression:
    """Members in order with commas between them, of which those that are not required may be left out."""
    before: list[Expression] = []
    for i, (member, required) in enumerate(members):
        if required:
            after = (then(_COMMA, m) if needed else optional(then(_COMMA, m)) for m, needed in members[i + 1 :])
            return Then((*(optional(then(m, _COMMA)) for m in before), member, *after))
        before.append(member)
    firsts = (Then((m, *(optional(then(_COMMA, n)) for n in before[i + 1 :]))) for i, m in enumerate(before))
    return optional(Either(tuple(firsts)))


def _enclosed(opening: str, item: Expression, closing: str) -> Expression:
    return then(opening, optional(then(item, Repeat(then(_COMMA, item), 0, None))), closing)


def _any_value(depth: int) -> Expression:
    """Any JSON value, with arrays and objects nested at most ``depth`` deep."""
    plain: list[Expression] = [_STRING, _NUMBER, text("true"), text("false"), text("null")]
    if depth > 0:
        inner = _any_value(depth - 1)
        plain += [_enclosed("[", inner, "]"), _enclosed("{", then(_STRING, _COLON, inner), "}")]
    return Either(tuple(plain))


def _inside(part: Expression) -> Expression:
    """The same texts as they are written within a JSON string; control characters without a short escape left out."""
    if isinstance(part, Repeat):
        return Repeat(_inside(part.part), part.least, part.most)
    if isinstance(part, Then):
        return Then(tuple(map(_inside, part.parts)))
    if isinstance(part, Either):
        return Either(tuple(map(_inside, part.parts)))
    escaped = (text(escape) for c, escape in _ESCAPES.items() if _holds(part.ranges, ord(c)))
    return Either((Chars(intersection(part.ranges, _PLAIN)), *escaped))


def _holds(ranges: Ranges, point: int) -> bool:
    return any(first <= point <= last for first, last in ranges)


def _string(schema: Mapping[str, Any], path: str) -> Expression:
    given = [name for name in ("pattern", "format", "minLength", "maxLength") if name in schema]
    if len(given) > 1 and given[0] in ("pattern", "format"):
        raise _wrong(f"{path}/{given[0]}", f"not supported beside {given[1]}")
    if "pattern" in schema:
        try:
            return then('"', _inside(parse_search(schema["pattern"])), '"')
        except InvalidConstraint as error:
            raise _wrong(f"{path}/pattern", str(error).removesuffix(".")) from error
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise _wrong(f"{path}/format", f"known are {', '.join(_FORMATS)}, found {shown(schema['format'])}")
        return then('"', parse(_FORMATS[schema["format"]], unicode=False), '"')
    least, most = _counts(schema, path, "minLength", "maxLength")
    return then('"', Repeat(_inside(ANY), least, most), '"')


_STRING = then('"', Repeat(_inside(ANY), 0, None), '"')


def _number(kind: str, schema: Mapping[str, Any], path: str) -> Expression:
    low, high = _bound(schema, path, "minimum"), _bound(schema, path, "maximum")
    above, below = _bound(schema, path, "exclusiveMinimum"), _bound(schema, path, "exclusiveMaximum")
    if kind == "integer":
        lows = [value for value in (low, None if above is None else above + 1) if value is not None]
        highs = [value for value in (high, None if below is None else below - 1) if value is not None]
        low, high = max(lows, default=None), min(highs, default=None)
    elif above is not None or below is not None:
        name = "exclusiveMinimum" if above is not None else "exclusiveMaximum"
        raise _wrong(f"{path}/{name}", "supported for integers only")
    if low is None and high is None:
        return _INTEGER if kind == "integer" else _NUMBER
    if low is not None and high is not None and low > high:
        raise _wrong(path, f"no number is from {low} to {high}")
    whole = _between(low, high)
    if kind == "integer":
        return whole
    fraction = then(".", _DIGITS)
    positive = _naturals(max(low or 0, 0), None if high is None else high - 1)
    negative = _naturals(max(-(high or 0), 0), None if low is None else -low - 1)
    return Either((whole, then(positive, fraction), then("-", negative, fraction)))


def _between(low: int | None, high: int | None) -> Expression:
    """The whole numbers from ``low`` to ``high``."""
    negative = then("-", _naturals(max(1, -high if high is not None else 1), None if low is None else -low))
    return Either((_naturals(max(low or 0, 0), high), negative))


def _naturals(low: int, high: int | None) -> Expression:
    """The numbers from ``low``, which is not negative, to ``high``; none if that is less."""
    if high is None:
        if low == 0:
            return _NATURAL
        longer = then(chars("123456789"), Repeat(_DIGIT, len(str(low)), None))
        return Either((_naturals(low, 10 ** len(str(low)) - 1), longer))
    parts = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        parts.append(_same_length(str(low), str(last)))
        low = last + 1
    return Either(tuple(parts))


def _same_length(low: str, high: str) -> Expression:
    """The numbers from ``low`` to ``high``, which have as many digits: a part for each digit of the two."""
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):  # of both ends at most one goes on
        return Repeat(_DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return then(low[0], _same_length(low[1:], high[1:]))
    middle = chars("".join(str(digit) for digit in range(int(low[0]) + 1, int(high[0]))))
    return Either(
        (
            then(low[0], _same_length(low[1:], "9" * rest)),
            then(middle, Repeat(_DIGIT, rest, rest)),
            then(high[0], _same_length("0" * rest, high[1:])),
        )
    )


def _literal(value: Any) -> Expression:
    """A value that the schema states."""
    if isinstance(value, dict) and value:
        members = [then(_literal(name), _COLON, _literal(inner)) for name, inner in value.items()]
        return then("{", _members([(member, True) for member in members]), "}")
    if isinstance(value, list) and value:
        return then("[", _members([(_literal(inner), True) for inner in value]), "]")
    return text(json.dumps(value, ensure_ascii=False))


def _types(schema: Mapping[str, Any], path: str) -> list[str]:
    """The types that a schema allows: as stated, or those that its keywords speak of."""
    if "type" not in schema:
        spoken = [kind for kind, keywords in _OF_TYPE.items() if schema.keys() & keywords and kind != "integer"]
        return spoken or [kind for kind in _OF_TYPE if kind != "integer"]
    stated = [schema["type"]] if isinstance(schema["type"], str) else _list(schema["type"], f"{path}/type")
    for kind in stated:
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise _wrong(f"{path}/type", f"known are {', '.join(_OF_TYPE)}, found {shown(kind)}")
    return stated


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types of a schema's values, where whole numbers are numbers."""
    if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return {kind for kind in _OF_TYPE for value in values if kind != "integer" and _is(value, kind)}
    return {"number" if kind == "integer" else kind for kind in _types(schema, "#")}


def _plainly_apart(branches: list[Any]) -> bool:
    """Whether all are lists of constants, none of which is in two of them."""
    listed = [_constants(branch) if isinstance(branch, dict) else None for branch in branches]
    known = [values for values in listed if values is not None]
    return len(known) == len(branches) and len(set().union(*known)) == sum(map(len, known))


def _constants(schema: Mapping[str, Any]) -> set[str] | None:
    """The values of an enum or const, as texts in which 1 and 1.0 are the same; None for other schemas."""
    if "const" not in schema and not isinstance(schema.get("enum"), list):
        return None
    values = schema.get("enum", [schema.get("const")])
    return {json.dumps(int(v) if _is(v, "integer") else v, sort_keys=True) for v in values}


def _is(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON schema."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value % 1 == 0)
    return kind == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def _list(value: Any, path: str, least: int = 1) -> list[Any]:
    if not isinstance(value, list) or len(value) < least:
        raise _wrong(path, f"expected a list{' that is not empty' if least else ''}, found {shown(value)}")
    return value


def _counts(schema: Mapping[str, Any], path: str, least: str, most: str) -> tuple[int, int | None]:
    counts = []
    for name in (least, most):
        value = schema.get(name)
        if value is not None and not (_is(value, "integer") and value >= 0):
            raise _wrong(f"{path}/{name}", f"expected a whole number that is not negative, found {shown(value)}")
        counts.append(None if value is None else int(value))
    low, high = counts[0] or 0, counts[1]
    if high is not None and low > high:
        raise _wrong(f"{path}/{least}", f"{low} is more than {most}, {high}")
    return low, high


def _bound(schema: Mapping[str, Any], path: str, name: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if not _is(value, "integer") or abs(value) > _MAX_BOUND:
        raise _wrong(f"{path}/{name}", f"whole numbers of at most 30 digits are supported, found {shown(value)}")
    return int(value)


def _wrong(path: str, what: str) -> InvalidConstraint:
    return InvalidConstraint(f"JSON schema, {path}: {what}.")
