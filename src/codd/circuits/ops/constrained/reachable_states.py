"""What of an automaton a window needs, on the host: the states that can occur, and which tokens lead where.

Tokens of one class are treated alike by every state. All classes that lead from one state to another are a *group*;
the chain moves along pairs of states, each with its group, and many pairs share one. Classes that no live group tells
apart are one *atom*: the leaf values are computed by atom, those of a group are sums of them.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from codd.circuits.parameters import Emission
from codd.constraints import Automaton

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
_Made = TypeVar("_Made")


class Pairs(NamedTuple):
    """Transitions from a state to the next, each with the group of classes that causes it."""

    source: Ids
    target: Ids
    group: Ids

    def select(self, which: Mask) -> "Pairs":
        """The pairs for which ``which`` is true."""
        return Pairs(*(part[which] for part in self))


class SortedColumns(NamedTuple):
    """An emission table with its tokens sorted by class."""

    order: Int[Tensor, " V"]
    columns: Float[Tensor, "V N"]
    silent: Bool[Tensor, " V"] | None
    """The tokens that no latent emits; None: there are none."""


class TokenClasses:
    """An automaton by pairs of states, and its tokens sorted by class. Made once for each automaton."""

    def __init__(self, automaton: Automaton) -> None:
        """Read the automaton's table: pairs of states, their groups of classes, and tokens by class."""
        table, self.classes = np.asarray(automaton.table), np.asarray(automaton.classes)
        self.pairs, members = _grouped(table)
        self.num_states, self.num_groups, self.num_classes = len(table), len(members), table.shape[1]
        # Which classes are in which group, sorted by class.
        inside = np.concatenate([*members, np.zeros(0, dtype=np.int64)])
        order = np.argsort(inside, kind="stable")
        self.entry_class = inside[order]
        self.entry_group = np.repeat(np.arange(len(members)), [len(one) for one in members])[order]
        self.entry_start = np.searchsorted(self.entry_class, np.arange(self.num_classes + 1))
        self._next = torch.from_numpy(table)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._device: dict[torch.device, Any] = {}
        self._columns: WeakKeyDictionary[Emission, SortedColumns] = WeakKeyDictionary()
        self.order = np.argsort(self.classes, kind="stable")
        """Tokens sorted by class."""
        self.offsets = np.searchsorted(self.classes[self.order], np.arange(self.num_classes + 1))
        # Sums of these tell sets of groups apart.
        self._marks = np.random.default_rng(0).integers(1, 2**63, self.num_groups, dtype=np.uint64)

    @classmethod
    def of(cls, automaton: Automaton) -> "TokenClasses":
        """Those of an automaton, computed at most once."""
        if automaton not in _made:
            _made[automaton] = cls(automaton)
        return _made[automaton]

    def tables(self, device: torch.device) -> tuple[Int[Tensor, "S C"], Int[Tensor, " V"]]:
        """The next state by class, and the class of each token."""
        if device not in self._tables:
            self._tables[device] = (self._next.to(device), torch.from_numpy(self.classes).to(device))
        return self._tables[device]

    def on_device(self, device: torch.device, make: Callable[["TokenClasses", torch.device], _Made]) -> _Made:
        """What the kernels of a device need, computed once."""
        made: _Made = self._device[device] if device in self._device else make(self, device)
        self._device[device] = made
        return made

    def sorted_columns(self, table: Emission) -> SortedColumns:
        """The emission in the order of classes: a copy that is made once."""
        if table not in self._columns:
            order = torch.from_numpy(self.order).to(table.stored.device)
            silent = ~table.support.any(-2)[order]
            self._columns[table] = SortedColumns(order, table.columns[order], silent if bool(silent.any()) else None)
        return self._columns[table]

    def groups_of(self, one: int) -> Ids:
        """The numbers of the groups that hold a class of tokens."""
        return self.entry_group[self.entry_start[one] : self.entry_start[one + 1]]

    def atoms(self, groups: Ids) -> "Atoms":
        """The atoms when only these groups are live: classes that none of them tells apart."""
        live = np.zeros(self.num_groups, dtype=bool)
        live[groups] = True
        marks = np.where(live, self._marks, np.uint64(0))[self.entry_group]
        sums = np.append(np.uint64(0), np.cumsum(marks, dtype=np.uint64))
        mark = sums[self.entry_start[1:]] - sums[self.entry_start[:-1]]
        _, representative, number = np.unique(mark, return_index=True, return_inverse=True)
        number = number.reshape(-1)
        if len(representative) and mark[representative[0]] == 0:  # classes in no live group
            representative, number = representative[1:], number - 1
        is_one = np.zeros(self.num_classes, dtype=bool)
        is_one[representative] = True
        chosen = is_one[self.entry_class] & live[self.entry_group]
        return Atoms(
            self.offsets, number, len(representative), self.entry_group[chosen], number[self.entry_class[chosen]]
        )


