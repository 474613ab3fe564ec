"""Regular expressions as trees, over Unicode characters; and sets of characters as sorted ranges."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each range: sorted, and with gaps between them."""
LAST = 0x10FFFF
_Place = TypeVar("_Place")
_SURROGATES = (0xD800, 0xDFFF)  # no characters, and UTF-8 has no bytes for them


@dataclass(frozen=True)
class Chars:
    """Exactly one character, which is in the set ``ranges``."""

    ranges: Ranges


@dataclass(frozen=True)
class Then:
    """One part after the other; none: the empty text."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True)
class Either:
    """One of the parts; none: nothing matches."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True)
class Repeat:
    """A part from ``least`` to ``most`` times (None: without end)."""

    part: "Expression"
    least: int
    most: int | None


@dataclass(frozen=True, eq=False)
class Graph:
    """The texts along the ways from state 0 to one that accepts."""

    edges: tuple[tuple[int, "Expression", int], ...]
    """From a state, by a text of the expression, to a state."""
    accepting: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """An upper bound on the states of its nondeterministic automaton."""
        return 2 + sum(1 if isinstance(part, Chars) else 2 + size(part) for _, part, _ in self.edges)


Expression = Chars | Then | Either | Repeat | Graph


def size(expression: Expression) -> int:
    """About how many states the nondeterministic automaton of an expression has."""
    if isinstance(expression, Graph):
        return expression.size
    if isinstance(expression, Repeat):
        most = expression.least + 1 if expression.most is None else expression.most
        return 1 + most * (1 + size(expression.part))
    if isinstance(expression, Chars):
        return 1
    return isinstance(expression, Either) + sum(map(size, expression.parts))


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The characters of any ranges, surrogates left out."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(_without_surrogates(ranges)):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    low, high = _SURROGATES
    for first, last in ranges:
        if first < low:
            yield first, min(last, low - 1)
        if last > high:
            yield max(first, high + 1), last


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The characters, surrogates aside, that are in none of the ranges."""
    gaps, after = [], 0
    for first, last in sorted(ranges):
        if first > after:
            gaps.append((after, first - 1))
        after = max(after, last + 1)
    return union([*gaps, (after, LAST)] if after <= LAST else gaps)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """The characters that are in both sets."""
    return complement((*complement(one), *complement(other)))


def text(string: str) -> Then:
    """The expression that matches this string and nothing else."""
    return Then(tuple(chars(c) for c in string))


@lru_cache(maxsize=4096)
def chars(characters: str) -> Chars:
    """The expression that matches any one of these characters."""
    return Chars(union((ord(c), ord(c)) for c in characters))


def then(*parts: Expression | str) -> Then:
    """One after the other; strings stand for themselves."""
    flat: list[Expression] = []
    for part in parts:
        whole = text(part) if isinstance(part, str) else part
        flat += whole.parts if isinstance(whole, Then) else (whole,)
    return Then(tuple(flat))


def optional(part: Expression) -> Repeat:
    """The expression that matches the part once, or the empty text."""
    return Repeat(part, 0, 1)


def graph(
    start: _Place, moves: Callable[[_Place], Iterable[tuple[Expression, _Place]]], ends: Callable[[_Place], bool]
) -> Expression:
    """The texts along the moves from a place to any that ends."""
    number, todo = {start: 0}, [start]
    edges: list[tuple[int, Expression, int]] = []
    while todo:
        place = todo.pop()
        for part, target in moves(place):
            if part is not NOTHING:
                if target not in number:
                    number[target] = len(number)
                    todo.append(target)
                edges.append((number[place], part, number[target]))
    accepting = tuple(at for place, at in number.items() if ends(place))
    return Graph(tuple(edges), accepting) if accepting else NOTHING


ANY = Chars(complement(()))
"""Any one character, newlines included."""
EMPTY = Then(())
NOTHING = Either(())
