import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from codd.circuits import HMM
from codd.circuits.evidence import Evidence
from codd.circuits.graph import Circuit, Node, leaf, mixture, product
from codd.errors import InvalidCircuit, InvalidEvidence
from tests.support.contract import EXACT, check_completions, check_sums
from tests.support.enumeration import chi_square_p_value
from tests.support.strategies import Truth, make_evidence, shape_checks

INF = math.inf


def close(found: Tensor, wanted: Tensor, atol: float = 1e-10) -> None:
    assert found.dtype == torch.float64
    assert_close(found, wanted, rtol=1e-13, atol=atol)


def log(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def cities() -> Circuit:
    """San (0) or New (1), then Diego (0) or York (1)."""
    west = product([leaf(0, [0.9, 0.1]), leaf(1, [0.8, 0.2])])
    east = product([leaf(0, [0.3, 0.7]), leaf(1, [0.25, 0.75])])
    return Circuit(mixture([west, east], weights=[0.6, 0.4]))


def random_circuit(seed: int, sizes: tuple[int, ...], depth: int = 2) -> Circuit:
    """A smooth, decomposable graph with shared nodes and zeros; variable t has sizes[t] tokens."""
    rng = random.Random(seed)
    pool: dict[frozenset[int], list[Node]] = {}

    def simplex(n: int) -> list[float]:
        raw = [rng.random() * (rng.random() > 0.15) for _ in range(n)]
        raw[rng.randrange(n)] += 0.3
        return [x / sum(raw) for x in raw]

    def make(scope: frozenset[int], budget: int) -> Node:
        known = pool.setdefault(scope, [])
        if len(known) > 1 and rng.random() < 0.3:
            return rng.choice(known)
        node: Node
        if budget > 0 and rng.random() < 0.6:
            children = [make(scope, budget - 1) for _ in range(rng.randint(1, 3))]
            node = mixture(children, weights=simplex(len(children)))
        elif len(scope) == 1:
            (variable,) = scope
            node = leaf(variable, simplex(sizes[variable]))
        else:
            names = rng.sample(sorted(scope), len(scope))
            cut = rng.randint(1, len(names) - 1)
            node = product([make(frozenset(part), budget) for part in (names[:cut], names[cut:])])
        known.append(node)
        return node

    everything = frozenset(range(len(sizes)))
    return Circuit(mixture([make(everything, depth) for _ in range(2)], weights=simplex(2)))


class Tree(NamedTuple):
    """One way to walk a circuit: the leaf of each variable, and the product of the weights on the way."""

    leaves: dict[int | str, Node]
    log_weight: float


def trees(node: Node) -> list[Tree]:
    """The circuit multiplied out: an implementation that shares nothing with the passes."""
    if node.kind == "leaf":
        return [Tree({node.variable: node}, 0.0)]
    below = [trees(child) for child in node.children]
    if node.kind == "mixture":
        weights = node.log_values.tolist()
        return [Tree(t.leaves, w + t.log_weight) for w, ts in zip(weights, below, strict=True) for t in ts]
    parts = itertools.product(*below)
    return [Tree({v: n for t in ts for v, n in t.leaves.items()}, sum(t.log_weight for t in ts)) for ts in parts]


class Walks(Truth):
    """The truth about a circuit from its walks, which take the part of an HMM's latent paths."""

    @cached_property
    def trees(self) -> list[Tree]:
        return trees(self.hmm.root)

    @cached_property
    def paths(self) -> Tensor:
        made = {node for tree in self.trees for node in tree.leaves.values()}
        numbered = [
            sorted((node for node in made if node.variable == v), key=lambda node: node.created)
            for v in self.hmm.variables
        ]
        names = self.hmm.variables
        return torch.tensor(
            [[same.index(tree.leaves[v]) for v, same in zip(names, numbered, strict=True)] for tree in self.trees]
        )

    @cached_property
    def joint(self) -> Tensor:
        rows, positions = [], torch.arange(self.length)
        for tree in self.trees:
            leaves = [tree.leaves[v].log_values for v in self.hmm.variables]
            table = torch.stack([pad(x, (0, self.hmm.vocab_size - len(x)), value=-INF) for x in leaves])
            rows.append(tree.log_weight + table[positions, self.strings].sum(-1))
        on_paths = self.latent[:, positions, self.paths].sum(-1)
        return self.weights[:, positions, self.strings].sum(-1)[..., None] + torch.stack(rows, -1) + on_paths[:, None]


def missing(batch: int, length: int) -> Evidence:
    return Evidence(missing=torch.ones(batch, length, dtype=torch.bool))


def random_evidence(kind: str, circuit: Circuit, seed: int = 0, batch: int = 3) -> Evidence:
    return make_evidence(kind, (batch, circuit.length), circuit.num_latents, circuit.vocab_size, seed)


KINDS = ("partly_observed", "log_potentials", "logits_temperatures", "sparse_tail", "latent", "missing", "mixed_all")
SIZES = ((2, 2), (3, 3, 3), (2, 4, 3), (2, 2, 2, 2))
CASES = [(seed, SIZES[seed % len(SIZES)]) for seed in (0, 1, 2, 3, 4, 5, 6, 15)]


@pytest.fixture(params=CASES, ids=lambda case: f"seed{case[0]}-sizes{case[1]}")
def circuit(request: pytest.FixtureRequest) -> Circuit:
    seed, sizes = request.param
    return random_circuit(seed, sizes)


def test_the_random_circuits_share_nodes_and_have_zeros() -> None:
    def parents(c: Circuit) -> int:
        edges = [child for node in c._nodes for child in node.children]
        return max(edges.count(child) for child in edges)

    circuits = [random_circuit(*case) for case in CASES]
    assert max(map(parents, circuits)) >= 3
    assert any(bool((n.log_values == -INF).any()) for c in circuits for n in c._nodes)


def check_all_queries(circuit: Circuit, ev: Evidence) -> None:
    """Every query against the circuit multiplied out."""
    for check in (check_sums, check_completions):
        check(circuit, Walks(circuit, ev), EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_queries_equal_the_circuit_multiplied_out(circuit: Circuit, kind: str) -> None:
    with shape_checks(False):
        check_all_queries(circuit, random_evidence(kind, circuit))


class TestCities:
    """Numbers computed by hand."""

    def test_log_prob(self) -> None:
        ids = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
        close(cities().log_prob(ids), log(0.462, 0.198, 0.118, 0.222))

    def test_scores_given_the_latents(self) -> None:
        ev = Evidence(
            log_potentials=torch.stack([log(2, 1), log(1, 3)])[None],
            tokens=torch.tensor([[0, 1]]),
            observed=torch.tensor([[False, True]]),
        )
        scores = cities().conditional_scores(ev, torch.tensor([[1, 0]]))
        close(scores[0], torch.stack([log(0.6, 0.7), log(0, 1)]))
        with pytest.raises(InvalidEvidence, match=r"latents must be in 0\.\.1, found 2"):
            cities().conditional_scores(ev, torch.tensor([[1, 2]]))


class TestSampling:
    def test_strings_and_latents_are_exact(self) -> None:
        c = random_circuit(10, (2, 4, 3))
        ev = make_evidence("log_potentials", (2, 3), c.num_latents, 4, scale=0.7)
        ev = replace(ev, latent_log_potentials=make_evidence("latent", (2, 3), c.num_latents).latent_log_potentials)
        drawn = c.sample(ev, generator=torch.Generator().manual_seed(0), num_samples=20_000)
        assert drawn.tokens.shape == drawn.latents.shape == (20_000, 2, 3)
        close(drawn.log_partition, c.log_partition(ev))
        exact = Walks(c, ev)
        # Walks with the same leaves cannot be told apart by their latents: add them up.
        paths, where = exact.paths.unique(dim=0, return_inverse=True)
        for b in range(2):
            table = torch.stack([exact.probability[b][:, where == i].logsumexp(-1) for i in range(len(paths))])
            path = (drawn.latents[:, b, None] == paths).all(-1).int().argmax(-1)
            string = (drawn.tokens[:, b, None] == exact.strings).all(-1).int().argmax(-1)
            counts = torch.bincount(path * len(exact.strings) + string, minlength=table.numel())
            assert chi_square_p_value(counts, table.flatten()) > 1e-3
            assert chi_square_p_value(counts, table.flip(0).flatten()) < 1e-9

    def test_observed_tokens_stay_and_excluded_ones_never_come(self) -> None:
        c = random_circuit(3, (2, 2, 2, 2))
        g = torch.Generator().manual_seed(1)
        tokens, observed = torch.ones(6, 4, dtype=torch.int32), torch.tensor([True, False, False, True]).expand(6, 4)
        banned = torch.where(torch.rand(6, 4, 2, generator=g) < 0.25, -INF, 0.0)
        ev = Evidence(log_potentials=banned, tokens=tokens, observed=observed)
        ev = ev.select(c.log_partition(ev) > -INF)
        assert ev.shape[0] > 0
        drawn = c.sample(ev, generator=torch.Generator().manual_seed(0), num_samples=50)
        assert bool((drawn.tokens[..., [0, 3]] == 1).all())
        for row in drawn.tokens:
            assert bool((c.conditional_log_prob(row, ev) > -INF).all())

    @pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2.0**-53, 3)])
    def test_nor_at_the_ends_of_the_unit_interval(
        self, monkeypatch: pytest.MonkeyPatch, uniform: float, token: int
    ) -> None:
        monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, uniform, dtype=torch.float64))
        assert Circuit(leaf(0, [0, 0.7, 0, 0.3, 0])).sample(missing(1, 1)).tokens.tolist() == [[token]]


