"""Gates on the inner states of low-rank transitions: every query against all strings and all latent paths."""

import math
import warnings
from dataclasses import dataclass, replace
from functools import cache, cached_property

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, Flows, inference, ops
from codd.circuits.evidence import Kind
from codd.errors import InvalidEvidence
from tests.support.enumeration import chi_square_p_value
from tests.support.strategies import BACKENDS, KINDS, Truth, generator, make_evidence, make_hmm, shape_checks

LAYOUTS = ("low_rank", "low_rank_per_position")
EXACT = {"rtol": 1e-9, "atol": 1e-9}
N, R, V, L, B = 3, 2, 4, 4, 3
QUERIES = ("log_partition", "posterior", "marginals")


@pytest.fixture(params=BACKENDS)
def backend(request):
    with ops.use(request.param):
        yield request.param


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    with shape_checks(False):
        yield


def make_gates(shape: tuple[int, int], rank: int = R, seed: int = 0, size: float = 1.0) -> Tensor:
    """Normal numbers, or (with a size beyond them) plus or minus the size with some noise."""
    g = generator(seed)
    noise = torch.randn(shape[0], shape[1] - 1, rank, generator=g, dtype=torch.float64)
    return noise if size == 1.0 else (torch.randint(2, noise.shape, generator=g) * 2 - 1) * size + noise


