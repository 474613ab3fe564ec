"""A constant added to a position's logits changes nothing: every query of the product against enumeration in float64.

What is enumerated is the distribution of the very numbers that are given: near 1e8 float32 knows multiples of 8 only.
"""

import itertools
import math
import os
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jaxtyping import config
from torch import Tensor

from codd import Coupled
from codd.circuits import HMM, Circuit, Factors, Head, HeadConfig, Modulated, leaf, mixture, ops, product
from codd.errors import CoddError, InvalidEvidence

pytestmark = pytest.mark.numerics
V, L, N, WIDTH = 3, 3, 2, 4
STRINGS = torch.tensor(list(itertools.product(range(V), repeat=L)))
OFFSETS = [0.0, *(sign * size for size in (1e3, 1e4, 1e6, 1e8, 3e38) for sign in (1, -1))]
LARGEST = {torch.float16: 5e4, torch.bfloat16: 3e38, torch.float32: 3e38, torch.float64: 3e38}


@pytest.fixture(scope="module", autouse=True)
def unchecked() -> Iterator[None]:
    """Without the shape checks, which draw random numbers, and without gradients."""
    config.update("jaxtyping_disable", True)
    with torch.no_grad():
        yield
    config.update("jaxtyping_disable", False)


def tree() -> Circuit:
    g = torch.Generator().manual_seed(2)

    def row(*positions: int):
        return product([leaf(t, torch.rand(V, generator=g).softmax(0).tolist()) for t in positions])

    return Circuit(
        mixture(
            [row(0, 1, 2), product([mixture([row(0, 1), row(0, 1)], weights=[0.4, 0.6]), row(2)])], weights=[0.3, 0.7]
        )
    )


def modulated() -> Modulated:
    factors = Factors.near_neutral(N, V, inner_states=2, noise=1.0)
    circuit = Modulated(HMM.from_factors(factors), Head(HeadConfig(WIDTH, N, inner_states=2)))
    g = torch.Generator().manual_seed(3)
    for parameter in circuit.head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g))
    return circuit


CIRCUITS = {
    "hmm": lambda: HMM.random(N, V, seed=1),
    "rank": lambda: HMM.random(N, V, seed=1, rank=1),
    "own": lambda: HMM.random(N, V, seed=1, length=L),
    "float64": lambda: HMM.random(N, V, seed=1, dtype=torch.float64),
    "modulated": modulated,
    "graph": tree,
}


def features(rows: int) -> Tensor:
    return torch.randn(1, L, WIDTH, generator=torch.Generator().manual_seed(5)).expand(rows, -1, -1)


def coupled(circuit, logits: Tensor, temperature: float, rows: int = 1) -> Coupled:
    """All positions masked, the same window as often as asked for."""
    return Coupled(
        circuit,
        logits=logits.expand(rows, -1, -1),
        tokens=torch.zeros(rows, L, dtype=torch.int64),
        masked=torch.ones(rows, L, dtype=torch.bool),
        temperature=temperature,
        features=features(rows),
    )


@cache
def prepared(name: str) -> tuple[HMM | Modulated | Circuit, Tensor]:
    """A circuit, and the logarithm of what it says of each string, whatever the network does, in float64."""
    circuit = CIRCUITS[name]()
    with ops.use("reference"):
        exact = circuit if name == "graph" else circuit.to(dtype=torch.float64)
        return circuit, coupled(exact, torch.zeros(1, L, V).double(), 1.0, len(STRINGS)).log_prob(STRINGS)


@st.composite
def windows(draw: st.DrawFn) -> Tensor:
    """Logits with an offset for each position, as far apart as their type can tell there; some tokens are excluded."""
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    offsets = torch.tensor(draw(st.lists(st.sampled_from(OFFSETS), min_size=L, max_size=L)), dtype=torch.float64)
    offsets = offsets.clamp(-LARGEST[dtype], LARGEST[dtype])[:, None]
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    apart = (offsets.abs() * torch.finfo(dtype).eps).clamp_min(1)
    logits = (torch.randn(L, V, generator=g, dtype=torch.float64) * apart + offsets).to(dtype)
    banned = torch.rand(L, V, generator=g) < draw(st.sampled_from([0.0, 0.3]))
    banned[:, draw(st.integers(0, V - 1))] = False
    return logits.masked_fill(banned, -math.inf)[None]


