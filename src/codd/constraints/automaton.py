"""Deterministic automata over tokens, stored by classes of tokens that no state tells apart."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from codd.constraints.tables import DFA, edges, minimal, trimmed, unique_rows
from codd.errors import EmptyLanguage, InvalidConstraint, shown

Accepting = Iterable[int] | Int[Tensor, " count"]


class Automaton:
    """A deterministic automaton over tokens: the texts that it accepts are a language.

    >>> even = Automaton([[0, 1], [1, 0]], start=0, accepting=[0])  # an even number of ones
    >>> even.accepts([1, 0, 1]), even.accepts([1, 0])
    (True, False)
    """

    classes: Int[Tensor, " vocab"]
    """The class of each token: tokens of one class lead from every state to the same one."""
    table: Int[Tensor, "states classes"]
    """The next state by state and class of the token; -1: no way on."""
    start: int
    """The state before the first token."""
    accepting: Bool[Tensor, " states"]
    """The states in which a text may end."""

    def __init__(self, next_states: Any, start: int = 0, accepting: Accepting = ()):
        """``next_states`` (S, V) holds whole numbers, -1 where there is no way on; ``accepting`` lists states.

        InvalidConstraint for a table of another shape, states that do not exist, or none at all.
        """
        table = _whole(next_states, "next_states", 2)
        columns, _, classes = unique_rows(table.T)
        self._set(columns.T, classes, start, accepting)

    @classmethod
    def from_classes(cls, table: Any, classes: Any, *, start: int = 0, accepting: Accepting = ()) -> "Automaton":
        """From the compact form: ``table`` (S, C), and the class (V,) of each token."""
        automaton = cls.__new__(cls)
        automaton._set(_whole(table, "table", 2), _whole(classes, "classes", 1), start, accepting)
        return automaton

    def _set(self, table: Any, classes: Any, start: int, accepting: Accepting) -> None:
        states, columns = table.shape
        if not states or not len(classes):
            raise InvalidConstraint(f"an automaton needs a state and a token, found {states} and {len(classes)}.")
        _check_range(table, "next states", -1, states)
        _check_range(classes, "classes of tokens", 0, columns)
        plain = isinstance(accepting, Iterable) and not isinstance(accepting, Tensor)
        listed = _whole(list(accepting) if plain else accepting, "accepting", 1)
        _check_range(listed, "accepting states", 0, states)
        try:
            self.start = operator.index(start)
        except TypeError as error:
            raise InvalidConstraint(f"start is a whole number, found {shown(start)}.") from error
        _check_range(np.array([self.start]), "start", 0, states)
        self.table = torch.from_numpy(np.ascontiguousarray(table, dtype=np.int64))
        self.classes = torch.from_numpy(classes.astype(np.int64))
        self.accepting = torch.zeros(states, dtype=torch.bool)
        self.accepting[torch.from_numpy(listed)] = True

    @property
    def num_states(self) -> int:
        """S, the number of states."""
        return self.table.shape[0]

    @property
    def num_classes(self) -> int:
        """C, the number of classes of tokens that no state tells apart."""
        return self.table.shape[1]

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.classes.shape[0]

    def __repr__(self) -> str:
        """The numbers of states, classes and tokens in one line."""
        return f"Automaton(states={self.num_states}, classes={self.num_classes}, vocab_size={self.vocab_size})"

    def after(self, tokens: Sequence[int] | Int[Tensor, " length"], state: int | None = None) -> int:
        """The state after some tokens, from ``state`` (default: the start); -1 if there is no way through them."""
        ids = _whole(tokens, "tokens", 1)
        _check_range(ids, "tokens", 0, self.vocab_size)
        now = self.start if state is None else state
        _check_range(np.array([now]), "state", -1, self.num_states)
        for column in self.classes[torch.from_numpy(ids)].tolist():
            if now < 0:
                break
            now = int(self.table[now, column])
        return now

    def accepts(self, tokens: Sequence[int] | Int[Tensor, " length"]) -> bool:
        """Whether some tokens are in the language."""
        state = self.after(tokens)
        return state >= 0 and bool(self.accepting[state])

    def possible(self, length: int) -> Bool[Tensor, "lengths states"]:
        """Row n, from 0 to ``length``: the states from which exactly n more tokens can lead to acceptance."""
        source, target = edges(self.table.numpy())
        rows = np.zeros((length + 1, self.num_states), dtype=bool)
        rows[0] = self.accepting.numpy()
        for n in range(length):
            rows[n + 1, source[rows[n, target]]] = True
        return torch.from_numpy(rows)

    def trimmed(self) -> "Automaton":
        """The smallest automaton of the same language; EmptyLanguage if there is no text in it."""
        dfa = DFA(self.table.numpy().astype(np.int32), self.start, self.accepting.numpy())
        return from_dfa(dfa, self.classes.numpy())

    def without(self, ids: Iterable[int]) -> "Automaton":
        """The texts that contain none of some tokens; EmptyLanguage if there are none."""
        dropped = _whole(sorted(set(ids)), "ids", 1)
        _check_range(dropped, "ids", 0, self.vocab_size)
        if not bool((self.table[:, self.classes[dropped]] >= 0).any()):
            return self
        table = np.full((self.num_states, self.num_classes + 1), -1, dtype=np.int32)
        table[:, :-1] = self.table.numpy()
        classes = self.classes.numpy().copy()
        classes[dropped] = self.num_classes
        table[:, np.setdiff1d(np.arange(self.num_classes), classes)] = -1  # classes without tokens lead nowhere
        return from_dfa(DFA(table, self.start, self.accepting.numpy()), classes)

    def with_end(self, end_ids: Iterable[int], pad_ids: Iterable[int] = ()) -> "Automaton":
        """The language's texts, also with an end token after them, and after it any end and padding tokens.

        One state is added, the last one: ``done``, which accepts, too. End and padding tokens lead to it from the
        accepting states (padding: from itself only) and are possible nowhere else.
        """
        ends, pads = (_whole(sorted(set(ids)), name, 1) for ids, name in ((end_ids, "end_ids"), (pad_ids, "pad_ids")))
        if not len(ends):
            raise InvalidConstraint("end_ids is empty: without an end token no text could end.")
        for ids, name in ((ends, "end_ids"), (pads, "pad_ids")):
            _check_range(ids, name, 0, self.vocab_size)
        done = self.num_states
        table = np.full((done + 1, self.num_classes + 2), -1, dtype=np.int64)
        table[:done, :-2] = self.table.numpy()
        accepting = np.flatnonzero(self.accepting.numpy()).tolist()
        table[accepting, -2] = done
        table[done, -2:] = done
        classes = self.classes.numpy().copy()
        classes[pads] = self.num_classes + 1
        classes[ends] = self.num_classes
        return Automaton.from_classes(table, classes, start=self.start, accepting=[*accepting, done])


def from_dfa(dfa: DFA, classes: Any) -> Automaton:
    """The smallest automaton with the language of ``dfa``, whose columns are ``classes`` (V,) of tokens."""
    kept = trimmed(dfa)
    if kept is None:
        raise EmptyLanguage("the language is empty: no sequence of tokens leads from the start to acceptance.")
    small = minimal(kept)
    columns, _, merged = unique_rows(small.table.T)
    ends = np.flatnonzero(small.accepting).tolist()
    return Automaton.from_classes(columns.T, merged[classes], start=small.start, accepting=ends)


def _whole(values: Any, name: str, dimensions: int) -> Any:
    """An array of whole numbers; InvalidConstraint for anything else."""
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise InvalidConstraint(f"{name} is no array: {error}.") from error
    if array.size == 0 and array.ndim == dimensions == 1:
        return array.astype(np.int64)
    if array.ndim != dimensions or array.dtype.kind not in "iu":
        raise InvalidConstraint(
            f"{name} has {dimensions} dimension(s) of whole numbers, found shape {array.shape} of {array.dtype}."
        )
    return array.astype(np.int64)


def _check_range(values: Any, name: str, least: int, end: int) -> None:
    wrong = values[(values < least) | (values >= end)]
    if wrong.size:
        raise InvalidConstraint(f"{name} are from {least} to {end - 1}, found {wrong.flat[0]}.")
