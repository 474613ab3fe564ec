"""Statements about a JSON value, joined by and, or and not: interned, so that equal ones are the same object."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from codd.constraints.determinism import combined, too_large
from codd.constraints.expressions import Expression

_MAX_STATEMENTS = 20_000
_MAX_WORK = 300_000  # parts of statements looked at while they are joined: most of a second
Atom = tuple[Any, ...]
"""The type of values that it refers to (it holds for all others), what it says, and its arguments."""
ANYTHING = "*"
"""The key of atoms that any element of an array or object can change."""


class Formula:
    """A statement in negation normal form: an atom or its negation, or all or any of some others."""

    __slots__ = ("atom", "joins", "keys", "number", "parts", "positive")

    def __init__(self, number: int, joins: str, parts: tuple["Formula", ...], atom: Atom, positive: bool):
        """``joins``: "and", "or", or nothing for an atom; ``number`` orders formulas by when they were made."""
        self.number, self.joins, self.parts, self.atom, self.positive = number, joins, parts, atom, positive
        self.keys: frozenset[str] = (
            frozenset().union(*(part.keys for part in parts)) if joins else frozenset((_key(atom),))
        )


TRUE, FALSE = Formula(0, "and", (), (), True), Formula(1, "or", (), (), True)


def _key(atom: Atom) -> str:
    """What an atom depends on: the name of a property, or `ANYTHING`."""
    if atom[:2] in (("object", "required"), ("object", "absent"), ("object", "property")):
        return f"={atom[2]}"
    return "holds" if atom[0] == "holds" else ANYTHING


class Formulas:
    """Makes the formulas of one schema."""

    def __init__(self) -> None:
        """None but true and false."""
        self._known: dict[Any, Formula] = {}
        self._negated: dict[int, Formula] = {0: FALSE, 1: TRUE}
        self._work = 0

    def literal(self, *atom: Any, positive: bool = True) -> Formula:
        """An atom, or its negation."""
        return self._made(("", atom, positive), "", (), atom, positive)

    def _made(self, key: Any, joins: str, parts: tuple[Formula, ...], atom: Atom, positive: bool) -> Formula:
        known = self._known.get(key)
        if known is None:
            if len(self._known) > _MAX_STATEMENTS:
                raise too_large("statements", _MAX_STATEMENTS)
            known = self._known[key] = Formula(len(self._known) + 2, joins, parts, atom, positive)
        return known

    def all(self, parts: Iterable[Formula]) -> Formula:
        """All of them hold."""
        return self._joined("and", parts, TRUE, FALSE)

    def any(self, parts: Iterable[Formula]) -> Formula:
        """At least one of them holds."""
        return self._joined("or", parts, FALSE, TRUE)

    def _joined(self, joins: str, parts: Iterable[Formula], none: Formula, decided: Formula) -> Formula:
        flat: dict[int, Formula] = {}
        for part in parts:
            if part is decided:
                return decided
            for inner in part.parts if part.joins == joins else (part,):
                flat[inner.number] = inner
        self._work += len(flat)
        if self._work > _MAX_WORK:
            raise too_large("steps to join statements", _MAX_WORK)
        flat.pop(none.number, None)
        if any(self.negation(part).number in flat for part in flat.values() if not part.joins):
            return decided
        if len(flat) == 1:
            return next(iter(flat.values()))
        ordered = tuple(flat[number] for number in sorted(flat))
        return (
            self._made((joins, tuple(flat[n].number for n in sorted(flat))), joins, ordered, (), True) if flat else none
        )

    def negation(self, formula: Formula) -> Formula:
        """It does not hold; of a value that is nested too deep nothing is known, nor of its negation."""
        found = self._negated.get(formula.number)
        if found is None:
            if formula.joins == "and":
                found = self.any(map(self.negation, formula.parts))
            elif formula.joins == "or":
                found = self.all(map(self.negation, formula.parts))
            elif formula.atom[0] == "deep":
                found = formula
            else:
                found = self.literal(*formula.atom, positive=not formula.positive)
            self._negated[formula.number] = found
            self._negated[found.number] = formula
        return found

    def substituted(
        self, formula: Formula, replace: Callable[[Atom], Formula | None], keys: frozenset[str] | None = None
    ) -> Formula:
        """With another formula for each atom (None: as it is); ``keys``: what the atoms to be replaced depend on."""
        known: dict[int, Formula] = {}

        def of(node: Formula) -> Formula:
            if keys is not None and keys.isdisjoint(node.keys):
                return node
            found = known.get(node.number)
            if found is None:
                if node.joins:
                    found = (self.all if node.joins == "and" else self.any)(of(part) for part in node.parts)
                else:
                    new = replace(node.atom)
                    found = node if new is None else new if node.positive else self.negation(new)
                known[node.number] = found
            return found

        return of(formula)

    def exactly_one(self, parts: list[Formula]) -> Formula:
        """One of them holds, and no other."""
        one, none = FALSE, TRUE
        for part in reversed(parts):
            fails = self.negation(part)
            one = self.any((self.all((part, none)), self.all((fails, one))))
            none = self.all((fails, none))
        return one


def literals(formula: Formula, keys: frozenset[str] | None = None) -> list[Formula]:
    """The atoms of a formula and their negations, in the order in which they were made; ``keys``: of these only."""
    seen: dict[int, Formula] = {}
    todo = [formula]
    while todo:
        node = todo.pop()
        if node.number not in seen and (keys is None or not keys.isdisjoint(node.keys)):
            seen[node.number] = node
            todo.extend(node.parts)
    return [seen[number] for number in sorted(seen) if not seen[number].joins]


def atoms(formula: Formula, keys: frozenset[str] | None = None) -> Iterator[Atom]:
    """The atoms of a formula, each once, in the order in which they were made; ``keys``: of these only."""
    yield from dict.fromkeys(literal.atom for literal in literals(formula, keys))


def holds(formula: Formula, truth: Callable[[Atom], bool]) -> bool:
    """Whether a formula holds, given the truth of its atoms; one with a value nested too deep does not."""
    if not formula.joins:
        return formula.atom[0] != "deep" and truth(formula.atom) == formula.positive
    return (all if formula.joins == "and" else any)(holds(part, truth) for part in formula.parts)


def fulfilling(formula: Formula, universe: Expression, expression: Callable[[Atom], Expression]) -> Expression:
    """The texts of an expression for which a formula holds, by the texts for which each of its atoms does."""
    said = list(atoms(formula))

    def accepts(matched: Sequence[bool]) -> bool:
        truth = dict(zip(said, matched[1:], strict=True))
        return holds(formula, truth.__getitem__)

    return combined([universe, *map(expression, said)], accepts)


def needs(formula: Formula, what: str) -> bool:
    """Whether a formula holds only where some atom of a kind does, whatever the others say."""
    if not formula.joins:
        return formula.atom[1] == what and formula.positive
    return (any if formula.joins == "and" else all)(needs(part, what) for part in formula.parts)
