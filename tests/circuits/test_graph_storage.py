"""General circuits on the disk: an exact round trip, and hostile files that are refused."""

import json
import math

import pytest
import torch

import codd
from codd.circuits import HMM, Circuit, Evidence, leaf, mixture, product, storage
from codd.errors import CoddError, FormatError, InvalidCircuit
from tests.support import FIXTURES


def shared() -> Circuit:
    """Text and numbers as variables in an order of their own, a shared node, zeros, leaves made out of order."""
    late = leaf("city", [0.0, 1.0, 0.0], name="late")
    early = [leaf("city", [0.2, 0.3, 0.5]), leaf(-7, [0.25, 0.75], name="")]
    both = mixture([late, early[0]], weights=[0.0, 1.0], name="a \u2603 \x00 \ud800")
    left, right = product([both, early[1]]), product([leaf(-7, [1.0, 0.0]), both])
    extra = leaf("weather", [1.0], name='"quoted"\n')
    return Circuit(
        product([mixture([left, right, left], weights=[0.1, 0.2, 0.7]), extra]), variables=["weather", "city", -7]
    )


CIRCUITS = {
    "shared": shared,
    "one leaf": lambda: Circuit(leaf("x", [0.1, 0.9])),
    "product only": lambda: Circuit(product([leaf(1, [1.0]), leaf(0, [0.5, 0.5])])),
    "chain": lambda: HMM.random(3, 4, seed=1, dtype=torch.float64).as_circuit(4),
    "large number as a variable": lambda: Circuit(leaf(2**80, [0.5, 0.5])),
}


@pytest.fixture(params=CIRCUITS)
def circuit(request) -> Circuit:
    return CIRCUITS[request.param]()


def assert_identical(a: Circuit, b: Circuit, names: bool = True) -> None:
    """The same nodes with the same parents, names, variables and parameters, to the bit."""
    assert a.variables == b.variables
    assert [type(v) for v in a.variables] == [type(v) for v in b.variables]
    number = [{node: i for i, node in enumerate(c._nodes)} for c in (a, b)]
    assert len(a._nodes) == len(b._nodes)
    for x, y in zip(a._nodes, b._nodes, strict=True):
        assert (x.kind, x.variable) == (y.kind, y.variable)
        assert x.name == y.name or not names  # those that were not given count up
        assert [number[0][child] for child in x.children] == [number[1][child] for child in y.children]
        assert torch.equal(x.log_values, y.log_values)
    places = [{number[i][node]: place for node, place in c._place.items()} for i, c in enumerate((a, b))]
    assert places[0] == places[1]


def test_round_trip_is_exact(circuit, tmp_path):
    assert circuit.save(tmp_path) == tmp_path
    for again in (Circuit.load(tmp_path), codd.load_circuit(tmp_path)):
        assert type(again) is Circuit
        assert_identical(again, circuit)
        ev = Evidence(missing=torch.ones(2, circuit.length, dtype=torch.bool))
        drawn = [c.sample(ev, generator=torch.Generator().manual_seed(3)) for c in (circuit, again)]
        assert torch.equal(drawn[0].tokens, drawn[1].tokens)
        assert torch.equal(drawn[0].latents, drawn[1].latents)
        assert torch.equal(circuit.posterior(ev), again.posterior(ev))


def test_a_file_of_codd_0_1_0_is_read():
    old = Circuit.load(FIXTURES / "graph")
    assert_identical(old, shared(), names=False)
    assert next(node.name for node in old._nodes if node.kind == "leaf") == "late"


def test_a_long_chain_is_saved_without_recursion(tmp_path):
    chain = HMM.random(2, 3, seed=1).as_circuit(1500)
    assert Circuit.load(chain.save(tmp_path)).length == 1500


def test_a_general_circuit_is_for_the_cpu(tmp_path):
    shared().save(tmp_path)
    config, tensors = storage.read_folder(tmp_path)
    with pytest.raises(InvalidCircuit, match="general circuit computes in float64 on the CPU"):
        Circuit.from_stored(config, tensors, "here").to("cuda")


# Hostile files: those of `base` with some of their tensors, or of their configuration, changed.


def base() -> Circuit:
    """Nodes 0 to 5: leaves of 0 and 1, their product, two more leaves, their product; 6: the mixture of the two."""
    pairs = [product([leaf(0, [0.5, 0.5]), leaf(1, [0.1, 0.2, 0.7])]) for _ in range(2)]
    return Circuit(mixture(pairs, weights=[0.4, 0.6]))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


