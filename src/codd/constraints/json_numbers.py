"""Numbers of JSON: what formulas over bounds and multiples allow, digit by digit."""

from collections.abc import Iterator, Mapping
from fractions import Fraction

from codd.constraints.determinism import too_large
from codd.constraints.expressions import (
    EMPTY,
    NOTHING,
    Either,
    Expression,
    Repeat,
    chars,
    graph,
    optional,
    text,
    then,
)
from codd.constraints.formulas import TRUE, Atom, Formula, atoms, fulfilling, holds, needs

_DIGIT = chars("0123456789")
_DIGITS = Repeat(_DIGIT, 0, None)
_NATURAL = Either((text("0"), then(chars("123456789"), _DIGITS)))
_FRACTION = then(".", Repeat(_DIGIT, 1, None))
_NO_FRACTION = optional(then(".", Repeat(text("0"), 1, None)))
_SIGN = optional(text("-"))
_INTEGER = then(_SIGN, _NATURAL)
_WITHOUT_MINUS_ZERO = Either((text("0"), then(_SIGN, chars("123456789"), _DIGITS)))
_PLAIN = then(_INTEGER, optional(_FRACTION))
_EXPONENT = then(chars("eE"), optional(chars("+-")), Repeat(_DIGIT, 1, 2))  # more would not fit a double
ANY_NUMBER = then(_PLAIN, optional(_EXPONENT))
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
    if whole and len(said) == 1:
        return _INTEGER

    return fulfilling(formula, _WITHOUT_MINUS_ZERO if whole else _PLAIN, _expression)


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
    same = _compared(abs(bound), strict, 1) if beyond else _PLAIN_MAGNITUDE
    other = NOTHING if beyond else _compared(-bound, strict, -1)
    positive, negative = (same, other) if what == "least" else (other, same)
    return Either((positive, then("-", negative)))


_PLAIN_MAGNITUDE = then(_NATURAL, optional(_FRACTION))


def _equal(value: Fraction) -> Expression:
    return then("-" if value < 0 else EMPTY if value else _SIGN, _compared(abs(value), False, 0))


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


def _compared(bound: Fraction, strict: bool, wanted: int) -> Expression:
    """The magnitudes above ``bound`` (1), below it (-1) or neither (0); unless ``strict`` with those equal to it.

    A place is what was read last, how many digits of the whole part or after the point, and how these compare.
    """
    whole, digits = _decimal(bound)
    stated = {"begin": str(whole), "whole": str(whole), "point": digits, "after": digits}

    def compares(part: str, read: int, order: int) -> int:
        """The whole part: with fewer digits it is less."""
        length = len(str(whole))
        return order if part in ("point", "after") else (read > length) - (read < length) or order

    def moves(place: tuple[str, int, int]) -> Iterator[tuple[Expression, tuple[str, int, int]]]:
        part, read, order = place
        if part in ("zero", "whole"):
            yield text("."), ("point", 0, compares(*place))
        if part == "zero":
            return
        after, at = "whole" if part in ("begin", "whole") else "after", min(read, len(stated[part])) + 1
        if order:
            yield _DIGIT, (after, at, order)
            return
        here = stated[part][read : read + 1] or "0"
        for digit in "0123456789":
            sign = (digit > here) - (digit < here)
            yield chars(digit), ("zero" if part == "begin" and digit == "0" else after, at, sign)

    def ends(place: tuple[str, int, int]) -> bool:
        part, read, _ = place
        order = compares(*place) or -bool(digits[read if part == "after" else 0 :])
        return part not in ("begin", "point") and (order == wanted or (order == 0 and not strict))

    return graph(("begin", 0, 0), moves, ends)


_START, _ZERO, _WHOLE = -3, -2, -1  # nothing was read, a zero, some digits: no point yet


def _multiples(step: Fraction) -> Expression:
    """The magnitudes that are multiples: remainders of the digits so far, and how many of them follow the point."""
    digits = len(_decimal(step)[1])
    modulus = int(step * 10**digits)
    if modulus * (digits + 1) > _MAX_REMAINDERS:
        raise too_large("remainders of a multiple", _MAX_REMAINDERS)

    def moves(place: tuple[int, int]) -> Iterator[tuple[Expression, tuple[int, int]]]:
        remainder, after = place
        if after == _START:
            yield text("0"), (0, _ZERO)
        if after in (_ZERO, _WHOLE):
            yield text("."), (remainder, 0)
        if after in (_START, _WHOLE) or 0 <= after < digits:
            for digit in range(after == _START, 10):
                yield chars(str(digit)), ((10 * remainder + digit) % modulus, after + 1 if after >= 0 else _WHOLE)
        elif after >= digits and remainder == 0:
            yield text("0"), (0, digits + 1)

    def ends(place: tuple[int, int]) -> bool:
        remainder, after = place
        missing = digits - min(max(after, 0), digits)
        return after not in (_START, 0) and remainder * 10**missing % modulus == 0

    return graph((0, _START), moves, ends)
