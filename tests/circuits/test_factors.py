"""Circuits made of free numbers: what their tables are, and that files and moves keep them."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, Factors, ops
from codd.circuits.factors import logits_of
from codd.circuits.storage import CONFIG_FILE
from codd.errors import FormatError, InvalidCircuit
from tests.support.strategies import generator, make_evidence

N, V, INNER = 5, 7, 3
KINDS = {
    "plain": {},
    "thin": {"transition_rank": 2, "emission_rank": 3},
    "detour": {"inner_states": INNER},
    "all": {"transition_rank": 2, "emission_rank": 3, "inner_states": INNER},
}


@pytest.fixture(params=KINDS)
def factors(request) -> Factors:
    """With a share and a bias that are not zero."""
    made = Factors.near_neutral(N, V, noise=1.0, seed=3, **KINDS[request.param])
    g = generator(8)
    bias = None if made.bias is None else torch.randn(V, generator=g)
    detour = None if made.detour is None else made.detour._replace(share=torch.randn(N, generator=g))
    return replace(made, bias=bias, detour=detour)


def pieces(tables: tuple) -> list[Tensor]:
    initial, transition, emission = tables
    return [initial, *(transition if isinstance(transition, tuple) else (transition,)), emission]


def whole(transition: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Probabilities from state to state."""
    return transition[0].exp() @ transition[1].exp() if isinstance(transition, tuple) else transition.exp()


def same(a: Factors, b: Factors) -> bool:
    left, right = a.named(), b.named()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# What they stand for.


def test_a_chain_of_some_of_the_states(factors):
    """Rows and columns of the others are gone, and each row sums to one again."""
    kept = torch.tensor([0, 2, 3])
    (initial, _, emission), made = factors.tables(), factors.restricted(kept)
    found = made.tables()
    assert_close(found[0].exp(), initial[kept].exp() / initial[kept].exp().sum())
    assert_close(found[2], emission[kept])

    def normalised(logits: Tensor) -> Tensor:
        weights = logits.softmax(-1)[:, kept]
        return weights / weights.sum(-1, keepdim=True)

    wanted = normalised(logits_of(factors.transition))[kept]
    if factors.detour is not None:
        share, left, right = factors.detour
        taken = share[kept].sigmoid()[:, None]
        wanted = (1 - taken) * wanted + taken * (left[kept].softmax(-1) @ normalised(right))
    assert_close(whole(found[1]), wanted, rtol=1e-5, atol=1e-6)


def test_states_that_are_never_reached_can_go():
    """Duplicates of others that nothing leads to: every string keeps its probability."""
    made = Factors.near_neutral(N, V, noise=1.0, seed=3)
    doubled = torch.tensor([0, 1, 1, 2, 3, 4, 0])
    copies, rest = torch.tensor([2, 6]), torch.tensor([0, 1, 3, 4, 5])
    blocked = torch.zeros(len(doubled)).index_fill(0, copies, -torch.inf)
    transition = logits_of(made.transition)[doubled][:, doubled] + blocked
    larger = Factors(made.initial[doubled] + blocked, (transition,), (logits_of(made.emission)[doubled],))
    strings = torch.randint(V, (9, 6), generator=generator(1))
    wanted = HMM.from_factors(larger).log_prob(strings)
    assert_close(HMM.from_factors(larger.restricted(rest)).log_prob(strings), wanted)
    for unreachable in (copies, torch.tensor([2])):
        with pytest.raises(InvalidCircuit, match="leads to none that is kept: keep more states"):
            larger.restricted(unreachable)


def test_tables_are_softmaxes_of_what_was_given(factors):
    initial, transition, emission = factors.tables()
    assert_close(initial, factors.initial.log_softmax(-1))
    logits = factors.emission[0] if len(factors.emission) == 1 else factors.emission[0] @ factors.emission[1]
    assert_close(emission, (logits + (0 if factors.bias is None else factors.bias)).log_softmax(-1))
    if factors.detour is None:
        assert_close(transition, logits_of(factors.transition).log_softmax(-1))


def test_a_detour_is_a_mixture_of_two_ways(factors):
    _, transition, _ = factors.tables()
    direct = logits_of(factors.transition).softmax(-1)
    if factors.detour is None:
        assert not isinstance(transition, tuple)
        return
    share, left, right = factors.detour
    taken = share.sigmoid()[:, None]
    wanted = (1 - taken) * direct + taken * (left.softmax(-1) @ right.softmax(-1))
    assert [tuple(x.shape) for x in transition] == [(N, N + INNER), (N + INNER, N)]
    assert_close(whole(transition), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [-60.0, 60.0])
