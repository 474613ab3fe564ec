"""Tables of two positions against all strings and paths, against conditioning, and at the ends of the range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, ops, pairwise
from codd.circuits.evidence import Kind
from codd.circuits.parameters import Transition
from tests.support.strategies import KINDS, LAYOUTS, Truth, generator, make_evidence, make_hmm, shape_checks, with_gates

N, V, L, B = 3, 4, 4, 3
EXACT = {"rtol": 0, "atol": 1e-9}
ROUNDED = {"rtol": 0, "atol": 2e-6}
DTYPES = {torch.float32: ROUNDED, torch.float64: EXACT}


def some_tokens(shape: tuple[int, int], vocab: int, count: int, seed: int = 0) -> Tensor:
    """Different ones at every position, in any order."""
    return torch.rand(*shape, vocab, generator=generator(seed)).argsort(-1)[..., :count]


def assert_sound(tables: Tensor, tolerance: float = 1e-5) -> Tensor:
    """Finite, probabilities, symmetric; gives their mutual information, of which the same is true."""
    assert bool(tables.isfinite().all())
    assert float(tables.min()) >= 0
    totals = tables.sum((-1, -2))
    assert bool(((totals - 1).abs() < tolerance).logical_or(totals == 0).all())
    assert_close(tables, tables.transpose(1, 2).mT, rtol=0, atol=0)
    found = pairwise.mutual_information(tables)
    assert bool(found.isfinite().all())
    assert float(found.min()) >= 0
    assert torch.equal(found, found.mT)
    assert not bool(found.diagonal(dim1=1, dim2=2).any())
    assert float(found.max()) <= math.log(tables.shape[-1]) + tolerance
    return found


@pytest.fixture
def conditioned(monkeypatch) -> list[Tensor]:
    """The candidates that were asked for by conditioning, which answers where the fast way may have lost something."""
    asked, by_conditioning = [], pairwise.by_conditioning
    monkeypatch.setattr(pairwise, "by_conditioning", lambda *args: asked.append(args[2]) or by_conditioning(*args))
    return asked


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fast_way_answers_by_itself(layout, dtype, conditioned):
    """Wrong rows would not keep their sums, and conditioning would give the right answer late."""
    for kind in ("logits", "mixed_all"):
        hmm, ev = make_hmm(layout, 20, 30, 12, dtype=dtype), make_evidence(kind, (2, 12), 20, 30)
        ev = with_gates(ev, hmm.rank) if "low_rank" in layout else ev
        hmm.pairwise(ev, some_tokens((2, 12), 30, 5))
    assert not conditioned


def test_sequences_whose_rows_lose_something_are_answered_by_conditioning(conditioned, monkeypatch):
    hmm, ev = make_hmm("dense", dtype=torch.float32), make_evidence("logits", (B, L))
    candidates = some_tokens((B, L), V, 2)
    wanted, through = hmm.pairwise(ev, candidates), Transition.through

    def lossy(steps, rows, t):
        rows = through(steps, rows, t).clone()
        rows[:, 1, 0] = 0.0 if t == 1 else rows[:, 1, 0]
        return rows

    monkeypatch.setattr(Transition, "through", lossy)
    assert_close(hmm.pairwise(ev, candidates), wanted, **ROUNDED)
    assert torch.equal(*conditioned, candidates[1:2])


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    gated=st.booleans(),
    shape=st.tuples(st.integers(1, 2), st.integers(2, 6)),
    vocab=st.integers(2, 6),
    count=st.integers(1, 6),
    scale=st.sampled_from([0.1, 1.0, 4.0, 30.0]),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 99),
)
def test_propagating_is_conditioning(kind, layout, gated, shape, vocab, count, scale, dtype, seed):
    with shape_checks(False):
        hmm = make_hmm(layout, N, vocab, shape[1], seed=seed, dtype=dtype)
        ev = make_evidence(kind, shape, N, vocab, seed=seed, scale=scale)
        ev = with_gates(ev, hmm.rank, seed) if gated and "low_rank" in layout else ev
        candidates = some_tokens(shape, vocab, min(count, vocab), seed)
        found = hmm.pairwise(ev, candidates)
        assert found.dtype == dtype
        wanted = pairwise.by_conditioning(hmm.to(dtype=torch.float64), ev, candidates)
        assert_close(found.double(), wanted, rtol=0, atol=1e-8 if dtype == torch.float64 else 2e-5)
        information = assert_sound(found)
        known = ev.rows(Kind.OBSERVED)
        assert float((information * (known[:, :, None] | known[:, None])).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_neutral_circuit_couples_nothing(dtype):
    hmm = HMM.neutral(5, 40, dtype=dtype)
    ev = Evidence(logits=torch.randn(2, 8, 40, generator=generator(1)) * 4)
    candidates = ev.logits.topk(6, dim=-1).indices
    tables = hmm.pairwise(ev, candidates)
    assert float(assert_sound(tables).max()) < 1e-9
    alone = ev.logits.softmax(-1).gather(-1, candidates)
    assert_close(tables[:, 0, 1, :-1, :-1].double(), (alone[:, 0, :, None] * alone[:, 1, None]).double(), **ROUNDED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [40.0, 400.0])
def test_circuits_whose_numbers_are_far_apart(scale, dtype):
    """Steps and tokens of probability exp(-1000): the rows would vanish, were it not noticed."""
    hmm = HMM.random(5, 9, seed=4, scale=scale, dtype=dtype)
    ev = Evidence(
        logits=torch.randn(3, 6, 9, generator=generator(5)) * 5,
        latent_log_potentials=torch.randn(3, 6, 5, generator=generator(6)) * scale,
    )
    candidates = some_tokens((3, 6), 9, 3)
    found = hmm.pairwise(ev, candidates)
    assert_sound(found)
    with ops.use("reference"):
        wanted = hmm.to(dtype=torch.float64).pairwise(ev, candidates)
    assert_close(found.double(), wanted, rtol=0, atol=1e-4)


def test_what_is_lost_on_the_way_is_noticed():
    """A state that the past all but excludes and the future asks for: float32 cannot hold the way there."""
    rare = -200.0
    hmm = HMM(
        torch.tensor([0.0, rare]),
        torch.tensor([[0.0, rare], [rare, 0.0]]),
        torch.tensor([[math.log(0.5), math.log(0.5), -math.inf], [math.log(0.9), math.log(0.1), rare]]),
    )
    only = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, -math.inf], [-math.inf, -math.inf, 0.0]]])
    ev, candidates = Evidence(log_potentials=only), torch.tensor([[[0], [0], [2]]])
    truth = Truth(hmm.to(dtype=torch.float64), ev).pairwise(candidates)
    assert_close(hmm.pairwise(ev, candidates).double(), truth, rtol=0, atol=1e-5)
    assert float(truth[0, 1, 1, 0, 0]) > 0.6  # the rare state is the one that counts


def test_impossible_evidence_has_empty_tables():
    hmm = HMM(torch.tensor([0.0]), torch.tensor([[0.0]]), torch.tensor([[math.log(0.5), math.log(0.5), -math.inf]]))
    logits = torch.zeros(2, 3, 3)
    logits[0, 1, :2] = -math.inf
    ev, candidates = Evidence(logits=logits), torch.arange(2).expand(2, 3, 2)
    for found in (hmm.pairwise(ev, candidates), pairwise.by_conditioning(hmm, ev, candidates)):
        assert not bool(found[0].any())
        assert float(found[1].sum()) == pytest.approx(9)
        assert not bool(assert_sound(found)[0].any())


def test_the_emission_may_be_kept_small():
    hmm = HMM.random(6, 10, seed=1).to(emission=torch.bfloat16)
    ev = Evidence(logits=torch.randn(2, 5, 10, generator=generator(2)))
    candidates = some_tokens((2, 5), 10, 4)
    widened = hmm.to(emission=torch.float32)
    assert_close(hmm.pairwise(ev, candidates), widened.pairwise(ev, candidates), **ROUNDED)


def test_gradients_are_not_kept():
    hmm = make_hmm("dense")
    ev = Evidence(logits=torch.zeros(1, L, V, requires_grad=True))
    assert not hmm.pairwise(ev, some_tokens((1, L), V, 2)).requires_grad
    assert not pairwise.by_conditioning(hmm, ev, some_tokens((1, L), V, 2)).requires_grad
