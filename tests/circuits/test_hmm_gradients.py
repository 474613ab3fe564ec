import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, Factors, SparsePotentials, inference, ops
from tests.support.strategies import KINDS, LAYOUTS, cases, generator, make_evidence, make_hmm, shape_checks

B, L, N, V = 3, 3, 2, 4
WEIGHTS = torch.tensor([1.5, -2.0, 0.0], dtype=torch.float64)
"""Upstream gradients: positive, negative and zero."""


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    with shape_checks(False):
        yield


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def wants(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def tables_of(hmm: HMM) -> list[Tensor]:
    steps = hmm.log_transition if isinstance(hmm.log_transition, tuple) else (hmm.log_transition,)
    return [hmm.log_initial, hmm.log_emission, *steps]


def rebuilt(tables: tuple[Tensor, ...] | list[Tensor]) -> HMM:
    initial, emission, *steps = tables
    return HMM(initial, steps[0] if len(steps) == 1 else tuple(steps), emission)


def normalised(raw: tuple[Tensor, ...] | list[Tensor]) -> HMM:
    return rebuilt([x.log_softmax(-1) for x in raw])


def assert_gradient(f: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Finite differences of the answers in random directions, with positive, negative and zero gradients from above."""
    assert gradcheck(lambda *x: f(*x) * WEIGHTS, wants(*inputs), fast_mode=True)


@pytest.mark.parametrize("kind", ["observed_latent", "logits", "sparse"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_the_log_parameters(layout, kind):
    hmm, ev = make_hmm(layout, N, V, L), make_evidence(kind, (B, L), N, V)
    assert_gradient(lambda *tables: rebuilt(tables).log_partition(ev), *tables_of(hmm))


EVIDENCE: dict[str, tuple[Callable[..., Evidence], tuple[Tensor, ...]]] = {
    "log_potentials": (lambda x: Evidence(log_potentials=x), (normal(0, B, L, V),)),
    "logits": (lambda x: Evidence(logits=x), (normal(1, B, L, V),)),
    "logits_temperature": (lambda x: Evidence(logits=x, temperature=0.6), (normal(2, B, L, V),)),
    "logits_temperatures": (
        lambda x: Evidence(logits=x, temperature=torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)),
        (normal(3, B, L, V),),
    ),
    "latent": (lambda x: Evidence(latent_log_potentials=x), (normal(4, B, L, N),)),
    "logits_latent": (
        lambda x, y: Evidence(logits=x, latent_log_potentials=y, temperature=0.8),
        (normal(5, B, L, V), normal(6, B, L, N)),
    ),
    "sparse": (
        lambda x: Evidence(sparse=SparsePotentials(torch.tensor([2, 0]).expand(B, L, 2).contiguous(), x)),
        (normal(7, B, L, 2),),
    ),
    "sparse_tail": (
        lambda x, y: Evidence(sparse=SparsePotentials(torch.tensor([3, 1]).expand(B, L, 2).contiguous(), x, y)),
        (normal(8, B, L, 2), normal(9, B, L)),
    ),
    "mixed": (
        lambda x, y, z, latent: Evidence(
            tokens=torch.full((B, L), 1),
            observed=torch.tensor([[True, False, False]]).expand(B, L),
            logits=x,
            temperature=0.9,
            sparse=SparsePotentials(torch.tensor([3, 1]).expand(B, L, 2).contiguous(), y, z),
            dense=torch.tensor([[True, True, False], [False, False, True], [True, False, False]]),
            missing=torch.tensor([[False, False, False], [False, False, False], [False, True, False]]),
            latent_log_potentials=latent,
        ),
        (normal(10, B, L, V), normal(11, B, L, 2), normal(12, B, L), normal(13, B, L, N)),
    ),
}


@pytest.mark.parametrize(("name", "backend"), [*((name, "eager") for name in EVIDENCE), ("mixed", "reference")])
def test_gradients_in_the_evidence(name, backend):
    make, inputs = EVIDENCE[name]
    hmm = make_hmm("dense", N, V, L)
    with ops.use(backend):
        assert_gradient(lambda *x: hmm.log_partition(make(*x)), *inputs)


@pytest.mark.parametrize("name", ["log_potentials", "logits_temperatures", "latent", "sparse_tail", "mixed"])
def test_gradients_of_the_conditional_log_prob(name):
    make, inputs = EVIDENCE[name]
    hmm = make_hmm("low_rank", N, V, L)
    tables = tables_of(hmm)
    ids = torch.tensor([[0, 1, 2], [3, 3, 3], [1, 0, 3]])

    def f(*x: Tensor) -> Tensor:
        return normalised(x[: len(tables)]).conditional_log_prob(ids, make(*x[len(tables) :]))

    assert_gradient(f, *tables, *inputs)


@given(cases(dtype=torch.float64))
@settings(max_examples=30, deadline=None)
def test_flows_are_the_gradient_in_the_log_parameters(case):
    hmm, ev = case
    tables = wants(*tables_of(hmm))
    share = torch.linspace(-1, 1, ev.shape[0], dtype=torch.float64)
    value = rebuilt(tables).log_partition(ev)
    gradients = torch.autograd.grad((value * share).sum(), tables)
    flows = hmm.flows(ev, share)
    steps = flows.transition if isinstance(flows.transition, tuple) else (flows.transition,)
    for gradient, flow in zip(gradients, (flows.initial, flows.emission, *steps), strict=True):
        assert_close(gradient, flow, rtol=1e-12, atol=1e-12)


def test_float32_gradients_are_those_of_float64():
    hmm, ev = make_hmm("dense", 5, 11, 6, dtype=torch.float32), make_evidence("mixed_all", (4, 6), 5, 11)
    found, wanted = [], []
    for dtype, out in ((torch.float32, found), (torch.float64, wanted)):
        tables = wants(*(x.to(dtype) for x in tables_of(hmm)))
        out.extend(torch.autograd.grad(rebuilt(tables).log_partition(ev).sum(), tables))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_gradients_have_the_type_of_what_they_belong_to():
    hmm = HMM.random(3, 5)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        logits = torch.zeros(2, 4, 5, dtype=dtype, requires_grad=True)
        latent = torch.zeros(2, 4, 3, dtype=dtype, requires_grad=True)
        hmm.log_partition(Evidence(logits=logits, latent_log_potentials=latent)).sum().backward()
        assert logits.grad.dtype == latent.grad.dtype == dtype


def test_only_what_asks_for_a_gradient_gets_one():
    hmm = HMM.random(3, 4)
    logits = torch.zeros(2, 3, 4, requires_grad=True)
    hmm.log_partition(Evidence(logits=logits)).sum().backward()
    assert logits.grad is not None
    assert all(x.grad is None for x in tables_of(hmm))
    emission = hmm.log_emission.clone().requires_grad_()
    HMM(hmm.log_initial, hmm.log_transition, emission).log_prob(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    assert emission.grad is not None


def test_integers_carry_no_gradient():
    hmm, ids = HMM.random(3, 4), torch.zeros(2, 3, dtype=torch.int64)
    assert not hmm.log_prob(ids).requires_grad
    weights = torch.zeros(2, 3, 1, requires_grad=True)
    value = hmm.log_partition(Evidence(tokens=ids, observed=ids > 0, sparse=SparsePotentials(ids[..., None], weights)))
    (gradient,) = torch.autograd.grad(value.sum(), weights)
    assert_close(gradient, torch.ones(2, 3, 1), rtol=0, atol=1e-6)  # each position's only token


def test_observed_and_missing_positions_pass_no_gradient_to_potentials():
    hmm = HMM.random(3, 4)
    logits = torch.randn(1, 3, 4, generator=generator(0)).requires_grad_()
    observed, missing = torch.tensor([[True, False, False]]), torch.tensor([[False, True, False]])
    ev = Evidence(tokens=torch.zeros(1, 3, dtype=torch.int64), observed=observed, missing=missing, logits=logits)
    (gradient,) = torch.autograd.grad(hmm.log_partition(ev).sum(), logits)
    assert bool((gradient[0, :2] == 0).all())
    assert bool((gradient[0, 2] != 0).all())


def test_no_gradient_is_recorded_where_none_is_wanted():
    logits = torch.zeros(2, 3, 4, requires_grad=True)
    hmm, ev = HMM.random(3, 4), Evidence(logits=logits)
    with torch.no_grad():
        assert not hmm.log_partition(ev).requires_grad
    assert hmm.log_partition(ev).requires_grad
    for rows in (hmm.posterior(ev), hmm.marginals(ev), hmm.flows(ev).initial):
        assert not rows.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_every_query_serves_a_circuit_that_is_being_trained(kind):
    tables = wants(*tables_of(make_hmm("dense", N, V, L)))
    hmm, ev = rebuilt(tables), make_evidence(kind, (B, L), N, V)
    ids = torch.zeros(B, L, dtype=torch.int64)
    hmm.conditional_log_prob(ids, ev)
    step = hmm.joint_step(ev, generator=generator(0))
    hmm.conditional_scores(ev, step.latents)
    assert torch.equal(hmm.sample(ev, generator=generator(0)).tokens >= 0, torch.ones(B, L, dtype=torch.bool))
    hmm.as_circuit(L)


def test_a_zero_probability_stays_zero():
    hmm = HMM(torch.tensor([1.0, 0.0]).log(), torch.eye(2).log(), HMM.random(2, 3).log_emission)
    tables = wants(*tables_of(hmm))
    value = rebuilt(tables).log_partition(Evidence(logits=torch.zeros(2, 4, 3)))
    initial, _, transition = torch.autograd.grad(value.sum(), tables)
    assert_close(initial, torch.tensor([2.0, 0.0]), rtol=0, atol=1e-5)
    assert_close(transition, torch.tensor([[6.0, 0.0], [0.0, 0.0]]), rtol=0, atol=1e-5)


# Gates and factors.

LOW_RANK = ("low_rank", "low_rank_per_position")
GATES = normal(20, B, L - 1, 2) * 2


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("layout", LOW_RANK)
@pytest.mark.parametrize("name", ["logits_latent", "sparse_tail", "mixed"])
def test_gradients_in_the_gates_and_all_else(name, layout, backend):
    make, inputs = EVIDENCE[name]
    tables = tables_of(make_hmm(layout, N, V, L))

    def f(gates: Tensor, *x: Tensor) -> Tensor:
        ev = replace(make(*x[len(tables) :]), step_log_gates=gates)
        return normalised(x[: len(tables)]).log_partition(ev)

    with ops.use(backend):
        assert_gradient(f, GATES, *tables, *inputs)


@pytest.mark.parametrize("kind", ["observed", "mixed_all"])
@pytest.mark.parametrize("inner", [0, 3])
@pytest.mark.parametrize("rank", [None, 1])
def test_gradients_in_the_factors(rank, inner, kind):
    """Through softmaxes, products of thin matrices, and the detour with its share and its gates."""
    made = Factors.near_neutral(N, V, transition_rank=rank, emission_rank=rank, inner_states=inner, noise=1.0)
    free = {name: x.double() for name, x in made.named().items()}
    ev = make_evidence(kind, (B, L), N, V)
    gates = [normal(21, B, L - 1, N + inner)] if inner else []

    def f(*x: Tensor) -> Tensor:
        hmm = HMM.from_factors(Factors.from_named(dict(zip(free, x, strict=False))))
        return hmm.log_partition(replace(ev, step_log_gates=x[-1]) if inner else ev)

    assert_gradient(f, *free.values(), *gates)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_gradient_of_gates_has_their_type(dtype):
    for length in (1, 3):
        gates = torch.zeros(2, length - 1, 2, dtype=dtype, requires_grad=True)
        ev = Evidence(logits=torch.zeros(2, length, 5), step_log_gates=gates)
        (found,) = torch.autograd.grad(HMM.random(3, 5, rank=2).log_partition(ev).sum(), gates)
        assert found.dtype == dtype
        assert found.shape == gates.shape


def suspect(gap: float) -> tuple[list[Tensor], Evidence]:
    """Sequence 1 must go where a gate and a latent potential nearly shut it out; what is left float32 would lose."""
    tables = [torch.tensor([0.5, 0.5]), torch.tensor([[0.6, 0.4, 0.0], [0.5, 0.2, 0.3]]), torch.eye(2), torch.eye(2)]
    gates, latent = normal(23, 3, 4, 2), normal(24, 3, 5, 2)
    gates[1, 1, 1] = latent[1, 2, 1] = -gap
    logits = normal(25, 3, 5, 3)
    tokens = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 1, 2], [1, 1, 0, 1, 0]])
    observed = torch.tensor([[True, False, True, False, True]]).expand(3, 5)
    ev = Evidence(tokens=tokens, observed=observed, logits=logits, latent_log_potentials=latent, step_log_gates=gates)
    return [x.double().log() for x in tables], ev


@pytest.mark.parametrize("gap", [60.0, 100.0, 1000.0])
def test_suspect_sequences_have_the_right_gradients(gap):
    found = []
    for dtype, backend in ((torch.float32, "eager"), (torch.float64, "reference")):
        tables, ev = suspect(gap)
        tables = wants(*(x.to(dtype) for x in tables))
        inputs = wants(*(x.to(dtype) for x in (ev.logits, ev.latent_log_potentials, ev.step_log_gates)))
        ev = replace(ev, logits=inputs[0], latent_log_potentials=inputs[1], step_log_gates=inputs[2])
        hmm = rebuilt(tables)
        with ops.use(backend), torch.no_grad():
            suspects = inference.smooth(hmm, ev, ops.backend_for(ev.device, dtype)).suspects
        assert (suspects is not None) == (dtype == torch.float32)
        with ops.use(backend):
            value = hmm.log_partition(ev)
            found.append(torch.autograd.grad((value * WEIGHTS.to(dtype)).sum(), (*inputs, *tables)))
            flows = hmm.flows(ev, WEIGHTS.to(dtype))
        gradients = found[-1][len(inputs) :]
        for a, b in zip(gradients, (flows.initial, flows.emission, *flows.transition), strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-5)
    for fast, exact in zip(*found, strict=True):
        assert_close(fast.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_of_gates_is_zero_where_the_evidence_is_impossible(dtype):
    potentials = torch.zeros(2, 3, 4, dtype=dtype)
    potentials[1, 2] = -math.inf
    for backend in ("eager", "reference"):
        gates = torch.zeros(2, 2, 2, dtype=dtype, requires_grad=True)
        ev = Evidence(log_potentials=potentials, step_log_gates=gates)
        with ops.use(backend):
            value = HMM.random(3, 4, rank=2, dtype=dtype).log_partition(ev)
        (found,) = torch.autograd.grad(value.nan_to_num(neginf=0.0).sum(), gates)
        assert bool((found[1] == 0).all())
        assert_close(found[0].sum(-1), torch.ones(2, dtype=dtype), rtol=0, atol=1e-5)
