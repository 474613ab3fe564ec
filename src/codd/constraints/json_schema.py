"""JSON schemas read as formulas: what each part says about a value, keyword by keyword, as the standard has it.

Atoms refer to one type and hold for values of all others. Schemas of elements (items, properties) are atoms that hold a
`Part`, which is read when a value of it is written. `codd.constraints.json_values` turns formulas into texts.
"""

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import Any
from urllib.parse import unquote

from codd.constraints.formulas import FALSE, TRUE, Formula, Formulas
from codd.constraints.json_strings import FORMATS
from codd.constraints.syntax import parse_search
from codd.errors import InvalidConstraint, shown

TYPES = ("null", "true", "false", "number", "string", "array", "object")
"""Types of values: each boolean is one, and whole numbers are numbers."""

_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
    *("$schema", "$id", "id", "$anchor", "$vocabulary", "$defs", "definitions"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}
_NAMED = ("null", "boolean", "integer", "number", "string", "array", "object")
_REFUSED = {"unevaluatedItems", "$dynamicRef", "$recursiveRef", "extends", "disallow"}
_HELPERS = {"then", "else", "minContains", "maxContains", "additionalItems"}
_MAX_DEPTH = 64
_OLD_DRAFTS = re.compile(r"draft-0[3467]")

Mentions = dict[str | tuple[str, str], Formula]
"""Which properties a schema names: a name, ("pattern", regex) or ("others", ""), and when it does."""


class Part:
    """The schema of an array's items or an object's properties, its path, and the definitions that it is nested in."""

    __slots__ = ("number", "open", "path", "schema")

    def __init__(self, number: int, schema: Any, path: str, opened: tuple[tuple[str, int], ...]):
        """``number`` orders the parts of a schema."""
        self.number, self.schema, self.path, self.open = number, schema, path, opened


