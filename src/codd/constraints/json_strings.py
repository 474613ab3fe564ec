"""Strings of JSON: what formulas over lengths, patterns and formats allow, and how it is written."""

import json
from functools import lru_cache

from codd.constraints.determinism import combined
from codd.constraints.expressions import (
    ANY,
    NOTHING,
    Chars,
    Either,
    Expression,
    Graph,
    Ranges,
    Repeat,
    Then,
    chars,
    complement,
    intersection,
    text,
    then,
)
from codd.constraints.formulas import FALSE, TRUE, Atom, Formula, atoms, fulfilling, holds, needs
from codd.constraints.syntax import parse, parse_search

_DATE = (
    r"\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST = rf"({_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"({_GROUP}:){{6}}{_LAST}",
        *(
            f"({'' if n == 0 else f'({_GROUP}:){{0,{n - 1}}}{_GROUP}'})?::({_GROUP}:){{{5 - n}}}{_LAST}"
            for n in range(6)
        ),
        f"(({_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
        f"(({_GROUP}:){{0,6}}{_GROUP})?::",
    ]
)
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PLAIN_PATH = r"[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2}"
_PATH = f"({_PLAIN_PATH}|:)"
_HOST = rf"(\[({_IPV6})\]|([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{{2}})*)"
_AUTHORITY = rf"//({_PATH}*@)?{_HOST}(:\d*)?(/{_PATH}*)*"
_TAIL = rf"(\?({_PATH}|[/?])*)?(#({_PATH}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:({_AUTHORITY}|/?({_PATH}+(/{_PATH}*)*)?){_TAIL}"
_DAY = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
_CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_SINGLE = r"([^\\^$.*+?()\[\]{}|\s]|\.|\\[dDwWsS.*+?()\[\]{}|^$\\/]|\[\^?(\w(-\w)?|[ .,:;_@#%&=!~]|\\[dws.\\\]-])+\])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})T{_TIME}",
    "duration": rf"P(\d+W|{_DAY}({_CLOCK})?|{_CLOCK})",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": r"([A-Za-z0-9][._+-]?){0,15}[A-Za-z0-9]@([A-Za-z0-9]-?){0,15}[A-Za-z0-9](\.[A-Za-z]{2,6}){1,2}",
    "uri": _URI,
    "uri-reference": rf"{_URI}|({_AUTHORITY}|(/{_PATH}+|({_PLAIN_PATH})+)(/{_PATH}*)*|/)?{_TAIL}",
    "json-pointer": "(/([^~/]|~[01])*)*",
    "regex": rf"\^?({_SINGLE}[*+?]?)*\$?",
    "byte": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?",
}
"""Patterns of the formats that are followed: each text is valid, though not every valid text is one of them."""

_ESCAPES = {c: json.dumps(c)[1:-1] for c in '"\\\b\f\n\r\t'}
_CONTROLS = {chr(point): f"\\u{point:04x}" for point in range(0x20) if chr(point) not in _ESCAPES}
_PLAIN = complement([(0, 0x1F), *((ord(c), ord(c)) for c in _ESCAPES)])


def written(formula: Formula) -> Expression:
    """The strings for which a formula over atoms of strings holds, in quotes."""
    return ANY_STRING if formula is TRUE else key(plain(formula))


def plain(formula: Formula) -> Expression:
    """The strings for which a formula over atoms of strings holds, by themselves."""
    parts = formula.parts if formula.joins == "and" else (formula,)
    if formula is not FALSE and all(part.atom[1:2] in (("length",), ("below",)) for part in parts):
        lower = [part.atom[2] for part in parts if part.positive == (part.atom[1] == "length")]
        upper = [part.atom[2] - 1 for part in parts if part.positive == (part.atom[1] == "below")]
        least, most = max(lower, default=0), min(upper, default=None)
        return NOTHING if most is not None and most < least else Repeat(ANY, least, most)
    if not formula.joins and formula.positive:
        return _expression(formula.atom)
    stated = dict.fromkeys(value for atom in atoms(formula) if atom[1] == "among" for value in atom[2])
    universe = Either(tuple(map(text, stated))) if needs(formula, "among") else Repeat(ANY, 0, None)
    return fulfilling(formula, universe, _expression)


def literal(value: str) -> Expression:
    """One string, as it is written."""
    return text(json.dumps(value, ensure_ascii=False))


def key(name: Expression) -> Expression:
    """Names, given without quotes, as they are written in an object."""
    return then('"', _inside(name), '"')


@lru_cache(maxsize=256)
def _expression(atom: Atom) -> Expression:
    """The strings, without quotes, for which an atom holds."""
    what, value = atom[1], atom[2]
    if what == "length":
        return Repeat(ANY, value, None)
    if what == "below":
        return Repeat(ANY, 0, value - 1)
    if what == "among":
        return Either(tuple(map(text, value)))
    return parse_search(value) if what == "pattern" else parse(FORMATS[value], unicode=False)


@lru_cache(maxsize=4096)
def matches(pattern: str, value: str) -> bool:
    """Whether a pattern of a JSON schema is found in a text."""
    return combined([text(value), parse_search(pattern)], all) is not NOTHING


def satisfies(formula: Formula, value: str) -> bool:
    """Whether a formula over atoms of strings holds for a text."""
    return holds(formula, lambda atom: combined([text(value), _expression(atom)], all) is not NOTHING)


def _inside(part: Expression) -> Expression:
    """The same texts as they are written within a JSON string.

    Control characters without a short escape are written only where a set has nothing else.
    """
    if isinstance(part, Repeat):
        return Repeat(_inside(part.part), part.least, part.most)
    if isinstance(part, Then):
        return Then(tuple(map(_inside, part.parts)))
    if isinstance(part, Either):
        return Either(tuple(map(_inside, part.parts)))
    if isinstance(part, Graph):
        return Graph(tuple((source, _inside(inner), target) for source, inner, target in part.edges), part.accepting)
    return _escaped(part)


@lru_cache(maxsize=4096)
def _escaped(part: Chars) -> Expression:
    plain = intersection(part.ranges, _PLAIN)
    short = "".join(escape[1] for c, escape in _ESCAPES.items() if _holds(part.ranges, ord(c)))
    ways: list[Expression] = [Chars(plain)] if plain else []
    if short:
        ways.append(then("\\", chars(short)))
    if not plain:
        ways += [text(escape) for c, escape in _CONTROLS.items() if _holds(part.ranges, ord(c))]
    return ways[0] if len(ways) == 1 else Either(tuple(ways))


def _holds(ranges: Ranges, point: int) -> bool:
    return any(first <= point <= last for first, last in ranges)


ANY_STRING = then('"', Repeat(_inside(ANY), 0, None), '"')
