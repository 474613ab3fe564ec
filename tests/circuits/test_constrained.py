"""A circuit given a regular language: every query against all strings and all latent paths, read by the automaton."""

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, Head, HeadConfig, Modulated, ops
from codd.circuits.constrained import ConstrainedHMM, WindowConstraint
from codd.circuits.factors import Factors
from codd.circuits.ops.constrained.eager import Linear
from codd.constraints import Automaton
from codd.coupling import Coupled
from codd.decoding.options import Options
from codd.decoding.samplers import Noise, sample_any_order, sample_latent
from codd.errors import InvalidEvidence
from tests.support.contract import EXACT, check_completions, check_incremental, check_sums
from tests.support.enumeration import chi_square_p_value, log_normalise
from tests.support.strategies import (
    BACKENDS,
    KINDS,
    LAYOUTS,
    Truth,
    generator,
    make_evidence,
    make_hmm,
    shape_checks,
    with_gates,
)

CASES = int(os.environ.get("CODD_FUZZ", "120"))
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def unchecked():
    """Without the checks of shapes, which take longer than such small cases."""
    with shape_checks(False):
        yield


def random_automaton(states: int, vocab: int, seed: int, holes: float = 0.3) -> Automaton:
    g = generator(seed)
    table = torch.randint(states, (states, vocab), generator=g)
    table = torch.where(torch.rand(states, vocab, generator=g) < holes, -1, table)
    if vocab > 2:
        table[:, 1] = table[:, 0]  # a class of two tokens
    accepting = (torch.rand(states, generator=g) < 0.6).nonzero()[:, 0].tolist()
    return Automaton(table.numpy(), start=int(torch.randint(states, (), generator=g)), accepting=accepting or [0])


def end_weights(states: int, seed: int) -> Tensor:
    g = generator(seed)
    weights = torch.randn(states, generator=g, dtype=torch.float64)
    return weights.masked_fill(torch.rand(states, generator=g) < 0.3, -math.inf)


def reading(strings: Tensor, automaton: Automaton, log_start: Tensor | None, log_end: Tensor | None) -> Tensor:
    """The log-weight of each string by itself, token by token."""
    starts = {automaton.start: 0.0} if log_start is None else dict(enumerate(log_start.tolist()))
    ends = [0.0 if ok else -math.inf for ok in automaton.accepting] if log_end is None else log_end.tolist()
    table = np.pad(np.asarray(automaton.table), ((0, 1), (0, 0)), constant_values=-1)  # the state -1 stays
    out = []
    for start, weight in starts.items():
        state = np.full(len(strings), start)
        for token in strings.numpy().T:
            state = table[state, np.asarray(automaton.classes)[token]]
        out.append(weight + torch.tensor([*ends, -math.inf], dtype=torch.float64)[torch.from_numpy(state)])
    return torch.stack(out).logsumexp(0)


@dataclass(frozen=True, eq=False)
class ConstrainedTruth:
    """The table of all strings and paths of a truth without the language, and the language."""

    plain: Truth
    automaton: Automaton
    log_start: Tensor | None = None
    log_end: Tensor | None = None

    @cached_property
    def truth(self) -> Truth:
        read = reading(self.plain.strings, self.automaton, self.log_start, self.log_end)
        return Truth(self.plain.hmm, self.plain.ev, read)

    @cached_property
    def circuit(self) -> ConstrainedHMM:
        return ConstrainedHMM(self.plain.hmm, self.automaton, self.log_start, self.log_end)


def make_case(seed: int, dtype: torch.dtype = torch.float64) -> ConstrainedTruth:
    g = generator(seed)

    def one_of(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    length, vocab, latents, states = one_of(1, 5), one_of(1, 6), one_of(1, 4), one_of(1, 6)
    while (vocab * latents) ** length > 5_000:
        length -= 1
    layout, kind = LAYOUTS[one_of(0, len(LAYOUTS) - 1)], KINDS[one_of(0, len(KINDS) - 1)]
    hmm = make_hmm(layout, latents, vocab, length, seed, dtype, scale=(0.5, 2.0)[seed % 2])
    ev = make_evidence(kind, (one_of(1, 3), length), latents, vocab, seed, dtype)
    log_start = end_weights(states, seed) if one_of(0, 2) == 0 else None
    log_end = end_weights(states, seed + 1) if one_of(0, 2) == 0 else None
    return ConstrainedTruth(Truth(hmm, ev), random_automaton(states, vocab, seed), log_start, log_end)


def agree(case: ConstrainedTruth, near: float = EXACT) -> None:
    for check in (check_sums, check_completions, check_incremental):
        check(case.circuit, case.truth, near)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("dtype", "backend", "every"),
    [
        (torch.float64, "eager", 1),
        (torch.float32, "eager", 10),
        (torch.float32, "native", 3),
        (torch.float64, "reference", 15),
    ],
)
def test_all_queries_against_enumeration(dtype, backend, every):
    possible, seeds = 0, range(0, CASES, every)
    with ops.use(backend):
        for seed in seeds:
            case = make_case(seed, dtype)
            agree(case, EXACT if dtype == torch.float64 else 1e-5)
            possible += int((case.truth.log_partition > -math.inf).sum())
    assert possible > len(seeds) / 2, "most cases should be possible, and some are not"


