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

from codd.circuits import HMM, Evidence, SparsePotentials, inference, ops
from codd.circuits.evidence import Kind
from codd.circuits.sampling import draw_token
from codd.errors import ImpossibleEvidence, InvalidCircuit, InvalidEvidence
from tests.support import FIXTURES
from tests.support.enumeration import all_strings, chi_square_p_value
from tests.support.strategies import (
    BACKENDS,
    KINDS,
    LAYOUTS,
    Truth,
    cases,
    factor_flows,
    generator,
    make_evidence,
    make_hmm,
    shape_checks,
    token_log_weights,
)

pytestmark = pytest.mark.numerics
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


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


def test_pyjuice_parameters_are_the_stored_ones(stored):
    hmm, truth = stored
    assert hmm.dtype == torch.float32
    for found, name in (
        (hmm.log_initial, "initial"),
        (hmm.log_emission, "emission"),
        (hmm.log_transition, "transition"),
    ):
        assert_close(found, truth[name].log(), rtol=0, atol=1e-6)


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


# Against all strings and all latent paths.


@cache
def truth_of(layout: str, kind: str, length: int = 4) -> Truth:
    seed = LAYOUTS.index(layout) * 100 + KINDS.index(kind)
    hmm = make_hmm(layout, length=length, seed=seed)
    return Truth(hmm, make_evidence(kind, (3, length), seed=seed))


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


EACH_ONCE = [*(("dense", kind) for kind in KINDS), *((layout, "mixed_all") for layout in LAYOUTS[1:])]
"""Every kind of evidence, and every layout of the tables with evidence of all kinds at once."""
MORE = [(layout, kind) for layout in LAYOUTS[1:] for kind in ("mixed_dense", "mixed_sparse")]
SHORT = [*((layout, "mixed_all") for layout in LAYOUTS), ("dense", "observed"), ("dense", "latent")]


@pytest.fixture(
    params=[*((*case, 4) for case in EACH_ONCE + MORE), *((*case, length) for case in SHORT for length in (1, 2))],
    ids=lambda case: "-".join(map(str, case)),
)
def truth(request):
    return truth_of(*request.param)


def test_every_query_by_enumeration(truth, backend):
    hmm, ev, shape = truth.hmm, truth.ev, truth.ev.shape
    assert_close(hmm.log_partition(ev), truth.log_partition, **EXACT)
    assert_close(hmm.posterior(ev), truth.posterior, **EXACT)
    assert_close(hmm.marginals(ev), truth.marginals, **EXACT)
    candidates = torch.randint(4, (*shape, 2), generator=generator(0))
    assert_close(hmm.marginals(ev, candidates), truth.marginals.gather(-1, candidates), **EXACT)
    latents = torch.randint(3, shape, generator=generator(1))
    rows = truth.emission[torch.arange(truth.length), latents]
    scores = truth.weights + torch.where(ev.rows(Kind.OBSERVED)[..., None], 0.0, rows)  # weight times emission
    assert_close(hmm.conditional_scores(ev, latents), scores, **EXACT)
    check_completions(truth)
    check_flows(truth, None)
    check_flows(truth, torch.tensor((0.5, -2.0, 0.0), dtype=torch.float64))


def check_completions(truth: Truth) -> None:
    """The conditional probability of every string, as completion of every sequence."""
    for b in range(3):
        alone = truth.ev.select(torch.full((len(truth.strings),), b))
        found = truth.hmm.conditional_log_prob(truth.strings, alone)
        hidden = ~truth.ev.rows(Kind.OBSERVED)[b]
        full = truth.strings if truth.ev.tokens is None else torch.where(hidden, truth.strings, truth.ev.tokens[b])
        place = (full * 4 ** torch.arange(truth.length - 1, -1, -1)).sum(-1)
        assert_close(found, truth.probability[b].logsumexp(-1)[place], **EXACT)
        # What is said at observed positions is ignored: each completion is counted once.
        once = (hidden | (truth.strings == 0)).all(-1)
        assert_close(found[once].logsumexp(0), torch.tensor(0.0).double(), **EXACT)


