"""Numbers of JSON: what formulas over bounds and multiples allow, digit by digit."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from codd.constraints.determinism import combined, too_large
from codd.constraints.expressions import (
    EMPTY,
    NOTHING,
    Either,
    Expression,
    Graph,
    Repeat,
    chars,
    optional,
    text,
    then,
)
from codd.constraints.formulas import TRUE, Atom, Formula, atoms, holds, needs

_DIGIT = chars("0123456789")
_DIGITS = Repeat(_DIGIT, 0, None)
_NATURAL = Either((text("0"), then(chars("123456789"), _DIGITS)))
_FRACTION = then(".", Repeat(_DIGIT, 1, None))
_NO_FRACTION = optional(then(".", Repeat(text("0"), 1, None)))
_SIGN = optional(text("-"))
_INTEGER = then(_SIGN, _NATURAL)
_PLAIN = then(_INTEGER, optional(_FRACTION))
_EXPONENT = then(chars("eE"), optional(chars("+-")), Repeat(_DIGIT, 1, 2))  # more would not fit a double
ANY_NUMBER = then(_PLAIN, optional(_EXPONENT))
_BOUNDS = (("integer",), ("least",), ("most",))
_MAX_DIGITS = 40
_MAX_REMAINDERS = 2_000


def written(formula: Formula, texts: Mapping[Fraction, str]) -> Expression:
    """The numbers for which a formula over atoms of numbers holds; ``texts``: how the schema writes those it states.

    Whole ones are written without a fraction where all have to be whole, and none with an exponent.
    """
    if formula is TRUE:
        return ANY_NUMBER
    said = list(atoms(formula))
    stated = dict.fromkeys(value for atom in said if atom[1] == "among" for value in atom[2])
    if stated and needs(formula, "among"):
        fits = [value for value in stated if holds(formula, lambda atom, value=value: _true(atom, value))]  # type: ignore[misc]
        return Either(tuple(text(texts[value]) for value in fits))
    whole = needs(formula, "integer")
    literals = formula.parts if formula.joins == "and" else (formula,)
    if whole and all(part.positive and part.atom[1:2] in _BOUNDS for part in literals):
        return _whole(literals)

    def accepts(matched: Sequence[bool]) -> bool:
        truth = dict(zip(said, matched[1:], strict=True))
        return holds(formula, truth.__getitem__)

    return combined([_INTEGER if whole else _PLAIN, *map(_expression, said)], accepts)


def _true(atom: Atom, value: Fraction) -> bool:
    _, what, *arguments = atom
    if what == "integer":
        return value.denominator == 1
    if what == "among":
        return bool(value in arguments[0])
    if what == "multiple":
        return bool((value / arguments[0]).denominator == 1)
    bound, strict = arguments
    return bool((not strict and value == bound) or (value > bound if what == "least" else value < bound))


def _expression(atom: Atom) -> Expression:
    """The plain texts (no exponent) of the numbers for which an atom holds."""
    _, what, *arguments = atom
    if what == "integer":
        return then(_INTEGER, _NO_FRACTION)
    if what == "among":
        return Either(tuple(map(_equal, arguments[0])))
    if what == "multiple":
        return then(_SIGN, _multiples(arguments[0]))
    bound, strict = arguments
    if what == "most":
        bound = -bound
    beyond = bound > 0 or (bound == 0 and strict)
    same = _from(abs(bound), strict) if beyond else _PLAIN_MAGNITUDE
    other = NOTHING if beyond else _up_to(-bound, strict)
    positive, negative = (same, other) if what == "least" else (other, same)
    return Either((positive, then("-", negative)))


_PLAIN_MAGNITUDE = then(_NATURAL, optional(_FRACTION))


def _equal(value: Fraction) -> Expression:
    whole, digits = _decimal(abs(value))
    fraction = then(".", digits, Repeat(text("0"), 0, None)) if digits else _NO_FRACTION
    return then(text("-") if value < 0 else _SIGN if value == 0 else EMPTY, str(whole), fraction)


def _decimal(value: Fraction) -> tuple[int, str]:
    """The whole part, and the digits after the point without zeros at the end."""
    whole, rest, digits = int(value), value - int(value), ""
    while rest:
        if len(digits) > _MAX_DIGITS:
            raise too_large("digits of a bound", _MAX_DIGITS)
        rest *= 10
        digits += str(int(rest))
        rest -= int(rest)
    if len(str(whole)) > _MAX_DIGITS:
        raise too_large("digits of a bound", _MAX_DIGITS)
    return whole, digits


def _from(low: Fraction, strict: bool) -> Expression:
    """The numbers that are not negative from ``low``, or above it."""
    whole, digits = _decimal(low)
    above = then(naturals(whole + 1, None), optional(_FRACTION))
    if digits:
        beside: Expression = then(".", _digits_from(digits, strict))
    else:
        more = then(".", Repeat(text("0"), 0, None), chars("123456789"), _DIGITS)
        beside = more if strict else optional(_FRACTION)
    return Either((above, then(str(whole), beside)))


def _digits_from(digits: str, strict: bool) -> Expression:
    """Digits after the point that make at least ``digits``, or more."""
    rest = (
        _digits_from(digits[1:], strict)
        if digits[1:]
        else then(_DIGITS, chars("123456789"), _DIGITS)
        if strict
        else _DIGITS
    )
    return Either((then(_between(int(digits[0]) + 1, 9), _DIGITS), then(digits[0], rest)))


def _up_to(high: Fraction, strict: bool) -> Expression:
    """The numbers that are not negative up to ``high``, or below it."""
    whole, digits = _decimal(high)
    below = then(naturals(0, whole - 1), optional(_FRACTION))
    if digits:
        beside: Expression = then(str(whole), optional(then(".", _digits_to(digits, strict))))
    else:
        beside = NOTHING if strict else then(str(whole), _NO_FRACTION)
    return Either((below, beside))


def _digits_to(digits: str, strict: bool) -> Expression:
    """Digits after the point that make at most ``digits``, or less; at least one."""
    if digits[1:]:
        rest: Expression = optional(_digits_to(digits[1:], strict))
    else:
        rest = NOTHING if strict else Repeat(text("0"), 0, None)
    return Either((then(_between(0, int(digits[0]) - 1), _DIGITS), then(digits[0], rest)))


def _between(first: int, last: int) -> Expression:
    return chars("".join(map(str, range(first, last + 1))))


def _multiples(step: Fraction) -> Expression:
    """The magnitudes that are multiples: remainders of the digits so far, and how many of them follow the point."""
    digits = len(_decimal(step)[1])
    modulus = int(step * 10**digits)
    if modulus * (digits + 1) > _MAX_REMAINDERS:
        raise too_large("remainders of a multiple", _MAX_REMAINDERS)
    number: dict[tuple[int, int], int] = {}
    edges: list[tuple[int, Expression, int]] = []
    accepting, todo = [], []

    def state(remainder: int, after: int) -> int:
        """``after``: digits after the point; -1: no point yet."""
        key = (remainder % modulus, min(after, digits + 1))
        if key not in number:
            number[key] = len(number) + 2
            todo.append(key)
        return number[key]

    edges.append((0, text("0"), 1))
    edges += [(0, text(str(digit)), state(digit, -1)) for digit in range(1, 10)]
    edges.append((1, text("."), state(0, 0)))
    accepting.append(1)
    while todo:
        remainder, after = todo.pop()
        here = number[remainder, after]
        if after != 0 and remainder * 10 ** (digits - min(max(after, 0), digits)) % modulus == 0:
            accepting.append(here)
        if after < 0:
            edges += [(here, text(str(digit)), state(10 * remainder + digit, -1)) for digit in range(10)]
            edges.append((here, text("."), state(remainder, 0)))
        elif after < digits:
            edges += [(here, text(str(digit)), state(10 * remainder + digit, after + 1)) for digit in range(10)]
        elif remainder == 0:
            edges.append((here, text("0"), state(0, after + 1)))
    return Graph(tuple(edges), tuple(accepting))


def _whole(literals: Sequence[Formula]) -> Expression:
    """The whole numbers within bounds."""
    low = high = None
    for _, what, *arguments in (part.atom for part in literals):
        if what != "integer":
            bound, strict = arguments
            _decimal(abs(bound))
            if what == "least":
                value = math.floor(bound) + 1 if strict else math.ceil(bound)
                low = value if low is None else max(low, value)
            else:
                value = math.ceil(bound) - 1 if strict else math.floor(bound)
                high = value if high is None else min(high, value)
    if low is None and high is None:
        return _INTEGER
    negative = then("-", naturals(max(1, -high if high is not None else 1), None if low is None else -low))
    return Either((naturals(max(low or 0, 0), high), negative))


def naturals(low: int, high: int | None) -> Expression:
    """The numbers from ``low``, which is not negative, to ``high``; none if that is less."""
    if high is None:
        if low == 0:
            return _NATURAL
        longer = then(chars("123456789"), Repeat(_DIGIT, len(str(low)), None))
        return Either((naturals(low, 10 ** len(str(low)) - 1), longer))
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
    return Either(
        (
            then(low[0], _same_length(low[1:], "9" * rest)),
            then(_between(int(low[0]) + 1, int(high[0]) - 1), Repeat(_DIGIT, rest, rest)),
            then(high[0], _same_length("0" * rest, high[1:])),
        )
    )
