"""What a static circuit is trained for, and its flows, without a graph through the chain.

For a window x with masked positions M, observed ones O, the network's answer phi, and a weight w, the objective is

    log p(x_M | x_O) = log F(all hard) - log F(O hard, M soft) + log phi(x_M),

the product as it is used. It gives positive flows (what the truth uses) and negative ones (what the model expects);
their difference is the derivative in the logarithms of the parameters.
"""

from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import HMM, Evidence
from codd.data.windows import WindowBatch
from codd.errors import InvalidInput

Weighting: TypeAlias = Literal["token", "elbo"]
Tables: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Initial, transition, emission: each row of a table is a distribution, or its flows."""
SMALLEST_LEVEL = 1e-3
"""Under this masking probability a window weighs no more: 1 / t has no bound."""


class Signed(NamedTuple):
    """Flows of some windows, all of them sums: those of the parts of a batch add up to those of the whole."""

    plus: Tables
    minus: Tables
    value: Float[Tensor, ""]
    """The weighted sum of log-likelihoods; -inf if a window is impossible under the circuit."""
    weight: Float[Tensor, ""]
    """The sum of the weights of windows."""
    tokens: Float[Tensor, ""]
    """The sum of the weights of masked tokens: ``value / tokens`` is a log-likelihood per token."""
    length: int
    """How many positions a window has."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is summed, for an all-reduce in place."""
        return (*self.plus, *self.minus, self.value, self.weight, self.tokens)


def weights_of(windows: WindowBatch, weighting: Weighting = "token") -> Float[Tensor, " W"]:
    """w(t) of each window; zero for those without masked tokens, which only fill the batch.

    "token": one, so that every masked token counts the same. "elbo": 1 / t, with which the sum over masked tokens is
    a bound of the log-likelihood of the whole window (t is at least 1e-3). Neither is normalised by the batch, so that
    parts of it add up: the optimizers divide by sums of weights.
    """
    useful = windows.masked.any(-1)
    if weighting == "token":
        return useful.float()
    if windows.level is None:
        raise InvalidInput("the weights 1 / t need WindowBatch.level, found None: give it, or weight by 'token'")
    return torch.where(useful, 1 / windows.level.clamp(min=SMALLEST_LEVEL), 0)


@torch.no_grad()
def signed_flows(hmm: HMM, windows: WindowBatch, weights: Float[Tensor, " W"] | None = None) -> Signed:
    """Flows and value of the objective. A window without masked tokens counts nothing, whatever its weight.

    On a GPU nothing here waits for the device.
    """
    given = weights_of(windows) if weights is None else weights
    w = torch.where(windows.masked.any(-1), given, 0).to(hmm.dtype)
    known, truth = windows.evidence(), Evidence(tokens=windows.tokens)
    plus, minus = (_flow_tables(hmm, ev, w) for ev in (truth, known))
    log_phi = torch.where(windows.masked, known.log_weights_of(windows.tokens, hmm.vocab_size), 0).sum(-1)
    log_prob = hmm.log_partition(truth) - hmm.log_partition(known) + log_phi.to(hmm.dtype)
    value = torch.where(w != 0, w * log_prob, 0).sum()  # a filler may be impossible
    return Signed(plus, minus, value, w.sum(), (w * windows.masked.sum(-1)).sum(), windows.masked.shape[1])


def _flow_tables(hmm: HMM, ev: Evidence, w: Float[Tensor, " W"]) -> Tables:
    flows = hmm.flows(ev, w)
    assert isinstance(flows.transition, Tensor), "free logits have one table for the transition"
    return flows.initial, flows.transition, flows.emission


def log_tables(hmm: HMM) -> Tables:
    """The log-probabilities of each table, without gradients."""
    return hmm.log_initial.detach(), hmm.transition.log_factors[0].detach(), hmm.log_emission.detach()


def with_tables(hmm: HMM, tables: Tables) -> HMM:
    """The circuit with other log-probabilities, which are taken to be normalised."""
    return HMM(*tables, window=hmm.window, validate=False)
