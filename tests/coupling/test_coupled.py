"""Every query of the product against enumeration of all completions, for chains and for general circuits."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import config
from torch import Tensor

import codd
from codd import Coupled
from codd.circuits import HMM, Circuit, Factors, Head, HeadConfig, Modulated, leaf, mixture, pairwise, product
from codd.errors import ImpossibleEvidence, InvalidEvidence

pytestmark = pytest.mark.numerics
V, L = 4, 5


def tree() -> Circuit:
    """A mixture of two ways to cut five positions, no chain."""
    random = torch.Generator().manual_seed(2)

    def leaves(*positions: int) -> list:
        return [leaf(t, torch.rand(V, generator=random).add(0.05).log().softmax(0).tolist()) for t in positions]

    def part(*positions: int):
        return mixture([product(leaves(*positions)), product(leaves(*positions))], weights=[0.3, 0.7])

    return Circuit(
        mixture(
            [product([part(0, 1), part(2, 3, 4)]), product([part(0, 1, 2), part(3, 4)]), product(leaves(*range(L)))],
            weights=[0.5, 0.3, 0.2],
        )
    )


CIRCUITS = {"hmm": lambda: HMM.random(3, V, seed=1, dtype=torch.float64), "graph": tree}


@pytest.fixture(params=CIRCUITS)
def circuit(request) -> HMM | Circuit:
    return CIRCUITS[request.param]()


def window(seed: int = 0, masked: tuple[int, ...] = (0, 2, 3, 4)) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    where = torch.zeros(2, L, dtype=torch.bool)
    where[0, list(masked)] = True
    where[1] = True
    return {
        "logits": 2 * torch.randn(2, L, V, generator=random, dtype=torch.float64),
        "tokens": torch.where(where, 77, torch.randint(0, V, (2, L), generator=random)),  # no circuit knows the mask
        "masked": where,
    }


def enumerate_all(
    circuit: HMM | Circuit, given: dict[str, Tensor], temperature: float, row: int
) -> tuple[Tensor, Tensor]:
    """All strings that agree with the observed tokens, and the logarithm of each one's weight under the product."""
    strings = torch.tensor(
        [
            string
            for string in itertools.product(range(V), repeat=L)
            if all(m or s == t for s, t, m in zip(string, given["tokens"][row], given["masked"][row], strict=True))
        ]
    )
    network = (given["logits"][row] / temperature).log_softmax(-1)
    of_masked = torch.where(given["masked"][row], network[torch.arange(L), strings], 0).sum(-1)
    return strings, circuit.log_prob(strings) + of_masked


@pytest.mark.parametrize("temperature", [1.0, 0.3, torch.tensor([0.5, 2.0])], ids=str)
def test_probabilities_of_all_completions(circuit, temperature):
    given = window()
    joint, each = Coupled(circuit, **given, temperature=temperature), torch.as_tensor(temperature).expand(2).tolist()
    for row in range(2):
        strings, weights = enumerate_all(circuit, given, each[row], row)
        assert len(strings) == V ** int(given["masked"][row].sum())
        assert float(joint.log_partition()[row]) == pytest.approx(float(weights.logsumexp(0)), abs=1e-6)
        one = {name: value[row : row + 1].expand(len(strings), *value.shape[1:]) for name, value in given.items()}
        found = Coupled(circuit, **one, temperature=each[row]).log_prob(strings)
        torch.testing.assert_close(found, weights - weights.logsumexp(0), atol=1e-9, rtol=0)
        assert float(found.exp().sum()) == pytest.approx(1.0, abs=1e-9)


def test_few_tokens_tell_no_more_than_all(circuit):
    given = window()
    joint = Coupled(circuit, **given, temperature=0.3)
    every = pairwise.mutual_information(joint.pairwise(torch.arange(V).expand(2, L, V)))
    for count in (V - 1, V, V + 3):  # all but one is all
        torch.testing.assert_close(joint.mutual_information(count), every, atol=1e-9, rtol=0)
    few = joint.mutual_information(1)
    likely = joint.marginals().topk(1, dim=-1).indices
    torch.testing.assert_close(few, pairwise.mutual_information(joint.pairwise(likely)), atol=1e-9, rtol=0)
    assert bool((few <= every + 1e-9).all())
    assert float((every - few).max()) > 1e-6
    observed = ~given["masked"][0]
    assert not bool(few[0, observed].any() or few[0, :, observed].any())


