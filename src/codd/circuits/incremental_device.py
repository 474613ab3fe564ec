"""Incremental conditioning on a GPU: a few launches per token, and the host never waits for the device."""

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence
from codd.circuits.incremental import IncrementalConditioner
from codd.circuits.ops.backend import Backend
from codd.circuits.ops.commit import triton as commit_kernels
from codd.circuits.ops.leaf.triton import fused
from codd.circuits.ops.propose import triton as propose_kernels
from codd.circuits.ops.sampling_rule import Committed, Proposals, SamplingRule
from codd.circuits.ops.scaled import Scaled

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM


class DeviceConditioner(IncrementalConditioner):
    """For dense evidence and one emission table. Both directions of the chain run again after every token.

    Whatever takes ``open_`` computes anything for sequences with no position in it.
    """

    @torch.no_grad()
    def __init__(self, hmm: "HMM", ev: Evidence, candidates: int | None, backend: Backend) -> None:
        """Compute what no later token changes, and prepare the candidates: not in a graph that is captured later."""
        fits = max(ev.shape[1], candidates or 0) <= commit_kernels.LARGEST
        super().__init__(hmm, ev, candidates if fits else None, backend)
        if self.candidates is not None:
            _ = self._prepared

    def _leaf_values(self) -> Scaled:
        leaf, self._totals = fused(self._hmm.emission, self._given)
        return leaf

    @cached_property
    def _prepared(self) -> tuple[Float[Tensor, "B L K N"], Float[Tensor, "B L K"]]:
        assert self.candidates is not None
        state = (self._leaf.log_scale, self._totals, self._latent)
        return commit_kernels.prepare(self._hmm.emission, self._given, self.candidates, *state)

    @torch.no_grad()
    def log_marginals(self) -> Float[Tensor, "B L K"]:
        """log p(x_t | evidence, committed tokens) of the candidates, or of all tokens if there are none."""
        return self.dense_log_marginals() if self.candidates is None else self._candidate_marginals(None)

    @torch.no_grad()
    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        """Log-probabilities of all tokens: (B, L, V), or (B, V) at one position of each sequence."""
        if positions is not None:
            return super().dense_log_marginals(positions)
        return self._dense_marginals(None, 1.0, "low_confidence", False)[0]

    def _both(self, open_: Bool[Tensor, "B L"] | None) -> tuple[Scaled, Scaled]:
        return self._backend.forward_backward(self._steps, self._hmm.log_initial, self._leaf, open_=open_)

    def _candidate_marginals(self, open_: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L K"]:
        assert self.candidates is not None
        forward, backward = self._both(open_)
        messages = (forward.values, backward.values, self._leaf.values)
        cached = (*self._prepared, self.candidates)
        return commit_kernels.candidate_marginals(*messages, *cached, self._tokens, self._observed, open_)

    def _dense_marginals(
        self, open_: Bool[Tensor, "B L"] | None, temperature: float, order: str, entropies: bool
    ) -> tuple[Float[Tensor, "B L V"], Float[Tensor, "4 B L S"], int]:
        """Log-probabilities of all tokens, what `propose` needs of each strip of them, and the width of a strip."""
        given = (self._hmm.emission, self._given, self._totals, self._both(open_), self._leaf, self._latent)
        state = (self._tokens, self._observed, open_)
        return propose_kernels.dense_marginals(*given, *state, 1 / temperature, order, entropies)

    @torch.no_grad()
    def commit_tokens(
        self,
        open_: Bool[Tensor, " L"],
        uniforms: Float[Tensor, " L"],
        given: Float[Tensor, " L"] | None,
        rule: SamplingRule,
    ) -> Committed:
        """As `eager.commit_tokens`, each token in a few launches that can be captured: the host never looks.

        There is a step for every position; those after the end commit nothing, and their launches end at once. A token
        that is settled has a positive probability given those before it, so together they are possible.
        """
        open_, uniforms = open_.clone()[None], uniforms[None]
        order = None if given is None else given[None]
        state, spent = (self._leaf, self._tokens, self._observed), torch.zeros(1, device=open_.device)
        few = self.candidates is not None and rule.plain and rule.candidates_suffice
        steps: list[tuple[Tensor, ...]] = []
        extra = 0 if rule.due is None else rule.least  # launches for which nothing was due any more
        for i in range(rule.most + extra):
            held_back = i >= rule.least
            may = open_ if held_back or rule.due is None else open_ & rule.due
            if few and self.candidates is not None:
                scale = None if self._latent is None else self._latent.log_scale
                log_p, columns = self._candidate_marginals(may), self._prepared[0]
                given_ = (log_p, self.candidates, may, rule.order, order, columns, scale)
                steps.append(commit_kernels.pick(*given_, *state, rule.limits[0] if held_back else None))
            else:
                proposals = self._proposals(may, uniforms, order, rule)
                fixed = (proposals, may, spent, rule.limits, not held_back, self._hmm.emission, self._latent)
                steps.append(commit_kernels.take(*fixed, *state))
            if may is not open_:
                open_ = open_ & ~self._observed
            self._messages = None
        if not steps:
            nothing = torch.zeros(0, dtype=torch.int64, device=open_.device)
            valid = self.log_partition[0] > -torch.inf
            return Committed(nothing, nothing, nothing.float(), nothing.bool(), valid)
        positions, tokens, probabilities, settled, keep = (torch.cat(parts) for parts in zip(*steps, strict=True))
        return Committed(positions, tokens, probabilities, keep, settled.all())

    def _proposals(
        self,
        open_: Bool[Tensor, "B L"],
        uniforms: Float[Tensor, "B L"],
        given: Float[Tensor, "B L"] | None,
        rule: SamplingRule,
    ) -> Proposals:
        """A token for every open position, drawn or the most probable one; by PyTorch from truncated distributions."""
        if rule.truncated:
            log_p = rule.temper(self.dense_log_marginals()[0])
            found = rule.propose(log_p, uniforms[0], None if given is None else given[0])
            return Proposals(*(x[None] for x in found))
        entropies = rule.entropy_budget is not None or rule.order == "entropy"
        heat = rule.temperature or 1.0
        marginals = self._dense_marginals(open_, heat, rule.order, entropies)
        numbers = uniforms if rule.temperature > 0 else None
        found = propose_kernels.propose(*marginals, open_, 1 / heat, rule.order, entropies, numbers)
        return found if given is None else found._replace(order=given)