@dataclass(frozen=True, eq=False)
class GatedTruth(Truth):
    """The weight of a step is the sum over inner states of left, gate and right; nothing else changes."""

    @cached_property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Probabilities, (L - 1, N, R) and (L - 1, R, N)."""
        left, right = (f.double().exp().expand(self.length - 1, -1, -1) for f in self.hmm.log_transition)
        return left, right

    def log_joint(self, weights: Tensor, latent: Tensor, gates: Tensor | None = None) -> Tensor:
        left, right = self.sides
        gates = self.ev.step_log_gates.double() if gates is None else gates
        out = self.hmm.log_initial.double()[self.paths[:, 0]].expand(self.ev.shape[0], -1)
        for t in range(self.length - 1):
            step = torch.einsum("ir,br,rj->bij", left[t], gates[:, t].exp(), right[t]).log()
            out = out + step[:, self.paths[:, t], self.paths[:, t + 1]]
        positions = torch.arange(self.length)
        out = out + latent[:, positions, self.paths].sum(-1)
        emitted = sum(self.emission[t][self.paths[:, t]][:, self.strings[:, t]].T for t in range(self.length))
        return out[:, None, :] + emitted + weights[:, positions, self.strings].sum(-1)[:, :, None]

    def through(self, share: Tensor) -> Tensor:
        """Expected uses of each way from a state through an inner state to a state, (L - 1, N, R, N)."""
        left, right = self.sides
        gates = self.ev.step_log_gates.double().exp()
        ways = torch.einsum("tir,btr,trj->btirj", left, gates, right)
        ways = ways / ways.sum(3, keepdim=True)
        states = torch.eye(self.hmm.num_states).double()[self.paths]
        on_paths = self.probability.exp().sum(1) * share.double()[:, None]
        steps = torch.einsum("bp,pti,ptj->btij", on_paths, states[:, :-1], states[:, 1:])
        return torch.einsum("btij,btirj->tirj", steps, ways)


@cache
def truth_of(layout: str, kind: str, length: int = L, size: float = 1.0) -> GatedTruth:
    seed = LAYOUTS.index(layout) * 100 + KINDS.index(kind)
    ev = make_evidence(kind, (B, length), seed=seed)
    gates = make_gates((B, length), seed=seed, size=size)
    return GatedTruth(make_hmm(layout, length=length, seed=seed), replace(ev, step_log_gates=gates))


CASES = [
    *(("low_rank", kind, L, 1.0) for kind in KINDS),
    *(("low_rank_per_position", kind, L, 1.0) for kind in ("observed", "sparse_tail", "mixed_all")),
    *((layout, kind, L, 60.0) for layout in LAYOUTS for kind in ("missing", "mixed_dense")),
    *((layout, "mixed_all", length, 1.0) for layout in LAYOUTS for length in (1, 2)),
    *(("low_rank", kind, 1, 1.0) for kind in ("observed", "latent")),
]
"""Layout, kind of evidence, length of the window, size of the gates."""


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def truth(request):
    return truth_of(*request.param)


def flat(flows: Flows) -> list[Tensor]:
    assert isinstance(flows.transition, tuple)
    return [flows.initial, *flows.transition, flows.emission]


# By enumeration, in float64.


def test_every_query_by_enumeration(truth, backend):
    hmm, ev = truth.hmm, truth.ev
    for name in QUERIES:
        assert_close(getattr(hmm, name)(ev), getattr(truth, name), **EXACT)
    candidates = torch.randint(V, (*ev.shape, 2), generator=generator(0))
    assert_close(hmm.marginals(ev, candidates), truth.marginals.gather(-1, candidates), **EXACT)
    assert_close(hmm.incremental(ev).log_marginals(), truth.marginals, **EXACT)
    check_completions(truth, B if backend == "eager" else 1)
    check_flows(truth, None)
    check_flows(truth, torch.tensor((0.5, -2.0, 0.0), dtype=torch.float64))
    check_joint_step(truth)


def check_completions(truth: GatedTruth, sequences: int) -> None:
    """The conditional probability of every string, as completion of some sequences."""
    for b in range(sequences):
        alone = truth.ev.select(torch.full((len(truth.strings),), b))
        hidden = ~truth.ev.rows(Kind.OBSERVED)[b]
        full = truth.strings if truth.ev.tokens is None else torch.where(hidden, truth.strings, truth.ev.tokens[b])
        place = (full * V ** torch.arange(truth.length - 1, -1, -1)).sum(-1)
        found = truth.hmm.conditional_log_prob(truth.strings, alone)
        assert_close(found, truth.probability[b].logsumexp(-1)[place], **EXACT)


def check_flows(truth: GatedTruth, weights: Tensor | None) -> None:
    """The expected counts of every parameter, and log Z."""
    found = truth.hmm.flows(truth.ev, weights)
    share = torch.ones(B) if weights is None else weights
    initial, _, emission = truth.flows(share)
    through = truth.through(share)
    for factor, wanted in zip(found.transition, (through.sum(3), through.sum(1)), strict=True):
        assert_close(factor, wanted if factor.ndim == 3 else wanted.sum(0), **EXACT)
    assert_close(found.initial, initial, **EXACT)
    assert_close(found.emission, emission if found.emission.ndim == 3 else emission.sum(0), **EXACT)
    assert_close(found.log_partition, truth.log_partition, **EXACT)


def check_joint_step(truth: GatedTruth) -> None:
    """A path and the scores given it: the same operations as by themselves, hence the same bits."""
    step = truth.hmm.joint_step(truth.ev, generator=generator(3))
    assert torch.equal(step.scores, truth.hmm.conditional_scores(truth.ev, step.latents))
    assert_close(step.log_partition, truth.log_partition, **EXACT)


# Samples.


def counts(rows: Tensor, table: Tensor) -> Tensor:
    """How often each row of the table occurs."""
    base = int(table.max()) + 1
    places = base ** torch.arange(table.shape[1])
    number = torch.empty(base ** table.shape[1], dtype=torch.int64)
    number[(table * places).sum(-1)] = torch.arange(len(table))
    return torch.bincount(number[(rows * places).sum(-1)], minlength=len(table))


@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_follow_the_joint_distribution(layout, dtype, size, backend):
    truth = truth_of(layout, "mixed_dense", 3, size)
    hmm, trials = truth.hmm.to(dtype=dtype), 10_000 if backend == "eager" else 2000
    for b in range(2):
        alone = truth.ev.select(torch.full((trials,), b))
        found = hmm.sample(alone, generator=generator(b + 20))
        by_string, by_path = truth.probability[b].logsumexp(-1), truth.probability[b].logsumexp(-2)
        assert chi_square_p_value(counts(found.tokens, truth.strings), by_string) > 1e-3
        assert chi_square_p_value(counts(found.latents, truth.paths), by_path) > 1e-3
        uniforms = torch.rand(1, trials, 3, generator=generator(b + 7))
        latents, value = inference.sample_latents(hmm, truth.ev.select(torch.tensor([b])), uniforms)
        assert chi_square_p_value(counts(latents[0], truth.paths), by_path) > 1e-3
        assert_close(value.double(), truth.log_partition[b : b + 1], rtol=1e-5, atol=1e-5)


# One token after the other.


def observing(ev: Evidence, tokens: Tensor, known: Tensor) -> Evidence:
    before = ev.rows(Kind.OBSERVED)
    given = tokens if ev.tokens is None else torch.where(before, ev.tokens, tokens)
    return replace(ev, tokens=given, observed=before | known)


@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_that_become_known_one_by_one(layout, size, backend):
    hmm, tokens = make_hmm(layout, seed=1), torch.randint(V, (B, L), generator=generator(4))
    ev = replace(make_evidence("mixed_dense", (B, L), seed=2), step_log_gates=make_gates((B, L), seed=3, size=size))
    order = torch.stack([torch.randperm(L, generator=generator(b)) for b in range(B)])
    known, each = torch.zeros(B, L, dtype=torch.bool), torch.arange(B)
    exact, single = hmm, hmm.to(dtype=torch.float32)
    conditioners = [(made.incremental(ev, count), count) for made in (exact, single) for count in (None, 2)]
    for t in range(L + 1):
        truth, at = GatedTruth(hmm, observing(ev, tokens, known)), order[:, t % L]
        for found, candidates in conditioners:
            near = 1e-9 if found.log_partition.dtype == torch.float64 else 2e-5
            want = truth.marginals if candidates is None else truth.marginals.gather(-1, found.candidates)
            assert_close(found.log_marginals().double().exp(), want.exp(), rtol=0, atol=near)
            dense = found.dense_log_marginals(at).double().exp()
            assert_close(dense, truth.marginals[each, at].exp(), rtol=0, atol=near)
            assert_close(found.log_partition.double(), truth.log_partition, rtol=near, atol=near)
            found.commit(at, tokens[each, at])
        known[each, at] = True
    for found, _ in conditioners:
        assert torch.equal(found.evidence.step_log_gates, ev.step_log_gates)


# float32, and what it would lose.


def assert_agrees(hmm: HMM, ev: Evidence, atol: float = 2e-4) -> None:
    """Every query of the fast path in the circuit's type, against the reference in float64."""
    exact, ids = hmm.to(dtype=torch.float64), torch.zeros(ev.shape, dtype=torch.int64)
    uniforms, share = torch.rand(ev.shape, generator=generator(0)), torch.linspace(-1, 2, ev.shape[0])
    answers = []
    for circuit, name in ((hmm, "eager"), (exact, "reference")):
        with ops.use(name):
            values = [circuit.log_partition(ev)]
            rows = [circuit.posterior(ev), circuit.marginals(ev)]
            flows, step = flat(circuit.flows(ev, share.to(circuit.dtype))), circuit.joint_step(ev, uniforms=uniforms)
            given = circuit.conditional_log_prob(ids, ev)
        assert all(x.dtype == circuit.dtype for x in (*values, *rows, *flows, given))
        answers.append((values, rows, flows, given, step.latents))
    (values, rows, flows, given, latents), (wanted, exact_rows, exact_flows, exact_given, exact_latents) = answers
    for a, b in zip(values, wanted, strict=True):
        assert_close(a.double(), b, rtol=1e-5, atol=atol)
    largest = float(wanted[0].abs().amax())  # the difference of two numbers of this size
    assert_close(given.double(), exact_given, rtol=1e-4, atol=atol + 1e-6 * largest)
    for a, b in zip(rows, exact_rows, strict=True):
        assert_close(a.double().exp(), b.exp(), rtol=0, atol=atol)
    for a, b in zip(flows, exact_flows, strict=True):
        assert_close(a.double(), b, rtol=1e-3, atol=atol)
    assert torch.equal(latents, exact_latents)


