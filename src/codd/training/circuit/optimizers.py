"""What turns flows into the next circuit: Adam on free logits, and mini-batch EM."""

import abc
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import HMM
from codd.errors import InvalidInput
from codd.training.circuit.objectives import Signed, Tables, flow_tables, gradient_of, log_tables, with_tables
from codd.training.ema import EMA

Rule: TypeAlias = Literal["em", "ratio", "baum-welch"]
RULES: tuple[Rule, ...] = ("em", "ratio", "baum-welch")
_SAFETY = 2.0
_SMALLEST = 1e-30
"""Negative flows take no probability below this: in 32 bits it would soon be zero for good."""


class Optimizer(abc.ABC):
    """Maximises an objective, mini-batch by mini-batch. The circuit and ``tensors`` are all that a run must keep."""

    def __init__(self, rate: float):
        """``rate``: the step size or learning rate, free to be changed between updates."""
        self.rate, self._averages = rate, EMA()

    @abc.abstractmethod
    def update(self, hmm: HMM, signed: Signed) -> HMM:
        """One update; gives the circuit with new parameters."""

    def tensors(self) -> dict[str, Tensor]:
        """The running averages and the count of updates, for a checkpoint."""
        return self._averages.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` gave."""
        self._averages.restore(tensors)


class Adam(Optimizer):
    """Adam on logits u with theta = softmax(u), from the flows of any objective.

    The gradient is that of the log-likelihood per scored token, ``value / tokens``. The logits are the circuit's own
    log-probabilities: what a row of logits has in common changes nothing. ``rate`` is the learning rate, and may be
    changed between updates. ``weight_decay`` draws every row towards the uniform one, that is towards the neutral
    circuit: an update leaves ``theta ** (1 - rate * weight_decay)``, normalised, before its step.
    """

    def __init__(
        self,
        lr: float = 1.5e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """The names are those of torch.optim.AdamW."""
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidInput(f"betas must be at least 0 and less than 1, found {betas}")
        if not lr >= 0 or not eps > 0 or not weight_decay >= 0:
            raise InvalidInput(
                f"lr and weight_decay must be at least 0 and eps positive, found {lr}, {weight_decay} and {eps}"
            )
        super().__init__(lr)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    @torch.no_grad()
    def update(self, hmm: HMM, signed: Signed) -> HMM:
        """One update; gives the circuit with new parameters."""
        tokens = signed.tokens.clamp(min=torch.finfo(signed.tokens.dtype).tiny)  # no tokens, no gradient
        gradients = [g / tokens for g in gradient_of(hmm, signed)]
        first = self._averages.smoothed("first", gradients, self.betas[0])
        second = self._averages.smoothed("second", [g * g for g in gradients], self.betas[1])
        self._averages.updates += 1
        kept = 1 - self.rate * self.weight_decay
        tables = (
            (log_theta * kept + self.rate * m / (v.sqrt() + self.eps)).log_softmax(-1)
            for log_theta, m, v in zip(log_tables(hmm), first, second, strict=True)
        )
        return with_tables(hmm, tuple(tables))


class Anemone(Optimizer):
    """Anemone: mini-batch EM with anchors, and its forms for objectives with negative flows.

    Flows F of a mini-batch of weight W are smoothed over updates, divided by W, and mixed with what the circuit itself
    would use: for a row n that a string of the circuit visits TD(n) times,

        em            theta ~ s F+ + (1 - s) TD theta + pc / K
        ratio         theta ~ theta (s F+ + (1 - s) TD theta + pc / K) / (s F- + (1 - s) TD theta + pc theta)
        baum-welch    theta ~ s (F+ - F-) + max((1 - s) TD, D) theta + pc / K

    so that rows which the data visit more than the circuit expects move more. D is twice the least that keeps every
    entry of its row from falling under zero, ``2 max_c s (F-_c - F+_c) / theta_c``. A table without negative flows
    (those of the local objective but the emission) takes the EM step under each rule. With s = 1 and no momentum these
    are the plain full-batch updates. ``rate`` is the step size s.

    Momentum is for ``em``, where it is 0.9 by default. With negative flows it is unstable and 0 by default: a token of
    a large vocabulary is in few batches, one of which moves its logarithm by about log V; remembered, it makes such a
    step again in every update that follows, until most of the vocabulary has vanished (docs/results/training.md).
    """

    def __init__(
        self, step_size: float = 0.4, momentum: float | None = None, pseudocount: float = 1e-6, rule: Rule = "em"
    ) -> None:
        """The step size is in (0, 1]; momentum None is that of the rule; the pseudocount is that of a whole row."""
        if momentum is None:
            momentum = 0.9 if rule == "em" else 0.0
        if not 0 <= momentum < 1:
            raise InvalidInput(f"momentum must be at least 0 and less than 1, found {momentum}")
        if rule not in RULES:
            raise InvalidInput(f"rule must be one of {', '.join(RULES)}, found {rule!r}")
        if not pseudocount >= 0 or (rule == "ratio" and pseudocount == 0):
            least = "positive for the rule 'ratio'" if rule == "ratio" else "at least 0"
            raise InvalidInput(f"pseudocount must be {least}, found {pseudocount}")
        super().__init__(step_size)
        self.momentum, self.pseudocount, self.rule = momentum, pseudocount, rule
        self._check_rate()

    @torch.no_grad()
    def update(self, hmm: HMM, signed: Signed) -> HMM:
        """One update; gives the circuit with new parameters."""
        self._check(hmm, signed)
        share = self.rate / signed.weight.clamp(min=self.rate)
        plus = self._averages.smoothed("plus", flow_tables(signed.plus), self.momentum)
        given = [x for x in signed.negative if x is not None]
        smooth = iter(self._averages.smoothed("minus", given, self.momentum))
        minus = [None if x is None else next(smooth) for x in signed.negative]
        self._averages.updates += 1
        visits = expected_visits(hmm, signed.length)
        tables = zip(log_tables(hmm), plus, minus, visits, strict=True)
        return with_tables(
            hmm,
            tuple(
                self._step(
                    log_theta, share * up, None if down is None else share * down, (1 - self.rate) * times[..., None]
                )
                for log_theta, up, down, times in tables
            ),
        )

    def _step(
        self,
        log_theta: Float[Tensor, "*rows K"],
        plus: Float[Tensor, "*rows K"],
        minus: Float[Tensor, "*rows K"] | None,
        anchor: Float[Tensor, "*rows 1"],
    ) -> Float[Tensor, "*rows K"]:
        """The new log-probabilities of a table."""
        theta, each = log_theta.exp(), self.pseudocount / log_theta.shape[-1]
        if minus is None:
            new = plus + anchor * theta + each
        elif self.rule == "ratio":
            new = (plus + anchor * theta + each) / (_per(minus, theta) + anchor + self.pseudocount)
            new = torch.where(theta > 0, new, 0)  # what is multiplied stays zero
        else:
            change = plus - minus
            least = _per(-change, theta).amax(-1, keepdim=True).clamp(min=0)
            new = (change + torch.maximum(anchor, _SAFETY * least) * theta).clamp(min=0) + each
        total = new.sum(-1, keepdim=True)
        share = new / total
        if minus is not None:  # what was possible stays so
            share = torch.where(theta > 0, share.clamp(min=_SMALLEST), share)
        return torch.where(total > 0, share.log(), log_theta)  # a row that nothing visits stays

    def _check(self, hmm: HMM, signed: Signed) -> None:
        self._check_rate()
        if not hmm.homogeneous:
            raise InvalidInput("Anemone updates circuits whose positions share their parameters. Use Adam.")
        if (signed.minus is None) != (self.rule == "em"):
            has, use = ("no", "rule='em'") if signed.minus is None else ("", "rule='ratio' or 'baum-welch'")
            raise InvalidInput(
                f"the {signed.objective} objective has {has} negative flows, which the rule {self.rule!r} "
                f"{'needs' if signed.minus is None else 'would ignore'}: use {use}".replace("  ", " ")
            )
        # Elsewhere than on the CPU, looking would wait for the device.
        if signed.weight.device.type == "cpu" and not float(signed.weight) >= self.rate:
            raise InvalidInput(
                f"the windows weigh {float(signed.weight):g} in all, less than the step size {self.rate:g}: "
                "give more windows with masked tokens, or larger weights"
            )

    def _check_rate(self) -> None:
        if not 0 < self.rate <= 1:
            raise InvalidInput(f"the step size must be in (0, 1], found {self.rate}")


def _per(x: Float[Tensor, "*rows K"], theta: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """x / theta; flows of what is impossible are zero."""
    return torch.where(theta > 0, x / theta.clamp(min=_SMALLEST), 0)


def expected_visits(hmm: HMM, length: int) -> Tables:
    """How often each row of each table is used by a string of the circuit itself: sums of top-down probabilities."""
    initial, *steps, _ = (x.exp() for x in log_tables(hmm))
    state, left = initial, torch.zeros_like(initial)
    for _ in range(length - 1):
        left = left + state
        for factor in steps:
            state = state @ factor
    uses = [left]
    for factor in steps[:-1]:
        uses.append(uses[-1] @ factor)
    return (torch.ones_like(initial[0]), *uses, left + state)
