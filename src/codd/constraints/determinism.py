"""From a regular expression to its smallest deterministic automaton over the bytes of UTF-8, within limits.

Characters first: those that no set of the expression tells apart are one symbol, so that the subset construction sees a
handful of them. Then each symbol is spelt in bytes.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from codd.constraints.expressions import LAST, NOTHING, Chars, Expression, Graph, Ranges, Repeat, Then, union
from codd.constraints.tables import DFA, Table, minimal, trimmed, unique_rows
from codd.errors import EmptyLanguage, InvalidConstraint

MAX_STATES = 16_384
"""The largest number of states of a compiled automaton, unless the caller gives another."""
MAX_COPIES = 60_000
"""The largest number of states of a nondeterministic automaton, and of characters that a constraint is written in."""
_MAX_WORK = 5_000_000  # moves looked at while subsets are built: about a second
_MAX_ENTRIES = 8_000_000  # of a table over characters: 32 MB
_MAX_INNER = 16_384  # states of a part of an expression
SLACK = 2
"""How many times the states of the result a stage before it may have."""


def byte_dfa(expression: Expression, max_states: int = MAX_STATES) -> DFA:
    """The smallest automaton over bytes (256 columns) of the texts that an expression matches, encoded as UTF-8.

    EmptyLanguage if it matches none; InvalidConstraint if the automaton would be too large.
    """
    by_character, symbols = _character_dfa([expression], any, SLACK * max_states)
    kept = trimmed(by_character)
    if kept is None:
        raise EmptyLanguage("the language is empty: the expression matches no text at all.")
    return _spelt(minimal(kept), symbols, SLACK * max_states)


def combined(expressions: Sequence[Expression], accepts: Callable[[Sequence[bool]], bool]) -> Expression:
    """The texts of the first expression that ``accepts`` takes, given which of the expressions match them."""
    dfa, steps = _character_dfa(expressions, lambda matched: matched[0] and accepts(matched), _MAX_INNER)
    return _graph(dfa, steps)


def classified(expressions: Sequence[Expression]) -> dict[tuple[bool, ...], Expression]:
    """The texts of the first expression by which of the expressions match them."""
    found: dict[tuple[bool, ...], list[int]] = {}
    states = iter(range(_MAX_INNER))

    def accepts(matched: Sequence[bool]) -> bool:
        found.setdefault(tuple(matched), []).append(next(states))
        return False

    dfa, steps = _character_dfa(expressions, accepts, _MAX_INNER)
    parts = {}
    for matched, ends in found.items():
        if matched[0]:
            accepting = np.zeros(len(dfa.table), dtype=bool)
            accepting[ends] = True
            parts[matched] = _graph(dfa._replace(accepting=accepting), steps)
    return parts


def _graph(dfa: DFA, steps: list[tuple[int, int]]) -> Expression:
    """An automaton over the symbols of `_symbols` as an expression."""
    kept = trimmed(dfa)
    if kept is None:
        return NOTHING
    small = minimal(kept)
    ranges: dict[int, list[tuple[int, int]]] = {}
    for (first, symbol), end in zip(steps, [*(first for first, _ in steps[1:]), LAST + 1], strict=True):
        ranges.setdefault(symbol, []).append((first, end - 1))
    place = np.argsort([small.start, *(s for s in range(len(small.table)) if s != small.start)])  # 0 is the start
    edges = []
    for state, row in enumerate(small.table):
        for target in np.unique(row[row >= 0]).tolist():
            points = union(span for symbol in np.flatnonzero(row == target).tolist() for span in ranges[symbol])
            edges.append((int(place[state]), Chars(points), int(place[target])))
    return Graph(tuple(edges), tuple(place[np.flatnonzero(small.accepting)].tolist()))


class TooLarge(InvalidConstraint):
    """A language whose automaton explodes."""


def too_large(what: str, most: int) -> TooLarge:
    """The error for a language whose automaton explodes."""
    return TooLarge(
        f"the constraint is too large: it needs more than {most:,} {what}. Shorten its counted repetitions ({{m,n}}, "
        "minLength, maxItems and the like), replace them by * or +, or allow more with max_states."
    )


class _NFA:
    """Thompson's automaton: ``moves[s]`` are (set of characters, next state), ``free[s]`` states reached by nothing."""

    def __init__(self, expressions: Sequence[Expression]):
        self.sets: dict[Ranges, int] = {}
        self.moves: list[list[tuple[int, int]]] = []
        self.free: list[list[int]] = []
        self._closures: dict[int, tuple[int, ...]] = {}
        self._work = 0
        self.starts = [self._state() for _ in expressions]
        self.ends = [self._add(part, start) for part, start in zip(expressions, self.starts, strict=True)]
        self._ending = set(self.ends)

    def _state(self) -> int:
        if len(self.moves) > MAX_COPIES:
            raise too_large("positions", MAX_COPIES)
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def _add(self, expression: Expression, start: int) -> int:
        """Add what leads from ``start`` through the expression; nothing leads back to ``start``. The end."""
        if isinstance(expression, Then):
            for part in expression.parts:
                start = self._add(part, start)
            return start
        if isinstance(expression, Repeat):
            return self._add_repeat(expression, start)
        if isinstance(expression, Graph):
            return self._add_graph(expression, start)
        end = self._state()
        if isinstance(expression, Chars):
            if expression.ranges:
                self.moves[start].append((self.sets.setdefault(expression.ranges, len(self.sets)), end))
        else:
            for part in expression.parts:
                self.free[self._add(part, start)].append(end)
        return end

    def _add_repeat(self, repeat: Repeat, start: int) -> int:
        for _ in range(repeat.least):
            start = self._add(repeat.part, self._joined(start))
        end = self._joined(start)
        if repeat.most is None:
            self.free[self._add(repeat.part, end)].append(end)
            return end
        for _ in range(repeat.most - repeat.least):
            start = self._add(repeat.part, self._joined(start))
            self.free[start].append(end)
        return end

    def _add_graph(self, graph: Graph, start: int) -> int:
        states: dict[int, int] = {0: self._joined(start)}
        for source, part, target in graph.edges:
            before, after = (states.get(s) or states.setdefault(s, self._state()) for s in (source, target))
            if isinstance(part, Chars):
                self.moves[before].append((self.sets.setdefault(part.ranges, len(self.sets)), after))
            else:
                self.free[self._add(part, self._joined(before))].append(after)
        end = self._state()
        for state in graph.accepting:
            self.free[states.setdefault(state, end)].append(end)
        return end

    def _joined(self, state: int) -> int:
        """A new state that ``state`` leads to."""
        new = self._state()
        self.free[state].append(new)
        return new

    def worked(self, steps: int) -> None:
        """Count what the construction has done; InvalidConstraint when it is too much."""
        self._work += steps
        if self._work > _MAX_WORK:
            raise too_large("steps to compile", _MAX_WORK)

    def closure(self, state: int) -> tuple[int, ...]:
        """The states with moves, and the end, that are reached from a state for nothing."""
        if state not in self._closures:
            seen, todo = {state}, [state]
            while todo:
                for following in self.free[todo.pop()]:
                    if following not in seen:
                        seen.add(following)
                        todo.append(following)
            self.worked(len(seen))
            self._closures[state] = tuple(s for s in seen if self.moves[s] or s in self._ending)
        return self._closures[state]