def check_flows(truth: Truth, weights: Tensor | None) -> None:
    """The expected counts of every parameter."""
    found = truth.hmm.flows(truth.ev, weights)
    initial, steps, emission = truth.flows(torch.ones(3) if weights is None else weights)
    assert_close(found.initial, initial, **EXACT)
    transition = found.transition if isinstance(found.transition, tuple) else (found.transition,)
    for factor, wanted in zip(transition, factor_flows(truth.hmm, steps), strict=True):
        assert_close(factor, wanted if factor.ndim == 3 else wanted.sum(0), **EXACT)
    assert_close(found.emission, emission if found.emission.ndim == 3 else emission.sum(0), **EXACT)


def test_log_prob_of_all_strings(layout, backend):
    truth = truth_of(layout, "missing")
    by_string = truth.joint[0].logsumexp(-1)
    found = truth.hmm.log_prob(truth.strings)
    assert_close(found, by_string, **EXACT)
    assert_close(found.logsumexp(0), torch.tensor(0.0).double(), **EXACT)


# Against the general circuit.


@pytest.mark.parametrize("emission", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rounded_parameters_become_a_circuit(emission):
    hmm = HMM.random(4, 3000, seed=1).to(emission=emission)
    ids = torch.randint(3000, (2, 3), generator=generator(0))
    assert_close(hmm.as_circuit(3).log_prob(ids), hmm.log_prob(ids).double(), rtol=0, atol=1e-2)


def test_a_circuit_has_the_length_of_its_tables():
    assert HMM.random(2, 3, length=4).as_circuit().length == 4


# Signatures.


@pytest.mark.parametrize(("layout", "kind"), EACH_ONCE)
def test_every_query_keeps_the_shapes_of_its_signature(layout, kind, backend):
    with shape_checks(True):
        hmm, ev = make_hmm(layout), make_evidence(kind, (3, 4))
        ids = torch.zeros(3, 4, dtype=torch.int64)
        assert hmm.log_partition(ev).shape == (3,)
        assert hmm.conditional_log_prob(ids, ev).shape == (3,)
        assert hmm.posterior(ev).shape == (3, 4, 3)
        assert hmm.marginals(ev).shape == (3, 4, 4)
        assert hmm.marginals(ev, ids[..., None].expand(3, 4, 2)).shape == (3, 4, 2)
        assert hmm.sample(ev, num_samples=2, generator=generator(0)).latents.shape == (2, 3, 4)
        step = hmm.joint_step(ev, generator=generator(0))
        assert step.scores.shape == hmm.conditional_scores(ev, step.latents).shape == (3, 4, 4)
        if hmm.homogeneous:
            assert hmm.flows(ev, torch.ones(3)).emission.shape == (3, 4)


# Properties.


def assert_same_probabilities(found: Tensor, wanted: Tensor) -> None:
    """Log-probabilities; float32 may call what is below its range impossible."""
    assert_close(found.double().exp(), wanted.double().exp(), rtol=1e-3, atol=1e-5)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_eager_float32_agrees_with_the_reference_in_float64(case):
    hmm, ev = case
    exact = hmm.to(dtype=torch.float64)
    ids = torch.randint(hmm.vocab_size, ev.shape, generator=generator(0))
    share = torch.linspace(-1, 2, ev.shape[0])
    with ops.use("eager"):
        found = [hmm.log_partition(ev), hmm.conditional_log_prob(ids, ev)]
        rows = [hmm.posterior(ev), hmm.marginals(ev)]
        flows = hmm.flows(ev, share)
    with ops.use("reference"):
        wanted = [exact.log_partition(ev), exact.conditional_log_prob(ids, ev)]
        exact_rows = [exact.posterior(ev), exact.marginals(ev)]
        exact_flows = exact.flows(ev, share.double())
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert_close(a.double(), b, **CLOSE)
    for a, b in zip(rows, exact_rows, strict=True):
        assert a.dtype == torch.float32
        assert_same_probabilities(a, b)
    for a, b in zip(flat_flows(flows), flat_flows(exact_flows), strict=True):
        assert a.dtype == torch.float32
        assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


def flat_flows(flows) -> list[Tensor]:
    steps = flows.transition if isinstance(flows.transition, tuple) else (flows.transition,)
    return [flows.initial, *steps, flows.emission]


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


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_neutral_circuit_changes_nothing(states, vocab, length, seed):
    hmm = HMM.neutral(states, vocab, dtype=torch.float64)
    logits = torch.randn(2, length, vocab, generator=generator(seed), dtype=torch.float64)
    ev = Evidence(logits=logits, temperature=0.8)
    assert_close(hmm.marginals(ev), (logits / 0.8).log_softmax(-1), **EXACT)
    assert_close(hmm.log_partition(ev), torch.full((2,), -length * math.log(vocab), dtype=torch.float64), **EXACT)


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


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_samples_of_every_layout_follow_the_joint_distribution(layout, backend):
    truth = sampled_truth(layout, "mixed_all")
    found = truth.hmm.sample(replicated(truth.ev, 0), generator=generator(3))
    counts = joint_cells(truth, found.tokens, found.latents)
    assert chi_square_p_value(counts, truth.probability[0].flatten()) > 1e-3


def test_many_samples_have_a_leading_axis_and_follow_the_distribution():
    truth = sampled_truth("dense", "mixed_all")
    found = truth.hmm.sample(truth.ev, num_samples=500, generator=generator(8))
    assert found.tokens.shape == found.latents.shape == (500, 2, 3)
    assert_close(found.log_partition.double(), truth.log_partition, rtol=0, atol=1e-5)
    for b in range(2):
        counts = joint_cells(truth, found.tokens[:, b], found.latents[:, b])
        assert chi_square_p_value(counts, truth.probability[b].flatten()) > 1e-3


def test_one_of_many_samples_is_the_single_sample():
    truth = sampled_truth("dense", "logits")
    one = truth.hmm.sample(truth.ev, generator=generator(5))
    many = truth.hmm.sample(truth.ev, num_samples=1, generator=generator(5))
    assert torch.equal(many.tokens[0], one.tokens)
    assert torch.equal(many.latents[0], one.latents)


@given(cases(dtype=torch.float64), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_the_same_uniforms_give_the_same_paths_in_both_backends(case, seed):
    hmm, ev = case
    uniforms = torch.rand(ev.shape[0], 3, ev.shape[1], generator=generator(seed), dtype=torch.float64)
    found = []
    for name in BACKENDS:
        with ops.use(name):
            found.append(inference.sample_latents(hmm, ev, uniforms)[0])
    assert torch.equal(*found)


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


def test_impossible_evidence_names_its_sequences(backend):
    hmm, ev = HMM.random(3, 4), impossible_batch()
    with pytest.raises(ImpossibleEvidence, match=r"sequence\(s\) 1, 4 of") as error:
        hmm.sample(ev)
    assert error.value.sequences == (1, 4)


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


@given(cases(dtype=torch.float64), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_joint_step_is_a_path_and_the_scores_given_it(case, seed):
    hmm, ev = case
    step = hmm.joint_step(ev, generator=generator(seed))
    assert_close(step.scores, hmm.conditional_scores(ev, step.latents), rtol=0, atol=0)
    assert_close(step.log_partition, hmm.log_partition(ev), **EXACT)


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


@pytest.mark.parametrize("kind", ["logits", "sparse_tail", "missing"])
def test_tokens_of_a_large_vocabulary_follow_their_distribution(kind):
    hmm = HMM.random(2, 333, seed=2)
    ev = make_evidence(kind, (1, 1), 2, 333, seed=3, dtype=torch.float32)
    found = hmm.sample(replicated(ev, 0, 60_000), generator=generator(1))
    counts = torch.bincount(found.tokens[:, 0], minlength=333)
    joint = hmm.log_emission.double() + hmm.log_initial.double()[:, None] + token_log_weights(ev, 333)[0, 0]
    assert chi_square_p_value(counts, joint.logsumexp(0).log_softmax(-1)) > 1e-3


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


# Bad input: one clear error each.

GOOD = HMM.random(3, 4)
INITIAL, TRANSITION, EMISSION = GOOD.log_initial, GOOD.log_transition, GOOD.log_emission


def with_row(table: Tensor, row: int | None, value: float) -> Tensor:
    table = table.clone()
    table[... if row is None else row] = value
    return table


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((with_row(INITIAL, None, -3.0), TRANSITION, EMISSION), r"log_initial sums to 0\.149"),
        ((INITIAL, with_row(TRANSITION, 1, 0.0), EMISSION), "row 1 of log_transition sums to 3"),
        ((INITIAL, TRANSITION, with_row(EMISSION, 2, -1.0)), r"row 2 of log_emission sums to 1\.47"),
        ((INITIAL, TRANSITION.exp(), EMISSION), r"row 0 of log_transition .*log_softmax"),
        ((INITIAL, TRANSITION, with_row(EMISSION, 0, math.nan)), "row 0 of log_emission holds NaN"),
        ((with_row(INITIAL, 1, math.nan), TRANSITION, EMISSION), "log_initial holds NaN"),
        ((INITIAL, with_row(TRANSITION, 2, -math.inf), EMISSION), "row 2 of log_transition sums to 0"),
        ((INITIAL[:2], TRANSITION, EMISSION), r"log_transition must be \(2, 2\).*found \(3, 3\)"),
        ((INITIAL[None], TRANSITION, EMISSION), r"log_initial must be \(N,\).*found shape \(1, 3\)"),
        ((INITIAL[:0], TRANSITION, EMISSION), r"N >= 1, found shape \(0,\)"),
        ((INITIAL, TRANSITION[:, :2], EMISSION), r"log_transition .*found \(3, 2\)"),
        ((INITIAL, TRANSITION[0], EMISSION), r"log_transition .*found \(3,\)"),
        ((INITIAL, TRANSITION[None, None], EMISSION), r"log_transition .*found \(1, 1, 3, 3\)"),
        ((INITIAL, (TRANSITION[:, :2], TRANSITION), EMISSION), r"log_transition .*\(3, 2\) and \(3, 3\)"),
        ((INITIAL, (TRANSITION, TRANSITION, TRANSITION), EMISSION), "log_transition must be"),
        ((INITIAL, (TRANSITION, TRANSITION[None]), EMISSION), r"log_transition .*\(3, 3\) and \(1, 3, 3\)"),
        ((INITIAL, TRANSITION, EMISSION[:2]), r"log_emission must be \(3, V\).*found \(2, 4\)"),
        ((INITIAL, TRANSITION, EMISSION[0]), r"log_emission .*found \(4,\)"),
        ((INITIAL, TRANSITION, EMISSION[:, :0]), r"log_emission has empty rows"),
        ((INITIAL, TRANSITION.expand(3, 3, 3), EMISSION.expand(3, 3, 4)), "3 positions and log_transition 3 steps"),
        ((INITIAL.double(), TRANSITION, EMISSION), "found torch.float64, torch.float32, torch.float32"),
        ((INITIAL, TRANSITION, EMISSION.double()), "found torch.float32, torch.float32, torch.float64"),
        ((INITIAL.half(), TRANSITION.half(), EMISSION.half()), "found torch.float16"),
        ((INITIAL.long(), TRANSITION, EMISSION), "found torch.int64"),
        ((INITIAL, TRANSITION, EMISSION.to("meta")), "different devices: cpu, meta"),
        ((INITIAL, TRANSITION.to("meta"), EMISSION), "different devices: cpu, meta"),
    ],
)
def test_bad_parameters_are_named(arguments, named):
    with pytest.raises(InvalidCircuit, match=named):
        HMM(*arguments)


def test_rows_of_low_rank_factors_are_checked_each():
    left, right = HMM.random(3, 4, rank=2).log_transition
    with pytest.raises(InvalidCircuit, match=r"row 1 of log_transition\[1\]"):
        HMM(INITIAL, (left, with_row(right, 1, 0.0)), EMISSION)
    with pytest.raises(InvalidCircuit, match=r"row 0 of log_transition\[0\]"):
        HMM(INITIAL, (with_row(left, 0, 0.0), right), EMISSION)


def test_rows_of_positions_are_named_by_position():
    hmm = HMM.random(3, 4, length=3)
    table = hmm.log_emission.clone()
    table[2, 1] = 0.0
    with pytest.raises(InvalidCircuit, match="row 2, 1 of log_emission sums to 4"):
        HMM(hmm.log_initial, hmm.log_transition, table)


def test_validation_can_be_left_out():
    HMM(INITIAL, with_row(TRANSITION, 1, 0.0), EMISSION, validate=False)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (-1, 2)])
