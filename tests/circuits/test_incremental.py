"""Tokens that become known one by one, against the marginals of evidence that has them observed from the start."""

import math
import warnings

import pytest
import torch
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, ops
from tests.support.strategies import generator, make_evidence, observing, shape_checks

INF = math.inf
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ONE = torch.tensor([1])


def needs_interpreter() -> None:
    """The tensors of these tests are on the CPU, where kernels run in Triton's interpreter only."""
    pytest.importorskip("triton")
    if CUDA:
        pytest.skip("kernels run on the GPU here")


def follow(
    hmm: HMM, ev: Evidence, candidates: int | None, atol: float, backend: str = "eager", queries: int = 1
) -> None:
    """Commit random tokens in random orders until nothing is masked; ask after every ``queries`` of them."""
    g = generator(3)
    exact = hmm.to(dtype=torch.float64)
    batch, length = ev.shape
    each = torch.arange(batch)
    with ops.use(backend):
        found = hmm.incremental(ev, candidates)
    tokens = torch.randint(hmm.vocab_size, ev.shape, generator=g)
    order = torch.stack([torch.randperm(length, generator=g) for _ in range(batch)])
    known = torch.zeros(ev.shape, dtype=torch.bool)
    for k in range(length + 1):
        if k % queries == 0 or k == length:
            now, at = observing(ev, tokens, known), order[:, k - 1]
            want = exact.marginals(now)
            listed = want if found.candidates is None else want.gather(-1, found.candidates)
            assert_close(found.log_partition.double(), exact.log_partition(now), rtol=atol, atol=10 * atol)
            assert_close(found.log_marginals().double().exp(), listed.exp(), rtol=0, atol=atol)
            assert_close(found.dense_log_marginals(at).double().exp(), want[each, at].exp(), rtol=0, atol=atol)
            assert_close(found.dense_log_marginals().double().exp(), want.exp(), rtol=0, atol=atol)
        if k < length:
            found.commit(order[:, k], tokens[each, order[:, k]])
            known[each, order[:, k]] = True


def far_apart() -> Evidence:
    """Logits that exclude tokens, one of them by ten thousand."""
    g = generator(4)
    logits = 3 * torch.randn(2, 6, 12, generator=g)
    logits[:, 1, 4] = 1e4
    logits[:, 3] = torch.where(torch.rand(2, 12, generator=g) < 0.7, -INF, logits[:, 3])
    logits[:, 3, 5] = 0.0
    logits[:, 4] *= 1e4
    return Evidence(logits=logits)


def sticky() -> HMM:
    """State i all but always emits token i, and states all but never change: tokens that do are lost in float32."""
    table = torch.full((4, 4), -60.0).fill_diagonal_(0.0).log_softmax(-1)
    return HMM(torch.zeros(4).log_softmax(-1), table, table)


def of_many_tokens(batch: int, dtype: torch.dtype) -> tuple[HMM, Evidence]:
    ev = make_evidence("mixed_dense", (batch, 17), 20, 50, seed=2, dtype=dtype)
    return HMM.random(20, 50, seed=1, dtype=dtype), ev


FOLLOWED = {
    "float64": (*of_many_tokens(3, torch.float64), None, 1e-9),
    "float64, candidates, few questions": (*of_many_tokens(1, torch.float64), 7, 1e-9, "eager", 3),
    "float32, candidates": (*of_many_tokens(1, torch.float32), 7, 2e-5),
    "float32, few questions": (*of_many_tokens(3, torch.float32), None, 2e-5, "eager", 3),
    "logits far apart": (HMM.random(6, 12, seed=2), far_apart(), 3, 1e-5),
    "logits far apart, reference": (HMM.random(6, 12, seed=2), far_apart(), 3, 1e-5, "reference"),
    "lost in float32, candidates": (sticky(), Evidence(logits=torch.randn(2, 8, 4, generator=generator(0))), 2, 1e-5),
    "lost in float32": (sticky(), Evidence(logits=torch.randn(2, 8, 4, generator=generator(0))), None, 1e-5),
    "latents far apart": (
        HMM.random(5, 7, seed=1),
        Evidence(
            logits=torch.randn(2, 6, 7, generator=generator(1)),
            latent_log_potentials=40 * torch.randn(2, 6, 5, generator=generator(0)),
        ),
        3,
        1e-4,
    ),
}


@pytest.mark.numerics
@pytest.mark.parametrize("given", FOLLOWED.values(), ids=FOLLOWED)
def test_tokens_that_become_known_are_evidence(given):
    with shape_checks(False):
        follow(*given)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("length", [None, 4])