@pytest.mark.parametrize("size", [1.0, 5.0, 30.0, 60.0, 200.0, 1000.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_agrees_with_the_reference(layout, size):
    hmm = make_hmm(layout, 9, 12, 9, seed=1, dtype=torch.float32)
    for kind in ("logits_temperatures", "mixed_all"):
        ev = make_evidence(kind, (4, 9), 9, 12, seed=3, dtype=torch.float32)
        assert_agrees(hmm, replace(ev, step_log_gates=make_gates((4, 9), 2, 5, size).float()))


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
    ev = Evidence(tokens=torch.tensor([[0, 2, 2], [0, 1, 2]]), step_log_gates=make_gates((2, 3), 3).float())
    assert hmm.sample(ev, generator=generator(0)).latents.tolist() == [[1, 1, 1]] * 2
    assert_agrees(hmm, ev)


# What gates mean.


def answers(hmm: HMM, ev: Evidence) -> list[Tensor]:
    step = hmm.joint_step(ev, generator=generator(0))
    return [getattr(hmm, name)(ev) for name in QUERIES] + [*flat(hmm.flows(ev)), *step]


@pytest.mark.parametrize("kind", ["missing", "mixed_dense", "mixed_all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gates_of_zero_are_no_gates(layout, kind, backend):
    hmm, ev = make_hmm(layout), make_evidence(kind, (B, L))
    zero = replace(ev, step_log_gates=torch.zeros(B, L - 1, R))
    for found, wanted in zip(answers(hmm, zero), answers(hmm, ev), strict=True):
        assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_kernels_leave_gates_to_the_eager_path():
    pytest.importorskip("triton")
    hmm = make_hmm("low_rank", dtype=torch.float32)
    logits = make_evidence("logits", (B, L), dtype=torch.float32).logits
    ev = Evidence(logits=logits, step_log_gates=make_gates((B, L)).float())
    wanted = answers(hmm, ev)
    with warnings.catch_warnings(), ops.use("triton"):
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy in the interpreter: infinities are allowed for
        found = answers(hmm, ev)
        marginals = hmm.incremental(ev, V).log_marginals()
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, rtol=1e-3, atol=1e-3)
    exact = hmm.marginals(ev).gather(-1, hmm.incremental(ev, V).candidates)
    assert_close(marginals, exact, rtol=2e-3, atol=2e-3)


# What is refused.

LOGITS = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("gates", "named"),
    [
        (torch.zeros(2, 3, 2), r"step_log_gates must have shape \(2, 2, \*\), found \(2, 3, 2\)"),
        (torch.zeros(1, 2, 2), r"\(2, 2, \*\), found \(1, 2, 2\)"),
        (torch.zeros(2, 2), r"\(2, 2, \*\), found \(2, 2\)"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), "must be floating point, found torch.int64"),
        (torch.zeros(2, 2, 2, device="meta"), "is on meta, the rest of the evidence on cpu"),
        (torch.full((2, 2, 2), math.nan), "must be finite"),
        (torch.full((2, 2, 2), -math.inf), "must be finite"),
        (torch.full((2, 2, 2), math.inf), "must be finite"),
    ],
)
def test_gates_that_do_not_fit_the_evidence(gates, named):
    with pytest.raises(InvalidEvidence, match=named):
        Evidence(logits=LOGITS, step_log_gates=gates)


@pytest.mark.parametrize(
    ("hmm", "named"),
    [
        (HMM.random(3, 4, rank=5), "over 2 inner states, the circuit has steps of rank 5"),
        (HMM.random(3, 4), "over 2 inner states, the circuit has no such steps"),
        (HMM.random(2, 4), "no such steps"),
    ],
)
def test_gates_that_do_not_fit_the_circuit(hmm, named):
    ev = Evidence(logits=LOGITS, step_log_gates=torch.zeros(2, 2, 2))
    for name in (*QUERIES, "flows", "sample", "joint_step", "incremental"):
        with pytest.raises(InvalidEvidence, match=named):
            getattr(hmm, name)(ev)


def test_gates_alone_are_no_evidence():
    with pytest.raises(InvalidEvidence, match="empty evidence"):
        Evidence(step_log_gates=torch.zeros(2, 2, 2))
