"""What turns flows into the next circuit: one protocol, mini-batch EM (see anemone.py) and Adam on free logits."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from codd.circuits import HMM
from codd.errors import InvalidInput
from codd.training.anemone import Anemone as Anemone
from codd.training.averages import Averages
from codd.training.objectives import Signed, gradient_of, log_tables, with_tables


@runtime_checkable
class Optimizer(Protocol):
    """Maximises an objective, mini-batch by mini-batch. The circuit and ``tensors`` are all that a run must keep."""

    rate: float
    """The step size or learning rate, free to be changed between updates."""

    def update(self, hmm: HMM, signed: Signed) -> HMM:
        """The next circuit."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The state, for a checkpoint."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        ...


class Adam:
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
        self.rate, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self._averages = Averages()

    @torch.no_grad()
    def update(self, hmm: HMM, signed: Signed) -> HMM:
        """The next circuit."""
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

    def tensors(self) -> dict[str, Tensor]:
        """The state, for a checkpoint."""
        return self._averages.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        self._averages.restore(tensors)