def test_sizes_must_be_positive(sizes):
    for make in (HMM.random, HMM.neutral):
        with pytest.raises(InvalidCircuit, match=f"positive, found {sizes[0]} and {sizes[1]}"):
            make(*sizes)


def test_only_exact_types_are_served():
    with pytest.raises(InvalidCircuit, match=r"dtype must be one of .*found torch.float16"):
        GOOD.to(dtype=torch.float16)
    with pytest.raises(InvalidCircuit, match=r"emission must be one of .*found torch.int8"):
        GOOD.to(emission=torch.int8)


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Evidence(tokens=IDS + 4), r"observed tokens must be in 0\.\.3, found 4"),
        (lambda: Evidence(tokens=IDS - 1), r"observed tokens must be in 0\.\.3, found -1"),
        (lambda: Evidence(sparse=SparsePotentials(IDS[..., None] + 9, torch.zeros(2, 3, 1))), r"sparse ids .*found 9"),
        (lambda: Evidence(sparse=SparsePotentials(IDS[..., None] - 2, torch.zeros(2, 3, 1))), r"sparse ids .*found -2"),
        (lambda: Evidence(log_potentials=torch.zeros(2, 3, 5)), "over 5 tokens, the circuit over 4"),
        (lambda: Evidence(logits=torch.zeros(2, 3, 3)), "over 3 tokens, the circuit over 4"),
        (lambda: Evidence(latent_log_potentials=torch.zeros(2, 3, 4)), "over 4 states, the circuit has 3"),
        (lambda: Evidence(tokens=IDS[:, :0]), "has 0 positions, the circuit serves at least 1"),
        (lambda: Evidence(tokens=IDS.to("meta")), "the evidence is on meta, the circuit on cpu"),
    ],
)
def test_evidence_that_does_not_fit_is_named(make, named):
    ev = make()
    for query in (
        GOOD.log_partition,
        GOOD.posterior,
        GOOD.marginals,
        GOOD.sample,
        GOOD.flows,
    ):
        with pytest.raises(InvalidEvidence, match=named):
            query(ev)