def test_two_cities_know_of_each_other():
    city = Circuit(
        mixture(
            [product([leaf(0, [1, 0]), leaf(1, [1, 0])]), product([leaf(0, [0, 1]), leaf(1, [0, 1])])],
            weights=[0.5, 0.5],
        )
    )
    masked = torch.ones(1, 2, dtype=torch.bool)
    joint = Coupled(city, logits=torch.zeros(1, 2, 2), tokens=torch.zeros(1, 2).long(), masked=masked)
    wanted = math.log(2) * (1 - torch.eye(2, dtype=torch.float64))[None]
    torch.testing.assert_close(joint.mutual_information(1), wanted)
    known = joint.condition(torch.tensor([[1, 0]]), torch.tensor([[True, False]]))
    assert not bool(known.mutual_information().any())
    with pytest.raises(InvalidEvidence, match="candidates must be at least 1, found 0"):
        joint.mutual_information(0)


def test_conditioning_is_division(circuit):
    """log p(all) = log p(some) + log p(the rest | some)."""
    given = window()
    joint = Coupled(circuit, **given, temperature=0.5)
    some = torch.randint(0, V, (2, L), generator=torch.Generator().manual_seed(9))
    x0 = torch.where(given["masked"], some, (given["tokens"] + 1) % V)  # what it says of observed positions is ignored
    known = torch.tensor([[True, True, False, True, False], [False, True, False, False, True]])
    rest = joint.condition(x0, known)
    assert torch.equal(rest.masked, given["masked"] & ~known)
    first = torch.stack([_sum_over_rest(circuit, given, x0, known, row) for row in range(2)])
    torch.testing.assert_close(joint.log_prob(x0), first + rest.log_prob(x0), atol=1e-9, rtol=0)


def _sum_over_rest(circuit, given, x0, known, row) -> Tensor:
    strings, weights = enumerate_all(circuit, given, 0.5, row)
    fixed = known[row] & given["masked"][row]
    agree = ((strings == x0[row]) | ~fixed).all(-1)
    return weights[agree].logsumexp(0) - weights.logsumexp(0)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    states=st.integers(1, 5),
    tokens=st.integers(2, 9),
    length=st.integers(1, 7),
    temperature=st.floats(0.1, 5),
)
def test_the_null_circuit_changes_nothing(seed, states, tokens, length, temperature):
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, length, tokens, generator=random)
    ids = torch.randint(0, tokens, (3, length), generator=random)
    masked = torch.rand(3, length, generator=random) < 0.6
    joint = Coupled(HMM.neutral(states, tokens), logits=logits, tokens=ids, masked=masked, temperature=temperature)
    factorized = (logits / temperature).log_softmax(-1)
    x0 = torch.randint(0, tokens, (3, length), generator=random)
    alone = torch.where(masked, factorized.gather(-1, x0[..., None])[..., 0], 0).sum(-1)
    torch.testing.assert_close(joint.log_prob(x0), alone, atol=2e-4, rtol=1e-5)
    given = torch.where(masked[..., None], factorized, torch.nn.functional.one_hot(ids, tokens).log())
    torch.testing.assert_close(joint.marginals().exp(), given.exp(), atol=1e-5, rtol=0)
    torch.testing.assert_close(joint.posterior().exp(), torch.full((3, length, states), 1 / states), atol=1e-5, rtol=0)
    wanted = torch.full((3,), -length * math.log(tokens))
    torch.testing.assert_close(joint.log_partition(), wanted, atol=1e-4, rtol=0)


def test_factors_that_exclude_each_other():
    never = HMM(torch.zeros(1), torch.zeros(1, 1), torch.tensor([[0.0, -math.inf]]))
    logits = torch.tensor([[[-math.inf, 0.0]]])
    joint = Coupled(never, logits=logits, tokens=torch.zeros(1, 1).long(), masked=torch.ones(1, 1).bool())
    assert float(joint.log_partition()) == -math.inf
    assert float(joint.log_prob(torch.tensor([[1]]))) == -math.inf
    assert not bool(joint.pairwise(torch.zeros(1, 1, 1).long()).any())
    assert float(joint.mutual_information()) == 0
    with pytest.raises(ImpossibleEvidence):
        joint.sample()


def test_what_does_not_fit_is_named(circuit, monkeypatch):
    given = window()
    with pytest.raises(InvalidEvidence, match="the network has 6 tokens, the circuit 4"):
        Coupled(circuit, **{**given, "logits": torch.zeros(2, L, 6)})
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as users run it: wrong shapes meet our own errors
    with pytest.raises(InvalidEvidence, match="must be"):
        codd.Coupled(circuit, **{**given, "masked": given["masked"][:, :3], "tokens": given["tokens"][:, :3]})
    if isinstance(circuit, Circuit):
        short = {name: value[:, :3] for name, value in given.items()}
        with pytest.raises(InvalidEvidence, match="has 3 positions, the circuit serves 5"):
            Coupled(circuit, **short).marginals()


# Modulated circuits.

N, R, D = 3, 2, 6


