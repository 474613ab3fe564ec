import itertools
import math
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, SparsePotentials, ops
from codd.circuits.sampling import draw_token
from tests.support import FIXTURES
from tests.support.contract import assert_agrees
from tests.support.enumeration import all_strings, chi_square_p_value
from tests.support.strategies import (
    BACKENDS,
    KINDS,
    Truth,
    cases,
    generator,
    make_evidence,
    make_hmm,
    shape_checks,
)

pytestmark = pytest.mark.numerics
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(params=BACKENDS)
def backend(request):
    with ops.use(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    with shape_checks(False):
        yield


# Files written by PyJuice, with the truth beside them.


@pytest.fixture(params=sorted(FIXTURES.glob("hmm/*.jpc")), ids=lambda path: path.stem)
def stored(request):
    name = request.param.stem.removesuffix("_legacy").removesuffix("_numpy1")
    return HMM.from_pyjuice(request.param), load_file(FIXTURES / "hmm" / f"{name}.safetensors")


def fixture_evidence(truth: dict[str, Tensor]) -> Evidence:
    return Evidence(tokens=truth["sequences"], observed=truth["observed"], log_potentials=truth["log_phi"])


def test_pyjuice_answers_are_the_stored_ones(stored):
    hmm, truth = stored
    ev, soft = fixture_evidence(truth), Evidence(log_potentials=truth["log_phi"])
    for name, dtype in itertools.product(BACKENDS, (torch.float64, torch.float32)):
        near = {"rtol": 0, "atol": TOLERANCE[dtype]}
        circuit = hmm.to(dtype=dtype)
        with ops.use(name):
            assert_close(circuit.log_prob(truth["sequences"]).double(), truth["loglik"], **near)
            assert_close(circuit.log_partition(ev).double(), truth["logF"], **near)
            assert_close(circuit.log_partition(soft).double(), truth["logZ_soft"], **near)
            assert_close(circuit.conditional_log_prob(truth["sequences"], ev).double(), truth["cond_ll"], **near)
            assert_close(circuit.posterior(ev).double().exp(), truth["posterior"], **near)
            assert_close(circuit.marginals(ev).double().exp(), truth["marginals"], **near)


# Against the general circuit.


@pytest.mark.parametrize("emission", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rounded_parameters_become_a_circuit(emission):
    hmm = HMM.random(4, 3000, seed=1).to(emission=emission)
    ids = torch.randint(3000, (2, 3), generator=generator(0))
    assert_close(hmm.as_circuit(3).log_prob(ids), hmm.log_prob(ids).double(), rtol=0, atol=1e-2)


# Properties.


@given(cases())
@settings(max_examples=40, deadline=None)
def test_float32_agrees_with_the_reference_in_float64(case):
    assert_agrees(*case, atol=2e-4)


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_sequence_does_not_depend_on_its_neighbours(case, random):
    hmm, ev = case
    b = random.randrange(ev.shape[0])
    alone = ev.select(torch.tensor([b]))
    near = {"rtol": 1e-5, "atol": 1e-5}
    assert_close(hmm.log_partition(alone)[0], hmm.log_partition(ev)[b], **near)
    assert_close(hmm.posterior(alone)[0], hmm.posterior(ev)[b], **near)
    assert_close(hmm.marginals(alone)[0], hmm.marginals(ev)[b], **near)
    uniforms = torch.rand(ev.shape, generator=generator(0))
    latents = hmm.joint_step(ev, uniforms=uniforms).latents[b]
    assert torch.equal(hmm.joint_step(alone, uniforms=uniforms[b : b + 1]).latents[0], latents)


# Sampling.

SAMPLES = 20_000


def replicated(ev: Evidence, b: int, count: int = SAMPLES) -> Evidence:
    return ev.select(torch.full((count,), b))


def joint_cells(truth: Truth, tokens: Tensor, latents: Tensor) -> Tensor:
    """How often each (string, path) was drawn, flat."""
    vocab, states, length = truth.hmm.vocab_size, truth.hmm.num_states, truth.length
    powers = torch.arange(length - 1, -1, -1)
    string = (tokens * vocab**powers).sum(-1)
    path = (latents * states**powers).sum(-1)
    return torch.bincount(string * states**length + path, minlength=len(truth.strings) * len(truth.paths))


@cache
def sampled_truth(layout: str, kind: str) -> Truth:
    hmm = make_hmm(layout, 2, 4, 3, seed=11, dtype=torch.float32)
    return Truth(hmm, make_evidence(kind, (2, 3), 2, 4, seed=5, dtype=torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_follow_the_joint_distribution(kind):
    truth = sampled_truth("dense", kind)
    for b in range(2):
        found = truth.hmm.sample(replicated(truth.ev, b), generator=generator(17 + b))
        counts = joint_cells(truth, found.tokens, found.latents)
        assert chi_square_p_value(counts, truth.probability[b].flatten()) > 1e-3


def test_one_of_many_samples_is_the_single_sample():
    truth = sampled_truth("dense", "logits")
    one = truth.hmm.sample(truth.ev, generator=generator(5))
    many = truth.hmm.sample(truth.ev, num_samples=1, generator=generator(5))
    assert torch.equal(many.tokens[0], one.tokens)
    assert torch.equal(many.latents[0], one.latents)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24, 1.0])
def test_the_ends_of_the_uniform_interval_give_possible_paths(uniform, backend):
    hmm = HMM(
        torch.tensor([0.0, 0.5, 0.5, 0.0]).log(),
        torch.tensor([[0.25] * 4, [0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]]).log(),
        HMM.random(4, 5).log_emission,
    )
    ev = Evidence(missing=torch.ones(2, 6, dtype=torch.bool))
    step = hmm.joint_step(ev, uniforms=torch.full((2, 6), uniform))
    assert bool(((step.latents == 1) | (step.latents == 2)).all())


def impossible_batch() -> Evidence:
    potentials = torch.zeros(5, 3, 4)
    potentials[1, 2] = -math.inf
    potentials[4, 0] = -math.inf
    return Evidence(log_potentials=potentials)


def test_the_check_for_impossible_evidence_can_be_left_out(backend):
    hmm, ev = HMM.random(3, 4), impossible_batch()
    found = hmm.sample(ev, check=False, generator=generator(0))
    assert (found.log_partition == -math.inf).nonzero()[:, 0].tolist() == [1, 4]
    assert bool(((found.tokens >= 0) & (found.tokens < 4)).all())
    assert bool(((found.latents >= 0) & (found.latents < 3)).all())


def test_joint_step_of_impossible_evidence_does_not_raise(backend):
    step = HMM.random(3, 4).joint_step(impossible_batch(), generator=generator(0))
    assert (step.log_partition == -math.inf).nonzero()[:, 0].tolist() == [1, 4]
    assert not step.scores.isnan().any()


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    cumulative = weights.double().cumsum(-1)
    return (cumulative <= uniform.double()[:, None] * cumulative[:, -1:]).sum(-1)


@example(512, 0, 0.5)  # whole blocks only
@given(st.integers(1, 1200), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 0.99]))
@settings(max_examples=60, deadline=None)
def test_draw_token_is_the_plain_inverse_cdf(vocab, seed, zeros):
    g = generator(seed)
    weights = torch.rand(40, vocab, generator=g, dtype=torch.float64)
    weights = weights * (torch.rand(40, vocab, generator=g) >= zeros)
    weights[:, int(torch.randint(vocab, (), generator=g))] += 0.5
    uniform = torch.rand(40, generator=g, dtype=torch.float64)
    assert torch.equal(draw_token(weights, uniform), inverse_cdf(weights, uniform * (1 - 2**-23)))