class TestExtremes:
    def test_far_apart_weights(self) -> None:
        c = random_circuit(1, (3, 3, 3))
        g = torch.Generator().manual_seed(0)
        phi = torch.tensor([1e4, -1e4, 0.0, -INF], dtype=torch.float64)[torch.randint(4, (5, 3, 3), generator=g)]
        check_all_queries(c, Evidence(log_potentials=phi))
        latent = torch.tensor([1e4, -1e4], dtype=torch.float64)[torch.randint(2, (5, 3, c.num_latents), generator=g)]
        check_all_queries(c, Evidence(log_potentials=phi, latent_log_potentials=latent))

    def test_tiny_parameters_survive_as_logarithms(self) -> None:
        tiny = torch.tensor([0.0, -1e4], dtype=torch.float64)
        c = Circuit(mixture([leaf(0, log_probs=tiny), leaf(0, log_probs=tiny)], log_weights=tiny))
        assert c.log_prob(torch.tensor([[1]])).tolist() == [-1e4]


class TestGraphs:
    def test_named_variables_of_different_sizes(self) -> None:
        c = Circuit(product([leaf("colour", [0.5, 0.5]), leaf("shape", [0.1, 0.2, 0.3, 0.4])]))
        assert c.variables == ("colour", "shape")
        assert c.vocab_size == 4
        close(c.log_prob(torch.tensor([[1, 3], [3, 1]])), log(0.2, 0))
        close(c.marginals(missing(1, 2))[0, 0], log(0.5, 0.5, 0, 0))
        assert int(c.sample(missing(200, 2), generator=torch.Generator()).tokens[:, 0].max()) == 1

    def test_positions(self) -> None:
        root = product([leaf(5, [0.9, 0.1]), leaf(2, [0.3, 0.7])])
        assert Circuit(root).variables == (2, 5)
        close(Circuit(root).log_prob(torch.tensor([[1, 0]])), log(0.63))
        chosen = Circuit(root, variables=[5, 2])
        close(chosen.log_prob(torch.tensor([[1, 0]])), log(0.03))
        assert Circuit(product([leaf("b", [1.0]), leaf(0, [1.0]), leaf("a", [1.0])])).variables == ("b", 0, "a")

    def test_leaves_are_numbered_in_order_of_creation(self) -> None:
        second, first = [0.2, 0.8], [0.6, 0.4]
        made = [leaf(0, first), leaf(0, second)]
        c = Circuit(mixture([made[1], made[0]], weights=[0.5, 0.5]))
        given = c.conditional_scores(missing(2, 1), torch.tensor([[0], [1]]))
        close(given[:, 0], torch.stack([log(*first), log(*second)]))

    def test_a_shared_child_is_evaluated_once(self) -> None:
        node: Node = leaf(0, [0.25, 0.75])
        for _ in range(100):  # 2**100 walks
            node = mixture([node, node], weights=[0.5, 0.5])
        c = Circuit(node)
        close(c.log_prob(torch.tensor([[1]])), log(0.75))
        close(c.posterior(missing(1, 1)), torch.zeros(1, 1, 1, dtype=torch.float64))

    def test_depth_has_no_limit(self) -> None:
        node: Node = leaf(0, [0.25, 0.75])
        for _ in range(3 * sys.getrecursionlimit()):
            node = mixture([node], weights=[1.0])
        c = Circuit(node)
        close(c.marginals(missing(1, 1)), log(0.25, 0.75)[None, None])
        assert c.sample(missing(2, 1), generator=torch.Generator()).tokens.shape == (2, 1)
        assert repr(node).startswith("Node(kind='mixture', name='mixture#")

    def test_nodes_cannot_change(self) -> None:
        probs = torch.tensor([0.5, 0.5])
        node = leaf(0, probs)
        probs[0] = 0.0
        close(node.log_values, log(0.5, 0.5))
        with pytest.raises(AttributeError):
            node.name = "other"  # type: ignore[misc]
        assert node != leaf(0, [0.5, 0.5])
        assert len({node, node}) == 1


