"""What a static circuit is trained for: three objectives and their flows, without a graph through the chain.

For a window x with masked positions M and observed ones O, the network's answer phi, and a weight w,

=============  ==================================================================================================
conditional    log p(x_M | x_O) = log F(all hard) - log F(O hard, M soft) + log phi(x_M), the product as it is used
local          log sum_z p(z) prod_O E[z_t, x_t] prod_M E[z_t, x_t] phi_t(x_t) / Z_t(z_t), normalised state by state
generative     log p(x), in which the network has no part
=============  ==================================================================================================

Each gives positive flows (what the truth uses) and negative ones (what the model expects); their difference is the
derivative in the logarithms of the parameters.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import HMM, Evidence, Flows, Kind, SparsePotentials
from codd.data.windows import WindowBatch
from codd.errors import InvalidInput

Objective: TypeAlias = Literal["conditional", "local", "generative"]
Weighting: TypeAlias = Literal["token", "elbo"]
Tables: TypeAlias = tuple[Tensor, ...]
"""Initial, transition (one or two factors), emission: each row of a table is a distribution, or its flows."""
SMALLEST_LEVEL = 1e-3
"""Under this masking probability a window weighs no more: 1 / t has no bound."""


@dataclass(frozen=True, eq=False)
class Signed:
    """Flows of some windows: all that an optimizer needs, and a sum, so that parts of a batch can be added."""

    plus: Flows
    minus: Flows | None
    """None for the generative objective; zero except for the emission for the local one."""
    value: Float[Tensor, ""]
    """The weighted sum of log-likelihoods; -inf if a window is impossible under the circuit."""
    weight: Float[Tensor, ""]
    """The sum of the weights of windows."""
    tokens: Float[Tensor, ""]
    """The sum of the weights of the tokens that are scored: the masked ones, or all if the objective is no conditional
    one. ``value / tokens`` is a log-likelihood per token."""
    objective: Objective
    length: int
    """How many positions a window has."""

    def __add__(self, other: "Signed") -> "Signed":
        """What both parts of a batch give together."""
        if (self.objective, self.length) != (other.objective, other.length):
            raise InvalidInput(
                f"flows of the {self.objective} objective over {self.length} positions cannot be added to those of "
                f"the {other.objective} one over {other.length}: use one objective and one length"
            )
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("value", "weight", "tokens")}
        minus = None if self.minus is None or other.minus is None else _sum(self.minus, other.minus)
        return replace(self, plus=_sum(self.plus, other.plus), minus=minus, **sums)

    def tensors(self) -> Tables:
        """All that is summed, for an all-reduce in place."""
        minus = () if self.minus is None else flow_tables(self.minus)
        return (*flow_tables(self.plus), *minus, self.value, self.weight, self.tokens)

    @property
    def negative(self) -> tuple[Tensor | None, ...]:
        """The negative flows of each table; None if the objective has none there, so that EM counts are all."""
        count = len(flow_tables(self.plus))
        if self.minus is None:
            return (None,) * count
        tables = flow_tables(self.minus)
        return tables if self.objective == "conditional" else (*(None,) * (count - 1), tables[-1])


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
def signed_flows(
    objective: Objective, hmm: HMM, windows: WindowBatch, weights: Float[Tensor, " W"] | None = None
) -> Signed:
    """Flows and value of an objective. A window without masked tokens counts nothing, whatever its weight.

    On a GPU nothing here waits for the device.
    """
    given = weights_of(windows) if weights is None else weights
    w = torch.where(windows.masked.any(-1), given, 0).to(hmm.dtype)
    if objective == "conditional":
        plus, minus, log_prob = _conditional(hmm, windows, w)
    elif objective == "local":
        plus, minus, log_prob = _local(hmm, windows, w)
    elif objective == "generative":
        plus, log_prob = _pass(hmm, Evidence(tokens=windows.tokens), w)
        minus = None
    else:
        raise InvalidInput(f"objective must be 'conditional', 'local' or 'generative', found {objective!r}")
    scored = windows.masked.sum(-1) if objective == "conditional" else windows.masked.shape[1]
    value = torch.where(w != 0, w * log_prob, 0).sum()  # a filler may be impossible
    return Signed(plus, minus, value, w.sum(), (w * scored).sum(), objective, windows.masked.shape[1])


def gradient_of(hmm: HMM, signed: Signed) -> Tables:
    """dJ / du for logits u with theta = softmax(u): G - theta sum G, where G = F+ - F-. The tables in their order."""
    gradients = []
    for log_theta, plus, minus in zip(log_tables(hmm), flow_tables(signed.plus), signed.negative, strict=True):
        g = plus if minus is None else plus - minus
        gradients.append(g - log_theta.exp() * g.sum(-1, keepdim=True))
    return tuple(gradients)


def _conditional(hmm: HMM, windows: WindowBatch, w: Float[Tensor, " W"]) -> tuple[Flows, Flows, Float[Tensor, " W"]]:
    known = windows.evidence()
    plus, log_all = _pass(hmm, Evidence(tokens=windows.tokens), w)
    minus, log_known = _pass(hmm, known, w)
    return plus, minus, log_all - log_known + _log_phi(hmm, windows, known)


def _local(hmm: HMM, windows: WindowBatch, w: Float[Tensor, " W"]) -> tuple[Flows, Flows, Float[Tensor, " W"]]:
    """All positions are scored: observed ones as plain hard evidence, masked ones also with phi / Z(z).

    That is hard evidence with the latent potential -log Z. What a masked position's state emits is taken away again
    as E phi / Z; nothing else is.
    """
    if not hmm.homogeneous:
        raise InvalidInput("the local objective needs a circuit whose positions share their parameters")
    known = windows.evidence()
    alone, apart = _single(hmm), _apart(known)
    log_z = (alone.posterior(apart) + alone.log_partition(apart)[:, None, None] + math.log(hmm.num_states)).reshape(
        *known.shape, hmm.num_states
    )
    possible = log_z > -torch.inf  # a state that emits nothing of what phi allows does not emit the truth either
    potential = torch.where(possible & windows.masked[..., None], -log_z, 0)
    hard = Evidence(tokens=windows.tokens, latent_log_potentials=potential)
    plus, value = _pass(hmm, hard, w)
    # The posterior over Z, times Z, is the posterior: the flows of single positions spread it as E phi / Z.
    uses = torch.where(possible, hmm.posterior(hard) - log_z, -torch.inf)
    spread = alone.flows(
        replace(apart, latent_log_potentials=uses.flatten(0, 1)[:, None]), (w[:, None] * windows.masked).flatten()
    )
    minus = Flows(torch.zeros_like(plus.initial), _zeros(plus), spread.emission)
    return plus, minus, value + _log_phi(hmm, windows, known)


def _single(hmm: HMM) -> HMM:
    """The circuit of single positions, every state as likely as another."""
    uniform = torch.zeros_like(hmm.log_initial).log_softmax(-1)
    return with_tables(hmm, (uniform, *log_tables(hmm)[1:]))


def _apart(known: Evidence) -> Evidence:
    """The soft evidence of each position as a window of its own; nothing about the observed ones."""

    def each(x: Tensor) -> Tensor:
        return x.flatten(0, 1)[:, None]

    s = known.sparse
    return Evidence(
        logits=None if known.logits is None else each(known.logits),
        sparse=None
        if s is None
        else SparsePotentials(each(s.ids), each(s.log_weights), None if s.log_tail is None else each(s.log_tail)),
        missing=each(known.rows(Kind.OBSERVED)),
    )


def _pass(hmm: HMM, ev: Evidence, w: Float[Tensor, " W"]) -> tuple[Flows, Float[Tensor, " W"]]:
    """Flows and log-partition of a pass, windows weighted by w."""
    return hmm.flows(ev, w), hmm.log_partition(ev)


def _log_phi(hmm: HMM, windows: WindowBatch, known: Evidence) -> Float[Tensor, " W"]:
    """The network's own log-probability of the masked tokens, log phi(x_M)."""
    log_weights = known.log_weights_of(windows.tokens, hmm.vocab_size)
    return torch.where(windows.masked, log_weights, 0).sum(-1).to(hmm.dtype)


