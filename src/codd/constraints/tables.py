"""Transition tables of deterministic automata, in NumPy: rows are states, columns symbols, -1 means no way on."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]
_MAX_WORK = 200_000_000  # entries looked at: some seconds
FAR = np.iinfo(np.int32).max
"""The distance of a state that cannot be reached."""


class DFA(NamedTuple):
    """A deterministic automaton over column numbers."""

    table: Table
    """(states, symbols): the next state, or -1."""
    start: int
    accepting: NDArray[np.bool_]
    """(states,): whether a text may end in each state."""


def edges(table: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct pairs of states (from, to) that some symbol joins."""
    source, symbol = np.nonzero(table >= 0)
    pairs = np.unique(source * len(table) + table[source, symbol])
    return pairs // len(table), pairs % len(table)


def distances(source: NDArray[np.int64], target: NDArray[np.int64], seeds: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The least number of edges from a seed to each state; FAR where no way leads."""
    order = np.argsort(source, kind="stable")
    target = target[order]
    first = np.searchsorted(source[order], np.arange(len(seeds) + 1))
    distance = np.where(seeds, 0, FAR).astype(np.int32)
    frontier, depth = np.flatnonzero(seeds), 0
    while len(frontier):
        depth += 1
        reached = np.unique(np.concatenate([target[first[state] : first[state + 1]] for state in frontier]))
        frontier = reached[distance[reached] == FAR]
        distance[frontier] = depth
    return distance


def trimmed(dfa: DFA) -> DFA | None:
    """Only the states that lie on a way from the start to acceptance; None if there is no such way."""
    source, target = edges(dfa.table)
    reached = distances(source, target, np.arange(len(dfa.table)) == dfa.start) < FAR
    kept = reached & (distances(target, source, dfa.accepting) < FAR)
    if not kept[dfa.start]:
        return None
    number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1).astype(np.int32)  # the last one stands for -1
    return DFA(number[dfa.table[kept]], int(number[dfa.start]), dfa.accepting[kept])


def minimal(dfa: DFA) -> DFA:
    """The smallest automaton of the same language, of a trimmed one.

    Moore's refinement, begun from the distance to acceptance, which separates the steps of a counter at once. A large
    automaton that still needs many rounds, as no usual one does, stays as it is.
    """
    source, target = edges(dfa.table)
    block = distances(target, source, dfa.accepting).astype(np.int64)
    count = work = 0
    while True:
        work += dfa.table.size
        if work > _MAX_WORK:
            return dfa
        seen = np.append(block, -1)[dfa.table]
        _, representative, block = unique_rows(np.column_stack([block, seen]).astype(np.int32))
        if len(representative) == count:
            break
        count = len(representative)
    table = np.append(block, -1)[dfa.table[representative]].astype(np.int32)
    return DFA(table, int(block[dfa.start]), dfa.accepting[representative])


def unique_rows(rows: NDArray[np.integer]) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
    """The distinct rows, where each is found first, and which of them each row is."""
    whole = np.ascontiguousarray(rows)
    if whole.shape[1] == 0:
        return whole[:1], np.zeros(min(len(whole), 1), np.int64), np.zeros(len(whole), np.int64)
    keys = whole.view(np.dtype((np.void, whole.dtype.itemsize * whole.shape[1]))).ravel()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)  # numbered as they come: the same rows give the same automaton on every machine
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return whole[first[order]], first[order], rank[inverse.ravel()]