def test_a_share_may_be_next_to_nothing(share):
    """No NaN, and the way that is taken is the other one alone."""
    made = Factors.near_neutral(N, V, inner_states=INNER)
    made = replace(made, detour=made.detour._replace(share=torch.full((N,), share)))
    hmm = HMM.from_factors(made)
    alone = made.detour.left.softmax(-1) @ made.detour.right.softmax(-1)
    direct = logits_of(made.transition).softmax(-1)
    assert_close(whole(hmm.log_transition), direct if share < 0 else alone, rtol=1e-5, atol=1e-6)
    ev = Evidence(logits=torch.randn(2, 6, V, generator=generator(0)))
    with ops.use("reference"):
        exact = hmm.to(dtype=torch.float64).log_partition(ev)
    assert_close(hmm.log_partition(ev).double(), exact, rtol=1e-5, atol=1e-5)


def test_gates_widen_and_narrow_the_detour_only():
    made = Factors.near_neutral(N, V, inner_states=INNER, noise=1.0)
    hmm = HMM.from_factors(made.map(lambda x: x.double()))
    ev = make_evidence("logits", (2, 6), N, V)
    for gate, share in ((-80.0, -60.0), (80.0, 60.0)):
        gates = torch.zeros(2, 5, N + INNER, dtype=torch.float64)
        gates[..., N:] = gate
        moved = replace(made, detour=made.detour._replace(share=torch.full((N,), share)))
        other = HMM.from_factors(moved.map(lambda x: x.double()))
        found = hmm.posterior(replace(ev, step_log_gates=gates))
        assert_close(found.exp(), other.posterior(ev).exp(), rtol=0, atol=1e-9)


# Where they start.


def test_near_neutral_depends_on_the_seed_only():
    options = KINDS["all"]
    first = Factors.near_neutral(N, V, seed=1, **options)
    torch.manual_seed(99)
    assert same(first, Factors.near_neutral(N, V, seed=1, **options))
    assert not same(first, Factors.near_neutral(N, V, seed=2, **options))
    assert (first.num_states, first.vocab_size) == (N, V)


# As named tensors.


def test_training_reaches_every_tensor(factors):
    free = factors.map(lambda x: x.clone().requires_grad_())
    gates = torch.randn(2, 3, N + INNER, generator=generator(1)) if factors.detour is not None else None
    ev = Evidence(logits=torch.randn(2, 4, V, generator=generator(0)), step_log_gates=gates)
    HMM.from_factors(free).log_partition(ev).sum().backward()
    assert all(x.grad is not None and bool((x.grad != 0).any()) for x in free)


@pytest.mark.parametrize("name", Factors.near_neutral(N, V, **KINDS["all"]).named())
def test_a_missing_tensor_is_named(name):
    tensors = Factors.near_neutral(N, V, **KINDS["all"]).named()
    del tensors[name]
    if name in ("emission_bias", "detour_share"):  # what says whether there is any
        Factors.from_named(tensors)
        return
    with pytest.raises(FormatError, match=f"my file: has no tensor '{name}'"):
        Factors.from_named(tensors, "my file")


# In files, and elsewhere.


def tables_of(hmm: HMM) -> list[Tensor]:
    return [hmm.log_initial, *hmm.transition.log_factors, hmm.log_emission]


def assert_near(found: HMM, wanted: HMM, atol: float) -> None:
    for a, b in zip(tables_of(found), tables_of(wanted), strict=True):
        finite = b > -torch.inf
        assert torch.equal(a > -torch.inf, finite)
        assert_close(a[finite], b[finite], rtol=0, atol=atol)


def test_what_is_saved_is_loaded(factors, tmp_path):
    hmm = HMM.from_factors(factors, window=6)
    found = HMM.load(hmm.save(tmp_path))
    assert same(found.factors, factors)
    assert (repr(found), found.window) == (repr(hmm), 6)
    assert_near(found, hmm, 0.0)


def test_half_precision_is_near_and_half_as_large(factors, tmp_path):
    hmm = HMM.from_factors(factors)
    hmm.save(tmp_path / "full")
    found = HMM.load(hmm.save(tmp_path / "half", half=True))
    assert found.dtype == torch.float32
    assert all(x.dtype == torch.float32 for x in found.factors)
    assert_near(found, hmm, 2e-2)
    stored = json.loads((tmp_path / "half" / CONFIG_FILE).read_text())["tensors"]
    assert {x["dtype"] for x in stored.values()} == {"float16"}


def test_moves_keep_the_factors(factors, tmp_path):
    hmm = HMM.from_factors(factors, window=4)
    assert same(hmm.to("cpu").factors, factors)
    assert all(x.device.type == "meta" for x in hmm.to("meta").factors)
    exact = hmm.to(dtype=torch.float64)
    assert all(x.dtype == torch.float64 for x in exact.factors)
    found = HMM.load(exact.save(tmp_path))
    assert (found.dtype, found.window) == (torch.float64, 4)
    assert_near(found, exact, 1e-5)
    assert same(exact.to(dtype=torch.float32).factors, factors)
    compact = hmm.to(emission=torch.bfloat16)
    assert compact.emission.compact
    assert same(compact.factors, factors)
