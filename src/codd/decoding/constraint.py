"""A language that a text must be in, while it is denoised: where it is read, and what it asks of one window.

Left of a window and right of it the automaton's state is known as well as the text is. Where tokens are masked there,
it is weighed by the network's own probabilities of them if those are at hand (full mode), and otherwise by whether the
text can still be completed at all: a block may end only where the tokens that remain can lead to acceptance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from codd.circuits import HMM
from codd.circuits.constrained import WindowConstraint
from codd.circuits.evidence import log_softmax, tempered
from codd.constraints import Automaton
from codd.errors import InvalidInput

Window = tuple[int, int]
"""First position, and one beyond the last."""
Weights = Mapping[int, NDArray[np.float64]]
"""The probabilities of the classes of tokens at some masked positions."""


class Edges(NamedTuple):
    """Transitions: a token of class ``token_class[i]`` leads from state ``source[i]`` to ``target[i]``."""

    source: NDArray[np.int64]
    token_class: NDArray[np.int64]
    target: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SequenceConstraint:
    """An automaton that reads some positions of a sequence, and must have accepted after the last of them."""

    automaton: Automaton
    span: Window
    """The positions that it reads; all masks are among them."""
    mask_id: int
    alone: HMM
    """The circuit that changes nothing: with it, the network alone is under the constraint."""

    @cached_property
    def edges(self) -> Edges:
        """All transitions of the automaton, one for each state and class of tokens that has a next state."""
        table = self.automaton.table.numpy()
        source, token_class = np.nonzero(table >= 0)
        return Edges(source, token_class, table[source, token_class])

    @cached_property
    def possible(self) -> Bool[Tensor, "n S"]:
        """Row n: the states from which n more tokens can lead to acceptance."""
        return self.automaton.possible(self.span[1] - self.span[0])

    def clipped(self, window: Window) -> Window:
        """The part of a window that is read."""
        return max(window[0], self.span[0]), min(window[1], self.span[1])

    def check(self, ids: Int[Tensor, " L"], number: int) -> None:
        """Raise InvalidInput if no text of the language fits where the masks are."""
        if self.before(ids.tolist(), self.span[1], {})[self.automaton.accepting.numpy()].any():
            return
        room = self.span[1] - self.span[0]
        if bool((ids[slice(*self.span)] == self.mask_id).all()):
            raise InvalidInput(
                f"prompt {number}: no text that the constraint allows fits into {room} tokens: raise gen_length."
            )
        raise InvalidInput(f"prompt {number}: no text that the constraint allows fits the given tokens and the masks.")

    def at(self, ids: Int[Tensor, " L"], window: Window, weights: Weights) -> WindowConstraint:
        """What is asked of a window: the weights of the automaton's states before and after it."""
        known = ids.tolist()
        ends = self.before(known, window[0], weights), self.after(known, window[1], weights)
        with np.errstate(divide="ignore"):
            return WindowConstraint(self.automaton, *(torch.from_numpy(np.log(end)) for end in ends))

    def before(self, ids: Sequence[int], position: int, weights: Weights) -> NDArray[np.float64]:
        """The weight of each state before a position, the largest being 1 (all 0: there is no way there)."""
        edges, states = self.edges, self.automaton.num_states
        now: NDArray[Any] = np.zeros(states)
        now[self.automaton.start] = 1.0
        for at in range(self.span[0], position):
            if ids[at] != self.mask_id:
                column = self._column(ids[at])
                there = column >= 0
                now = np.bincount(column[there], now[there], states)
            elif at in weights:
                flow = now[edges.source] * weights[at][edges.token_class]
                now = np.bincount(edges.target, flow, states)
            else:
                now = (np.bincount(edges.target, now[edges.source], states) > 0).astype(float)
            now = now / (now.max() or 1.0)
        return now

    def after(self, ids: Sequence[int], position: int, weights: Weights) -> NDArray[np.float64]:
        """The weight of what follows a position given each state there, the largest being 1."""
        end, edges, states = self.span[1], self.edges, self.automaton.num_states
        masked = end
        while masked > position and ids[masked - 1] == self.mask_id and masked - 1 not in weights:
            masked -= 1
        now: NDArray[Any] = self.possible[end - masked].numpy().astype(float)
        for at in range(masked - 1, position - 1, -1):
            if ids[at] != self.mask_id:
                column = self._column(ids[at])
                now = np.where(column >= 0, now[column], 0.0)
            elif at in weights:
                now = np.bincount(edges.source, weights[at][edges.token_class] * now[edges.target], states)
            else:
                now = (np.bincount(edges.source, now[edges.target], states) > 0).astype(float)
            now = now / (now.max() or 1.0)
        return now

    def _column(self, token: int) -> NDArray[np.int64]:
        column: NDArray[np.int64] = self.automaton.table[:, self.automaton.classes[token]].numpy()
        return column

    def weights(
        self, positions: Int[Tensor, " R"], logits: Float[Tensor, "R V"], window: Window, temperature: float
    ) -> Weights:
        """The network's probabilities of classes at the masked positions outside of a window."""
        outside = ((positions < window[0]) | (positions >= window[1])).nonzero()[:, 0]
        rows = logits[outside.to(logits.device)]
        probabilities = log_softmax(tempered(rows, temperature, torch.promote_types(rows.dtype, torch.float32))).exp()
        classes = self.automaton.classes.to(logits.device)
        sums = probabilities.new_zeros(len(rows), self.automaton.num_classes).index_add_(1, classes, probabilities)
        return dict(zip(positions[outside].tolist(), sums.double().cpu().numpy(), strict=True))


def constrain(
    automaton: Automaton, ids: Int[Tensor, " L"], prompt_length: int, number: int, mask_id: int, alone: HMM
) -> SequenceConstraint:
    """The constraint of a sequence: on what follows its prompt, or on the masks of the prompt and what is between them.

    Raises InvalidInput where there are masks in both, or where no text fits.
    """
    masked = (ids == mask_id).nonzero()[:, 0].tolist()
    inside = [place for place in masked if place < prompt_length]
    if inside and len(ids) > prompt_length:
        raise InvalidInput(
            f"prompt {number} has masks, and gen_length puts others after it: a constraint is about one or the other. "
            "Give gen_length=0 to fill the prompt's own."
        )
    span = (min(inside), max(inside) + 1) if inside else (prompt_length, len(ids))
    constraint = SequenceConstraint(automaton, span, mask_id, alone)
    constraint.check(ids, number)
    return constraint
