"""What an event does to the running quantity of a story: the numbers that it draws and the equations it leaves.

Every number is an integer from 2 to 999 (so that nouns are always plural), every division is exact, and one factor of
every product and every divisor is at most 12. Random choices are made from ``Random.random`` alone: Python promises
that only this method gives the same numbers in every version; choice, randint and shuffle may change, and with them
what "the test problems" are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")
MOST = 999
LARGEST_FACTOR = 12
NAMED_PARTS = (2, 3, 4, 5, 6, 8, 10)


def pick(rng: Random, options: Sequence[T]) -> T:
    """One of the options, each as likely as the others."""
    return options[int(rng.random() * len(options))]


def between(rng: Random, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def distinct(rng: Random, options: Sequence[T], count: int) -> list[T]:
    """``count`` different options, in random order."""
    left = list(options)
    return [left.pop(int(rng.random() * len(left))) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Move:
    """One event in numbers: the equations in order, the result of the last, and the numbers that the texts name."""

    result: int
    equations: tuple[str, ...]
    n: int = 0
    k: int = 0
    m: int = 0


Draw = Callable[[Random, int, int, int, int], Move | None]


def spread(rng: Random, low: int, high: int) -> int:
    """A number in [low, high], with one, two and three digits all well represented where the range allows them."""
    top = min(high, pick(rng, (20, 99, 99, MOST, MOST)))
    return between(rng, low, max(low, top))


def add(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Add a number n to the running quantity; None if no n fits the limits."""
    high = min(high, limit - value)
    if high < low:
        return None
    n = spread(rng, low, high)
    rounded = n - (value + n) % between(rng, 1, LARGEST_FACTOR)  # more results that a later event can divide
    n = rounded if rounded >= low else n
    return Move(value + n, (f"{value} + {n} = {value + n}",), n=n)


def subtract(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Subtract a number n from the running quantity; None if no n fits the limits."""
    low = max(low, value - limit)
    high = min(high, value - 2)
    if high < low:
        return None
    n = spread(rng, low, high)
    rounded = n + (value - n) % between(rng, 1, LARGEST_FACTOR)
    n = rounded if rounded <= high else n
    return Move(value - n, (f"{value} - {n} = {value - n}",), n=n)


def reach(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Replace the quantity by what it lacks to a goal n, n - value; None if no n fits."""
    low = max(low, value + 2)
    high = min(high, value + limit, value + 60 + value // 2)
    if high < low:
        return None
    n = between(rng, low, high)
    n = n - n % 5 if n - n % 5 >= low else n
    return Move(n - value, (f"{n} - {value} = {n - value}",), n=n)


def multiply(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Multiply the running quantity by k; None if no k fits the limits."""
    high = min(high, LARGEST_FACTOR, limit // value)
    if high < low:
        return None
    k = between(rng, low, high)
    return Move(value * k, (f"{value} * {k} = {value * k}",), k=k)


def divide(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Divide the running quantity by one of its divisors k; None if it has none that fits."""
    high = min(high, LARGEST_FACTOR, value // 2)
    divisors = [k for k in range(low, high + 1) if value % k == 0 and value // k <= limit]
    if not divisors:
        return None
    k = pick(rng, divisors)
    return Move(value // k, (f"{value} / {k} = {value // k}",), k=k)


def part(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Divide the running quantity by a k that has an everyday name (half, a third, ...); None if none fits."""
    parts = [k for k in NAMED_PARTS if low <= k <= high and value % k == 0 and 2 <= value // k <= limit]
    if not parts:
        return None
    k = pick(rng, parts)
    return Move(value // k, (f"{value} / {k} = {value // k}",), k=k)


def cut(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """What is left when a named part goes: value / k, then value minus that."""
    move = part(rng, value, low, high, limit)
    if move is None or value - move.result < 2:
        return None
    rest = value - move.result
    return Move(rest, (*move.equations, f"{value} - {move.result} = {rest}"), k=move.k)


def add_groups(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """K groups of m come: k * m, then value plus that."""
    grouped = groups(rng, 0, low, high, limit - value)
    if grouped is None:
        return None
    result = value + grouped.result
    return Move(result, (*grouped.equations, f"{value} + {grouped.result} = {result}"), k=grouped.k, m=grouped.m)


def subtract_groups(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """K groups of m go: k * m, then value minus that."""
    grouped = groups(rng, 0, low, high, value - 2)
    if grouped is None or value - grouped.result > limit:
        return None
    result = value - grouped.result
    return Move(result, (*grouped.equations, f"{value} - {grouped.result} = {result}"), k=grouped.k, m=grouped.m)


def start(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Begin a story with the quantity n."""
    n = spread(rng, low, min(high, limit))
    return Move(n, (), n=n)


def groups(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Begin a story with k groups of m, m in [low, high]; None if no m fits."""
    high = min(high, limit // 2)
    if high < low:
        return None
    m = between(rng, low, high)
    k = between(rng, 2, min(LARGEST_FACTOR, limit // m))
    return Move(k * m, (f"{k} * {m} = {k * m}",), k=k, m=m)


def pair(rng: Random, value: int, low: int, high: int, limit: int) -> Move | None:
    """Begin a story with n of one kind and m of another."""
    n, m = spread(rng, low, min(high, limit // 2)), spread(rng, low, min(high, limit // 2))
    return Move(n + m, (f"{n} + {m} = {n + m}",), n=n, m=m)


DRAWS: dict[str, Draw] = {
    "add": add,
    "sub": subtract,
    "reach": reach,
    "mul": multiply,
    "div": divide,
    "part": part,
    "cut": cut,
    "add groups": add_groups,
    "sub groups": subtract_groups,
    "start": start,
    "groups": groups,
    "pair": pair,
}
COST = {"start": 0, "cut": 2, "add groups": 2, "sub groups": 2} | {
    kind: 1 for kind in ("add", "sub", "reach", "mul", "div", "part", "groups", "pair")
}
