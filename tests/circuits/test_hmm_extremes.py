import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, SparsePotentials, ops
from codd.errors import ImpossibleEvidence, InvalidEvidence
from tests.support.contract import assert_agrees, check_hmm, flat
from tests.support.strategies import (
    BACKENDS,
    LAYOUTS,
    Truth,
    generator,
    make_evidence,
    make_hmm,
    shape_checks,
    with_gates,
)

INF = math.inf
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    with shape_checks(False):
        yield


@pytest.fixture(params=BACKENDS)
def backend(request):
    with ops.use(request.param):
        yield request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def log(*rows: list[float]) -> Tensor:
    return torch.tensor(rows[0] if len(rows) == 1 else list(rows)).log()


def left_to_right(states: int, vocab: int = 4, seed: int = 0) -> HMM:
    """Starts in the first state, stays or moves on, and never comes back."""
    ahead = torch.eye(states) * 0.5 + torch.eye(states).roll(1, 1) * 0.5
    ahead[-1] = torch.eye(states)[-1]
    return HMM(torch.eye(states)[0].log(), ahead.log(), HMM.random(states, vocab, seed).log_emission)


def permutation(states: int, vocab: int = 4, seed: int = 0) -> HMM:
    """Each state has one successor."""
    order = torch.randperm(states, generator=generator(seed))
    return HMM(
        HMM.random(states, vocab).log_initial, torch.eye(states)[order].log(), HMM.random(states, vocab).log_emission
    )


def deterministic(states: int) -> HMM:
    """State i always emits token i; any state may follow any other."""
    return HMM(
        *(HMM.neutral(states, states).log_initial, HMM.random(states, states).log_transition), torch.eye(states).log()
    )


def exactly_normalised(hmm: HMM) -> HMM:
    """In float64, with rows that sum to one in float64 too."""
    tables = (hmm.log_initial, hmm.log_transition, hmm.log_emission)
    return HMM(*(x.double().log_softmax(-1) for x in tables))


# Extreme potentials.


@pytest.mark.usefixtures("backend")
def test_one_hot_potentials_are_observations(dtype):
    hmm = HMM.random(3, 4, dtype=dtype)
    ids = torch.randint(4, (2, 5), generator=generator(0))
    hard = Evidence(tokens=ids)
    one_hot = torch.full((2, 5, 4), -INF, dtype=dtype).scatter(-1, ids[..., None], 0.0)
    listed = SparsePotentials(ids[..., None], torch.zeros(2, 5, 1, dtype=dtype))
    for soft in (Evidence(log_potentials=one_hot), Evidence(logits=one_hot), Evidence(sparse=listed)):
        assert_close(hmm.log_partition(soft), hmm.log_prob(ids), rtol=1e-5, atol=1e-5)
        assert_close(hmm.marginals(soft), hmm.marginals(hard), rtol=1e-5, atol=1e-5)
        assert_close(hmm.flows(soft).emission, hmm.flows(hard).emission, rtol=1e-5, atol=1e-5)
        assert torch.equal(hmm.sample(soft, generator=generator(1)).tokens, ids)


# Impossible evidence.