@given(st.integers(257, 1200), st.integers(0, 1000), st.sampled_from([1.0, 1e-20]))
@settings(max_examples=60, deadline=None)
def test_draw_token_never_picks_a_token_without_weight(vocab, seed, scale):
    g = generator(seed)
    weights = torch.rand(64, vocab, generator=g) * (torch.rand(64, vocab, generator=g) < 0.02) * scale
    only = torch.randint(vocab, (64,), generator=g)
    weights[torch.arange(64), only] = scale
    for uniform in (torch.zeros(64), torch.ones(64), torch.rand(64, generator=g)):
        picked = draw_token(weights, uniform)
        assert bool((weights.gather(-1, picked[:, None]) > 0).all())


# Construction.


def test_the_sizes_say_what_the_circuit_is():
    hmm = HMM.random(3, 5, rank=2, length=4)
    assert (hmm.num_states, hmm.num_latents, hmm.vocab_size, hmm.length) == (3, 3, 5, 4)
    assert repr(hmm) == "HMM(num_states=3, vocab_size=5, length=4, rank=2, float32, cpu)"
    assert HMM.random(3, 5).length is None
    assert "bfloat16" in repr(HMM.random(3, 5).to(emission=torch.bfloat16))


def test_random_circuits_depend_on_the_seed_only():
    assert torch.equal(HMM.random(3, 5, seed=1).log_emission, HMM.random(3, 5, seed=1).log_emission)
    assert not torch.equal(HMM.random(3, 5, seed=1).log_emission, HMM.random(3, 5, seed=2).log_emission)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_ids_may_be_any_integers(dtype, backend):
    hmm, ids = HMM.random(3, 5, dtype=torch.float64), all_strings(5, 2)
    assert_close(hmm.log_prob(ids.to(dtype)), hmm.log_prob(ids), **EXACT)
    weights = torch.randn(1, 2, 2, generator=generator(0), dtype=torch.float64)
    listed = torch.tensor([[[1, 3], [4, 0]]])
    plain, small = (Evidence(sparse=SparsePotentials(x, weights)) for x in (listed, listed.to(dtype)))
    assert_close(hmm.log_partition(small), hmm.log_partition(plain), **EXACT)
    assert_close(hmm.marginals(small), hmm.marginals(plain), **EXACT)
    assert_close(hmm.marginals(plain, listed.to(dtype)), hmm.marginals(plain, listed), **EXACT)
    assert hmm.conditional_log_prob(ids[:1].to(dtype), plain).shape == (1,)
    assert hmm.sample(small, generator=generator(0)).tokens.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_potentials_may_have_another_type_than_the_circuit(dtype, backend):
    hmm = HMM.random(3, 5)
    logits = torch.randn(2, 4, 5, generator=generator(0)).to(dtype)
    for found, same in (
        (Evidence(logits=logits, temperature=0.7), Evidence(logits=logits.double(), temperature=0.7)),
        (Evidence(log_potentials=logits), Evidence(log_potentials=logits.double())),
        (
            Evidence(latent_log_potentials=logits[..., :3].contiguous()),
            Evidence(latent_log_potentials=logits[..., :3].double()),
        ),
    ):
        assert_close(hmm.log_partition(found), hmm.log_partition(same), rtol=1e-5, atol=1e-5)
        assert_close(hmm.marginals(found), hmm.marginals(same), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["eager", "native"])
def test_tables_may_lie_in_memory_in_any_order(name):
    tables = torch.rand(9), torch.rand(9, 9, generator=generator(1)), torch.rand(9, 7, generator=generator(0))
    plain = [x.log_softmax(-1).contiguous() for x in tables]
    strange = [x if x.ndim == 1 else x.T.contiguous().T for x in plain]
    assert not any(x.is_contiguous() for x in strange[1:])
    for ev in (Evidence(tokens=all_strings(7, 2)), Evidence(logits=torch.rand(2, 3, 7, generator=generator(2)))):
        for query in ("log_partition", "posterior", "marginals"):
            with ops.use(name):
                found, want = (getattr(HMM(*x), query)(ev) for x in (strange, plain))
            assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_forced_backend_ends_with_its_block():
    cpu = torch.device("cpu")
    for name, inner in itertools.product(BACKENDS, repeat=2):
        with ops.use(name):
            with ops.use(inner):
                assert ops.backend_for(cpu, torch.float32).name == inner
            assert ops.backend_for(cpu, torch.float32).name == name
    assert ops.backend_for(cpu, torch.float64).name == "eager"