class Schemas:
    """Reads the parts of one schema; a path locates a part ("#/properties/name")."""

    def __init__(self, root: Any, ref_depth: int):
        """``ref_depth``: how often a definition may contain itself."""
        self.formulas = Formulas()
        self.ignored: dict[str, None] = {}
        self.written: dict[Fraction, str] = {}
        """How the schema writes the numbers that it states."""
        self._root, self._ref_depth = root, ref_depth
        self._parts: dict[Any, Part] = {}
        self._texts: dict[int, str] = {}
        self._read: dict[Part, tuple[Formula, Mentions]] = {}
        self._reached: dict[str, frozenset[str]] = {}
        self._keep: list[Any] = []
        self._ids = dict(_identified(root))
        stated = root.get("$schema", "") if isinstance(root, dict) else ""
        self._alone = isinstance(stated, str) and bool(_OLD_DRAFTS.search(stated))

    def part(self, schema: Any, path: str, opened: tuple[tuple[str, int], ...] = ()) -> Part:
        """The part of a schema; equal ones are one."""
        text = self._texts.get(id(schema))
        if text is None:
            self._keep.append(schema)  # so that its id stays its own
            text = self._texts[id(schema)] = json.dumps(schema, sort_keys=False)
        if opened and "$ref" not in text:
            opened = ()
        return self._parts.setdefault((text, opened), Part(len(self._parts), schema, path, opened))

    def read(self, part: Part) -> tuple[Formula, Mentions]:
        """What a part says, and the properties that it names."""
        if part not in self._read:
            self._read[part] = self._of(part.schema, part.path, part.open)
        return self._read[part]

    def held(self, schema: Any, path: str, opened: tuple[tuple[str, int], ...]) -> Part:
        """The part of a schema of elements."""
        if not isinstance(schema, dict | bool):
            raise wrong(path, f"expected a schema (an object or a boolean), found {shown(schema)}")
        return self.part(schema, path, opened)

    def _of(self, schema: Any, path: str, opened: tuple[tuple[str, int], ...]) -> tuple[Formula, Mentions]:
        if isinstance(schema, bool):
            return (TRUE if schema else FALSE), {}
        if not isinstance(schema, dict):
            raise wrong(path, f"expected a schema (an object or a boolean), found {shown(schema)}")
        if path.count("/") > 4 * _MAX_DEPTH:
            raise wrong("#", f"nested more than {_MAX_DEPTH} deep")
        said: list[Formula] = []
        mentions: Mentions = {}
        alone = self._alone and "$ref" in schema
        readers: dict[Any, str] = {}
        for word in _KEYWORDS:
            if word in schema and (not alone or word == "$ref"):
                readers.setdefault(word if word in _EACH else _KEYWORDS[word], word)
        for keyword in readers.values():
            says, names = _KEYWORDS[keyword](self, schema, f"{path}/{keyword}", opened)
            said.append(says)
            self._mention(mentions, names, TRUE)
        for keyword in sorted(schema.keys() - _KEYWORDS.keys() - _ANNOTATIONS - _HELPERS):
            if keyword in _REFUSED:
                raise wrong(f"{path}/{keyword}", "this keyword is not supported")
            self.ignored[f"{path}/{keyword}"] = None
        return self.formulas.all(said), mentions

    def _mention(self, mentions: Mentions, more: Mentions, condition: Formula) -> None:
        for name, when in more.items():
            both = self.formulas.all((condition, when))
            mentions[name] = self.formulas.any((mentions.get(name, FALSE), both))

    def is_type(self, *kinds: str) -> Formula:
        """The value is of one of these types."""
        return self.formulas.any(self.formulas.literal("is", kind) for kind in kinds)

    # Each keyword: what it says, and the properties that it names.

    def _type(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        given = schema["type"]
        found = []
        for kind in [given] if isinstance(given, str) else _list(given, path):
            if kind not in _NAMED and kind != "any":
                raise wrong(path, f"known are {', '.join(_NAMED)}, found {shown(kind)}")
            if kind == "any":  # of the third draft
                return TRUE, {}
            if kind == "integer":
                whole = self.formulas.literal("number", "integer")
                found.append(self.formulas.all((self.is_type("number"), whole)))
            else:
                found.append(self.is_type(*(("true", "false") if kind == "boolean" else (kind,))))
        return self.formulas.any(found), {}

    def _enum(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        return self._constants(_list(schema["enum"], path), path)

    def _const(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        return self._constants([schema["const"]], path)

    def _constants(self, values: list[Any], path: str) -> tuple[Formula, Mentions]:
        texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
        numbers: dict[Fraction, None] = {}
        found, mentions = [], Mentions()
        for value in values:
            if is_number(value):
                numbers[exact(value)] = None
                self.written.setdefault(exact(value), json.dumps(value))
            elif isinstance(value, list | dict):
                says, names = self._structure(value, path)
                found.append(says)
                self._mention(mentions, names, says)
            elif not isinstance(value, str):
                found.append(self.is_type(json.dumps(value)))
        for kind, among in (("string", texts), ("number", tuple(numbers))):
            if among:
                found.append(self.formulas.all((self.is_type(kind), self.formulas.literal(kind, "among", among))))
        return self.formulas.any(found), mentions

    def _structure(self, value: list[Any] | dict[str, Any], path: str) -> tuple[Formula, Mentions]:
        """An array or object that the schema states: as a schema that has no other value."""
        literal, count = self.formulas.literal, len(value)
        said = []
        if isinstance(value, list):
            said += [literal("array", "item", i, self.part({"const": item}, path)) for i, item in enumerate(value)]
            said += self._counted("array", "length", count, count)
            return self.formulas.all((self.is_type("array"), *said)), {}
        for name, inner in value.items():
            said += [literal("object", "required", name), self._property(name, self.part({"const": inner}, path))]
        said += self._counted("object", "count", 0, count)
        return self.formulas.all((self.is_type("object"), *said)), dict.fromkeys(value, TRUE)

    def _property(self, name: str, part: Part) -> Formula:
        return self.formulas.literal("object", "property", name, part)

    def _counted(self, kind: str, what: str, least: int, most: int | None) -> list[Formula]:
        """A lower and an upper bound."""
        said = [self.formulas.literal(kind, what, least)] if least else []
        return said if most is None else [*said, self.formulas.literal(kind, "below", most + 1)]

    def _all_of(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        said, mentions = self._branches(schema["allOf"], path, opened, certain=True)
        return self.formulas.all(said), mentions

    def _branches(
        self, branches: Any, path: str, opened: Any, *, certain: bool = False
    ) -> tuple[list[Formula], Mentions]:
        """What each branch says, and the properties that they name: where a branch holds, or all do for certain."""
        mentions = Mentions()
        said = []
        for i, branch in enumerate(_list(branches, path)):
            says, names = self._of(branch, f"{path}/{i}", opened)
            said.append(says)
            self._mention(mentions, names, TRUE if certain else says)
        return said, mentions

    def _any_of(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        said, mentions = self._branches(schema["anyOf"], path, opened)
        return self.formulas.any(said), mentions

    def _one_of(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        branches = _list(schema["oneOf"], path)
        if (listed := _all_constants(branches)) is not None:
            counts: dict[str, int] = {}
            keyed = [[_canonical(value) for value in values] for values in listed]
            for values in keyed:
                for key in dict.fromkeys(values):
                    counts[key] = counts.get(key, 0) + 1
            once = {
                key: v for keys, values in zip(keyed, listed, strict=True) for key, v in zip(keys, values, strict=True)
            }
            return self._constants([value for key, value in once.items() if counts[key] == 1], path)
        said, mentions = self._branches(branches, path, opened)
        return self.formulas.exactly_one(said), mentions

    def _not(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        return self.formulas.negation(self._of(schema["not"], path, opened)[0]), {}

    def _if(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        base = path.rpartition("/")[0]
        condition, names = self._of(schema["if"], path, opened)
        fails, mentions, said = self.formulas.negation(condition), Mentions(), []
        self._mention(mentions, names, condition)
        for keyword, when, unless in (("then", condition, fails), ("else", fails, condition)):
            if keyword in schema:
                says, names = self._of(schema[keyword], f"{base}/{keyword}", opened)
                said.append(self.formulas.any((unless, says)))
                self._mention(mentions, names, when)
        return self.formulas.all(said), mentions

    def _ref(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        reference = schema["$ref"]
        target, where = self._resolved(reference, path)
        reached = self._reaches(reference, path)
        if reference in reached:
            counts = {name: count for name, count in opened if name in reached}
            if counts.get(reference, 0) >= self._ref_depth:
                return self.formulas.literal("deep"), {}
            counts[reference] = counts.get(reference, 0) + 1
            opened = tuple(sorted(counts.items()))
        return self._of(target, where, opened)

    def _reaches(self, reference: str, path: str) -> frozenset[str]:
        """The references that a definition holds, directly or through others."""
        if reference not in self._reached:
            found: set[str] = set()
            todo = [reference]
            while todo:
                for node in _objects(self._resolved(todo.pop(), path)[0]):
                    inner = node.get("$ref")
                    if isinstance(inner, str) and inner not in found:
                        found.add(inner)
                        todo.append(inner)
            self._reached[reference] = frozenset(found)
        return self._reached[reference]

    def _resolved(self, reference: Any, path: str) -> tuple[Any, str]:
        """The schema that a reference names, and its path."""
        if not isinstance(reference, str):
            raise wrong(path, f"expected a text, found {shown(reference)}")
        base, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        if base in ("", self._ids.get("")):
            target = self._root
        elif base in self._ids:
            target = self._ids[base]
        else:
            raise wrong(path, f"only references within the schema (#/...) are supported, found {shown(reference)}")
        if fragment and not fragment.startswith("/"):
            if f"#{fragment}" not in self._ids:
                raise wrong(path, f"{shown(reference)} is not in the schema")
            return self._ids[f"#{fragment}"], reference
        for step in fragment.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, dict) and step in target:
                target = target[step]
            else:
                raise wrong(path, f"{shown(reference)} is not in the schema")
        return target, reference

    def _bound(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        keyword = path.rpartition("/")[2]
        value, side = schema[keyword], "least" if keyword.endswith("inimum") else "most"
        if isinstance(value, bool) and keyword.startswith("exclusive"):  # of the fourth draft: beside minimum
            return TRUE, {}
        if not is_number(value):
            raise wrong(path, f"expected a number, found {shown(value)}")
        strict = keyword.startswith("exclusive") or schema.get(f"exclusive{keyword.capitalize()}") is True
        return self.formulas.literal("number", side, exact(value), strict), {}

    def _multiple(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        value = schema["multipleOf"] if "multipleOf" in schema else schema["divisibleBy"]
        if not is_number(value) or value <= 0:
            raise wrong(path, f"expected a number above 0, found {shown(value)}")
        return self.formulas.literal("number", "multiple", exact(value)), {}

    def _counts(self, schema: Any, path: str, opened: Any, *, kind: str, what: str) -> tuple[Formula, Mentions]:
        base, _, keyword = path.rpartition("/")
        low, high = (_count(schema, base, side + keyword[3:]) for side in ("min", "max"))
        return self.formulas.all(self._counted(kind, what, low or 0, high)), {}

    def _pattern(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        return self.formulas.literal("string", "pattern", _checked_pattern(schema["pattern"], path)), {}

    def _format(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        form = schema["format"]
        if isinstance(form, str) and form in FORMATS:
            return self.formulas.literal("string", "format", form), {}
        self.ignored[f"{path} {shown(form)}"] = None
        return TRUE, {}

    def _items(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        said, base = [], path.rpartition("/")[0]
        leading = schema.get("prefixItems", [])
        others, where = schema.get("items", True), f"{base}/items"
        if isinstance(others, list):  # before the draft of 2020
            leading, others, where = others, schema.get("additionalItems", True), f"{base}/additionalItems"
        for i, inner in enumerate(_list(leading, f"{base}/prefixItems", 0)):
            said.append(self.formulas.literal("array", "item", i, self.held(inner, f"{base}/prefixItems/{i}", opened)))
        if others is not True:
            part = self.held(others, where, opened)
            said.append(self.formulas.literal("array", "items", len(leading), part))
        return self.formulas.all(said), {}

    def _contains(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        part, base = self.held(schema["contains"], path, opened), path.rpartition("/")[0]
        least, most = (_count(schema, base, name) for name in ("minContains", "maxContains"))
        literal = self.formulas.literal
        said = [literal("array", "contains", part, 1 if least is None else least)] if least != 0 else []
        if most is not None:
            said.append(literal("array", "rarer", part, most + 1))
        return self.formulas.all(said), {}

    def _unique(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        return (self.formulas.literal("array", "unique", frozenset()) if schema["uniqueItems"] is True else TRUE), {}

    def _required(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        if isinstance(schema["required"], bool):  # of the third draft
            self.ignored[path] = None
            return TRUE, {}
        names = _names(schema["required"], path)
        said = [self.formulas.literal("object", "required", name) for name in names]
        return self.formulas.all(said), dict.fromkeys(names, TRUE)

    def _properties(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        base = path.rpartition("/")[0]
        named, patterns = (
            _object(schema.get(word, {}), f"{base}/{word}") for word in ("properties", "patternProperties")
        )
        said, mentions = [], Mentions()
        for name, inner in named.items():
            part = self.held(inner, f"{base}/properties/{name.replace('~', '~0').replace('/', '~1')}", opened)
            said.append(self._property(name, part))
            mentions[name] = TRUE
        for regex, inner in patterns.items():
            where = f"{base}/patternProperties/{regex.replace('~', '~0').replace('/', '~1')}"
            part = self.held(inner, where, opened)
            said.append(self.formulas.literal("object", "matching", _checked_pattern(regex, where), part))
            mentions["pattern", regex] = TRUE
        others = schema.get("additionalProperties", True)
        if others is not True:
            part = self.held(others, f"{base}/additionalProperties", opened)
            said.append(self.formulas.literal("object", "others", tuple(named), tuple(patterns), part))
        if others is not False and "additionalProperties" in schema:
            mentions["others", ""] = TRUE
        return self.formulas.all(said), mentions

    def _property_names(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        return self.formulas.literal("object", "names", self.held(schema["propertyNames"], path, opened)), {}

    def _unevaluated(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        if not isinstance(schema["unevaluatedProperties"], bool):
            raise wrong(path, "supported as true or false only")
        return TRUE, {} if schema["unevaluatedProperties"] else {("closed", ""): TRUE}

    def _dependencies(self, schema: Any, path: str, opened: Any) -> tuple[Formula, Mentions]:
        said, mentions = [], Mentions()
        for name, needed in _object(schema[path.rpartition("/")[2]], path).items():
            lacks = self.formulas.literal("object", "absent", name)
            if isinstance(needed, list | str):
                names = _names([needed] if isinstance(needed, str) else needed, f"{path}/{name}")
                says: Formula = self.formulas.all(self.formulas.literal("object", "required", other) for other in names)
                inner: Mentions = dict.fromkeys(names, TRUE)
            else:
                says, inner = self._of(needed, f"{path}/{name}", opened)
            said.append(self.formulas.any((lacks, says)))
            self._mention(mentions, inner, self.formulas.negation(lacks))
        return self.formulas.all(said), mentions


_KEYWORDS: dict[str, Any] = {
    **{"type": Schemas._type, "enum": Schemas._enum, "const": Schemas._const},
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), Schemas._properties),
    **{"required": Schemas._required, "propertyNames": Schemas._property_names},
    **dict.fromkeys(("minProperties", "maxProperties"), partial(Schemas._counts, kind="object", what="count")),
    **dict.fromkeys(("items", "prefixItems"), Schemas._items),
    **{"contains": Schemas._contains, "uniqueItems": Schemas._unique},
    **dict.fromkeys(("minItems", "maxItems"), partial(Schemas._counts, kind="array", what="length")),
    **dict.fromkeys(("minLength", "maxLength"), partial(Schemas._counts, kind="string", what="length")),
    **{"pattern": Schemas._pattern, "format": Schemas._format},
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), Schemas._bound),
    **dict.fromkeys(("multipleOf", "divisibleBy"), Schemas._multiple),
    **{"$ref": Schemas._ref, "allOf": Schemas._all_of, "anyOf": Schemas._any_of, "oneOf": Schemas._one_of},
    **{"not": Schemas._not, "if": Schemas._if, "unevaluatedProperties": Schemas._unevaluated},
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), Schemas._dependencies),
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EACH = {*_BOUNDS, "dependencies", "dependentRequired", "dependentSchemas"}  # read by themselves; others with their kin


def is_number(value: Any) -> bool:
    """Whether a value is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact(value: Any) -> Fraction:
    """A number as the schema writes it, without a rounding."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _identified(root: Any) -> Iterator[tuple[str, Any]]:
    """Schemas by the names that they give themselves; "" is the name of the root."""
    for node in _objects(root):
        for word in ("$id", "id", "$anchor"):
            name = node.get(word)
            if isinstance(name, str) and node is root and word != "$anchor":
                yield "", name.removesuffix("#")
            elif isinstance(name, str):
                yield f"#{name}" if word == "$anchor" else name.removesuffix("#"), node


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all objects within it."""
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            yield node
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)


def _all_constants(branches: list[Any]) -> list[list[Any]] | None:
    """The values of each branch, if all of them say nothing but which values they have."""
    found = []
    for branch in branches:
        if not isinstance(branch, dict) or branch.keys() - _ANNOTATIONS not in ({"const"}, {"enum"}):
            return None
        values = branch.get("enum", [branch.get("const")])
        if not isinstance(values, list):
            return None
        found.append(values)
    return found


def _canonical(value: Any) -> str:
    """A text for each value, the same for equal ones: 1 and 1.0, also within others."""

    def plain(inner: Any) -> Any:
        if is_number(inner):
            return {"number": str(exact(inner))}
        if isinstance(inner, dict):
            return {"object": {name: plain(item) for name, item in inner.items()}}
        return [plain(item) for item in inner] if isinstance(inner, list) else inner

    return json.dumps(plain(value), sort_keys=True)


def _checked_pattern(pattern: Any, path: str) -> str:
    try:
        parse_search(pattern)
    except InvalidConstraint as error:
        raise wrong(path, str(error).removesuffix(".")) from error
    return str(pattern)


def _list(value: Any, path: str, least: int = 1) -> list[Any]:
    if not isinstance(value, list) or len(value) < least:
        raise wrong(path, f"expected a list{' that is not empty' if least else ''}, found {shown(value)}")
    return value


def _names(value: Any, path: str) -> list[str]:
    for name in _list(value, path, 0):
        if not isinstance(name, str):
            raise wrong(path, f"expected names of properties, found {shown(name)}")
    return list(dict.fromkeys(value))


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(path, f"expected an object, found {shown(value)}")
    return value


def _count(schema: Any, path: str, name: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if not is_number(value) or value % 1 or value < 0:
        raise wrong(f"{path}/{name}", f"expected a whole number that is not negative, found {shown(value)}")
    return int(value)


def wrong(path: str, what: str) -> InvalidConstraint:
    """The error for a part of a schema."""
    return InvalidConstraint(f"JSON schema, {path}: {what}.")