def modulated(states: int = N, inner: int = R, zero: bool = False) -> Modulated:
    """With a head that has learnt something, unless it should say nothing."""
    factors = Factors.near_neutral(N, V, inner_states=R, noise=1.0).map(lambda x: x.double())
    head = Head(HeadConfig(D, states, inner, hidden=5, dropout=0.3))
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for x in () if zero else head.parameters():
            x.copy_(torch.randn(x.shape, generator=random))
    return Modulated(HMM.from_factors(factors), head)


def states_of_network(seed: int = 0) -> Tensor:
    return torch.randn(2, L, D, generator=torch.Generator().manual_seed(seed))


def answers(joint: Coupled) -> list[Tensor]:
    """Everything that can be asked, a few tokens later too."""
    x0 = torch.randint(0, V, (2, L), generator=torch.Generator().manual_seed(8))
    drawn = joint.sample(generator=torch.Generator().manual_seed(5), num_samples=3)
    step = joint.joint_step(torch.rand(2, L, generator=torch.Generator().manual_seed(6)))
    out = [joint.log_partition(), joint.log_prob(x0), joint.marginals(), joint.posterior(), joint.scores(step.latents)]
    for candidates in (None, 2):
        given = joint.conditionals(candidates)
        given.commit(torch.tensor([2, 0]), torch.tensor([1, 3]))
        out += [given.log_marginals(), given.dense_log_marginals(torch.tensor([3, 1])), given.log_partition]
    out += [joint.pairwise(torch.tensor([2, 0]).expand(2, L, 2)), joint.mutual_information(2)]
    rest = joint.condition(x0, torch.tensor([[False, False, True, False, False]] * 2))
    return [x.detach() for x in (*out, *drawn, *step, rest.marginals(), rest.log_partition())]


def assert_same(found: Coupled, wanted: Coupled) -> None:
    for a, b in zip(answers(found), answers(wanted), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("states", "inner"), [(N, 0), (0, R), (N, R)], ids=["latents", "steps", "both"])
def test_a_head_that_says_nothing_changes_nothing(states, inner):
    circuit, given = modulated(states, inner, zero=True), window()
    assert_same(Coupled(circuit, **given, features=states_of_network()), Coupled(circuit.hmm, **given))


@pytest.mark.parametrize(("states", "inner"), [(N, 0), (0, R), (N, R)], ids=["latents", "steps", "both"])
def test_what_a_head_says_is_evidence(states, inner):
    circuit, given = modulated(states, inner), window()
    latents, gates = circuit.head(states_of_network(), given["masked"])
    if gates is not None:  # the direct way, through as many inner states as there are states, has none
        gates = torch.cat((torch.zeros(2, L - 1, N), gates), -1)
    joint = Coupled(circuit, **given, features=states_of_network())
    by_hand = Coupled(circuit.hmm, **given, latent_log_potentials=latents, step_log_gates=gates)
    assert_same(joint, by_hand)
    alone = Coupled(circuit.hmm, **given)
    assert float((joint.marginals().exp() - alone.marginals().exp()).abs().max()) > 1e-2  # it says something


def test_other_potentials_are_added_to_the_heads():
    circuit, given = modulated(), window()
    random = torch.Generator().manual_seed(2)
    pull, gates = torch.randn(2, L, N, generator=random), torch.randn(2, L - 1, N + R, generator=random)
    found = circuit.modulate(states_of_network(), given["masked"])
    more = {"latent_log_potentials": pull, "step_log_gates": gates}
    joint = Coupled(circuit, **given, features=states_of_network(), **more)
    sums = {name: more[name] + getattr(found, name) for name in more}
    assert_same(joint, Coupled(circuit.hmm, **given, **sums))


def test_the_head_is_told_what_was_hidden_from_the_network():
    circuit, given = modulated(), window()
    hidden = torch.ones(2, L, dtype=torch.bool)
    found = circuit.modulate(states_of_network(), hidden)
    joint = Coupled(circuit, **given, features=states_of_network(), hidden=hidden)
    assert_same(joint, Coupled(circuit.hmm, **given, **found._asdict()))
    now = Coupled(circuit, **given, features=states_of_network())
    assert float((joint.marginals().exp() - now.marginals().exp())[0].abs().max()) > 1e-3
    assert_same(now, Coupled(circuit, **given, features=states_of_network(), hidden=given["masked"]))


def test_the_objective_reaches_the_head_and_the_network():
    circuit, given = modulated(), window()
    features = states_of_network().requires_grad_()
    logits = given["logits"].clone().requires_grad_()
    x0 = torch.zeros(2, L, dtype=torch.int64)
    Coupled(circuit, **{**given, "logits": logits}, features=features).log_prob(x0).sum().backward()
    for x in (features, logits, *circuit.head.parameters()):
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
        assert bool((x.grad != 0).any())