def test_compact_emission(backend, length):
    if backend == "triton":
        needs_interpreter()
    hmm = HMM.random(9, 30, seed=1, length=length).to(emission=torch.bfloat16)
    assert hmm.emission.compact
    ev = make_evidence("logits_temperature", (2, 4), 9, 30, seed=2, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        follow(hmm, ev, 5, 1e-5 if backend == "eager" else 3e-3, backend, queries=4)


@pytest.mark.numerics
def test_a_committed_token_is_certain_and_a_known_position_stays():
    hmm = HMM.random(5, 9, seed=1)
    logits = torch.randn(1, 4, 9, generator=generator(0))
    found = hmm.incremental(Evidence(logits=logits), 3)
    lightest = int(logits[0, 1].argmin())
    found.commit(ONE, torch.tensor([lightest]))
    assert lightest not in found.candidates[0, 1].tolist()
    assert torch.isneginf(found.log_marginals()[0, 1]).all()
    before = found.log_marginals()
    found.commit(ONE, torch.tensor([(lightest + 1) % 9]))
    assert found.evidence.tokens[0, 1] == lightest
    assert_close(found.log_marginals(), before, rtol=0, atol=1e-6)  # messages that start at 1 now are scaled anew
    want = torch.full((9,), -INF).index_fill(0, torch.tensor(lightest), 0)
    assert torch.equal(found.dense_log_marginals(ONE)[0], want)


def test_the_given_evidence_is_left_alone():
    ev = make_evidence("mixed_dense", (2, 4), 3, 5, seed=1, dtype=torch.float32)
    tokens, observed = ev.tokens.clone(), ev.observed.clone()
    found = HMM.random(3, 5).incremental(ev, 2)
    held = found.evidence
    found.commit(torch.tensor([0, 1]), torch.tensor([2, 3]))
    assert torch.equal(ev.tokens, tokens)
    assert torch.equal(ev.observed, observed)
    assert torch.equal(held.observed, observed)


# Extremes.


@pytest.mark.parametrize("backend", ["eager", "reference", "triton"])
@pytest.mark.parametrize("candidates", [None, 2])
def test_an_impossible_token(backend, candidates):
    """Only the sequence that it was committed in becomes impossible, and nothing is NaN."""
    if backend == "triton":
        needs_interpreter()
    emission = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]).log()
    hmm = HMM(torch.tensor([0.5, 0.5]).log(), HMM.random(2, 2).log_transition, emission)
    ev = Evidence(logits=torch.randn(2, 4, 3, generator=generator(0)))
    with warnings.catch_warnings(), ops.use(backend):
        warnings.simplefilter("ignore", RuntimeWarning)
        found = hmm.incremental(ev, candidates)
        found.commit(torch.tensor([2, 2]), torch.tensor([2, 1]))
        for _ in range(2):
            assert torch.isneginf(found.log_partition).tolist() == [True, False]
            for out in (found.log_marginals(), found.dense_log_marginals(), found.dense_log_marginals(ONE.expand(2))):
                assert torch.isneginf(out[0]).all()
                assert not out.isnan().any()
                assert bool((out[1] > -INF).any())
            found.commit(torch.tensor([0, 0]), torch.tensor([1, 1]))


@pytest.mark.parametrize(
    ("emission", "commits"),
    [
        # A committed token that the only possible state emits with less than the smallest number of float32.
        ([[0.0, -INF, -INF], [-120.0, 0.0, -INF]], [(0, 0), (2, 1)]),
        # Messages from both sides that are small where the other is large: both are numbers, their product is none.
        ([[-1.0, -INF, -1.0], [-78.0, -78.0, 0.0], [-INF, -1.0, -1.0]], [(0, 0), (2, 1)]),
    ],
)
def test_each_way_of_losing_something(emission, commits):
    table = torch.tensor(emission, dtype=torch.float64).log_softmax(-1).float()
    states = len(table)
    hmm = HMM(torch.zeros(states).log_softmax(-1), torch.eye(states).log(), table)
    logits = torch.randn(1, 3, 3, generator=generator(0))
    found, now = hmm.incremental(Evidence(logits=logits), 3), Evidence(logits=logits)
    for t, v in commits:
        at, token = torch.tensor([t]), torch.tensor([v])
        found.commit(at, token)
        now = observing(now, token.expand(1, 3), torch.arange(3)[None] == t)
        exact = hmm.to(dtype=torch.float64)
        with ops.use("reference"):
            want, value = exact.marginals(now).exp(), exact.log_partition(now)
        assert_close(found.log_marginals().double().exp(), want.gather(-1, found.candidates), rtol=0, atol=1e-5)
        assert_close(found.log_partition.double(), value, rtol=1e-5, atol=1e-5)
    assert float(value) < -100


@pytest.mark.numerics
def test_a_long_window_from_left_to_right_keeps_its_scale():
    """Each chain starts where the last one did plus one: what is taken out of a message must not be forgotten."""
    hmm = HMM.random(4, 5, seed=1, scale=3.0)
    ev = Evidence(missing=torch.ones(1, 100, dtype=torch.bool))
    tokens = hmm.sample(ev, generator=generator(0)).tokens
    found = hmm.incremental(ev)
    total = 0.0
    for t in range(100):
        total += float(found.dense_log_marginals(torch.tensor([t]))[0, tokens[0, t]])
        found.commit(torch.tensor([t]), tokens[:, t])
    assert total == pytest.approx(float(hmm.log_prob(tokens)), rel=1e-5)
    assert float(found.log_partition) == pytest.approx(float(hmm.log_prob(tokens)), rel=1e-5)


@pytest.mark.skipif(not CUDA, reason="there is no device to wait for")
def test_nothing_waits_for_the_device():
    hmm = HMM.random(256, 5000, seed=3).to(DEVICE, emission=torch.bfloat16)
    logits = torch.randn(2, 32, 5000, generator=generator(0)).bfloat16().to(DEVICE)
    observed = (torch.rand(2, 32, generator=generator(1)) < 0.5).to(DEVICE)
    ev = Evidence(tokens=torch.zeros_like(observed, dtype=torch.int64), observed=observed, logits=logits)
    at, token = torch.tensor([3, 4], device=DEVICE), torch.tensor([1, 2], device=DEVICE)

    def use():
        found = hmm.incremental(ev, 64)
        found.commit(at, token)
        return found.log_marginals(), found.dense_log_marginals(at), found.log_partition

    want = use()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = use()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