@given(st.sampled_from(sorted(CIRCUITS)), windows(), st.sampled_from([1.0, 0.3, 2.5]))
@example("hmm", torch.tensor([[[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [3e38, 3e38, -math.inf]]]), 0.3)
@settings(max_examples=int(os.environ.get("CODD_FUZZ", 30)))
def test_offsets_cancel(name, logits, temperature):
    circuit, of_circuit = prepared(name)
    network = logits[0].double()
    network = ((network - network.amax(-1, keepdim=True)) / temperature).log_softmax(-1)
    wanted = (of_circuit + network[torch.arange(L), STRINGS].sum(-1)).log_softmax(0)
    close = {"atol": 2e-6, "rtol": 0}

    def agree(found: Tensor, exact: Tensor) -> None:
        torch.testing.assert_close(found.double(), exact, **close)

    found = coupled(circuit, logits, temperature, len(STRINGS)).log_prob(STRINGS)
    agree(found.exp(), wanted.exp())
    assert float(found.double().exp().sum()) == pytest.approx(1, abs=5e-6)
    joint, p = coupled(circuit, logits, temperature), wanted.exp()
    marginals = torch.stack([torch.stack([p[STRINGS[:, t] == v].sum() for v in range(V)]) for t in range(L)])
    agree(joint.marginals()[0].exp(), marginals)
    agree(joint.conditionals().log_marginals()[0].exp(), marginals)
    few = joint.conditionals(2)
    of_few = few.log_marginals()[0].exp()
    agree(of_few, marginals if few.candidates is None else marginals.gather(-1, few.candidates[0]))
    pairs = torch.zeros(L, L, V, V, dtype=torch.float64)
    for s, t in itertools.product(range(L), repeat=2):
        pairs[s, t].index_put_((STRINGS[:, s], STRINGS[:, t]), p, accumulate=True)
    tables = joint.pairwise(torch.arange(V).expand(1, L, V))
    agree(tables[0, ..., :V, :V], pairs)
    alone = torch.xlogy(marginals, marginals).sum(-1)
    information = (torch.xlogy(pairs, pairs).sum((-1, -2)) - alone[:, None] - alone).fill_diagonal_(0)
    torch.testing.assert_close(joint.mutual_information(V)[0].double(), information, atol=2e-5, rtol=0)
    possible = p > 1e-12
    with_offset, without = (
        coupled(circuit, x, temperature).sample(generator=torch.Generator().manual_seed(7), num_samples=8).tokens[:, 0]
        for x in (logits, logits.double() - logits.double().amax(-1, keepdim=True))
    )
    assert torch.equal(with_offset, without)
    assert all(bool(possible[(drawn == STRINGS).all(-1)]) for drawn in with_offset)
    follow_the_chain_rule(joint, STRINGS[int(p.argmax())], float(p.max()))


def follow_the_chain_rule(joint: Coupled, best: Tensor, probability: float) -> None:
    """Committed one by one, the tokens of a string have conditional probabilities that multiply to its own."""
    conditioner, total = joint.conditionals(), 0.0
    for t, v in enumerate(best.tolist()):
        total += float(conditioner.log_marginals()[0, t, v])
        conditioner.commit(torch.tensor([t]), torch.tensor([v]))
    assert math.exp(total) == pytest.approx(probability, abs=5e-6)


@pytest.mark.parametrize("name", CIRCUITS)
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_position_without_any_token_is_impossible(name, temperature):
    logits = torch.full((1, L, V), 1e8)
    logits[0, 1] = -math.inf
    joint = coupled(CIRCUITS[name](), logits, temperature)
    assert float(joint.log_partition()) == float(joint.log_prob(STRINGS[:1])) == -math.inf
    assert bool((joint.marginals() == -math.inf).all())
    with pytest.raises(CoddError):
        joint.sample()


@pytest.mark.parametrize("temperature", [3e-39, 1e-300, 1e39])
def test_temperatures_that_float32_cannot_divide_by_are_refused(temperature):
    with pytest.raises(
        InvalidEvidence, match=r"temperature must be positive and finite, found .* \(in float32: 1\.2e-38"
    ):
        coupled(CIRCUITS["hmm"](), torch.zeros(1, L, V), temperature)


@pytest.mark.parametrize("temperature", [1.2e-38, 8.5e37])
def test_extreme_temperatures_exclude_what_is_excluded(temperature):
    logits = torch.tensor([1e8, -math.inf, 2e8]).expand(1, L, V)
    found = coupled(HMM.neutral(N, V), logits, temperature).marginals()[0].exp()
    wanted = torch.tensor([0.0, 0.0, 1.0] if temperature < 1 else [0.5, 0.0, 0.5])
    torch.testing.assert_close(found, wanted.expand(L, V))
