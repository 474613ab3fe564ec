"""One interface for circuits of every kind: what they say of themselves, and the same answers through it."""

import pytest
import torch
from jaxtyping import config
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Circuit, Evidence, Factors, Head, HeadConfig, Modulated, Modulation
from codd.circuits.protocol import Conditioner, ProbabilisticCircuit
from codd.errors import InvalidCircuit, InvalidEvidence

B, L, V, N, R, D = 2, 4, 5, 3, 2, 6
EXACT = {"atol": 1e-9, "rtol": 1e-9}
ONES = torch.ones(B, L, dtype=torch.int64)
QUERIES = {
    **{name: lambda c, ev, name=name: getattr(c, name)(ev) for name in ("log_partition", "marginals", "posterior")},
    "conditional_log_prob": lambda c, ev: c.conditional_log_prob(ONES, ev),
    "sample": lambda c, ev: c.sample(ev, generator=torch.Generator().manual_seed(1), num_samples=2).tokens,
    "conditional_scores": lambda c, ev: c.conditional_scores(ev, ONES),
    "joint_step": lambda c, ev: c.joint_step(ev, uniforms=torch.full((B, L), 0.3)).scores,
    "pairwise": lambda c, ev: c.pairwise(ev, torch.tensor([0, 3]).expand(B, L, 2)),
    "incremental": lambda c, ev: c.incremental(ev).log_marginals(),
}


def chain() -> HMM:
    return HMM.random(N, V, seed=1, dtype=torch.float64)


def modulated(states: int = N, inner: int = R) -> Modulated:
    head = Head(HeadConfig(D, states, inner))
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random))
    factors = Factors.near_neutral(N, V, inner_states=R, noise=1.0).map(lambda x: x.double())
    return Modulated(HMM.from_factors(factors), head.requires_grad_(False))


KINDS = {"hmm": chain, "modulated": modulated, "graph": lambda: chain().as_circuit(L)}


@pytest.fixture(params=KINDS)
def circuit(request) -> ProbabilisticCircuit:
    return KINDS[request.param]()


def features() -> Tensor:
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(3))


def masked() -> Tensor:
    return torch.tensor([[True, False, True, True], [True, True, True, True]])


def evidence(modulation: Modulation | None = None) -> Evidence:
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(B, L, V, generator=random, dtype=torch.float64)
    tokens = torch.randint(0, V, (B, L), generator=random)
    return Evidence(
        tokens=tokens, observed=~masked(), logits=logits, **({} if modulation is None else modulation._asdict())
    )


def test_every_kind_is_a_probabilistic_circuit(circuit):
    assert isinstance(circuit, ProbabilisticCircuit)
    inner, modulation = circuit.condition_on(features(), masked())
    assert isinstance(inner, ProbabilisticCircuit)
    assert isinstance(circuit.incremental(evidence(modulation)), Conditioner)


def test_what_circuits_say_of_themselves():
    for circuit, length, width in ((chain(), None, None), (modulated(), None, D), (chain().as_circuit(L), L, None)):
        assert (circuit.vocab_size, circuit.num_latents, circuit.feature_width) == (V, N, width)
        assert (circuit.length, circuit.window) == (length, length)
        assert (circuit.device, circuit.dtype) == (torch.device("cpu"), torch.float64)
        assert circuit.supports_cuda_graphs == (not isinstance(circuit, Circuit))
    assert HMM.random(N, V, length=L).window == L


def test_static_circuits_ignore_features():
    for circuit in (chain(), chain().as_circuit(L)):
        for given in (None, features()):
            answers, modulation = circuit.condition_on(given, masked())
            assert answers is circuit
            assert modulation == (None, None)


def test_a_modulated_circuit_is_its_hmm_and_the_heads_evidence(monkeypatch):
    circuit = modulated()
    answers, modulation = circuit.condition_on(features(), masked())
    assert answers is circuit.hmm
    assert_close(modulation, circuit.modulate(features(), masked()), **EXACT)
    with pytest.raises(InvalidEvidence, match="this circuit is modulated: give the network's last hidden states"):
        circuit.condition_on(None, masked())
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as users run it: wrong shapes meet our own errors
    with pytest.raises(InvalidEvidence, match=r"features must be \(B, L, 6\) = \(2, 4, 6\).*found \(2, 4, 7\)"):
        circuit.condition_on(torch.zeros(B, L, D + 1), masked())


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_queries_of_a_modulated_circuit_are_those_of_its_hmm(query):
    circuit = modulated()
    ev = evidence(circuit.condition_on(features(), masked())[1])
    assert torch.equal(query(circuit, ev), query(circuit.hmm, ev))  # the same code on the same numbers
    with pytest.raises(InvalidEvidence, match=r"no latent_log_potentials.*condition_on\(features, masked\)"):
        query(circuit, evidence())
    with pytest.raises(InvalidEvidence, match="no step_log_gates"):
        query(circuit, evidence(Modulation(ev.latent_log_potentials)))


class TestJointStepOfAGeneralCircuit:
    def test_latents_are_decided_by_the_uniforms(self):
        graph, ev = chain().as_circuit(L), evidence()
        uniforms = torch.rand(40, B, L, generator=torch.Generator().manual_seed(2))
        steps = [graph.joint_step(ev, uniforms=u) for u in uniforms]
        assert torch.equal(steps[0].latents, graph.joint_step(ev, uniforms=uniforms[0]).latents)
        assert len({tuple(step.latents.flatten().tolist()) for step in steps}) > 10
        for step in steps:
            assert torch.equal(step.scores, graph.conditional_scores(ev, step.latents))
            assert torch.equal(step.log_partition, graph.log_partition(ev))

    def test_or_by_a_generator(self):
        graph, ev = chain().as_circuit(L), evidence()
        one, two = (graph.joint_step(ev, generator=torch.Generator().manual_seed(7)) for _ in range(2))
        assert torch.equal(one.latents, two.latents)

    def test_impossible_evidence_does_not_raise(self):
        graph, ev = chain().as_circuit(L), evidence()
        nothing = ev.logits.clone()
        nothing[0, 0] = -torch.inf
        ev = Evidence(tokens=ev.tokens, observed=ev.observed, logits=nothing)
        step = graph.joint_step(ev, uniforms=torch.rand(B, L))
        assert float(step.log_partition[0]) == -torch.inf
        assert float(step.log_partition[1]) > -torch.inf
        assert_close(step.scores, ev.dense_log_weights(V))


def test_a_general_circuit_stays_where_it_is():
    graph = chain().as_circuit(L)
    for place in ({}, {"device": "cpu"}, {"dtype": torch.float64}, {"device": torch.device("cpu")}):
        assert graph.to(**place) is graph
    for place in ({"device": "cuda"}, {"dtype": torch.float32}):
        with pytest.raises(InvalidCircuit, match="general circuit computes in float64 on the CPU, not"):
            graph.to(**place)
