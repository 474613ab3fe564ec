"""Incremental conditioning: tokens become known one after the other, and the marginals of the rest follow each.

The evidence of a position that is not yet known stays as it is, so its leaf values, which cost a pass over the
vocabulary, are computed once. A token that becomes known replaces them with its column of the emission, and the
messages are made again:

    p(x_t = v | evidence) = w_t(v) sum_i f_t(i) pot_t(i) E[i, v] b_t(i) / sum_i f_t(i) L_t(i) b_t(i)

The denominator sums over the whole vocabulary, so the probabilities of a few candidates are exact, too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits import inference, pairwise
from codd.circuits.evidence import EVERYWHERE, Evidence, Index, Kind, check_ids
from codd.circuits.inference import Smoothed
from codd.circuits.ops.backend import Backend, use
from codd.circuits.ops.commit import eager, native
from codd.circuits.ops.sampling_rule import Committed, SamplingRule
from codd.circuits.ops.scaled import Scaled, exponentials
from codd.circuits.protocol import Conditioner, ProbabilisticCircuit, Unconditioned
from codd.errors import InvalidEvidence

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM


class IncrementalConditioner:
    """An HMM and evidence to which tokens are added one by one. Made by ``HMM.incremental``."""

    certain_is_free = False

    @torch.no_grad()
    def __init__(self, hmm: "HMM", ev: Evidence, candidates: int | None, backend: Backend) -> None:
        """Compute what no later token changes: leaf values, and which tokens are candidates."""
        self._backend = backend
        self._offered, self._centred = ev, ev.centred()
        self._given = ev = self._centred.evidence
        self._hmm, self._steps = hmm, inference.steps_of(hmm, ev)
        latent = ev.latent_log_potentials
        self._latent = None if latent is None else exponentials(latent.to(hmm.dtype))
        self._leaf = self._leaf_values()
        self._observed = ev.rows(Kind.OBSERVED)
        self._tokens = (
            torch.zeros(ev.shape, dtype=torch.int64, device=ev.device)
            if ev.tokens is None
            else torch.where(self._observed, ev.tokens, 0)  # a mask's id need not be in the vocabulary
        )
        self._messages: Smoothed | None = None
        self.candidates = None if candidates is None else _heaviest(ev, candidates)

    def _leaf_values(self) -> Scaled:
        return inference.check_leaf(self._backend.leaf_values(self._hmm.emission, self._given))

    @property
    def evidence(self) -> Evidence:
        """The evidence with all tokens that were committed."""
        return self._with_tokens(self._offered)

    def _with_tokens(self, ev: Evidence) -> Evidence:
        return replace(ev, tokens=self._tokens.clone(), observed=self._observed.clone())

    @property
    @torch.no_grad()
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of the evidence and all committed tokens; -inf where they are impossible together."""
        log_z = self._exactly(
            self._passes().log_partition.clone(), lambda ev, _: inference.log_partition(self._hmm, ev)
        )
        taken = torch.where(self._observed, 0, self._centred.tokens).sum(-1) + self._centred.latents
        return (log_z + taken).to(self._hmm.dtype)

    @torch.no_grad()
    def commit(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> None:
        """Observe one more token in each sequence; a position that is known already stays as it is."""
        self._check("positions", positions, self._given.shape[1])
        self._check("tokens", tokens, self._hmm.vocab_size)
        at = (torch.arange(len(positions), device=positions.device), positions.long())
        new = ~self._observed[at]
        log = self._hmm.emission.log_columns(tokens.long(), positions.long())
        if self._given.latent_log_potentials is not None:
            log = log + self._given.latent_log_potentials[at].to(log.dtype)
        row = exponentials(log[:, None])
        self._leaf.values[at] = torch.where(new[:, None], row.values[:, 0], self._leaf.values[at])
        self._leaf.log_scale[at] = torch.where(new[:, None], row.log_scale[:, 0], self._leaf.log_scale[at])
        self._tokens[at] = torch.where(new, tokens, self._tokens[at])
        self._observed[at] = torch.ones_like(new)  # True would be copied to the device, and waited for
        self._messages = None

    def commit_tokens(
        self,
        open_: Bool[Tensor, " L"],
        uniforms: Float[Tensor, " L"],
        given: Float[Tensor, " L"] | None,
        rule: SamplingRule,
    ) -> Committed:
        """Commit tokens one by one, as the rule says, with the loop of the backend; of one sequence only."""
        return self._backend.commit_tokens(self, open_, uniforms, given, rule)

    @torch.no_grad()
    def chain(self, candidates: int) -> native.Chain | None:
        """What the commit loop in C reads; None where it does not serve the circuit or the evidence."""
        ev, emission, steps = self._given, self._hmm.emission, self._steps
        one_table = self._hmm.dtype == torch.float32 and not (steps.low_rank or steps.stepwise or emission.per_position)
        dense = ev.potentials is not None and ev.sparse is None and len(ev.kind) == 1
        if not one_table or not dense or candidates >= self._hmm.vocab_size:
            return None
        listed = _heaviest(ev, candidates) if self.candidates is None else self.candidates
        return (
            steps.linear[0] if steps.narrowed is None else steps.narrowed,
            self._hmm.log_initial.detach().softmax(-1),
            emission.columns,
            None if self._latent is None else self._latent.values[0],
            self._leaf.values[0],
            listed[0],
            (self._log_weights(EVERYWHERE).gather(-1, listed) + self._offset(EVERYWHERE))[0].exp(),
        )

    @torch.no_grad()
    def log_marginals(self) -> Float[Tensor, "B L K"]:
        """log p(x_t | evidence, committed tokens) of the candidates, or of all tokens if there are none.

        Normalised over all tokens: what the candidates leave to one is the probability of all others.
        """
        if self.candidates is None:
            return self.dense_log_marginals()
        candidates, (columns, weights) = self.candidates, self._prepared
        # The states last in both: read as it lies, this product is several times faster than the other way round.
        log_p = (self._cavity(EVERYWHERE)[:, :, None] @ columns.mT)[:, :, 0].log_().add_(weights)
        out = self._known(log_p, candidates == self._tokens[..., None], EVERYWHERE)
        return self._exactly(out, lambda ev, index: inference.marginals(self._hmm, ev, candidates[index]))

    @torch.no_grad()
    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        """Log-probabilities of all tokens: (B, L, V), or (B, V) at one position of each sequence."""
        batch, length = self._given.shape
        vocabulary = torch.arange(self._hmm.vocab_size, device=self._given.device)
        hit = vocabulary == self._tokens[..., None]
        if positions is not None:
            self._check("positions", positions, length)
            at: Index = (torch.arange(batch, device=positions.device)[:, None], positions.long()[:, None])
            out, one = self._known(self._dense(at), hit[at], at)[:, 0], positions.long()
            return self._exactly(
                out, lambda ev, index: inference.marginals(self._hmm, ev)[torch.arange(len(index)), one[index]]
            )
        unknown: Index = (slice(None), (~self._observed).any(0).nonzero()[:, 0])
        out = torch.where(hit, 0.0, -torch.inf).to(self._hmm.dtype)
        out[unknown] = self._known(self._dense(unknown), hit[unknown], unknown)
        out.masked_fill_((self._passes().log_partition == -torch.inf)[:, None, None], -torch.inf)
        return self._exactly(out, lambda ev, _: inference.marginals(self._hmm, ev))

    def _dense(self, index: Index) -> Float[Tensor, "B R V"]:
        """Log-probabilities of all tokens at positions that are not known."""
        cavity = self._cavity(index)
        if self._latent is not None:
            cavity = cavity * self._latent.values[index]
        log_p = self._hmm.emission.emitted(cavity, index[1]).log_()
        return log_p.add_(self._log_weights(index)).add_(self._offset(index))

    def _known(self, log_p: Float[Tensor, "B R K"], hit: Bool[Tensor, "B R K"], index: Index) -> Float[Tensor, "B R K"]:
        """The same, with certainty where a token is known, and -inf where the evidence is impossible."""
        known = torch.where(hit, 0.0, -torch.inf).to(log_p.dtype)
        out = torch.where(self._observed[index][..., None], known, log_p)
        return out.masked_fill_((self._passes().log_partition == -torch.inf)[:, None, None], -torch.inf)

    def _check(self, name: str, given: Int[Tensor, " B"], limit: int) -> None:
        batch = self._given.shape[0]
        if given.shape != (batch,) or given.dtype.is_floating_point or given.dtype == torch.bool:
            raise InvalidEvidence(
                f"{name} must be integers, one per sequence: ({batch},); found {tuple(given.shape)} of {given.dtype}"
            )
        if given.device != self._given.device:
            raise InvalidEvidence(f"{name} are on {given.device}, the evidence on {self._given.device}: move them")
        if given.device.type == "cpu":  # elsewhere, looking at values would wait for the device
            check_ids(name, given, limit)

    @cached_property
    def _prepared(self) -> tuple[Float[Tensor, "B L K N"], Float[Tensor, "B L K"]]:
        """Columns of the candidates times latent potentials, and log-weights with the scales that belong to them."""
        assert self.candidates is not None
        columns = self._hmm.emission.columns_of(self.candidates)
        if self._latent is not None:
            columns *= self._latent.values[:, :, None]
        return columns, self._log_weights(EVERYWHERE).gather(-1, self.candidates) + self._offset(EVERYWHERE)

    def _passes(self) -> Smoothed:
        """Messages under all that is known; `suspects` are the sequences that the reference has to answer."""
        if self._messages is None:
            self._messages = inference.passes(self._hmm, self._steps, self._leaf, self._backend)
        return self._messages

    def _cavity(self, index: Index) -> Float[Tensor, "B R N"]:
        """Forward times backward over Z, up to the scale of the leaf."""
        found = self._passes()
        cavity = found.forward.values[index] * found.backward.values[index]
        total = (cavity * self._leaf.values[index]).sum(-1, keepdim=True)
        return cavity / torch.where(total > 0, total, 1)

    def _offset(self, index: Index) -> Float[Tensor, "B R 1"]:
        """The logarithm of the scale that the latent potential has and the leaf has not."""
        scale = -self._leaf.log_scale[index]
        return scale if self._latent is None else scale + self._latent.log_scale[index]

    def _log_weights(self, index: Index) -> Float[Tensor, "B R V"]:
        """The log-weight of every token before anything was committed."""
        return self._given.dense_log_weights(self._hmm.vocab_size, self._hmm.dtype, index)

    def _exactly(self, fast: Tensor, exact: Callable[[Evidence, Int[Tensor, " S"]], Tensor]) -> Tensor:
        """The answer, with that of the reference for suspect sequences."""
        suspect = self._passes().suspects
        if suspect is not None:
            index = suspect.nonzero()[:, 0]
            with use("reference"):
                fast[index] = exact(self._with_tokens(self._given).select(index), index).to(fast.dtype)
        return fast


class RecomputingConditioner:
    """`codd.circuits.protocol.Conditioner` by asking again after every token: for any circuit, and for comparison."""

    candidates: Int[Tensor, "B L K"] | None = None
    """Always None: `log_marginals` covers all V tokens."""
    certain_is_free = False
    commit_tokens = eager.commit_tokens

    def __init__(self, circuit: ProbabilisticCircuit, ev: Evidence) -> None:
        """Start from evidence; nothing is computed yet."""
        self._circuit = circuit
        self.evidence = ev
        """The evidence with all tokens that were committed."""

    @property
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of the evidence and all committed tokens."""
        return self._circuit.log_partition(self.evidence)

    def log_marginals(self) -> Float[Tensor, "B L V"]:
        """log p(x_t | evidence, committed tokens) of all tokens."""
        return self._circuit.marginals(self.evidence)

    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        """Log-probabilities of all tokens: (B, L, V), or (B, V) at one position of each sequence."""
        log_p = self.log_marginals()
        return log_p if positions is None else log_p[torch.arange(len(log_p), device=log_p.device), positions]

    def commit(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> None:
        """Observe one more token in each sequence; a position that is known already stays as it is."""
        ev = self.evidence
        observed = ev.rows(Kind.OBSERVED)
        known = (
            torch.zeros_like(ev.kind, dtype=torch.int64) if ev.tokens is None else torch.where(observed, ev.tokens, 0)
        )
        new = torch.zeros_like(observed).scatter(1, positions[:, None], True) & ~observed
        self.evidence = replace(ev, tokens=torch.where(new, tokens[:, None], known), observed=observed | new)


class Recomputing(Unconditioned):
    """The queries that any circuit answers by being asked for its marginals again and again."""

    def pairwise(
        self: ProbabilisticCircuit, ev: Evidence, candidates: Int[Tensor, "B L K"]
    ) -> Float[Tensor, "B L L C C"]:
        """p(class at s, class at t | evidence) of every two positions: each candidate, and last all other tokens."""
        return pairwise.by_conditioning(self, ev, candidates.long()).to(self.dtype)

    def incremental(self: ProbabilisticCircuit, ev: Evidence, candidates: int | None = None) -> Conditioner:
        """Marginals of all tokens while tokens are committed one by one; fewer ``candidates`` would save no work."""
        return RecomputingConditioner(self, ev)


def _heaviest(ev: Evidence, count: int) -> Int[Tensor, "B L K"]:
    """The tokens with the largest dense potentials; a temperature does not change which they are."""
    if ev.potentials is None:
        raise InvalidEvidence(
            "candidates are the tokens with the largest dense potentials, and this evidence has none: "
            "give logits or log_potentials, or candidates=None for all tokens"
        )
    if not 1 <= count <= ev.potentials.shape[-1]:
        raise InvalidEvidence(f"candidates must be between 1 and V = {ev.potentials.shape[-1]}, found {count}")
    if ev.device.type != "cpu":
        return ev.potentials.topk(count, dim=-1).indices
    dense, out = ev.rows(Kind.DENSE), torch.zeros(*ev.shape, count, dtype=torch.int64)
    out[dense] = ev.potentials[dense].topk(count, dim=-1).indices  # of the others nothing is asked
    return out