# Tables in one order, whatever the layout of the transition.


def flow_tables(flows: Flows) -> Tables:
    """The flows of each table, in the order of `Tables`."""
    steps = flows.transition if isinstance(flows.transition, tuple) else (flows.transition,)
    return (flows.initial, *steps, flows.emission)


def log_tables(hmm: HMM) -> Tables:
    """The log-probabilities of each table, in the order of `Tables`, without gradients."""
    return tuple(x.detach() for x in (hmm.log_initial, *hmm.transition.log_factors, hmm.log_emission))


def with_tables(hmm: HMM, tables: Tables) -> HMM:
    """The circuit with other log-probabilities, which are taken to be normalised."""
    initial, *steps, emission = tables
    transition = steps[0] if len(steps) == 1 else (steps[0], steps[1])
    return HMM(initial, transition, emission, window=hmm.window, validate=False)


def _zeros(flows: Flows) -> Tensor | tuple[Tensor, Tensor]:
    if isinstance(flows.transition, tuple):
        return torch.zeros_like(flows.transition[0]), torch.zeros_like(flows.transition[1])
    return torch.zeros_like(flows.transition)


def _sum(a: Flows, b: Flows) -> Flows:
    initial, *steps, emission = (x + y for x, y in zip(flow_tables(a), flow_tables(b), strict=True))
    return Flows(initial, steps[0] if len(steps) == 1 else (steps[0], steps[1]), emission)