HUGE = 2**62
BAD_TENSORS = {
    "a cycle": {"children": ints(0, 1, 6, 4, 2, 5)},
    "a node that is its own child": {"children": ints(0, 1, 3, 5, 2, 5)},
    "a child that is not there": {"children": ints(0, 1, 3, 7, 2, 5)},
    "a negative child": {"children": ints(0, -1, 3, 4, 2, 5)},
    "a huge child": {"children": ints(0, HUGE, 3, 4, 2, 5)},
    "a node without a parent": {"children": ints(0, 1, 0, 1, 2, 5)},
    "fewer children": {"children": ints(0, 1, 3, 4, 2)},
    "more children": {"children": ints(0, 1, 3, 4, 2, 5, 5)},
    "counts that overflow": {"child_counts": ints(0, 0, HUGE, 0, 0, HUGE, 4)},
    "a negative count": {"child_counts": ints(0, 0, -2, 0, 0, 2, 6)},
    "a leaf with children": {"child_counts": ints(1, 0, 1, 0, 0, 2, 2)},
    "a product without children": {"child_counts": ints(0, 0, 0, 0, 0, 4, 2)},
    "fewer counts": {"child_counts": ints(0, 0, 2)},
    "no nodes": {"kinds": ints(), "child_counts": ints()},
    "an unknown kind": {"kinds": ints(0, 0, 1, 0, 0, 1, 3)},
    "a leaf too many": {"leaf_variables": ints(0, 1, 0, 1, 1)},
    "an order with a gap": {"leaf_order": ints(0, 1, 2, 4)},
    "an order with a number twice": {"leaf_order": ints(0, 1, 2, 2)},
    "a variable that is not there": {"leaf_variables": ints(0, 1, 0, 2)},
    "a huge variable": {"leaf_variables": ints(0, 1, 0, HUGE)},
    "no tokens": {"variable_sizes": ints(0, 5)},
    "huge sizes": {"variable_sizes": ints(HUGE, HUGE)},
    "sizes that do not add up": {"variable_sizes": ints(3, 3)},
    "fewer probabilities": {"log_probs": torch.zeros(9).double()},
    "more weights": {"log_weights": torch.zeros(3).double()},
    "weights of another sum": {"log_weights": torch.zeros(2).double()},
    "weights that are no numbers": {"log_weights": torch.tensor([math.nan, 0.0]).double()},
    "infinite probabilities": {"log_probs": torch.full((10,), math.inf).double()},
    "a graph that is not decomposable": {
        "kinds": ints(0, 0, 1, 0, 0, 1, 1),
        "log_weights": torch.zeros(0).double(),
    },
    "a graph that is not smooth": {
        "kinds": ints(0, 0, 2, 0, 0, 2, 2),
        "log_weights": torch.full((6,), 0.5).double().log(),
    },
    "mixtures without weights": {"kinds": ints(0, 0, 2, 0, 0, 2, 1)},
    "float32": {"log_probs": torch.zeros(10)},
    "a matrix": {"children": ints(0, 1, 3, 4, 2, 5)[None]},
    "int32": {"kinds": torch.zeros(7, dtype=torch.int32)},
    "names that are no JSON": {"names": torch.zeros(4, dtype=torch.uint8)},
    "names of nested lists": {"names": torch.full((100_000,), 91, dtype=torch.uint8)},
    "fewer names": {"names": torch.tensor(list(b'["a"]'), dtype=torch.uint8)},
    "names that are numbers": {"names": torch.tensor(list(b"[1,2,3,4,5,6,7]"), dtype=torch.uint8)},
}


BAD = [*((name, {}, changes) for name, changes in BAD_TENSORS.items())]
BAD += [
    (f"variables {found}", {"variables": found}, {})
    for found in (None, {}, "01", [], [0], [0, 1, 2], [0, 0], [0, 1.0], [0, None], [True, False], [[0], [1]], [0, 0.5])
]


@pytest.mark.parametrize(("config", "tensors"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_hostile_files_are_refused(config, tensors, tmp_path):
    base().save(tmp_path / "good")
    good = storage.read_folder(tmp_path / "good")
    storage.write_folder(tmp_path / "bad", good[0] | config, good[1] | tensors)
    with pytest.raises(FormatError, match=r"bad: .*Save or download the circuit again"):
        Circuit.load(tmp_path / "bad")


def test_a_small_file_cannot_ask_for_a_huge_table(tmp_path):
    """2**13 variables, one of them of 2**14 tokens and one of 2**14 leaves: 2**41 numbers from less than a megabyte."""
    variables, many = 2**13, 2**14
    leaves = many + variables - 1
    sizes, places = torch.ones(variables).long(), torch.cat([torch.zeros(many).long(), torch.arange(1, variables)])
    sizes[-1] = many
    tensors = {
        "kinds": torch.cat([torch.zeros(leaves).long(), ints(2, 1)]),
        "child_counts": torch.cat([torch.zeros(leaves).long(), ints(many, variables)]),
        "children": torch.cat([torch.arange(many), ints(leaves), torch.arange(many, leaves)]),
        "leaf_variables": places,
        "leaf_order": torch.arange(leaves),
        "variable_sizes": sizes,
        "log_probs": torch.cat([torch.zeros(leaves - 1), torch.full((many,), -14 * math.log(2))]).double(),
        "log_weights": torch.full((many,), -14 * math.log(2)).double(),
        "names": torch.tensor(list(json.dumps([""] * (leaves + 2)).encode()), dtype=torch.uint8),
    }
    storage.write_folder(tmp_path, {"circuit": "graph", "variables": list(range(variables))}, tensors)
    with pytest.raises(FormatError, match="do not fit together"):
        Circuit.load(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_tensors_read_or_raise_our_error(seed, tmp_path):
    random = torch.Generator().manual_seed(seed)
    shared().save(tmp_path)
    config, tensors = storage.read_folder(tmp_path)
    names = sorted(tensors)
    for _ in range(2):
        name = names[int(torch.randint(len(names), (1,), generator=random))]
        at = int(torch.randint(len(tensors[name]), (1,), generator=random))
        value = int(torch.randint(-3, 9, (1,), generator=random)) % (256 if name == "names" else 2**62)
        tensors[name][at] = value
    storage.write_folder(tmp_path, config, tensors)
    try:
        found = Circuit.load(tmp_path)
    except CoddError:
        return
    nothing = Evidence(missing=torch.ones(1, found.length, dtype=torch.bool))
    assert abs(float(found.log_partition(nothing))) < 1e-3