def impossible(kind: str, dtype: torch.dtype) -> tuple[HMM, Evidence]:
    """Sequence 0 is possible, sequence 1 is not."""
    hmm, zero = HMM.random(3, 4, dtype=dtype), torch.zeros(2, 5, 4, dtype=dtype)
    empty = zero.clone()
    empty[1, 3] = -INF
    match kind:
        case "potentials":
            return hmm, Evidence(log_potentials=empty)
        case "logits":
            return hmm, Evidence(logits=empty)
        case "sparse":
            ids = torch.arange(4).expand(2, 5, 4).contiguous()
            return hmm, Evidence(sparse=SparsePotentials(ids, empty))
        case "sparse_tail":
            ids = torch.tensor([1]).expand(2, 5, 1).contiguous()
            return hmm, Evidence(sparse=SparsePotentials(ids, empty[..., :1], empty[..., 0]))
        case "latent":
            return hmm, Evidence(latent_log_potentials=empty[..., :3])
        case "tokens":
            hmm = deterministic(4).to(dtype=dtype)
            latent = torch.full((2, 5, 4), -INF, dtype=dtype)
            latent[..., 1] = 0.0
            ids = torch.ones(2, 5, dtype=torch.int64)
            ids[1, 2] = 0
            return hmm, Evidence(tokens=ids, latent_log_potentials=latent)
        case "chain":
            ids = torch.zeros(2, 5, dtype=torch.int64)
            hmm = HMM(torch.tensor([1.0, 0.0]).log(), torch.eye(2).log(), torch.eye(2).log()).to(dtype=dtype)
            ids[1, 4] = 1
            return hmm, Evidence(tokens=ids)
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["potentials", "logits", "sparse", "sparse_tail", "latent", "tokens", "chain"])
def test_impossible_evidence_is_minus_infinity_and_never_nan(kind, backend, dtype):
    hmm, ev = impossible(kind, dtype)
    value = hmm.log_partition(ev)
    assert value[1] == -INF
    assert math.isfinite(value[0])
    for rows in (hmm.posterior(ev), hmm.marginals(ev)):
        assert bool((rows[1] == -INF).all())
        assert_close(rows[0].exp().sum(-1), torch.ones(5, dtype=dtype), rtol=0, atol=1e-5)
    assert hmm.conditional_log_prob(torch.ones(2, 5, dtype=torch.int64), ev)[1] == -INF
    alone = flat(hmm.flows(ev.select(torch.tensor([0]))))
    for found, wanted in zip(flat(hmm.flows(ev)), alone, strict=True):
        assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ImpossibleEvidence) as error:
        hmm.sample(ev)
    assert error.value.sequences == (1,)


@pytest.mark.parametrize("kind", ["potentials", "logits", "sparse", "latent"])
def test_gradients_of_impossible_evidence_are_not_nan(kind, dtype):
    hmm, ev = impossible(kind, dtype)
    inputs = [
        x for x in (ev.potentials, ev.latent_log_potentials, ev.sparse and ev.sparse.log_weights) if x is not None
    ]
    tables = [hmm.log_initial, hmm.log_transition, hmm.log_emission]
    for x in (*inputs, *tables):
        x.requires_grad_()
    ids = torch.ones(2, 5, dtype=torch.int64)
    for value in (hmm.log_partition(ev), hmm.conditional_log_prob(ids, ev)):
        for gradient in torch.autograd.grad(value[0], (*inputs, *tables), retain_graph=True):
            assert not gradient.isnan().any()
        for gradient in torch.autograd.grad(value.nan_to_num(neginf=0.0).sum(), (*inputs, *tables)):
            assert not gradient.isnan().any()


# Zeros in the parameters, and what float32 would lose.


@pytest.mark.parametrize("make", [left_to_right, permutation, deterministic], ids=lambda f: f.__name__)
def test_zeros_by_enumeration(make, backend):
    hmm = exactly_normalised(make(3))
    ev = make_evidence("mixed_all", (4, 4), 3, hmm.vocab_size, seed=2)
    check_hmm(hmm, Truth(hmm, ev))


Case = tuple[HMM, Evidence]


def potentials_of_ten_thousand() -> Iterator[Case]:
    signs = torch.randint(2, (4, 6, 3), generator=generator(1)) * 2.0 - 1.0
    noise = torch.randn(4, 6, 3, generator=generator(2))
    for layout, dtype in itertools.product(LAYOUTS, DTYPES):
        for name in ("logits", "log_potentials", "latent_log_potentials"):
            yield make_hmm(layout, 3, 3, 6, dtype=dtype), Evidence(**{name: signs * 1e4 + noise})