def test_a_circuit_of_one_length_serves_no_other():
    with pytest.raises(InvalidEvidence, match="has 3 positions, the circuit serves 4"):
        HMM.random(3, 4, length=4).log_prob(IDS)


def test_a_mask_id_at_hidden_positions_is_no_error():
    observed = torch.tensor([[True, False, True]] * 2)
    GOOD.log_partition(Evidence(tokens=torch.where(observed, 0, 99), observed=observed))
    GOOD.log_partition(Evidence(tokens=torch.where(observed, 0, -1), observed=observed))


def test_ids_of_a_completion_are_checked():
    ev = Evidence(missing=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(InvalidEvidence, match=r"shape \(2, 3\), found \(2, 2\)"):
        GOOD.conditional_log_prob(IDS[:, :2], ev)
    with pytest.raises(InvalidEvidence, match=r"found 7"):
        GOOD.conditional_log_prob(IDS + 7, ev)


def test_candidates_are_checked():
    ev = Evidence(missing=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(InvalidEvidence, match=r"candidates must be in 0\.\.3, found 4"):
        GOOD.marginals(ev, torch.full((2, 3, 1), 4))


def test_there_is_no_other_backend():
    with pytest.raises(ValueError, match=r"'fast'.*reference, eager, native, triton"), ops.use("fast"):
        pass


def test_a_forced_backend_ends_with_its_block():
    cpu = torch.device("cpu")
    for name, inner in itertools.product(BACKENDS, repeat=2):
        with ops.use(name):
            with ops.use(inner):
                assert ops.backend_for(cpu, torch.float32).name == inner
            assert ops.backend_for(cpu, torch.float32).name == name
    assert ops.backend_for(cpu, torch.float64).name == "eager"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda hmm, ev: hmm.log_partition(Evidence(log_potentials=torch.zeros(0, 3, 4))), "batch is empty"),
        (lambda hmm, ev: hmm.sample(ev, num_samples=0), "num_samples must be at least 1, found 0"),
        (lambda hmm, ev: hmm.conditional_scores(ev, torch.full((2, 3), 9)), r"latents must be in 0\.\.2, found 9"),
        (lambda hmm, ev: hmm.conditional_scores(ev, torch.zeros(1, 3, dtype=torch.long)), r"shape \(2, 3\)"),
        (lambda hmm, ev: hmm.flows(ev, torch.ones(5)), r"weights must be \(B,\) = \(2,\), found \(5,\)"),
    ],
)
def test_arguments_that_do_not_fit_the_evidence_are_named(ask, message):
    with shape_checks(False), pytest.raises(InvalidEvidence, match=message):
        ask(HMM.random(3, 4), Evidence(logits=torch.zeros(2, 3, 4)))