a, b = leaf(0, [0.5, 0.5], name="A"), leaf(1, [0.5, 0.5], name="B")
ab = product([a, b], name="AB")


class TestInvalidCircuits:
    @pytest.mark.parametrize(
        ("root", "words"),
        [
            (mixture([ab, a], weights=[0.5, 0.5], name="mix"), ["mix is not smooth", "AB has {0, 1}", "A has {0}"]),
            (product([ab, b], name="prod"), ["prod is not decomposable", "AB has {0, 1}", "B has {1}"]),
            (product([a, a], name="square"), ["square is not decomposable", "A has {0} and A has {0}"]),
            (mixture([a, a], weights=[0.5, 0.6], name="mix"), ["mix sums to 1.1", "must sum to 1"]),
            (mixture([a, a], weights=[1.5, -0.5], name="mix"), ["mix holds NaN"]),
            (mixture([a], weights=[0.5, 0.5], name="mix"), ["mix must be one for each of its 1 children"]),
            (mixture([], weights=[], name="mix"), ["mix has no children"]),
            (product([], name="prod"), ["prod has no children"]),
            (leaf(0, [0.5, 0.4], name="L"), ["L sums to 0.9"]),
            (leaf(0, [math.nan, 1.0], name="L"), ["L holds NaN"]),
            (leaf(0, log_probs=[math.inf, -1.0], name="L"), ["L sums to inf"]),
            (leaf(0, [], name="L"), ["L has empty rows"]),
            (leaf(0, torch.full((2, 2), 0.25), name="L"), ["L must be one-dimensional, found shape (2, 2)"]),
            (
                mixture([a, leaf(0, [1.0, 0.0, 0.0], name="long")], weights=[0.5, 0.5]),
                ["long must have 2 tokens, as A has"],
            ),
        ],
    )
    def test_the_message_names_the_nodes(self, root: Node, words: list[str]) -> None:
        with pytest.raises(InvalidCircuit) as error:
            Circuit(root)
        for word in words:
            assert word in str(error.value)

    def test_a_fault_deep_inside_is_found_and_automatic_names_are_readable(self) -> None:
        inner = mixture([leaf(0, [1.0]), leaf(1, [1.0])], weights=[0.5, 0.5])
        outer = product([leaf(2, [1.0]), inner])
        with pytest.raises(InvalidCircuit, match=rf"{inner.name} is not smooth.*leaf#\d+ has {{0}}"):
            Circuit(mixture([outer], weights=[1.0]))

    def test_long_scopes_are_cut_short(self) -> None:
        wide = product([leaf(v, [1.0]) for v in range(20)])
        with pytest.raises(InvalidCircuit, match=r"\{0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\}"):
            Circuit(mixture([wide, leaf(0, [1.0])], weights=[0.5, 0.5]))

    def test_rounding_is_tolerated_and_no_more(self) -> None:
        Circuit(leaf(0, [0.5, 0.5 + 9e-5]))
        Circuit(leaf(0, torch.rand(5000).softmax(0)))
        with pytest.raises(InvalidCircuit):
            Circuit(leaf(0, [0.5, 0.5 + 2e-4]))

    @pytest.mark.parametrize("variables", [[0], [0, 1, 2], [0, 1, 1]])
    def test_variables_must_be_a_permutation(self, variables: list[int]) -> None:
        with pytest.raises(InvalidCircuit, match=r"each of \[0, 1\] once, found \[0"):
            Circuit(ab, variables=variables)

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: product(iter([a, "B"]), name="P"), "a child is a str"),
            (lambda: leaf(0, name="L"), "give probs or log_probs.*none"),
            (lambda: mixture([a], [1.0], log_weights=[0.0], name="M"), "give weights or log_weights.*both"),
        ],
    )
    def test_what_is_not_a_node_at_all(self, make: Callable[[], Node], words: str) -> None:
        with pytest.raises(InvalidCircuit, match=words):
            make()


def test_nan_at_an_observed_position_is_ignored() -> None:
    phi = torch.full((1, 2, 2), math.nan)
    ev = Evidence(tokens=torch.tensor([[0, 0]]), observed=torch.tensor([[True, True]]), log_potentials=phi)
    close(cities().log_partition(ev), log(0.462))


def rows(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).log_softmax(-1)


class Operations(TorchDispatchMode):
    """Counts what PyTorch is asked to do."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class TestChains:
    """An HMM written out, by `HMM.as_circuit`."""

    def test_a_query_takes_operations_in_proportion_to_edges_and_not_to_paths(self) -> None:
        counts = {}
        for length, states in ((16, 4), (32, 4), (32, 8)):
            circuit = HMM.random(states, 11).as_circuit(length)
            with Operations() as operations:
                circuit.marginals(Evidence(log_potentials=torch.zeros(4, length, 11)))
            counts[length, states] = operations.count
        assert counts[32, 8] <= 4 * counts[32, 4] <= 4 * 2.2 * counts[16, 4]