def zero_transitions() -> Iterator[Case]:
    for kind in ("observed", "logits", "latent", "mixed_dense", "mixed_sparse", "mixed_all"):
        for make in (left_to_right, permutation):
            yield make(4, 5), make_evidence(kind, (3, 7), 4, 5, dtype=torch.float32, scale=3.0)


def zero_emissions() -> Iterator[Case]:
    g = generator(3)
    table = torch.rand(4, 6, generator=g) * (torch.rand(4, 6, generator=g) < 0.4)
    table[:, 0] += 0.01
    base = HMM.random(4, 6)
    hmm = HMM(base.log_initial, base.log_transition, (table / table.sum(-1, keepdim=True)).log())
    for kind in ("log_potentials", "logits", "sparse", "sparse_tail", "mixed_all"):
        yield hmm, make_evidence(kind, (4, 6), 4, 6, dtype=torch.float32, scale=20.0)


def two_absorbing_halves() -> Iterator[Case]:
    """The one that every position favours is killed by the very last: the other lies five thousand nats below."""
    latent = torch.zeros(2, 500, 2)
    latent[:, :, 1] = -10.0
    latent[0, -1] = torch.tensor([-INF, 0.0])
    hmm = HMM(log([0.5, 0.5]), torch.eye(2).log(), log([0.9, 0.1], [0.1, 0.9]))
    yield hmm, Evidence(latent_log_potentials=latent)


def a_survivor_far_below() -> Iterator[Case]:
    """Latents favour state 0 by the gap at two positions; a third one leaves only state 1."""
    hmm = HMM(log([0.5, 0.5]), torch.eye(2).log(), log([0.7, 0.3], [0.2, 0.8]))
    for gap, where in itertools.product((20.0, 60.0, 80.0, 90.0, 100.0, 1000.0), (0, 4, 8, -1)):
        latent = torch.zeros(2, 10, 2)
        latent[:, (where + 1) % 10, 1] = latent[:, (where + 3) % 10, 1] = -gap
        latent[0, where, 0] = -INF
        yield hmm, Evidence(latent_log_potentials=latent)


def a_survivor_between_two_dead_ends() -> Iterator[Case]:
    """Of three states one dies at the start and one at the end; the third is faint from both sides."""
    transition = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).log()
    hmm = HMM(torch.tensor([0.5, 0.5, 0.0]).log(), transition, HMM.random(3, 4).log_emission)
    for gap in (20.0, 40.0, 60.0, 80.0, 87.0, 95.0, 103.0, 120.0):
        latent = torch.zeros(1, 6, 3)
        latent[0, 1, 1] = latent[0, 4, 1] = -gap
        latent[0, 2, 2] = latent[0, 5, 0] = latent[0, 3, 2] = -INF
        yield hmm, Evidence(latent_log_potentials=latent)


def an_improbable_start_times_an_improbable_leaf() -> Iterator[Case]:
    for gap in (30.0, 60.0, 70.0, 80.0):
        rare = math.exp(-gap)
        hmm = HMM(log([1.0, rare]), torch.eye(2).log(), log([0.5, 0.5, 0.0], [rare, 0.5, 0.5]))
        yield hmm, Evidence(tokens=torch.tensor([[0, 1, 2], [0, 1, 1]]))


def parameters_as_small_as_a_logarithm_can_say() -> Iterator[Case]:
    """The second token can be reached only through one faint entry."""
    gaps = (60.0, 90.0, 100.0, 200.0, 5000.0)
    for table, gap, dtype in itertools.product(("initial", "transition", "emission"), gaps, DTYPES):
        faint, stay = torch.tensor([0.0, -gap]), torch.eye(2).log()
        initial = faint if table == "initial" else torch.tensor([0.0, -INF])
        transition = torch.stack([faint, stay[1]]) if table == "transition" else stay
        emission = torch.stack([faint, faint]) if table == "emission" else stay
        ids = torch.tensor([[1, 1]]) if table != "transition" else torch.tensor([[0, 1]])
        yield HMM(initial, transition, emission).to(dtype=dtype), Evidence(tokens=ids)