def _grouped(table: NDArray[np.int64]) -> tuple[Pairs, list[Ids]]:
    """The pairs of states, and the classes of each group."""
    source, by = np.nonzero(table >= 0)
    target = table[source, by]
    order = np.lexsort((by, target, source))
    source, target, by = source[order], target[order], by[order]
    first = np.flatnonzero(np.diff(source * len(table) + target, prepend=-1))
    numbers: dict[bytes, int] = {}
    sets = [by[begin:end].tobytes() for begin, end in pairwise([*first.tolist(), len(by)])]
    group = np.array([numbers.setdefault(one, len(numbers)) for one in sets], dtype=np.int64)
    if len(numbers) > 4 * table.shape[1] and len(by) < 4 * len(first):  # many, and little is gained: take the classes
        return Pairs(source, target, by), [np.array([one]) for one in range(table.shape[1])]
    return Pairs(source[first], target[first], group), [np.frombuffer(one, dtype=by.dtype) for one in numbers]


_made: WeakKeyDictionary[Automaton, TokenClasses] = WeakKeyDictionary()


class Atoms:
    """Classes of tokens that the live groups do not tell apart, and which group holds which of them."""

    def __init__(self, offsets: Ids, of_class: Ids, count: int, group: Ids, atom: Ids) -> None:
        """Sort what `TokenClasses.atoms` found.

        Args:
            offsets: where the tokens of each class begin, sorted by class.
            of_class: the atom of each class; -1 for those of none.
            count: the number of atoms.
            group: with ``atom``, which group holds which atom.
            atom: see ``group``.
        """
        order = np.argsort(group, kind="stable")
        self.count, self.group, self.atom, self.of_class = count, group[order], atom[order], of_class
        starts = np.flatnonzero(np.diff(of_class, prepend=-2))
        ends = np.append(starts[1:], len(of_class))
        begin, end, number = offsets[starts], offsets[ends], of_class[starts]
        kept = (number >= 0) & (end > begin)
        begin, end, number = begin[kept], end[kept], number[kept]
        self.runs: list[tuple[int, int, int]] = list(zip(number.tolist(), begin.tolist(), end.tolist(), strict=True))
        """Tokens of one atom that are next to each other when sorted by class: the atom, begin and end."""
        alone = (end - begin == 1) & (np.bincount(number, minlength=count)[number] == 1)
        self.single = number[alone], begin[alone]
        """Atoms of just one token, and where that one is in the sorted order."""
        self.longer = [run for run, one in zip(self.runs, alone.tolist(), strict=True) if not one]
        """The runs of the other atoms."""
        # Of each token in sorted order; those of no atom have the number after the last.
        self._sorted = torch.from_numpy(np.repeat(np.where(of_class < 0, count, of_class), np.diff(offsets)))

    def inside(self, groups: Ids) -> tuple[Ids, Ids]:
        """The atoms of some groups one after the other: the numbers of the group in the list, and of the atom."""
        first, last = np.searchsorted(self.group, groups), np.searchsorted(self.group, groups, side="right")
        row = np.repeat(np.arange(len(groups)), last - first)
        return row, self.atom[np.arange(len(row)) - (np.cumsum(last - first) - last)[row]]

    def sorted_atoms(self, device: torch.device) -> Int[Tensor, " V"]:
        """The atom of each token in the order sorted by class; the number after the last for those of none."""
        return self._sorted.to(device)


class ReachableStates:
    """The live pairs of states at each position of B windows: reachable from the start, and the end from them.

    Windows of a batch share it: a state that is live in one of them is kept for all.
    """

    def __init__(
        self, classes: TokenClasses, start: Mask, end: Mask, tokens: Int[Tensor, "B L"], observed: Bool[Tensor, "B L"]
    ) -> None:
        """``start`` and ``end``: the states that are possible before the first position and after the last."""
        self._classes = classes
        self._observed = observed.cpu().numpy()
        seen = classes.classes[np.where(self._observed, tokens.cpu().numpy(), 0)]
        pairs, length = classes.pairs, self._observed.shape[1]
        reach = np.zeros((length + 1, classes.num_states), dtype=bool)
        reach[0] = start
        steps = []
        for t in range(length):
            steps.append(reach[t][pairs.source] & self._allowed(t, seen[:, t]))
            reach[t + 1][pairs.target[steps[t]]] = True
        reach[length] &= end
        for t in reversed(range(length)):
            steps[t] &= reach[t + 1][pairs.target]
            reach[t] = False
            reach[t][pairs.source[steps[t]]] = True
        self.pairs = [pairs.select(step) for step in steps]
        """The live pairs of each position."""
        self.first, self.last = np.flatnonzero(reach[0]), np.flatnonzero(reach[length])
        """The live states before the first position and after the last."""

    def _allowed(self, t: int, seen: Ids) -> Mask:
        """The pairs that the observed tokens of a position, of these classes, leave open."""
        groups = np.ones(self._classes.num_groups, dtype=bool)
        if self._observed[:, t].all():
            groups[:] = False
            for one in np.unique(seen).tolist():
                groups[self._classes.groups_of(one)] = True
        return groups[self._classes.pairs.group]

    def groups(self, t: int) -> Ids:
        """The sorted numbers of the groups that live pairs of position t have."""
        return np.unique(self.pairs[t].group)

    @cached_property
    def hidden(self) -> tuple[Ids, Ids]:
        """Positions that are not observed, in the order of positions, and their sequences."""
        positions, sequences = np.nonzero(~self._observed.T)
        return positions, sequences

    @cached_property
    def atoms(self) -> Atoms:
        """The atoms of all positions that some sequence does not observe."""
        groups = [self.groups(t) for t in np.unique(self.hidden[0]).tolist()]
        return self._classes.atoms(np.unique(np.concatenate([*groups, np.zeros(0, dtype=np.int64)])))
