"""A constant in a row of log-weights is a factor of Z and of nothing else: probabilities keep their digits."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codd.circuits import HMM, Evidence
from tests.support.strategies import Truth, make_evidence, make_hmm, shape_checks

pytestmark = pytest.mark.numerics
KINDS = ("log_potentials", "sparse", "sparse_tail", "latent", "observed_latent", "mixed_dense", "mixed_sparse")
OFFSETS = [sign * size for size in (0, 1e3, 1e4, 1e6, 1e8, 1e37) for sign in (1, -1)]
V, L, N = 3, 3, 2


def shifted(ev: Evidence, offsets: Tensor) -> Evidence:
    """Every row of log-weights with a constant of its position."""
    rows = offsets[None, :, None]
    changes = {
        name: x + rows for name in ("log_potentials", "latent_log_potentials") if (x := getattr(ev, name)) is not None
    }
    if ev.sparse is not None:
        tail = None if ev.sparse.log_tail is None else ev.sparse.log_tail + rows[..., 0]
        changes["sparse"] = replace(ev.sparse, log_weights=ev.sparse.log_weights + rows, log_tail=tail)
    return replace(ev, **changes)


def without_constants(ev: Evidence) -> tuple[Evidence, Tensor]:
    """The very same numbers in float64, the largest of each row at zero, and what log Z loses by that: (B,)."""
    soft, taken, changes = ev.rows(1) | ev.rows(2), 0, {}
    for name in ("log_potentials", "latent_log_potentials"):
        if (x := getattr(ev, name)) is not None:
            top = x.double().amax(-1)
            changes[name] = x.double() - top[..., None]
            taken = taken + (top if name.startswith("latent") else torch.where(soft, top, 0))
    if (sparse := ev.sparse) is not None:
        top = sparse.log_weights.double().amax(-1)
        tail = None if sparse.log_tail is None else sparse.log_tail.double() - top
        changes["sparse"] = replace(sparse, log_weights=sparse.log_weights.double() - top[..., None], log_tail=tail)
        taken = taken + torch.where(soft, top, 0)
    return replace(ev, **changes), taken.sum(-1)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(["dense", "low_rank", "per_position"]),
    st.lists(st.sampled_from(OFFSETS), min_size=L, max_size=L),
    st.integers(0, 2**20),
)
@settings(max_examples=int(os.environ.get("CODD_FUZZ", 20)))
def test_constants_change_log_z_alone(kind, layout, offsets, seed):
    with shape_checks(False):
        hmm = make_hmm(layout, N, V, L, seed, torch.float32)
        ev = shifted(make_evidence(kind, (2, L), N, V, seed, torch.float32), torch.tensor(offsets))
        plain, taken = without_constants(ev)
        exact = hmm.to(dtype=torch.float64)
        truth = Truth(exact, plain)
        log_z = truth.log_partition + taken

        def agree(found: Tensor, wanted: Tensor) -> None:
            torch.testing.assert_close(found.double(), wanted.double(), atol=5e-6, rtol=0)

        many = ev.select(torch.zeros(len(truth.strings), dtype=torch.int64))
        p = hmm.conditional_log_prob(truth.strings, many).double().exp()
        strings = truth.probability[0].logsumexp(-1).exp()
        known = ev.rows(0)[0]  # what a string says of observed positions is ignored
        fits = torch.ones(len(p), dtype=torch.bool)
        if ev.tokens is not None:
            fits = ((truth.strings == ev.tokens[0]) | ~known).all(-1)
        agree(p[fits], strings[fits])
        assert float(p[fits].sum()) == pytest.approx(1, abs=1e-5)
        agree(hmm.marginals(ev).exp(), truth.marginals.exp())
        agree(hmm.posterior(ev).exp(), truth.posterior.exp())
        candidates = torch.arange(2).expand(2, L, 2)
        agree(hmm.pairwise(ev, candidates), exact.pairwise(plain, candidates))
        flows, wanted = hmm.flows(ev), exact.flows(plain)
        agree(flows.emission, wanted.emission)
        step = hmm.joint_step(ev, uniforms=torch.full((2, L), 0.5))
        for found in (flows.log_partition, step.log_partition):
            torch.testing.assert_close(found.double(), log_z, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(hmm.log_partition(ev).double(), log_z, rtol=1e-6, atol=1e-5)
        commit_one_by_one(hmm, exact, ev, plain)


def commit_one_by_one(hmm: HMM, exact: HMM, ev: Evidence, plain: Evidence) -> None:
    """Marginals after every token, and log Z of what is left: a token that is known takes its row's constant along."""
    fast, slow = hmm.incremental(ev), exact.incremental(plain)
    for t in range(L):
        torch.testing.assert_close(fast.log_marginals().exp().double(), slow.log_marginals().exp(), atol=5e-6, rtol=0)
        token = slow.log_marginals()[:, t].argmax(-1)
        for conditioner in (fast, slow):
            conditioner.commit(torch.full((2,), t), token)
        _, taken = without_constants(fast.evidence)
        wanted = slow.log_partition + taken
        torch.testing.assert_close(fast.log_partition.double(), wanted, rtol=1e-6, atol=1e-5)


def test_gradients_keep_their_digits():
    hmm, random = HMM.random(N, V, seed=1, rank=2), torch.Generator().manual_seed(0)
    constants = torch.tensor([1e8, -1e6, 1e4])[:, None]
    given = [torch.randn(2, L, size, generator=random) * 8 + constants for size in (V, N)]
    given.append(torch.randn(2, L - 1, 2, generator=random) * 8 + constants[:-1])

    def gradients(circuit: HMM, weights: list[Tensor]) -> tuple[Tensor, ...]:
        weights = [x.clone().requires_grad_() for x in weights]
        names = ("log_potentials", "latent_log_potentials", "step_log_gates")
        log_z = circuit.log_partition(Evidence(**dict(zip(names, weights, strict=True))))
        return torch.autograd.grad(log_z.sum(), weights)

    exact = gradients(hmm.to(dtype=torch.float64), [x.double() - x.double().amax(-1, keepdim=True) for x in given])
    for found, wanted in zip(gradients(hmm, given), exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=5e-6, rtol=0)
        assert bool(found.isfinite().all())