def tokens_that_are_nearly_excluded() -> Iterator[Case]:
    """The favourite token of the potentials has no emission: what is left is at the edge of float32's range."""
    base = HMM.random(2, 4)
    hmm = HMM(base.log_initial, base.log_transition, log([0.0, 0.3, 0.2, 0.5], [0.0, 0.1, 0.6, 0.3]))
    for name, gap in itertools.product(("logits", "log_potentials"), (60.0, 80.0, 88.0, 95.0, 100.0, 110.0, 1e4)):
        potentials = torch.randn(3, 4, 4, generator=generator(0))
        potentials[..., 0] += gap
        yield hmm, Evidence(**{name: potentials})


def listed_tokens_that_are_nearly_excluded() -> Iterator[Case]:
    """Of the listed tokens the circuit allows only the lightest."""
    hmm = HMM(log([0.5, 0.5]), HMM.random(2, 4).log_transition, log([0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]))
    ids = torch.tensor([[[0, 1]]]).expand(2, 3, 2).contiguous()
    for gap in (20.0, 80.0, 100.0, 200.0, 1e4):
        yield hmm, Evidence(sparse=SparsePotentials(ids, torch.tensor([0.0, -gap]).expand(2, 3, 2)))


def listed_tokens_that_are_lighter_than_the_tail() -> Iterator[Case]:
    """One state emits only listed tokens, which the evidence all but excludes in favour of the others."""
    rows = torch.tensor([[0.3, 0.3, 0.4, 0.0, 0.0], [0.1, 0.1, 0.1, 0.3, 0.4]])
    hmm, ids = HMM(log([0.5, 0.5]), torch.eye(2).log(), rows.log()), torch.arange(3).expand(3, 4, 3).contiguous()
    for gap in (1.0, 10.0, 20.0, 80.0, 200.0):
        latent = torch.zeros(3, 4, 2)
        latent[0, -1, 1], latent[1, -1, 1] = -INF, -2 * gap
        weights = torch.tensor([0.0, -0.5, -1.0]).expand(3, 4, 3) - gap
        yield hmm, Evidence(sparse=SparsePotentials(ids, weights, torch.zeros(3, 4)), latent_log_potentials=latent)


def gates_of_any_size() -> Iterator[Case]:
    for layout, size in itertools.product(("low_rank", "low_rank_per_position"), (1.0, 5.0, 30.0, 60.0, 200.0, 1000.0)):
        for kind in ("logits_temperatures", "mixed_all"):
            ev = make_evidence(kind, (4, 9), 9, 12, seed=3, dtype=torch.float32)
            yield make_hmm(layout, 9, 12, 9, seed=1, dtype=torch.float32), with_gates(ev, 2, 5, size)


def the_widest_gate_leads_from_nowhere() -> Iterator[Case]:
    """States have an inner state of their own; the widest gate is that of a third one, which none of them takes."""
    left, right = torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    initial, emission = torch.tensor([0.5, 0.5, 0.0]), HMM.random(3, 4, seed=2).log_emission
    for size, dtype in itertools.product((60.0, 90.0, 800.0), DTYPES):
        hmm = HMM(initial.log(), (left.log(), right.log()), emission).to(dtype=dtype)
        gates = torch.zeros(2, 6, 3)
        gates[..., 2] = size
        yield hmm, replace(make_evidence("logits", (2, 7), 3, 4, dtype=dtype), step_log_gates=gates)


