"""Decisions: from one network call, the joint distribution of several fields that a text would fill in.

The fields stand in a fixed text (`codd.constraints.forms`). Network x circuit, given that a block holds such a text, is
a chain over latents and states of an automaton, and the automaton remembers which value it has read. So the probability
of a value, given those of the fields before it, is that of visiting a state.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf
from typing import Any

import torch
from torch import Tensor

from codd.backbones import Backbone
from codd.circuits import HMM
from codd.circuits.constrained import ConstrainedHMM
from codd.circuits.protocol import ProbabilisticCircuit
from codd.constraints.forms import CompiledForm
from codd.coupling import Coupled
from codd.decoding.options import DEFAULTS
from codd.errors import InvalidConstraint, InvalidInput

MOST_STATES = 1 << 18
"""States of the form, some microseconds each, in all beginnings of assignments that are gone on with."""


@dataclass(frozen=True)
class Decision:
    """The joint distribution of some fields, given that a text fills them in."""

    joint: dict[tuple[str, ...], float]
    """The probability of each assignment, a value per field in the order in which the fields were given, the most
    probable first: of all assignments, or of as many as were asked for."""
    marginals: dict[str, dict[str, float]]
    """The probability of each value of each field by itself, whatever ``joint`` leaves out."""

    @property
    def best(self) -> dict[str, str]:
        """The most probable assignment."""
        return dict(zip(self.marginals, next(iter(self.joint)), strict=True))

    @property
    def probability(self) -> float:
        """The probability of the most probable assignment."""
        return next(iter(self.joint.values()))

    @property
    def mass(self) -> float:
        """The probability of all assignments in ``joint`` together: 1 if none is left out."""
        return sum(self.joint.values())


class Decider:
    """The distribution of a form's values in the block behind a prompt, from one network call."""

    @torch.no_grad()
    def __init__(
        self,
        backbone: Backbone,
        circuit: ProbabilisticCircuit | None,
        form: CompiledForm,
        prompt: Sequence[int],
        mask_id: int,
    ):
        """Call the network on the prompt and the form, of which it sees the fixed text whose place is certain."""
        window = [mask_id if token is None else token for token in form.given]
        ids = torch.tensor([[*prompt, *window]], device=backbone.device)
        positions = torch.arange(len(prompt), ids.shape[1], device=ids.device)[None]
        tokens = ids[:, len(prompt) :]
        logits, states = backbone.masked_logits(ids, positions, mask_id=mask_id)
        joint = Coupled(
            HMM.neutral(1, backbone.vocab_size).to(backbone.device) if circuit is None else circuit,
            logits=logits,
            tokens=tokens,
            masked=tokens == mask_id,
            features=states,
        )
        self._form = form
        self._passages = ConstrainedHMM(joint.circuit, form.automaton).passages(joint.evidence)

    @cached_property
    def log_marginals(self) -> list[list[float]]:
        """Log-probabilities of each field's values by itself."""
        visits = self._passages.log_visits()
        return [self._of_values(field, visits.logsumexp(0), visits[-1]) for field in range(len(self._form.read))]

    def descending(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """Assignments by the numbers of their values, and their log-probabilities: the most probable one first.

        Best first: no assignment is more probable than the values that it begins with are together. Where a great many
        of these are as probable as any assignment, InvalidConstraint is raised after `MOST_STATES`.
        """
        read, passages, tried = self._form.read, self._passages, 0
        most = MOST_STATES // self._form.automaton.num_states
        heap: list[tuple[float, tuple[int, ...], Any]] = [(0.0, (), passages.begin())]
        while heap:
            cost, chosen, reached = heapq.heappop(heap)
            if len(chosen) == len(read):
                yield chosen, -cost
                most += len(read)
                continue
            tried += 1
            if tried > most:
                raise InvalidConstraint(
                    f"{most:,} beginnings of assignments of the {len(read)} fields are as probable as the best whole "
                    "one, which is not found in time: decide on fewer fields or values at once."
                )
            behind = passages.at(reached, int(read[len(chosen) - 1][chosen[-1]])) if chosen else reached
            reached = passages.onward(behind, read[len(chosen)])
            log_probs = passages.log_probs(reached)
            for value, log_p in enumerate(self._of_values(len(chosen), log_probs, log_probs)):
                if log_p > -inf:
                    heapq.heappush(heap, (-log_p, (*chosen, value), reached))

    def _of_values(self, field: int, passed: Tensor, ended: Tensor) -> list[float]:
        """The values of a field, by the log-probabilities of passing states and, for the last one, of ending there."""
        found = passed[torch.from_numpy(self._form.read[field])]
        if field == len(self._form.read) - 1:
            found = torch.logaddexp(found, ended[torch.from_numpy(self._form.ends)])
        values: list[float] = found.tolist()
        return values


def decision(decider: Decider, values: Mapping[str, Sequence[str]], names: Sequence[str], top: int) -> Decision:
    """The decision over values by name, in the order of the form; ``names``: the order of the answer.

    Raises:
        InvalidInput: Network and circuit leave no assignment possible.
        InvalidConstraint: There are too many assignments, none of which stands out.
    """
    if top < 1:
        raise InvalidInput(f"top must be at least 1, found {top}.")
    listed, order = list(values.values()), [list(values).index(name) for name in names]
    joint = {}
    for chosen, log_p in decider.descending():
        joint[tuple(listed[i][chosen[i]] for i in order)] = exp(log_p)
        if len(joint) == top:
            break
    if not joint:
        raise InvalidInput("network and circuit together leave no assignment of the fields possible.")
    marginals = [
        dict(zip(texts, map(exp, logs), strict=True)) for texts, logs in zip(listed, decider.log_marginals, strict=True)
    ]
    return Decision(joint, {name: marginals[i] for name, i in zip(names, order, strict=True)})


def check_room(
    backbone: Backbone, circuit: ProbabilisticCircuit | None, form: CompiledForm, prompt: Sequence[int], mask_id: int
) -> None:
    """Raise InvalidConstraint for a form that one block does not hold, InvalidInput for a prompt that does not fit."""
    if mask_id in prompt:
        raise InvalidInput("the prompt has masks: a decision fills its fields only, which stand behind the prompt.")
    size = backbone.block_size
    room = DEFAULTS.block_length if size is None else size - len(prompt) % size
    if circuit is not None and circuit.length is not None:
        room = min(room, circuit.length)
    if len(form.given) > room:
        raise InvalidConstraint(
            f"the fields and the text around them take up to {len(form.given)} tokens, but one block has room for "
            f"{room}: take shorter names or values, or decide on fewer fields at once."
        )
    limit = backbone.max_length
    if limit is not None and len(prompt) + len(form.given) > limit:
        raise InvalidInput(
            f"the prompt has {len(prompt)} tokens, with the fields {len(prompt) + len(form.given)}, but this model was "
            f"made for {limit}: shorten the prompt."
        )
