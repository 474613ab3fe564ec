"""JSON texts of the values for which a formula holds.

Arrays and objects are read element by element. A state is the formula that the rest has to fulfil; the next one depends
on which schemas of an element hold for its value, so that every combination of keywords is exact. Properties come in
the order in which the schema names them; others follow.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from codd.constraints import json_numbers, json_strings
from codd.constraints.determinism import MAX_COPIES, classified, too_large
from codd.constraints.expressions import (
    ANY,
    EMPTY,
    NOTHING,
    Either,
    Expression,
    Graph,
    Repeat,
    graph,
    optional,
    size,
    text,
    then,
)
from codd.constraints.formulas import ANYTHING, FALSE, TRUE, Atom, Formula, atoms, holds, literals
from codd.constraints.json_schema import TYPES, Mentions, Part, Schemas
from codd.constraints.syntax import parse_search

_SPACE = optional(text(" "))
_COMMA, _COLON = then(",", _SPACE), then(":", _SPACE)
_HOLDS = frozenset(("holds",))
_SINGLE = {"null": None, "true": True, "false": False}
_AT_LEAST = {("count", True), ("length", True), ("below", False)}
_FIRSTS = ("^[0-9]", "^[a-f]", "^[g-l]", "^[m-r]", "^[s-z]")
_ARRAY_KEEPS = {"item", "items", "unique", "below", "rarer"}
"""What holds of an array that ends."""
_OBJECT_KEEPS = {"absent", "property", "matching", "others", "names", "below"}
_MAX_UNIQUE = 8
_CHARACTERS_PER_ITEM = 15
_MAX_STEPS = 20_000

_Change = Callable[[Atom], Formula | None]
_Kind = tuple[Expression, dict[Any, bool]]
_Slot = tuple[Expression, _Change, frozenset[str] | None]
"""A name as it is written, what a member of it changes, and the keys of the atoms that it can change."""
_Place = tuple[Any, ...]
"""Where one is in an array or object, and the formula that the rest has to fulfil."""


class Values:
    """Writes the values of one schema."""

    def __init__(self, schemas: Schemas, *, additional: bool, every_type: bool, any_depth: int, longest: int):
        """Write the values of a schema.

        Args:
            schemas: the schema, as it is read.
            additional: whether properties that no schema names are allowed.
            every_type: whether values are allowed of types that no keyword refers to.
            any_depth: how deep arrays and objects nest that the schema leaves open.
            longest: how many characters a string has at most that the schema gives a maximum; arrays have as many items
                as fit into this many characters.
        """
        self._longest = longest
        self._schemas, self._formulas = schemas, schemas.formulas
        self._additional, self._every_type, self._any_depth = additional, every_type, any_depth
        self._known: dict[int, Expression] = {}
        self._open = [Either((json_strings.ANY_STRING, json_numbers.ANY_NUMBER, *map(text, TYPES[:3])))]
        for _ in range(any_depth):
            self._open.append(Either((self._open[0], self._enclosed("[", -1), self._enclosed("{", -1))))
        self._impossible: dict[int, bool] = {}
        self._steps = 0
        self.narrowed = False
        """Whether arrays of unique items have at most one that is not stated by the schema."""

    def of(self, guard: Formula) -> Expression:
        """The values for which a formula over parts of the schema holds; what it leaves open nests so deep."""
        if guard is TRUE:
            return self._open[self._any_depth - 1]
        if guard.number not in self._known:
            self._known[guard.number] = self._written(guard)
        return self._known[guard.number]

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise too_large("states of arrays and objects", _MAX_STEPS)

    def _written(self, guard: Formula) -> Expression:
        whole, mentions = self._opened(guard)
        if whole is TRUE:
            return self._open[self._any_depth]
        kinds = {kind: self._of_type(whole, kind) for kind in TYPES}
        if not self._every_type and all(atom[0] != "is" for atom in atoms(whole)):
            spoken = {kind: says for kind, says in kinds.items() if says is not TRUE}
            kinds = spoken if any(says is not FALSE for says in spoken.values()) else kinds
        parts = [self._value(kind, says, mentions) for kind, says in kinds.items() if says is not FALSE]
        written = Either(tuple(part for part in parts if part is not NOTHING))
        if size(written) > MAX_COPIES:
            places = [atom[1].path for atom in atoms(guard)]
            raise too_large(f"positions ({', '.join(places[:2])})", MAX_COPIES)
        return written if written.parts else NOTHING

    def _opened(self, guard: Formula) -> tuple[Formula, Mentions]:
        """A formula over parts as one over their keywords, and the properties that they name."""
        mentions = Mentions()
        certain = guard.parts if guard.joins == "and" else (guard,)
        for atom in atoms(guard):
            says, names = self._schemas.read(atom[1])
            when = TRUE if self._formulas.literal(*atom) in certain else says
            for name, condition in names.items():
                both = self._formulas.all((when, condition))
                mentions[name] = self._formulas.any((mentions.get(name, FALSE), both))
        return self._formulas.substituted(guard, lambda atom: self._schemas.read(atom[1])[0]), mentions

    def _of_type(self, formula: Formula, kind: str) -> Formula:
        """What a formula says about the values of a type; those that are nested too deep are none."""

        def replace(atom: Atom) -> Formula | None:
            if atom[0] == "is":
                return TRUE if atom[1] == kind else FALSE
            return FALSE if atom[0] == "deep" else None if atom[0] == kind else TRUE

        return self._formulas.substituted(formula, replace)

    def _value(self, kind: str, says: Formula, mentions: Mentions) -> Expression:
        if kind == "array":
            return self._array(says)
        if kind == "object":
            return self._object(says, {name: self._of_type(when, kind) for name, when in mentions.items()})
        if kind == "number":
            return json_numbers.written(says, self._schemas.written)
        return json_strings.written(self._shortened(says)) if kind == "string" else text(kind)

    def _shortened(self, says: Formula) -> Formula:
        """With smaller counts where there are maxima that only few texts come near to."""
        counts = [part for part in literals(says) if part.atom[1] in ("length", "below")]
        least = [part.atom[2] for part in counts if (part.atom[1], part.positive) in _AT_LEAST]
        most = [part.atom for part in counts if (part.atom[1], part.positive) not in _AT_LEAST]
        if not most:
            return says
        kind = most[0][0]
        longest = self._longest if kind == "string" else self._longest // _CHARACTERS_PER_ITEM
        if max(least, default=0) > longest or all(atom[2] <= longest + 1 for atom in most):
            return says
        return self._formulas.all((says, self._formulas.literal(kind, "below", longest + 1)))

    def _enclosed(self, opening: str, depth: int) -> Expression:
        """An array or object of which nothing is said, with values of a depth."""
        name = EMPTY if opening == "[" else then(json_strings.ANY_STRING, _COLON)
        items = Graph(((0, EMPTY, 1), (1, then(name, self._open[depth]), 2), (2, _COMMA, 1)), (0, 2))
        return then(opening, items, {"[": "]", "{": "}"}[opening])

    def _branches(self, formula: Formula, guard: Formula = TRUE) -> Iterator[tuple[Formula, Formula]]:
        """The ways in which the parts that a formula asks for can hold, and what is left of it in each."""
        self._step()
        part = next(atoms(formula, _HOLDS), None)
        if part is None:
            yield guard, formula
            return
        for truth in (TRUE, FALSE):
            left = self._formulas.substituted(formula, _Given(part, truth), _HOLDS)
            if left is not FALSE:
                both = self._formulas.all((guard, self._formulas.literal(*part, positive=truth is TRUE)))
                if guard is TRUE or not self._empty(both):
                    yield from self._branches(left, both)

    def _grouped(self, formula: Formula) -> list[tuple[Formula, Formula]]:
        """What holds for an element's value, and what the rest has to fulfil then."""
        found: dict[Formula, list[Formula]] = {}
        for guard, left in self._branches(formula):
            found.setdefault(left, []).append(guard)
        return [(self._formulas.any(guards), left) for left, guards in found.items()]

    def _empty(self, guard: Formula) -> bool:
        """Whether it is plain that no value fulfils a formula over parts."""
        if guard.number not in self._impossible:
            whole, _ = self._opened(guard)
            self._impossible[guard.number] = all(_contradicts(self._of_type(whole, kind)) for kind in TYPES)
        return self._impossible[guard.number]

    def _array(self, says: Formula) -> Expression:
        if says is TRUE:
            return self._enclosed("[", self._any_depth - 1)
        says, constants = self._shortened(says), self._constants(says)

        def moves(place: _Place) -> Iterator[tuple[Expression, _Place]]:
            self._step()
            kind, state = place
            if kind != "item":
                yield (EMPTY if kind == "start" else _COMMA), ("item", state)
                return
            for guard, left in self._grouped(self._formulas.substituted(state, self._item(constants))):
                yield self.of(guard), ("after", left)

        def ends(place: _Place) -> bool:
            kind, state = place
            return kind != "item" and holds(state, lambda atom: atom[1] in _ARRAY_KEEPS)

        return then("[", graph(("start", says), moves, ends), "]")

    def _item(self, constants: list[Part]) -> _Change:
        """What an atom says about the rest of an array, given what holds for its first item."""
        literal, all_of, any_of = self._formulas.literal, self._formulas.all, self._formulas.any

        def change(atom: Atom) -> Formula | None:
            what, arguments = atom[1], atom[2:]
            if what in ("length", "below"):
                return self._counted(atom)
            if what in ("contains", "rarer"):
                part, count = arguments
                one = literal("array", what, part, count - 1) if count > 1 else TRUE if what == "contains" else FALSE
                missed = all_of((literal("holds", part, positive=False), literal(*atom)))
                return any_of((all_of((literal("holds", part), one)), missed))
            if what == "unique":
                return self._unlike(arguments[0], constants)
            index, part = arguments
            if index:
                return literal("array", what, index - 1, part)
            held = literal("holds", part)
            return held if what == "item" else all_of((held, literal(*atom)))

        return change

    def _unlike(self, seen: frozenset[Part | None], constants: list[Part]) -> Formula:
        """An item is none of those before it; of items that are no constants there is one at most."""
        literal, all_of = self._formulas.literal, self._formulas.all
        ways = [
            all_of((literal("holds", part), literal("array", "unique", seen | {part})))
            for part in constants
            if part not in seen
        ]
        another = literal("deep") if None in seen else literal("array", "unique", seen | {None})
        fails = (literal("holds", part, positive=False) for part in constants)
        return self._formulas.any((*ways, all_of((*fails, another))))

    def _constants(self, says: Formula) -> list[Part]:
        """The values that unique items are told apart by: those that the schema states."""
        asked = list(atoms(says))
        if all(atom[1] != "unique" for atom in asked):
            return []
        found: dict[tuple[str, Any], Any] = {}
        finite = False
        for part in (atom[3] for atom in asked if atom[1] in ("item", "items")):
            whole, finite = self._schemas.read(part)[0], True
            for kind in TYPES:
                says = self._of_type(whole, kind)
                stated = [value for atom in atoms(says) if atom[1] == "among" for value in atom[2]]
                if kind in _SINGLE and says is not FALSE:
                    stated = [_SINGLE[kind]]
                found |= {(kind, value): value for value in stated}
                finite = finite and (bool(stated) or says is FALSE)
        if not finite or len(found) > _MAX_UNIQUE:
            self.narrowed = True
        if len(found) > _MAX_UNIQUE:
            return []
        values = [float(v) if kind == "number" and v % 1 else int(v) if kind == "number" else v for (kind, v) in found]
        return [self._schemas.part({"const": value}, "#") for value in values]

    def _object(self, says: Formula, mentions: Mentions) -> Expression:
        closed = bool(mentions) and (not self._additional or ("closed", "") in mentions)
        if says is TRUE and not closed:
            return self._enclosed("{", self._any_depth - 1)
        names = [name for name in mentions if isinstance(name, str)]
        for atom in atoms(says):
            names += (
                [atom[2]] if atom[1] in ("required", "absent", "property") else atom[2] if atom[1] == "others" else ()
            )
        names = list(dict.fromkeys(names))
        said = literals(says)
        apart = any(part.atom[2] > 1 for part in said if (part.atom[1], part.positive) in _AT_LEAST)
        open_to = [m for m in mentions if isinstance(m, tuple) and m[0] != "closed"]
        kinds = self._kinds(names, says, mentions, apart) if open_to or not closed else []
        told = ("matching", "others", "names")
        once = apart or any(not part.positive and part.atom[1] in told for part in said)
        if closed:
            says = self._closed(says, names, kinds, mentions)
        slots: list[_Slot] = [
            (json_strings.literal(name), self._member(name), frozenset((f"={name}", ANYTHING))) for name in names
        ]
        free: list[_Slot] = [
            (json_strings.key(written), self._free_member(i, matched), None)
            for i, (written, matched) in enumerate(kinds)
        ]
        if once:  # of two members with one name only the last counts
            slots, free = [*slots, *free], []

        def moves(place: _Place) -> Iterator[tuple[Expression, _Place]]:
            self._step()
            kind, state, index, *guard = place
            if kind == "value":
                yield self.of(guard[0]), ("after", state, index)
            elif kind != "member":
                yield (EMPTY if kind == "start" else _COMMA), ("member", state, index)
            else:
                for written, change, keys in slots[index : index + 1] or free:
                    after = self._formulas.substituted(state, change, keys)
                    for fits, left in self._grouped(after):
                        yield then(written, _COLON), ("value", left, min(index + 1, len(slots)), fits)
                if index < len(names):
                    state = self._formulas.substituted(state, _absent, frozenset((f"={names[index]}",)))
                if index < len(slots) and state is not FALSE:
                    yield EMPTY, ("member", state, index + 1)

        def ends(place: _Place) -> bool:
            return place[0] in ("start", "after") and holds(place[1], lambda atom: atom[1] in _OBJECT_KEEPS)

        return then("{", graph(("start", says, 0), moves, ends), "}")

    def _closed(self, says: Formula, names: list[str], kinds: list[_Kind], mentions: Mentions) -> Formula:
        """Without the properties that no schema names which holds."""

        def allowed(name: str | None, matches: Callable[[str], bool]) -> Formula:
            when = [mentions.get(("others", ""), FALSE)]
            if name is not None:
                when.append(mentions.get(name, FALSE))
            patterns = [m for m in mentions if isinstance(m, tuple) and m[0] == "pattern"]
            return self._formulas.any((*when, *(mentions[m] for m in patterns if matches(m[1]))))

        said = [says]
        for name in names:
            fails = self._formulas.literal("object", "required", name, positive=False)
            said.append(self._formulas.any((fails, allowed(name, partial(json_strings.matches, value=name)))))
        for number, (_, matched) in enumerate(kinds):
            fails = self._formulas.literal("object", "free", number, positive=False)
            said.append(self._formulas.any((fails, allowed(None, matched.__getitem__))))
        return self._formulas.all(said)

    def _kinds(self, names: list[str], says: Formula, mentions: Mentions, apart: bool) -> list[_Kind]:
        """The kinds of names that are not listed: their texts, and which patterns and schemas of names they match.

        ``apart``: also by what they begin with, so that several can be told apart.
        """
        named = [m[1] for m in mentions if isinstance(m, tuple) and m[0] == "pattern"]
        patterns: dict[Any, Expression] = {pattern: parse_search(pattern) for pattern in named}
        for atom in atoms(says):
            if atom[1] == "names":
                patterns[atom[2]] = json_strings.plain(self._of_type(self._schemas.read(atom[2])[0], "string"))
            for pattern in (atom[2],) if atom[1] == "matching" else atom[3] if atom[1] == "others" else ():
                patterns[pattern] = parse_search(pattern)
        if apart:
            patterns |= {first: parse_search(first) for first in _FIRSTS}
        listed = Either(tuple(map(text, names)))
        parts = classified([Repeat(ANY, 0, None), listed, *patterns.values()])
        return [
            (texts, dict(zip(patterns, matched[2:], strict=True))) for matched, texts in parts.items() if not matched[1]
        ]

    def _member(self, name: str) -> _Change:
        """What an atom says about the rest of an object, given what holds for the value of a property."""

        def change(atom: Atom) -> Formula | None:
            what, arguments = atom[1], atom[2:]
            if what in ("required", "absent", "property") and arguments[0] != name:
                return None
            if what == "required":
                return TRUE
            if what == "absent":
                return FALSE
            if what == "property":
                return self._formulas.literal("holds", arguments[1])
            if what == "names":
                whole = self._of_type(self._schemas.read(arguments[0])[0], "string")
                return None if json_strings.satisfies(whole, name) else FALSE
            if what == "matching":
                return self._of_each(atom, json_strings.matches(arguments[0], name))
            if what == "others":
                named = name in arguments[0] or any(json_strings.matches(pattern, name) for pattern in arguments[1])
                return self._of_each(atom, not named)
            return self._counted(atom)

        return change

    def _free_member(self, number: int, matched: dict[Any, bool]) -> _Change:
        """As `_member`, for a name of a kind."""

        def change(atom: Atom) -> Formula | None:
            what, arguments = atom[1], atom[2:]
            if what == "free":
                return TRUE if arguments[0] == number else None
            if what == "names":
                return None if matched[arguments[0]] else FALSE
            if what == "matching":
                return self._of_each(atom, matched[arguments[0]])
            if what == "others":
                return self._of_each(atom, not any(matched[pattern] for pattern in arguments[1]))
            return self._counted(atom)

        return change

    def _of_each(self, atom: Atom, concerned: bool) -> Formula | None:
        """What a schema of many properties says about this one and those that follow."""
        if not concerned:
            return None
        return self._formulas.all((self._formulas.literal("holds", atom[-1]), self._formulas.literal(*atom)))

    def _counted(self, atom: Atom) -> Formula | None:
        """What a count says about the rest."""
        kind, what, count = atom[:3]
        if what not in ("length", "count", "below"):
            return None
        return self._formulas.literal(kind, what, count - 1) if count > 1 else FALSE if what == "below" else TRUE


class _Given:
    """One atom is known."""

    def __init__(self, known: Atom, truth: Formula):
        self._known, self._truth = known, truth

    def __call__(self, atom: Atom) -> Formula | None:
        return self._truth if atom == self._known else None


def _absent(atom: Atom) -> Formula:
    """What is left of an atom of a property that is not there."""
    return FALSE if atom[1] == "required" else TRUE


def _contradicts(formula: Formula) -> bool:
    """Whether it is plain that a formula does not hold: other constants."""
    if formula is FALSE:
        return True
    if formula.joins == "or":
        return all(map(_contradicts, formula.parts))
    if formula.joins != "and":
        return False
    listed = [part for part in formula.parts if not part.joins and part.atom[1:2] == ("among",)]
    certain = [set(part.atom[2]) for part in listed if part.positive]
    left = set.intersection(*certain) if certain else None
    if left is not None and not left.difference(*(part.atom[2] for part in listed if not part.positive)):
        return True
    return any(part.joins == "or" and _contradicts(part) for part in formula.parts)