def a_narrow_gate_meets_an_improbable_future() -> Iterator[Case]:
    """Each is a number of float32, their product need not be: state 1 is nearly shut off, and then the only one."""
    ways = torch.eye(2).log(), torch.eye(2).log()
    hmm = HMM(log([0.5, 0.5]), ways, log([0.5, 0.5, 0.0], [0.5, 0.2, 0.3]))
    ids = torch.tensor([[0, 1, 0, 0, 2], [0, 0, 0, 1, 2]])
    for gap in (20.0, 60.0, 75.0, 85.0, 100.0, 1000.0):
        gates, latent = torch.zeros(2, 4, 2), torch.zeros(2, 5, 2)
        gates[:, 1, 1] = gates[1, 2, 1] = latent[:, 2, 1] = -gap
        for more in ({"tokens": ids}, {"logits": torch.zeros(2, 5, 3)}):
            yield hmm, Evidence(**more, latent_log_potentials=latent, step_log_gates=gates)


def an_improbable_start_times_an_improbable_future() -> Iterator[Case]:
    """Only state 1 can start and emit the tokens, both barely; a path that is lost must not end in the last state."""
    for gap in (30.0, 60.0, 80.0, 200.0):
        rare = torch.tensor([[0.0, -INF, -INF], [-gap, -gap, 0.0], [0.0, 0.0, 0.0]]).log_softmax(-1)
        hmm = HMM(torch.tensor([0.0, -gap, -INF]), (torch.eye(3).log(), torch.eye(3).log()), rare)
        yield hmm, with_gates(Evidence(tokens=torch.tensor([[0, 2, 2], [0, 1, 2]])), 3)


SURVIVORS = {
    two_absorbing_halves: (0, slice(None), "latents", 1),
    an_improbable_start_times_an_improbable_future: (slice(None), slice(None), "latents", 1),
    listed_tokens_that_are_nearly_excluded: (slice(None), slice(None), "tokens", 1),
}
"""Sequences and positions of which samples can be one thing only."""
CASES = (
    *(potentials_of_ten_thousand, zero_transitions, zero_emissions, a_survivor_far_below, gates_of_any_size),
    *(a_survivor_between_two_dead_ends, an_improbable_start_times_an_improbable_leaf, tokens_that_are_nearly_excluded),
    *(parameters_as_small_as_a_logarithm_can_say, listed_tokens_that_are_lighter_than_the_tail),
    *(the_widest_gate_leads_from_nowhere, a_narrow_gate_meets_an_improbable_future, *SURVIVORS),
)


@pytest.mark.parametrize("cases", CASES, ids=lambda f: f.__name__)
def test_what_float32_would_lose_is_as_in_float64(cases):
    for hmm, ev in cases():
        assert_agrees(hmm, ev, rtol=1e-6 if cases is tokens_that_are_nearly_excluded else 1e-4)
        if cases in SURVIVORS:
            sequences, positions, name, wanted = SURVIVORS[cases]
            found = getattr(hmm.sample(ev, generator=generator(0)), name)[sequences, positions]
            assert bool((found == wanted).all())


@given(
    st.integers(0, 100_000),
    st.sampled_from(DTYPES),
    st.sampled_from([1.0, 5.0, 30.0, 100.0, 1000.0]),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 0.7]),
)
@settings(max_examples=60, deadline=None)
def test_forbidden_tokens_states_and_steps_anywhere(seed, dtype, scale, zeros, share):
    g = generator(seed)
    states, length = 4, 9
    table = torch.rand(states, states, generator=g)
    if zeros:
        table = table * (torch.rand(states, states, generator=g) < 0.5)
    table = table + torch.eye(states) * 0.1
    base = HMM.random(states, 5, seed)
    hmm = HMM(base.log_initial, (table / table.sum(-1, keepdim=True)).log(), base.log_emission).to(dtype=dtype)
    latent = torch.randn(3, length, states, generator=g) * scale
    latent[torch.rand(3, length, states, generator=g) < 0.2] = -INF
    potentials = torch.randn(3, length, 5, generator=g) * scale
    potentials[torch.rand(3, length, 5, generator=g) < share] = -INF
    for name in ("logits", "log_potentials"):
        assert_agrees(hmm, Evidence(**{name: potentials}, latent_log_potentials=latent))


# Sizes.


