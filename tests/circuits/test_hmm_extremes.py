import math
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
from tests.support.enumeration import chi_square_p_value
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_potentials_of_ten_thousand(layout, dtype):
    hmm = make_hmm(layout, 3, 3, 6, dtype=dtype)
    signs = torch.randint(2, (4, 6, 3), generator=generator(1)) * 2.0 - 1.0
    noise = torch.randn(4, 6, 3, generator=generator(2))
    for name in ("logits", "log_potentials", "latent_log_potentials"):
        assert_agrees(hmm, Evidence(**{name: signs * 1e4 + noise}))


def test_logits_of_ten_thousand_by_hand(backend, dtype):
    hmm = HMM.random(3, 4, dtype=dtype)
    logits = torch.full((2, 5, 4), -1e4, dtype=dtype)
    ids = torch.randint(4, (2, 5), generator=generator(0))
    logits = logits.scatter(-1, ids[..., None], 1e4)
    assert_close(hmm.log_partition(Evidence(logits=logits)), hmm.log_prob(ids), rtol=1e-5, atol=1e-5)
    assert_close(hmm.posterior(Evidence(logits=logits)), hmm.posterior(Evidence(tokens=ids)), rtol=1e-5, atol=1e-5)


def test_one_hot_potentials_are_observations(backend, dtype):
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


def test_one_hot_latent_potentials_fix_the_path(backend, dtype):
    hmm = HMM.random(3, 4, dtype=dtype)
    path = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
    fixed = torch.full((2, 4, 3), -INF, dtype=dtype).scatter(-1, path[..., None], 0.0)
    ev = Evidence(latent_log_potentials=fixed)
    steps = hmm.log_transition[path[:, :-1], path[:, 1:]].sum(-1)
    assert_close(hmm.log_partition(ev), hmm.log_initial[path[:, 0]] + steps, rtol=1e-5, atol=1e-5)
    assert_close(hmm.posterior(ev), fixed, rtol=0, atol=1e-5)
    assert_close(hmm.marginals(ev), hmm.log_emission[path], rtol=1e-5, atol=1e-5)
    assert torch.equal(hmm.sample(ev, generator=generator(0)).latents, path)


@given(st.integers(0, 10_000), st.sampled_from(DTYPES), st.sampled_from([0.3, 0.7]))
@settings(max_examples=20, deadline=None)
def test_forbidden_tokens_and_states_anywhere(seed, dtype, share):
    g = generator(seed)
    hmm = HMM.random(4, 5, seed, dtype=dtype)
    potentials, latent = torch.randn(3, 6, 5, generator=g), torch.randn(3, 6, 4, generator=g)
    potentials[torch.rand(3, 6, 5, generator=g) < share] = -INF
    latent[torch.rand(3, 6, 4, generator=g) < share / 2] = -INF
    assert_agrees(hmm, Evidence(log_potentials=potentials, latent_log_potentials=latent))
    assert_agrees(hmm, Evidence(logits=potentials))


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


# Zeros in the parameters.


@pytest.mark.parametrize("kind", ["observed", "logits", "latent", "mixed_dense", "mixed_sparse", "mixed_all"])
@pytest.mark.parametrize("make", [left_to_right, permutation], ids=lambda f: f.__name__)
def test_zero_transitions(make, kind):
    hmm = make(4, 5)
    assert_agrees(hmm, make_evidence(kind, (3, 7), 4, 5, dtype=torch.float32, scale=3.0))


@pytest.mark.parametrize("make", [left_to_right, permutation, deterministic], ids=lambda f: f.__name__)
def test_zeros_by_enumeration(make, backend):
    hmm = exactly_normalised(make(3))
    ev = make_evidence("mixed_all", (4, 4), 3, hmm.vocab_size, seed=2)
    check_hmm(hmm, Truth(hmm, ev))


@pytest.mark.parametrize("kind", ["log_potentials", "logits", "sparse", "sparse_tail", "mixed_all"])
def test_zero_emissions(kind):
    g = generator(3)
    table = torch.rand(4, 6, generator=g) * (torch.rand(4, 6, generator=g) < 0.4)
    table[:, 0] += 0.01
    base = HMM.random(4, 6)
    hmm = HMM(base.log_initial, base.log_transition, (table / table.sum(-1, keepdim=True)).log())
    assert_agrees(hmm, make_evidence(kind, (4, 6), 4, 6, dtype=torch.float32, scale=20.0))


