import itertools
import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from codd.circuits.builders import balanced_tree, chain, independent_mixture
from codd.circuits.evidence import Evidence
from codd.errors import InvalidCircuit
from tests.support.enumeration import all_strings, enumerate_completions, log_normalise

# Shape errors are ours for users, and jaxtyping's where its checks are switched on in tests: both name the argument.
WRONG_SHAPE = (InvalidCircuit, TypeCheckError)


def close(found: Tensor, wanted: Tensor) -> None:
    assert_close(found, wanted, rtol=1e-13, atol=1e-10)


def rows(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).log_softmax(-1)


def paths_of_a_chain(initial: Tensor, transition: Tensor, emission: Tensor, strings: Tensor) -> Tensor:
    """(paths, strings): the log-probability of every path of states together with every string."""
    length, states = emission.shape[:2]
    table = []
    for path in itertools.product(range(states), repeat=length):
        score = initial[path[0]] + sum(transition[t, path[t], path[t + 1]] for t in range(length - 1))
        table.append(score + sum(emission[t, path[t], strings[:, t]] for t in range(length)))
    return torch.stack(table)


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("per_step", [False, True])
def test_a_chain_is_the_hidden_markov_model(length: int, per_step: bool) -> None:
    steps, positions = ((length - 1,), (length,)) if per_step else ((), ())
    initial, transition, emission = rows(2), rows(*steps, 2, 2, seed=1), rows(*positions, 2, 3, seed=2)
    circuit = chain(initial, transition, emission, length)
    strings = all_strings(3, length)
    every = paths_of_a_chain(initial, transition.expand(length - 1, 2, 2), emission.expand(length, 2, 3), strings)
    close(circuit.log_prob(strings), every.logsumexp(0))
    assert (circuit.length, circuit.vocab_size, circuit.num_latents) == (length, 3, 2)

    soft = torch.randn(1, length, 3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ev = Evidence(log_potentials=soft)
    joint = log_normalise((every + soft[0, torch.arange(length), strings].sum(-1)).flatten()).reshape(every.shape)
    states = all_strings(2, length)  # the same order as itertools.product
    posterior = torch.stack(
        [torch.stack([joint[states[:, t] == k].flatten().logsumexp(0) for k in range(2)]) for t in range(length)]
    )
    close(circuit.posterior(ev)[0], posterior)
    close(circuit.marginals(ev), enumerate_completions(circuit.log_prob, 3, length, ev).marginals)


def test_leaf_k_of_a_chain_is_state_k() -> None:
    emission = rows(5, 4, 3)
    close(chain(rows(4), rows(4, 4, 4), emission, 5).leaf_log_probs, emission)
    close(chain(rows(4), rows(4, 4), emission[0], 5).leaf_log_probs, emission[:1].expand(5, 4, 3))


def test_a_forced_path_of_states_is_sampled() -> None:
    # Initial state 2, then the cycle 2 -> 0 -> 1 -> 2; state k emits token k.
    one_hot = torch.eye(3, dtype=torch.float64).log()
    circuit = chain(one_hot[2], one_hot[[1, 2, 0]], one_hot, 4)
    drawn = circuit.sample_unconditional(3, torch.Generator().manual_seed(0))
    assert drawn.latents.tolist() == drawn.tokens.tolist() == [[2, 0, 1, 2]] * 3


def test_a_chain_of_500() -> None:
    length, initial, transition, emission = 500, rows(3), rows(3, 3, seed=1), rows(3, 4, seed=2)
    circuit = chain(initial, transition, emission, length)
    ids = torch.randint(4, (2, length), generator=torch.Generator().manual_seed(0))
    forward = initial + emission[:, ids[:, 0]].T
    for t in range(1, length):
        forward = (forward[:, :, None] + transition).logsumexp(1) + emission[:, ids[:, t]].T
    assert_close(circuit.log_prob(ids), forward.logsumexp(-1), rtol=1e-12, atol=0)
    half = torch.arange(length).expand(2, length) % 2 == 0
    drawn = circuit.sample(Evidence(tokens=ids, observed=half), torch.Generator().manual_seed(0))
    assert torch.equal(drawn.tokens[:, ::2], ids[:, ::2])


class Operations(TorchDispatchMode):
    """Counts what PyTorch is asked to do."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_query_on_a_chain_takes_few_operations() -> None:
    """In proportion to the nodes: not to the edges, four times as many with twice the states, nor to the paths."""
    counts = {}
    for length, states in ((16, 8), (32, 8), (32, 16)):
        circuit = chain(rows(states), rows(states, states), rows(states, 11), length)
        with Operations() as operations:
            circuit.marginals(Evidence(log_potentials=torch.zeros(4, length, 11)))
        counts[length, states] = operations.count
    assert counts[32, 16] <= 2 * counts[32, 8] <= 2.2 * 2 * counts[16, 8]


def tree_log_prob(root: Tensor, transition: Tensor, emission: Tensor, ids: Tensor) -> Tensor:
    """The string probabilities of a balanced tree, by messages over explicit ranges."""
    number = iter(range(2 * emission.shape[0]))

    def message(start: int, stop: int) -> Tensor:
        """(strings, states): the log-probability of the tokens in the range given the state that covers it."""
        mine = next(number)
        if stop - start == 1:
            below = emission[start][:, ids[:, start]].T
        else:
            middle = math.ceil((start + stop) / 2)
            below = message(start, middle) + message(middle, stop)
        return below if mine == 0 else (transition[mine - 1] + below[:, None]).logsumexp(-1)

    return (root + message(0, emission.shape[0])).logsumexp(-1)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shared", [False, True])
def test_a_balanced_tree(length: int, shared: bool) -> None:
    edges, positions = ((), ()) if shared else ((2 * length - 2,), (length,))
    root, transition, emission = rows(3), rows(*edges, 3, 3, seed=1), rows(*positions, 3, 2, seed=2)
    circuit = balanced_tree(root, transition, emission, length)
    strings = all_strings(2, length)
    wide = (transition.expand(2 * length - 2, 3, 3), emission.expand(length, 3, 2))
    close(circuit.log_prob(strings), tree_log_prob(root, *wide, strings))
    close(circuit.log_prob(strings).logsumexp(0), torch.zeros((), dtype=torch.float64))
    close(circuit.leaf_log_probs, wide[1])


def test_marginals_of_a_balanced_tree() -> None:
    ev = Evidence(logits=torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    tree = balanced_tree(rows(2), rows(6, 2, 2, seed=1), rows(4, 2, 3, seed=2), 4)
    close(tree.marginals(ev), enumerate_completions(tree.log_prob, 3, 4, ev).marginals)


def test_a_mixture_of_independents() -> None:
    weights, probs = rows(3).exp(), rows(3, 2, 4, seed=1).exp()
    circuit = independent_mixture(weights, probs)
    table = torch.einsum("k,kx,ky->xy", weights, probs[:, 0], probs[:, 1])
    close(circuit.log_prob(all_strings(4, 2)), table.log().flatten())
    close(circuit.leaf_log_probs.exp(), probs.transpose(0, 1))
    ev = Evidence(tokens=torch.tensor([[1, 2]]))
    close(circuit.posterior(ev)[0].exp(), (weights * probs[:, 0, 1] * probs[:, 1, 2] / table[1, 2]).expand(2, 3))


class TestInvalid:
    def test_shapes(self) -> None:
        with pytest.raises(WRONG_SHAPE, match="log_transition"):
            chain(rows(3), rows(2, 2), rows(3, 4), 4)
        with pytest.raises(WRONG_SHAPE, match="log_emission"):
            chain(rows(3), rows(3, 3), rows(2, 4), 4)
        with pytest.raises(WRONG_SHAPE, match="log_initial"):
            chain(rows(3, 3), rows(3, 3), rows(3, 4), 4)
        with pytest.raises(WRONG_SHAPE, match="log_emission"):
            chain(rows(3), rows(3, 3), rows(4), 4)
        with pytest.raises(WRONG_SHAPE, match="weights"):
            independent_mixture(rows(2).exp(), rows(3, 2, 4).exp())

    def test_steps(self) -> None:
        with pytest.raises(InvalidCircuit, match=r"log_transition must be \(3, 3\).*\(3, 3, 3\).*found \(4, 3, 3\)"):
            chain(rows(3), rows(4, 3, 3), rows(3, 4), 4)
        with pytest.raises(InvalidCircuit, match=r"log_transition must be \(3, 3\).*\(6, 3, 3\).*found \(4, 3, 3\)"):
            balanced_tree(rows(3), rows(4, 3, 3), rows(3, 4), 4)
        with pytest.raises(InvalidCircuit, match="length must be at least 1, found 0"):
            chain(rows(3), rows(3, 3), rows(3, 4), 0)

    def test_not_normalised(self) -> None:
        with pytest.raises(InvalidCircuit, match=r"weights of mixture#\d+ must sum to 1"):
            chain(rows(3), rows(3, 3) + 0.1, rows(3, 4), 4)
        with pytest.raises(InvalidCircuit, match=r"probs of leaf#\d+ must sum to 1"):
            independent_mixture(rows(2).exp(), rows(2, 2, 4).exp() * 2)