@pytest.mark.parametrize("length", [1, 2, 500, 4096])
@pytest.mark.parametrize("kind", ["observed", "logits", "mixed_all"])
def test_windows_of_any_length(length, kind):
    exact = HMM.random(3, 5, seed=1, dtype=torch.float64)
    hmm, ev = exact.to(dtype=torch.float32), make_evidence(kind, (2, length), 3, 5, dtype=torch.float32)
    value = exact.log_partition(ev)
    assert_close(hmm.log_partition(ev).double(), value, rtol=2e-6, atol=1e-5)
    with ops.use("reference"):
        assert_close(exact.log_partition(ev), value, rtol=1e-10, atol=1e-9)
    for found, wanted in ((hmm.posterior(ev), exact.posterior(ev)), (hmm.marginals(ev), exact.marginals(ev))):
        assert_close(found.double().exp(), wanted.exp(), rtol=0, atol=1e-5)
    for found, wanted in zip(flat(hmm.flows(ev)), flat(exact.flows(ev)), strict=True):
        assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert hmm.sample(ev, generator=generator(0)).tokens.shape == (2, length)


@pytest.mark.parametrize("states", [1, 2, 257, 1024])
def test_many_states(states):
    hmm = HMM.random(states, 7, seed=2)
    ev = make_evidence("mixed_all", (2, 3), states, 7, dtype=torch.float32)
    with ops.use("reference"):
        value, posterior, marginals = hmm.log_partition(ev), hmm.posterior(ev), hmm.marginals(ev)
    assert_close(hmm.log_partition(ev), value, rtol=1e-5, atol=1e-5)
    assert_close(hmm.posterior(ev).exp(), posterior.exp(), rtol=1e-3, atol=1e-7)
    assert_close(hmm.marginals(ev).exp(), marginals.exp(), rtol=1e-4, atol=1e-6)


# Potentials that mean nothing.


@pytest.mark.parametrize("value", [INF, math.nan])
def test_infinite_and_nan_potentials_name_their_position(value, backend, dtype):
    hmm, wrong = HMM.random(3, 3, dtype=dtype), torch.zeros(4, 5, 3, dtype=dtype)
    wrong[2, 3, 1] = value
    ids = torch.tensor([0, 1]).expand(4, 5, 2).contiguous()
    tail = SparsePotentials(ids, torch.zeros(4, 5, 2, dtype=dtype), wrong[..., 1])
    for ev in (
        Evidence(log_potentials=wrong),
        Evidence(logits=wrong),
        Evidence(latent_log_potentials=wrong),
        Evidence(sparse=SparsePotentials(ids, wrong[..., :2])),
        Evidence(sparse=tail),
    ):
        for query in (hmm.log_partition, hmm.posterior, hmm.marginals, hmm.flows, hmm.sample):
            with pytest.raises(InvalidEvidence, match="sequence 2, position 3 hold NaN or"):
                query(ev)


def test_what_an_observed_or_missing_position_holds_does_not_matter(backend, dtype):
    hmm = HMM.random(3, 4, dtype=dtype)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    observed = torch.tensor([[True, False, False], [False, True, False]])
    potentials = torch.randn(2, 3, 4, generator=generator(0), dtype=dtype)
    spoiled = torch.where(observed[..., None], math.nan, potentials)
    spoiled[:, 2] = INF
    missing = torch.tensor([[False, False, True]] * 2)
    good, bad = (
        Evidence(tokens=tokens, observed=observed, missing=missing, log_potentials=p) for p in (potentials, spoiled)
    )
    for name in ("log_partition", "posterior", "marginals"):
        assert_close(getattr(hmm, name)(bad), getattr(hmm, name)(good), rtol=0, atol=0)
    assert_close(hmm.flows(bad).emission, hmm.flows(good).emission, rtol=0, atol=0)
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert_close(hmm.conditional_log_prob(ids, bad), hmm.conditional_log_prob(ids, good), rtol=0, atol=0)