# What float32 would lose.


def test_the_surviving_path_lies_five_thousand_nats_below():
    """Two absorbing halves: the one that every position favours is killed by the very last one."""
    length, gap = 500, 10.0
    hmm = HMM(log([0.5, 0.5]), torch.eye(2).log(), log([0.9, 0.1], [0.1, 0.9]))
    latent = torch.zeros(2, length, 2)
    latent[:, :, 1] = -gap
    latent[0, -1] = torch.tensor([-INF, 0.0])
    ev = Evidence(latent_log_potentials=latent)
    assert_agrees(hmm, ev)
    value = hmm.log_partition(ev)
    assert_close(value[0], torch.tensor(math.log(0.5) - gap * (length - 1)), rtol=1e-5, atol=1e-2)
    assert_close(hmm.posterior(ev)[0, 0], torch.tensor([-INF, 0.0]), rtol=0, atol=1e-5)
    assert hmm.sample(ev, generator=generator(0)).latents[0].tolist() == [1] * length


@pytest.mark.parametrize("gap", [20.0, 60.0, 80.0, 90.0, 100.0, 1000.0])
def test_a_survivor_far_below_is_noticed_whatever_the_gap(gap):
    """Latents favour state 0 by the gap at two positions; a third one leaves only state 1."""
    hmm = HMM(log([0.5, 0.5]), torch.eye(2).log(), log([0.7, 0.3], [0.2, 0.8]))
    for where in (0, 4, 8, -1):
        latent = torch.zeros(2, 10, 2)
        latent[:, (where + 1) % 10, 1] = -gap
        latent[:, (where + 3) % 10, 1] = -gap
        latent[0, where, 0] = -INF
        assert_agrees(hmm, Evidence(latent_log_potentials=latent))


@pytest.mark.parametrize("gap", [20.0, 40.0, 60.0, 80.0, 87.0, 95.0, 103.0, 120.0])
def test_a_survivor_between_two_dead_ends_is_noticed(gap):
    """Of three states one dies at the start and one at the end; the third is faint from both sides."""
    hmm = HMM(
        torch.tensor([0.5, 0.5, 0.0]).log(), torch.eye(3) * 0.5 + 0.5 / 3, HMM.random(3, 4).log_emission, validate=False
    )
    transition = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).log()
    hmm = HMM(hmm.log_initial, transition, hmm.log_emission)
    latent = torch.zeros(1, 6, 3)
    latent[0, 1, 1] = latent[0, 4, 1] = -gap
    latent[0, 2, 2] = latent[0, 5, 0] = latent[0, 3, 2] = -INF
    assert_agrees(hmm, Evidence(latent_log_potentials=latent))


