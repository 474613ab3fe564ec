"""What turns flows into the next circuit: Adam on free logits, and anemone, a mini-batch EM."""

import abc
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import HMM
from codd.errors import InvalidInput
from codd.training.circuit.objectives import Signed, Tables, gradient_of, log_tables, with_tables
from codd.training.ema import EMA

Rule: TypeAlias = Literal["ratio", "baum-welch"]
_SAFETY = 2.0
_SMALLEST = 1e-30
"""Negative flows take no probability below this: in 32 bits it would soon be zero for good."""


class Optimizer(abc.ABC):
    """Maximises the objective, mini-batch by mini-batch. The circuit and ``tensors`` are all that a run must keep."""

    def __init__(self, rate: float):
        """``rate``: the step size or learning rate, free to be changed between updates."""
        self.rate, self._averages = rate, EMA()

    def tensors(self) -> dict[str, Tensor]:
        """The running averages and the count of updates, for a checkpoint."""
        return self._averages.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` gave."""
        self._averages.restore(tensors)

    @torch.no_grad()
    def update(self, hmm: HMM, signed: Signed) -> HMM:
        """One update; gives the circuit with new parameters."""
        tables = self._new_tables(hmm, signed)
        self._averages.updates += 1
        return with_tables(hmm, tables)

    @abc.abstractmethod
    def _new_tables(self, hmm: HMM, signed: Signed) -> Tables: ...


class Adam(Optimizer):
    """Adam on logits u with theta = softmax(u).

    The gradient is that of the log-likelihood per scored token, ``value / tokens``. The logits are the circuit's own
    log-probabilities: what a row of logits has in common changes nothing. ``rate`` is the learning rate.
    """

    eps = 1e-8

    def __init__(self, lr: float = 1.5e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        """The names are those of torch.optim.Adam."""
        super().__init__(lr)
        self.betas = betas

    def _new_tables(self, hmm: HMM, signed: Signed) -> Tables:
        tokens = signed.tokens.clamp(min=torch.finfo(signed.tokens.dtype).tiny)  # no tokens, no gradient
        gradients = [g / tokens for g in gradient_of(hmm, signed)]
        first = self._averages.smoothed("first", gradients, self.betas[0])
        second = self._averages.smoothed("second", [g * g for g in gradients], self.betas[1])
        initial, transition, emission = (
            (log_theta + self.rate * m / (v.sqrt() + self.eps)).log_softmax(-1)
            for log_theta, m, v in zip(log_tables(hmm), first, second, strict=True)
        )
        return initial, transition, emission


class Anemone(Optimizer):
    """Anemone: mini-batch EM with anchors, in its forms for objectives with negative flows.

    Flows F of a mini-batch of weight W are smoothed over updates, divided by W, and mixed with what the circuit itself
    would use: for a row n that a string of the circuit visits TD(n) times,

        ratio         theta ~ theta (s F+ + (1 - s) TD theta + pc / K) / (s F- + (1 - s) TD theta + pc theta)
        baum-welch    theta ~ s (F+ - F-) + max((1 - s) TD, D) theta + pc / K

    so that rows which the data visit more than the circuit expects move more. D is twice the least that keeps every
    entry of its row from falling under zero, ``2 max_c s (F-_c - F+_c) / theta_c``. With s = 1 and no momentum these
    are the plain full-batch updates. ``rate`` is the step size s. The ratio form with momentum 0.9 is the paper's.

    The ratio form is unstable with momentum: a token of a large vocabulary is in few batches, one of which moves its
    logarithm by about log V; remembered, it makes such a step again in every update that follows, until most of the
    vocabulary has vanished (docs/results/training.md).
    """

    def __init__(
        self, step_size: float = 0.4, momentum: float = 0.0, pseudocount: float = 1e-6, rule: Rule = "baum-welch"
    ) -> None:
        """The step size is in (0, 1], the momentum in [0, 1); the positive pseudocount is that of a whole row."""
        super().__init__(step_size)
        self.momentum, self.pseudocount, self.rule = momentum, pseudocount, rule

    def _new_tables(self, hmm: HMM, signed: Signed) -> Tables:
        # Elsewhere than on the CPU, looking would wait for the device.
        if signed.weight.device.type == "cpu" and not float(signed.weight) >= self.rate:
            raise InvalidInput(
                f"the windows weigh {float(signed.weight):g} in all, less than the step size {self.rate:g}: "
                "give more windows with masked tokens, or larger weights"
            )
        share = self.rate / signed.weight.clamp(min=self.rate)
        plus = self._averages.smoothed("plus", signed.plus, self.momentum)
        minus = self._averages.smoothed("minus", signed.minus, self.momentum)
        visits = expected_visits(hmm, signed.length)
        initial, transition, emission = (
            self._step(log_theta, share * up, share * down, (1 - self.rate) * times[..., None])
            for log_theta, up, down, times in zip(log_tables(hmm), plus, minus, visits, strict=True)
        )
        return initial, transition, emission

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