@pytest.mark.parametrize("layout", ["low_rank", "low_rank_per_position"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_are_honoured(layout, backend):
    hmm, shape = make_hmm(layout, 3, 3, 4, seed=1), (2, 4)
    ev = make_evidence("mixed_dense", shape, 3, 3, seed=2)
    ev = replace(ev, missing=None)
    with ops.use(backend):
        agree(ConstrainedTruth(Truth(hmm, with_gates(ev, 2)), random_automaton(4, 3, 3, holes=0.1)))


@pytest.mark.numerics
def test_messages_in_c_are_those_of_pytorch():
    """40 states fill whole registers and leave some over; tokens are committed in between."""
    hmm, automaton = HMM.random(num_states=40, vocab_size=12, seed=3), random_automaton(9, 12, seed=4)
    logits = 3 * torch.randn(1, 8, 12, generator=generator(5))
    found = []
    for backend in ("native", "eager"):
        with ops.use(backend):
            conditioner = ConstrainedHMM(hmm, automaton).incremental(Evidence(logits=logits), 6)
            for t in (4, 1, 6, 7):
                best = int(conditioner.dense_log_marginals()[0, t].argmax())
                conditioner.commit(torch.tensor([t]), torch.tensor([best]))
                found.append((conditioner.log_marginals().exp(), conditioner.log_partition, conditioner.candidates))
    for fast, slow in zip(found[:4], found[4:], strict=True):
        assert_close(fast, slow, **SINGLE)


def test_an_automaton_with_more_ways_than_classes():
    """So many sets of classes lead from state to state that the classes themselves are fewer."""
    hmm, ev = make_hmm("dense", 2, 7, 3, 1), make_evidence("mixed_dense", (2, 3), 2, 7, 2)
    table = (torch.arange(40)[:, None] + torch.randint(3, (40, 7), generator=generator(0))) % 40
    case = ConstrainedTruth(Truth(hmm, ev), Automaton(table.numpy(), 0, list(range(5))))
    assert case.circuit._chain.classes.num_groups == case.automaton.num_classes == 7
    agree(case)


def sampled_case(seed: int = 7) -> ConstrainedTruth:
    hmm = make_hmm("dense", 2, 3, 3, seed)
    ev = Evidence(
        tokens=torch.tensor([[0, 9, 9], [9, 9, 9]]),
        observed=torch.tensor([[True, False, False], [False] * 3]),
        logits=torch.randn(2, 3, 3, generator=generator(seed), dtype=torch.float64),
    )
    automaton = Automaton([[0, 1, 2], [1, -1, 0], [2, 0, -1]], 0, [0, 2])
    log_start = torch.tensor([0.0, -0.5, -1.0], dtype=torch.float64)
    return ConstrainedTruth(Truth(hmm, ev), automaton, log_start, torch.tensor([0.3, -math.inf, 0.0]).double())


def number_of(tokens: Tensor, vocab: int) -> Tensor:
    return (tokens * vocab ** torch.arange(tokens.shape[-1] - 1, -1, -1)).sum(-1)


def fits(tokens: Tensor, case: ConstrainedTruth) -> None:
    """A chi-square test of samples (M, B, L) over all strings."""
    by_string = case.truth.probability.logsumexp(-1)
    for b in range(tokens.shape[1]):
        counts = torch.bincount(number_of(tokens[:, b], case.plain.hmm.vocab_size), minlength=by_string.shape[1])
        assert chi_square_p_value(counts, by_string[b]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_samples_follow_the_distribution(dtype):
    case = sampled_case()
    circuit = case.circuit.to(dtype=dtype)
    samples = circuit.sample(case.plain.ev, generator=generator(1), num_samples=4000)
    fits(samples.tokens, case)
    one = circuit.sample(case.plain.ev, generator=generator(1))
    assert one.tokens.shape == one.latents.shape == (2, 3)
    latents = samples.latents[:, 1, 1] % 2
    wanted = case.truth.posterior[1, 1]
    assert chi_square_p_value(torch.bincount(latents, minlength=2), wanted) > 1e-3


def test_tokens_by_the_scores_of_a_joint_step_follow_the_distribution():
    case = sampled_case()
    ev = case.plain.ev
    many = Evidence(
        tokens=ev.tokens[1:].expand(3000, -1),
        observed=ev.observed[1:].expand(3000, -1),
        logits=ev.logits[1:].expand(3000, -1, -1),
    )
    step = case.circuit.joint_step(many, generator=generator(5))
    assert_close(step.scores, case.circuit.conditional_scores(many, step.latents), **CLOSE)
    weights = step.scores.flatten(0, 1).softmax(-1)
    tokens = torch.multinomial(weights, 1, generator=generator(6)).view(3000, 1, 3)
    truth = ConstrainedTruth(
        Truth(case.plain.hmm, ev.select(torch.tensor([1]))), case.automaton, case.log_start, case.log_end
    )
    fits(tokens, truth)


def test_numbers_far_apart_are_answered_all_the_same():
    """The only string of the language is one that the network and the circuit all but exclude, in float32."""
    hmm = HMM.random(3, 4, seed=1, scale=30.0)
    logits = torch.randn(2, 5, 4, generator=generator(2)) * 60
    automaton = Automaton([[1, 2, -1, -1], [-1, 1, 0, -1], [-1, -1, 2, 0]], 0, [1])
    ev = Evidence(logits=logits, temperature=0.3)
    truth = ConstrainedTruth(Truth(hmm, ev), automaton).truth
    circuit = ConstrainedHMM(hmm, automaton)
    assert float(truth.log_partition.max()) < -100
    assert_close(circuit.log_partition(ev), truth.log_partition.float(), rtol=1e-5, atol=1e-3)
    assert_close(circuit.marginals(ev).exp(), truth.marginals.exp().float(), rtol=1e-3, atol=1e-4)
    samples = circuit.sample(ev, generator=generator(3), num_samples=20)
    assert all(automaton.accepts(s) for s in samples.tokens.flatten(0, 1).tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_no_number_holds_is_answered_by_logarithms(dtype):
    """Two states that never change: the one that weighs exp(-2000) at first is the likely one in the end."""
    stay = torch.eye(2, dtype=dtype).log()
    hmm = HMM(torch.full((2,), 0.5, dtype=dtype).log(), stay, HMM.random(2, 3, dtype=dtype).log_emission)
    latent = torch.zeros(2, 3, 2, dtype=dtype)
    latent[0, 0, 1], latent[0, 2, 0] = -2000, -2001
    ev = Evidence(latent_log_potentials=latent)
    case = ConstrainedTruth(Truth(hmm, ev), Automaton([[1, 0, 0], [0, 1, -1]], 0, [0]))
    agree(case, EXACT if dtype == torch.float64 else 1e-5)


def test_what_cannot_be_is_said():
    hmm = make_hmm("dense", 2, 3, 3)
    automaton = Automaton([[1, -1, -1], [2, -1, -1], [-1, -1, -1]], 0, [2])  # two tokens, not three
    circuit = ConstrainedHMM(hmm, automaton)
    ev = Evidence(missing=torch.ones(2, 3, dtype=torch.bool))
    assert circuit.log_partition(ev).tolist() == [-math.inf] * 2
    assert bool((circuit.marginals(ev) == -math.inf).all())
    assert bool((circuit.posterior(ev) == -math.inf).all())
    assert circuit.joint_step(ev).log_partition.tolist() == [-math.inf] * 2
    assert circuit.incremental(ev).log_partition.tolist() == [-math.inf] * 2
    with pytest.raises(InvalidEvidence, match="NaN"):
        circuit.log_partition(Evidence(log_potentials=torch.full((1, 3, 3), math.nan).double()))


class TestCoupled:
    def window(self, circuit, constraint, dtype: torch.dtype = torch.float32, **more: Tensor) -> Coupled:
        g = generator(3)
        tokens = torch.tensor([[2, 0, 0, 0, 1]])
        masked = torch.tensor([[False, True, True, True, False]])
        logits = torch.randn(1, 5, 3, generator=g, dtype=dtype)
        return Coupled(circuit, logits=logits, tokens=tokens, masked=masked, constraint=constraint, **more)

    automaton = Automaton([[0, 1, 0], [-1, 0, 2], [1, 2, -1]], 0, [0, 1])

    def accepted(self) -> list[list[int]]:
        strings = [[2, a, b, c, 1] for a in range(3) for b in range(3) for c in range(3)]
        return [s for s in strings if self.automaton.accepts(s)]

    @pytest.mark.parametrize("circuit", [HMM.random(4, 3, seed=2), HMM.neutral(1, 3)])
    def test_the_queries_are_those_of_the_product_given_the_language(self, circuit):
        plain, joint = self.window(circuit, None), self.window(circuit, self.automaton)
        strings = torch.tensor(self.accepted())
        log_p = torch.cat([plain.log_prob(s[None]) for s in strings])
        assert_close(torch.cat([joint.log_prob(s[None]) for s in strings]), log_normalise(log_p), **SINGLE)
        assert_close(joint.log_partition() - plain.log_partition(), log_p.logsumexp(0, keepdim=True), **SINGLE)
        outside = torch.tensor([[2, 1, 0, 0, 1]])
        assert not self.automaton.accepts(outside[0].tolist())
        assert joint.log_prob(outside).item() == -math.inf
        wanted = torch.zeros(5, 3).index_put_(
            (torch.arange(5).expand_as(strings), strings), log_normalise(log_p).exp()[:, None], accumulate=True
        )
        assert_close(joint.marginals()[0].exp(), wanted, **SINGLE)
        rest = joint.condition(strings[:1], torch.tensor([[False, True, False, False, False]]))
        same = strings[:, 1] == strings[0, 1]
        assert_close(rest.log_prob(strings[:1]), log_normalise(log_p[same])[:1], **SINGLE)
        assert bool((joint.mutual_information() >= 0).all())

    def test_a_window_may_begin_and_end_anywhere(self):
        ends = torch.tensor([-math.inf, 0.0, 0.0])
        joint = self.window(
            HMM.neutral(1, 3), WindowConstraint(self.automaton, torch.tensor([0.0, 0.0, -math.inf]), ends)
        )
        for string in joint.sample(generator=generator(0), num_samples=30).tokens[:, 0].tolist():
            assert {self.automaton.after(string, 0), self.automaton.after(string, 1)} & {1, 2}

    def test_a_modulated_circuit_is_conditioned_first(self):
        head = Head(HeadConfig(6, 3, 2))
        factors = Factors.near_neutral(3, 3, inner_states=2, noise=1.0)
        circuit = Modulated(HMM.from_factors(factors), head)
        features = torch.randn(1, 5, 6, generator=generator(1))
        with torch.no_grad():
            for weight in head.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator(2)))
            plain = self.window(circuit, None, features=features)
            joint = self.window(circuit, self.automaton, features=features)
            strings = torch.tensor(self.accepted())
            log_p = torch.cat([plain.log_prob(s[None]) for s in strings])
            got = torch.cat([joint.log_prob(s[None]) for s in strings])
        assert_close(got, log_normalise(log_p), **SINGLE)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("circuit", [HMM.random(4, 3, seed=2), HMM.neutral(1, 3)])
    @pytest.mark.parametrize("sampler", ["any_order", "latent"])
    def test_samplers_write_words_of_the_language(self, circuit, temperature, sampler):
        written = set()
        for seed in range(6):
            joint = self.window(circuit, self.automaton)
            noise = Noise.drawn(5, generator(seed))
            while bool(joint.masked.any()):
                options = Options.of(temperature=temperature, sampler=sampler)
                if sampler == "any_order":
                    ranking = sample_any_order(joint, 1, options, noise)
                else:
                    ranking = sample_latent(joint, 1, options, noise)
                assert bool(ranking.valid)
                step = ranking.writes()
                where = torch.zeros_like(joint.masked)
                where[0, step.positions] = True
                tokens = joint.tokens.clone()
                tokens[0, step.positions] = step.tokens
                joint = joint.condition(tokens, where)
            assert self.automaton.accepts(joint.tokens[0].tolist())
            written.add(tuple(joint.tokens[0].tolist()))
        assert temperature == 0 or len(written) > 1

    def test_what_the_language_excludes_is_void(self):
        joint = self.window(HMM.neutral(1, 3), Automaton([[0, -1, 0]], 0, [0]))  # the last token is 1
        noise = Noise.drawn(5, generator(0))
        for temperature in (0.0, 1.0):
            options = Options.of(temperature=temperature)
            assert not bool(sample_any_order(joint, 2, options, noise).valid)
            assert not bool(sample_latent(joint, 2, options, noise).valid)


def test_only_live_states_and_classes_cost(monkeypatch):
    """A chain of 200 states of which a window of 3 positions can see 4: rows are made for these alone."""
    size = 200
    table = np.full((size, 6), -1)
    table[np.arange(size - 1), np.arange(size - 1) % 6] = np.arange(1, size)
    automaton = Automaton(table, 0, [3])
    circuit = ConstrainedHMM(HMM.random(2, 6), automaton)
    seen = []
    step = Linear.step

    def counted(self, transition, t, rows, reverse):
        seen.append(len(rows.ids))
        return step(self, transition, t, rows, reverse)

    monkeypatch.setattr(Linear, "step", counted)
    with ops.use("eager"):
        assert float(circuit.log_partition(Evidence(missing=torch.ones(1, 3, dtype=torch.bool)))) > -math.inf
    assert seen == [1, 1]