def _symbols(nfa: _NFA) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Characters grouped by the sets that hold them.

    As steps (first code point, symbol; -1: in no set), in order, and the symbols of each set.
    """
    bounds = np.unique([0, LAST + 1, *(p for ranges in nfa.sets for a, b in ranges for p in (a, b + 1))])
    holders: list[list[int]] = [[] for _ in bounds]
    for number, ranges in enumerate(nfa.sets):
        for first, last in np.searchsorted(bounds, np.add(ranges, [0, 1])).tolist():
            nfa.worked(last - first)
            for place in range(first, last):
                holders[place].append(number)
    symbols: dict[tuple[int, ...], int] = {(): -1}
    steps = [
        (first, symbols.setdefault(tuple(sets), len(symbols) - 1))
        for first, sets in zip(bounds.tolist(), holders, strict=True)
    ]
    members: list[list[int]] = [[] for _ in nfa.sets]
    for sets, symbol in symbols.items():
        for number in sets:
            members[number].append(symbol)
    return steps, members


def _character_dfa(
    expressions: Sequence[Expression], accepts: Callable[[Sequence[bool]], bool], most: int
) -> tuple[DFA, list[tuple[int, int]]]:
    """The subset construction over all expressions side by side, and the steps of `_symbols`.

    ``accepts``: whether a text is in the language, by which of the expressions match it.
    """
    nfa = _NFA(expressions)
    steps, symbols_of = _symbols(nfa)
    columns = max(symbol for _, symbol in steps) + 1
    first = frozenset(state for start in nfa.starts for state in nfa.closure(start))
    number, queue, rows, accepting = {first: 0}, deque([first]), [], []
    while queue:
        subset = queue.popleft()
        reached: dict[int, set[int]] = {}
        for set_of, target in {move for state in subset for move in nfa.moves[state]}:
            closed = nfa.closure(target)
            nfa.worked(len(symbols_of[set_of]) * (1 + len(closed)))
            for symbol in symbols_of[set_of]:
                reached.setdefault(symbol, set()).update(closed)
        row = np.full(columns, -1, dtype=np.int32)
        for symbol in sorted(reached):
            following = frozenset(reached[symbol])
            if following not in number:
                number[following] = len(number)
                queue.append(following)
            row[symbol] = number[following]
        if len(number) > most:
            raise too_large("states over characters", most)
        if len(number) * columns > _MAX_ENTRIES:
            raise too_large("entries in its table", _MAX_ENTRIES)
        rows.append(row)
        accepting.append(accepts([end in subset for end in nfa.ends]))
    return DFA(np.array(rows, dtype=np.int32).reshape(len(rows), columns), 0, np.array(accepting)), steps


def _spelt(dfa: DFA, steps: list[tuple[int, int]], most: int) -> DFA:
    """A minimal automaton over symbols, over bytes; minimal as well.

    A state within a character is known by what the bytes that are left of it lead to. Its row begins with a
    continuation byte and so it never equals a state between characters, nor one with another number of bytes left.
    """
    states = len(dfa.table)
    ending = np.column_stack([dfa.table, np.full(states, -1, dtype=np.int32)])  # symbol -1: no way on
    nowhere = ending[:, -1]
    inner: dict[bytes, int] = {}
    known: dict[tuple[int, ...], NDArray[np.int32]] = {}
    starts = np.array([first for first, _ in steps])
    values = np.array([symbol for _, symbol in steps])

    def numbered(rows: Table) -> NDArray[np.int32]:
        """The number of the state within a character with each of these rows of 64 continuations."""
        distinct, _, which = unique_rows(rows)
        numbers = [inner.setdefault(row.tobytes(), states + len(inner)) if (row >= 0).any() else -1 for row in distinct]
        if states + len(inner) > most:
            raise too_large("states over bytes", most)
        return np.array(numbers, dtype=np.int32)[which]

    def block(first: int, count: int, least: int) -> NDArray[np.int32]:
        """Where each state is after bytes that leave ``count`` code points from ``first``, those below least aside."""
        if first + count <= least:
            return nowhere
        low, high = np.searchsorted(starts, [first, first + count - 1], side="right") - 1
        offsets = np.maximum(starts[low : high + 1] - first, 0)
        key = (count, max(least - first, 0), *offsets.tolist(), *values[low : high + 1].tolist())
        if key not in known:
            if count == 1:
                known[key] = ending[:, values[low]]
            else:
                size = count // 64
                parts = [block(first + i * size, size, least) for i in range(64)]
                known[key] = numbered(np.column_stack(parts).astype(np.int32))
        return known[key]

    columns = [block(byte, 1, 0) for byte in range(0x80)]
    columns += [nowhere] * 0x42  # continuation bytes, and C0 and C1, which begin nothing
    columns += [block((byte & 0x1F) << 6, 1 << 6, 0x80) for byte in range(0xC2, 0xE0)]
    columns += [block((byte & 0x0F) << 12, 1 << 12, 0x800) for byte in range(0xE0, 0xF0)]
    columns += [block((byte & 0x07) << 18, 1 << 18, 0x10000) for byte in range(0xF0, 0xF5)]
    table = np.full((states + len(inner), 256), -1, dtype=np.int32)
    table[:states, : len(columns)] = np.column_stack(columns)
    for row, number in inner.items():
        table[number, 0x80:0xC0] = np.frombuffer(row, dtype=np.int32)
    return DFA(table, dfa.start, np.append(dfa.accepting, np.zeros(len(inner), dtype=bool)))
