"""An automaton as tables on a device, for the kernels of `triton`."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from codd.circuits.ops.constrained.reachable_states import Ids, TokenClasses

LEAF_TOKENS, MARGINAL_TOKENS = 1024, 128
"""Tokens of one class that a program sums over, or whose marginals it computes."""


class Edges(NamedTuple):
    """Lists of pairs: those of row r are ``x[ptr[r]:ptr[r + 1]]`` and ``y`` likewise."""

    ptr: Int[Tensor, " rows"]
    x: Int[Tensor, " P"]
    y: Int[Tensor, " P"]

    @classmethod
    def of(cls, rows: int, key: Ids, x: Ids, y: Ids, device: torch.device) -> "Edges":
        """Pairs sorted by the row that they belong to."""
        order = np.argsort(key, kind="stable")
        ptr = np.searchsorted(key[order], np.arange(rows + 1))
        return cls(*(torch.from_numpy(part.astype(np.int32)).to(device) for part in (ptr, x[order], y[order])))


class Pieces(NamedTuple):
    """Stretches of the tokens sorted by class, each of one class."""

    begin: Int[Tensor, " pieces"]
    end: Int[Tensor, " pieces"]
    owner: Int[Tensor, " pieces"]

    @classmethod
    def of(cls, offsets: Ids, size: int, device: torch.device) -> "Pieces":
        """The classes in stretches of at most that many tokens."""
        counts = -(-np.diff(offsets) // size)
        owner = np.repeat(np.arange(len(counts)), counts)
        first = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = offsets[owner] + first * size
        end = np.minimum(begin + size, offsets[owner + 1])
        return cls(*(torch.from_numpy(part.astype(np.int32)).to(device) for part in (begin, end, owner)))


class Tables:
    """An automaton as the kernels read it."""

    def __init__(self, classes: TokenClasses, device: torch.device) -> None:
        """Sort its pairs of states in the three ways that the kernels need, and its tokens by class."""
        pairs, entry_class, entry_group = classes.pairs, classes.entry_class, classes.entry_group
        self.states, self.groups, self.classes = classes.num_states, classes.num_groups, classes.num_classes
        self.into = Edges.of(self.states, pairs.target, pairs.source, pairs.group, device)
        self.leaving = Edges.of(self.states, pairs.source, pairs.target, pairs.group, device)
        self.between = Edges.of(self.groups, pairs.group, pairs.source, pairs.target, device)
        self.members = Edges.of(self.groups, entry_group, entry_class, entry_class, device)
        self.holders = Edges.of(self.classes, entry_class, entry_group, entry_group, device)
        self.leaf_pieces = Pieces.of(classes.offsets, LEAF_TOKENS, device)
        self.marginal_pieces = Pieces.of(classes.offsets, MARGINAL_TOKENS, device)
        number = np.arange(len(self.leaf_pieces.owner))
        self.parts = Edges.of(self.classes, self.leaf_pieces.owner.cpu().numpy(), number, number, device)
        self.order = torch.from_numpy(classes.order.astype(np.int32)).to(device)
        member = np.zeros((self.groups, self.classes), dtype=bool)
        member[entry_group, entry_class] = True
        self.member, self.class_of = torch.from_numpy(member).to(device), classes.tables(device)[1]
        """Which group holds which class, and the class of each token."""
        self.widest = int(np.bincount(pairs.source, minlength=1).max(initial=1))
        """The largest number of pairs that leave one state."""
