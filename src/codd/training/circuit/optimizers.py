"""Anemone, a mini-batch EM: what turns flows into the next circuit."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import HMM
from codd.errors import InvalidInput
from codd.training.circuit.objectives import Signed, Tables, log_tables, with_tables

Rule: TypeAlias = Literal["ratio", "baum-welch"]
UPDATES = "updates"
_SAFETY = 2.0
_SMALLEST = 1e-30
"""Negative flows take no probability below this: in 32 bits it would soon be zero for good."""


class Anemone:
    """Anemone: mini-batch EM with anchors, in its forms for objectives with negative flows.

    Flows F of a mini-batch of weight W are smoothed over updates, divided by W, and mixed with what the circuit itself
    would use: for a row n that a string of the circuit visits TD(n) times,

        ratio         theta ~ theta (s F+ + (1 - s) TD theta + pc / K) / (s F- + (1 - s) TD theta + pc theta)
        baum-welch    theta ~ s (F+ - F-) + max((1 - s) TD, D) theta + pc / K

    so that rows which the data visit more than the circuit expects move more. D is twice the least that keeps every
    entry of its row from falling under zero, ``2 max_c s (F-_c - F+_c) / theta_c``. With s = 1 and no momentum these
    are the plain full-batch updates. The ratio form with momentum 0.9 is the paper's.

    The ratio form is unstable with momentum: a token of a large vocabulary is in few batches, one of which moves its
    logarithm by about log V; remembered, it makes such a step again in every update that follows, until most of the
    vocabulary has vanished (docs/results/training.md).
    """

    def __init__(
        self, step_size: float = 0.4, momentum: float = 0.0, pseudocount: float = 1e-6, rule: Rule = "baum-welch"
    ) -> None:
        """The step size is in (0, 1], the momentum in [0, 1); the positive pseudocount is that of a whole row."""
        self.rate, self.momentum, self.pseudocount, self.rule = step_size, momentum, pseudocount, rule
        self.updates = 0
        self._averages: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """The running averages of flows and the count of updates, for a checkpoint; the next update changes them."""
        return {UPDATES: torch.tensor(self.updates), **self._averages}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` gave; KeyError if the count of updates is missing."""
        self.updates = int(tensors[UPDATES])
        self._averages = {name: x.clone() for name, x in tensors.items() if name != UPDATES}

    @torch.no_grad()
    def update(self, hmm: HMM, signed: Signed) -> HMM:
        """One update; gives the circuit with new parameters."""
        # Elsewhere than on the CPU, looking would wait for the device.
        if signed.weight.device.type == "cpu" and not float(signed.weight) >= self.rate:
            raise InvalidInput(
                f"the windows weigh {float(signed.weight):g} in all, less than the step size {self.rate:g}: "
                "give more windows with masked tokens, or larger weights"
            )
        share = self.rate / signed.weight.clamp(min=self.rate)
        plus, minus = self._smoothed("plus", signed.plus), self._smoothed("minus", signed.minus)
        visits = expected_visits(hmm, signed.length)
        initial, transition, emission = (
            self._step(log_theta, share * up, share * down, (1 - self.rate) * times[..., None])
            for log_theta, up, down, times in zip(log_tables(hmm), plus, minus, visits, strict=True)
        )
        self.updates += 1
        return with_tables(hmm, (initial, transition, emission))

    def _smoothed(self, name: str, flows: Tables) -> Sequence[Tensor]:
        """Averages over the updates so far, corrected for their start at zero."""
        if self.momentum == 0:
            return flows
        out = []
        for i, flow in enumerate(flows):
            average = self._averages.setdefault(f"{name}.{i}", torch.zeros_like(flow))
            average.mul_(self.momentum).add_(flow, alpha=1 - self.momentum)
            out.append(average / (1 - self.momentum ** (self.updates + 1)))
        return out

    def _step(
        self,
        log_theta: Float[Tensor, "*rows K"],
        plus: Float[Tensor, "*rows K"],
        minus: Float[Tensor, "*rows K"],
        anchor: Float[Tensor, "*rows 1"],
    ) -> Float[Tensor, "*rows K"]:
        """The new log-probabilities of a table."""
        theta, each = log_theta.exp(), self.pseudocount / log_theta.shape[-1]
        if self.rule == "ratio":
            new = (plus + anchor * theta + each) / (_per(minus, theta) + anchor + self.pseudocount)
            new = torch.where(theta > 0, new, 0)  # what is multiplied stays zero
        else:
            change = plus - minus
            least = _per(-change, theta).amax(-1, keepdim=True).clamp(min=0)
            new = (change + torch.maximum(anchor, _SAFETY * least) * theta).clamp(min=0) + each
        total = new.sum(-1, keepdim=True)
        share = new / total
        share = torch.where(theta > 0, share.clamp(min=_SMALLEST), share)  # what was possible stays so
        return torch.where(total > 0, share.log(), log_theta)  # a row that nothing visits stays


def _per(x: Float[Tensor, "*rows K"], theta: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """x / theta; flows of what is impossible are zero."""
    return torch.where(theta > 0, x / theta.clamp(min=_SMALLEST), 0)


def expected_visits(hmm: HMM, length: int) -> Tables:
    """How often each row of each table is used by a string of the circuit itself: sums of top-down probabilities."""
    initial, transition, _ = (x.exp() for x in log_tables(hmm))
    state, left = initial, torch.zeros_like(initial)
    for _ in range(length - 1):
        left = left + state
        state = state @ transition
    return torch.ones_like(initial[0]), left, left + state