@pytest.mark.parametrize("gap", [30.0, 60.0, 70.0, 80.0])
def test_an_improbable_start_times_an_improbable_leaf_is_not_zero(gap):
    rare = math.exp(-gap)
    hmm = HMM(log([1.0, rare]), torch.eye(2).log(), log([0.5, 0.5, 0.0], [rare, 0.5, 0.5]))
    ids = torch.tensor([[0, 1, 2], [0, 1, 1]])
    assert_agrees(hmm, Evidence(tokens=ids))
    assert_close(hmm.log_prob(ids)[0], torch.tensor(-2 * gap + 2 * math.log(0.5)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gap", [60.0, 90.0, 100.0, 200.0, 5000.0])
@pytest.mark.parametrize("table", ["initial", "transition", "emission"])
def test_parameters_may_be_as_small_as_a_logarithm_can_say(table, gap, dtype):
    """The second token can be reached only through one faint entry."""
    faint = torch.tensor([0.0, -gap])
    initial = faint if table == "initial" else torch.tensor([0.0, -INF])
    stay = torch.eye(2).log()
    transition = torch.stack([faint, stay[1]]) if table == "transition" else stay
    emission = torch.stack([faint, faint]) if table == "emission" else stay
    hmm = HMM(initial, transition, emission).to(dtype=dtype)
    ids = torch.tensor([[1, 1]]) if table != "transition" else torch.tensor([[0, 1]])
    wanted = -2 * gap if table == "emission" else -gap
    assert_agrees(hmm, Evidence(tokens=ids))
    assert_close(hmm.log_prob(ids), torch.tensor([wanted], dtype=dtype), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gap", [60.0, 80.0, 88.0, 95.0, 100.0, 110.0, 1e4])
@pytest.mark.parametrize("name", ["logits", "log_potentials"])
def test_tokens_that_every_state_allows_may_all_be_nearly_excluded(gap, name):
    """The favourite token of the potentials has no emission: what is left is at the edge of float32's range."""
    hmm = HMM(
        HMM.random(2, 4).log_initial, HMM.random(2, 4).log_transition, log([0.0, 0.3, 0.2, 0.5], [0.0, 0.1, 0.6, 0.3])
    )
    potentials = torch.randn(3, 4, 4, generator=generator(0))
    potentials[..., 0] += gap
    ev = Evidence(**{name: potentials})
    assert_agrees(hmm, ev, rtol=1e-6)
    tokens = hmm.sample(ev.select(torch.zeros(1500, dtype=torch.int64)), generator=generator(1)).tokens
    wanted = hmm.to(dtype=torch.float64).marginals(ev)[0]
    for t in range(4):
        assert chi_square_p_value(torch.bincount(tokens[:, t], minlength=4), wanted[t]) > 1e-3


@pytest.mark.parametrize("gap", [20.0, 80.0, 100.0, 200.0, 1e4])
def test_listed_tokens_may_be_nearly_excluded(gap):
    """Of the listed tokens the circuit allows only the lightest."""
    hmm = HMM(log([0.5, 0.5]), HMM.random(2, 4).log_transition, log([0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]))
    sparse = SparsePotentials(
        torch.tensor([[[0, 1]]]).expand(2, 3, 2).contiguous(), torch.tensor([0.0, -gap]).expand(2, 3, 2)
    )
    ev = Evidence(sparse=sparse)
    assert_agrees(hmm, ev)
    assert hmm.sample(ev, generator=generator(0)).tokens.tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("gap", [1.0, 10.0, 20.0, 80.0, 200.0])
def test_listed_tokens_may_be_lighter_than_the_tail(gap):
    """One state emits only listed tokens, which the evidence all but excludes in favour of the others."""
    rows = torch.tensor([[0.3, 0.3, 0.4, 0.0, 0.0], [0.1, 0.1, 0.1, 0.3, 0.4]])
    hmm = HMM(log([0.5, 0.5]), torch.eye(2).log(), rows.log())
    ids = torch.tensor([[[0, 1, 2]]]).expand(3, 4, 3).contiguous()
    latent = torch.zeros(3, 4, 2)
    latent[0, -1, 1] = -INF
    latent[1, -1, 1] = -2 * gap
    weights = torch.tensor([0.0, -0.5, -1.0]).expand(3, 4, 3) - gap
    ev = Evidence(sparse=SparsePotentials(ids, weights, torch.zeros(3, 4)), latent_log_potentials=latent)
    assert_agrees(hmm, ev)
    tokens = hmm.sample(ev, generator=generator(0)).tokens[0]
    assert bool((tokens < 3).all())


@given(st.integers(0, 100_000), st.sampled_from([5.0, 30.0, 100.0, 1000.0]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_adversarial_latent_potentials_and_zeros(seed, scale, zeros):
    g = generator(seed)
    states, length = 4, 9
    table = torch.rand(states, states, generator=g)
    if zeros:
        table = table * (torch.rand(states, states, generator=g) < 0.5)
    table = table + torch.eye(states) * 0.1
    hmm = HMM(
        HMM.random(states, 5, seed).log_initial,
        (table / table.sum(-1, keepdim=True)).log(),
        HMM.random(states, 5, seed).log_emission,
    )
    latent = torch.randn(3, length, states, generator=g) * scale
    latent[torch.rand(3, length, states, generator=g) < 0.2] = -INF
    logits = torch.randn(3, length, 5, generator=g) * scale
    assert_agrees(hmm, Evidence(logits=logits, latent_log_potentials=latent))


# Gates.


@pytest.mark.parametrize("size", [1.0, 5.0, 30.0, 60.0, 200.0, 1000.0])
@pytest.mark.parametrize("layout", ["low_rank", "low_rank_per_position"])
def test_gates_of_any_size(layout, size):
    hmm = make_hmm(layout, 9, 12, 9, seed=1, dtype=torch.float32)
    for kind in ("logits_temperatures", "mixed_all"):
        ev = make_evidence(kind, (4, 9), 9, 12, seed=3, dtype=torch.float32)
        assert_agrees(hmm, with_gates(ev, 2, 5, size))


def detour() -> HMM:
    """States stay what they are by an inner state of their own; a third one, which none of them takes, leads away."""
    left = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    right = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    initial = torch.tensor([0.5, 0.5, 0.0])
    return HMM(initial.log(), (left.log(), right.log()), HMM.random(3, 4, seed=2).log_emission)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [60.0, 90.0, 800.0])
def test_the_widest_gate_may_lead_from_nowhere(size, dtype):
    """The largest number of every step belongs to a way that nobody takes: all that counts is far below it."""
    hmm, gates = detour().to(dtype=dtype), torch.zeros(2, 6, 3)
    gates[..., 2] = size
    ev = make_evidence("logits", (2, 7), 3, 4, dtype=dtype)
    assert_agrees(hmm, replace(ev, step_log_gates=gates))
    assert_close(hmm.log_partition(replace(ev, step_log_gates=gates)), hmm.log_partition(ev), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gap", [20.0, 60.0, 75.0, 85.0, 100.0, 1000.0])
def test_a_narrow_gate_meets_an_improbable_future(gap):
    """Each is a number of float32, their product need not be: state 1 is nearly shut off, and then the only one."""
    hmm = HMM(
        torch.tensor([0.5, 0.5]).log(),
        (torch.eye(2).log(), torch.eye(2).log()),
        torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.2, 0.3]]).log(),
    )
    gates, latent = torch.zeros(2, 4, 2), torch.zeros(2, 5, 2)
    gates[:, 1, 1] = gates[1, 2, 1] = latent[:, 2, 1] = -gap
    ids = torch.tensor([[0, 1, 0, 0, 2], [0, 0, 0, 1, 2]])
    assert_agrees(hmm, Evidence(tokens=ids, latent_log_potentials=latent, step_log_gates=gates))
    free = Evidence(logits=torch.zeros(2, 5, 3), latent_log_potentials=latent, step_log_gates=gates)
    assert_agrees(hmm, free)


@pytest.mark.parametrize("gap", [30.0, 60.0, 80.0, 200.0])
def test_an_improbable_start_times_an_improbable_future(gap):
    """Only state 1 can start and emit the tokens, both barely; a path that is lost must not end in the last state."""
    rare = torch.tensor([[0.0, -math.inf, -math.inf], [-gap, -gap, 0.0], [0.0, 0.0, 0.0]]).log_softmax(-1)
    hmm = HMM(torch.tensor([0.0, -gap, -math.inf]), (torch.eye(3).log(), torch.eye(3).log()), rare)
    ev = with_gates(Evidence(tokens=torch.tensor([[0, 2, 2], [0, 1, 2]])), 3)
    assert hmm.sample(ev, generator=generator(0)).latents.tolist() == [[1, 1, 1]] * 2
    assert_agrees(hmm, ev)


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


def test_four_thousand_states():
    uniform = torch.full((4096,), -math.log(4096.0))
    hmm = HMM(uniform, uniform.expand(4096, 4096), HMM.random(4096, 3, seed=0).log_emission)
    ids = torch.tensor([[0, 2], [1, 1]])
    table = hmm.log_emission.double().logsumexp(0) - math.log(4096.0)
    assert_close(hmm.log_prob(ids).double(), table[ids].sum(-1), rtol=1e-5, atol=1e-5)
    assert_close(hmm.posterior(Evidence(tokens=ids)).exp().sum(-1), torch.ones(2, 2), rtol=0, atol=1e-5)


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
