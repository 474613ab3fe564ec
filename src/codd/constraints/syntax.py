"""Python's regular expressions as trees. Python's own parser reads them: they mean what ``re`` means by them."""

import re
import re._constants as op  # type: ignore[import-not-found]  # private, and the same since 3.11: the one grammar of re
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from operator import eq
from typing import Any

from codd.constraints.determinism import combined, too_large
from codd.constraints.expressions import (
    ANY,
    EMPTY,
    LAST,
    NOTHING,
    Chars,
    Either,
    Expression,
    Ranges,
    Repeat,
    Then,
    complement,
    union,
)
from codd.errors import InvalidConstraint, shown

_REFUSED = {
    op.ASSERT: "a lookahead or lookbehind, (?=...) or (?<=...)",
    op.ASSERT_NOT: "a negative lookahead or lookbehind, (?!...) or (?<!...)",
    op.GROUPREF: "a backreference",
    op.GROUPREF_EXISTS: "a conditional group, (?(1)...)",
    op.ATOMIC_GROUP: "an atomic group, (?>...)",
    op.POSSESSIVE_REPEAT: "a possessive repetition (*+, ++, ?+ or {m,n}+)",
}
_BOUNDARIES = {
    op.AT_BEGINNING: "^ after the beginning",
    op.AT_BEGINNING_STRING: r"\A after the beginning",
    op.AT_END: "$ before the end",
    op.AT_END_STRING: r"\Z before the end",
}
_BEGINS = (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
_ENDS = (op.AT_END, op.AT_END_STRING)
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
_TYPES = re.ASCII | re.UNICODE  # of which one holds at a time
_MAX_PATTERN, _MAX_ALTERNATIVES = 20_000, 1_000
_SURROGATE_COUNT, _SURROGATE_FIRST = 0x800, 0xD800
_ECMA_NEWLINES = "\n\r\u2028\u2029"
_ECMA_SPACES = "\ufeff"  # a space to ECMAScript, not to Python


def check_text(text: str) -> None:
    """Raise InvalidConstraint for a string with half a surrogate pair, which UTF-8 cannot write."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise InvalidConstraint(f"{shown(text)} has half a surrogate pair, which is no text.")


def parse(pattern: str, unicode: bool = True) -> Expression:
    r"""The texts that ``re.fullmatch(pattern, text)`` matches; InvalidConstraint names what is not regular or wrong.

    Without ``unicode``, \d, \w and \s are the ASCII characters of these kinds, and \D, \W and \S what Unicode counts
    as none: texts match both with ``re.ASCII`` and without.
    """
    tree, flags = _parsed(pattern)
    return _Reader(pattern, narrow=not unicode).sequence(tree, flags, True, True)


def parse_search(pattern: str) -> Expression:
    r"""The texts in which a pattern of a JSON schema is found, wherever in them.

    Where ECMAScript and Python disagree (whether \d has digits of all scripts, say), what both of them match.
    Lookaheads right after ^ are followed.
    """
    tree, flags = _parsed(pattern)
    if flags & ~re.UNICODE:
        raise InvalidConstraint(f"the pattern {shown(pattern)} sets flags, which JSON schemas do not have.")
    reader, around = _Reader(pattern, narrow=True, ecma=True), Repeat(ANY, 0, None)
    alternatives: list[Expression] = []
    for branch in _apart(list(tree)):
        if len(alternatives) == _MAX_ALTERNATIVES:
            raise too_large("alternatives that begin or end with ^ or $", _MAX_ALTERNATIVES)
        begins, ends = (len(branch) > 0 and branch[i][0] is op.AT and branch[i][1] in at for i, at in _EDGES)
        looks = 0  # lookaheads at the beginning of the text, which are other patterns for it
        while begins and 1 + looks < len(branch) and _looks_ahead(branch[1 + looks]):
            looks += 1
        inner = reader.sequence(branch[1 + looks :] if looks else branch, flags, begins, ends)
        found: Expression = Then((EMPTY if begins else around, inner, EMPTY if ends else around))
        if looks:
            wanted = [True, *(kind is op.ASSERT for kind, _ in branch[1 : 1 + looks])]
            ahead = [reader.ahead(inside, flags, around) for _, (_, inside) in branch[1 : 1 + looks]]
            found = combined([found, *ahead], partial(eq, wanted))
        alternatives.append(found)
    return Either(tuple(alternatives))


_EDGES = ((0, _BEGINS), (-1, _ENDS))


def _apart(items: list[Any]) -> Iterator[list[Any]]:
    """A pattern as alternatives none of which begins or ends with several, so that each has its own ^ and $."""
    for place, at in ((0, _BEGINS), (-1, _ENDS)):
        first: Any = items[place] if items else (None, ())
        (kind, value), options = first, list[Any]()
        if kind is op.BRANCH:
            options = value[1]
        elif kind is op.SUBPATTERN and not any(value[1:3]):
            options = [value[3]]
        if any(item[0] is op.AT and item[1] in at for option in options for item in _edges(option)):
            for option in options:
                yield from _apart([*option, *items[1:]] if place == 0 else [*items[:-1], *option])
            return
    yield items


def _edges(items: Any) -> list[Any]:
    """The first and last items of a pattern, also of those that begin and end it."""
    found = []
    for kind, value in (items[0], items[-1]) if len(items) > 1 else items:  # twice the same would double at each depth
        found.append((kind, value))
        for option in value[1] if kind is op.BRANCH else [value[3]] if kind is op.SUBPATTERN else ():
            found += _edges(option)
    return found


def _looks_ahead(item: Any) -> bool:
    return item[0] in (op.ASSERT, op.ASSERT_NOT) and item[1][0] == 1


def _parsed(pattern: str) -> tuple[Any, int]:
    if not isinstance(pattern, str):
        raise InvalidConstraint(f"a pattern is a str, found {shown(pattern)}.")
    if len(pattern) > _MAX_PATTERN:
        raise InvalidConstraint(f"a pattern has at most {_MAX_PATTERN:,} characters, found {len(pattern):,}.")
    try:
        tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, MemoryError, ValueError) as error:
        raise InvalidConstraint(f"{shown(pattern)} is no regular expression of Python: {error}.") from error
    return tree, tree.state.flags


class _Reader:
    """Walks the parser's tree; ``narrow``: as `parse` without unicode, ``ecma``: as `parse_search`."""

    def __init__(self, pattern: str, narrow: bool, ecma: bool = False):
        self.pattern, self.narrow, self.ecma = pattern, narrow, ecma

    def refuse(self, what: str) -> InvalidConstraint:
        return InvalidConstraint(
            f"the pattern {shown(self.pattern)} has {what}, which is not supported: write it without."
        )

    def ahead(self, pattern: Any, flags: int, around: Expression) -> Expression:
        """The texts at whose beginning a pattern is found."""
        branches = pattern[0][1][1] if len(pattern) == 1 and pattern[0][0] is op.BRANCH else [pattern]
        ends = [len(branch) > 0 and branch[-1][0] is op.AT and branch[-1][1] in _ENDS for branch in branches]
        parts = [self.sequence(branch, flags, True, end) for branch, end in zip(branches, ends, strict=True)]
        return Either(tuple(Then((p, EMPTY if end else around)) for p, end in zip(parts, ends, strict=True)))

    def sequence(self, pattern: Any, flags: int, at_start: bool, at_end: bool) -> Expression:
        """``at_start``, ``at_end``: whether this is where the whole text begins or ends."""
        items = list(pattern)
        begins = next((i for i, item in enumerate(items) if item[0] is not op.AT or item[1] not in _BEGINS), len(items))
        ends = next((i for i in range(len(items), 0, -1) if items[i - 1][0] is not op.AT), 0)
        parts = [
            self.item(kind, value, flags, at_start and i <= begins, at_end and i >= ends - 1)
            for i, (kind, value) in enumerate(items)
        ]
        return parts[0] if len(parts) == 1 else Then(tuple(parts))

    def item(self, kind: Any, value: Any, flags: int, at_start: bool, at_end: bool) -> Expression:
        if kind in _REFUSED:
            raise self.refuse(_REFUSED[kind])
        if kind is op.AT:
            if (value in _BEGINS and at_start) or (value in _ENDS and at_end):
                return EMPTY
            raise self.refuse(_BOUNDARIES.get(value, r"a word boundary, \b or \B"))
        if kind is op.BRANCH:
            return Either(tuple(self.sequence(branch, flags, at_start, at_end) for branch in value[1]))
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            if self.ecma and (added or removed):
                raise self.refuse("flags inside")
            kept = flags & ~(_TYPES if added & _TYPES else 0)
            return self.sequence(inner, (kept | added) & ~removed, at_start, at_end)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            part = self.sequence(inner, flags, False, False)
            return Repeat(part, int(least), None if most is op.MAXREPEAT else int(most))
        if kind is op.FAILURE:
            return NOTHING
        return Chars(self.characters(kind, value, flags))

    def characters(self, kind: Any, value: Any, flags: int) -> Ranges:
        if kind is op.ANY:
            newlines = _ECMA_NEWLINES if self.ecma else "\n"
            return complement(()) if flags & re.DOTALL else complement(_points(newlines))
        if kind is op.LITERAL:
            return self.of_set([(kind, value)], flags)
        if kind is op.NOT_LITERAL:
            return self.of_set([(op.NEGATE, None), (op.LITERAL, value)], flags)
        if kind is op.IN:
            return self.of_set(value, flags)
        raise self.refuse(f"a part that is not known here ({kind})")

    def of_set(self, items: list[Any], flags: int) -> Ranges:
        """A set in brackets, or a single character."""
        negated = items[0][0] is op.NEGATE
        members = union(
            span for kind, value in items[negated:] for span in self.of_member(kind, value, flags, bool(negated))
        )
        return complement(members) if negated else members

    def of_member(self, kind: Any, value: Any, flags: int, negated: bool) -> Ranges:
        if kind is op.CATEGORY:
            return self.of_category(_CATEGORIES[value], flags & re.ASCII, negated)
        first, last = (value, value) if kind is op.LITERAL else value
        if flags & re.IGNORECASE:
            source = rf"[\U{first:08x}-\U{last:08x}]"
            cased = re.finditer(source, _cased_characters(), flags & (re.ASCII | re.IGNORECASE))
            return union([(first, last), *((ord(match[0]), ord(match[0])) for match in cased)])
        return union([(first, last)])

    def of_category(self, source: str, ascii: int, negated: bool) -> Ranges:
        r"""The characters of \d, \D and so on; ``negated``: in a set that excludes them."""
        if not self.narrow:
            return _scanned(source, ascii)
        if source[1].isupper():
            return complement(self.of_category(source.lower(), ascii, not negated))
        wide = _points(_ECMA_SPACES) if self.ecma and source == r"\s" else ()
        return union((*_scanned(source, ascii), *wide)) if negated else _scanned(source, re.ASCII)


def _points(characters: str) -> Ranges:
    return union((ord(c), ord(c)) for c in characters)


@lru_cache(maxsize=256)
def _scanned(source: str, flags: int) -> Ranges:
    """The characters that a pattern for one character matches, asked of ``re`` itself."""
    matches = re.finditer(f"{source}+", _all_characters(), flags)
    return union((_point(match.start()), _point(match.end() - 1)) for match in matches)


@cache
def _cased_characters() -> str:
    """Those that differ from their lower or upper case: no others match what they are not."""
    return "".join(c for c in _all_characters() if c.lower() != c or c.upper() != c)


@cache
def _all_characters() -> str:
    return "".join(map(chr, (*range(_SURROGATE_FIRST), *range(_SURROGATE_FIRST + _SURROGATE_COUNT, LAST + 1))))


def _point(index: int) -> int:
    return index if index < _SURROGATE_FIRST else index + _SURROGATE_COUNT
