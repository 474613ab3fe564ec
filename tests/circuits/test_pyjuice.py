import json
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from codd.circuits import pyjuice
from codd.circuits.pyjuice import read_jpc
from codd.errors import CoddError, FormatError, UnsafePickle
from tests.support import FIXTURES

INDEX = json.loads((FIXTURES / "hmm" / "index.json").read_text())
HMMS = sorted((FIXTURES / "hmm").glob("*.jpc"))
MALICIOUS = sorted((FIXTURES / "malicious").glob("*.jpc"))
CANARY_CODE = "import os; p = os.environ.get('CODD_FIXTURE_CANARY'); p and open(p, 'w').close()"


@pytest.fixture(autouse=True)
def canary(tmp_path, monkeypatch):
    """A path that harmful pickles create; no test may leave it behind."""
    path = tmp_path / "canary"
    monkeypatch.setenv("CODD_FIXTURE_CANARY", str(path))
    yield path
    assert not path.exists()


@pytest.fixture
def read(tmp_path):
    """Read bytes as if they were a file."""

    def read_bytes(data: bytes):
        path = tmp_path / "circuit.jpc"
        path.write_bytes(data)
        return read_jpc(path)

    return read_bytes


class Evil:
    """Runs the canary's code when it is unpickled by ``pickle``."""

    def __reduce__(self):
        return exec, (CANARY_CODE,)


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def leaf(num_cats: int = 4, name: str = "Categorical") -> bytes:
    state = b"}" + text("num_cats") + b"J" + struct.pack("<i", num_cats) + b"s"
    return b"\x80\x04" + stack_global("pyjuice.nodes.distributions.categorical", name) + b")\x81" + state + b"b."


def rows(n: int, m: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).random((n, m)).astype(np.float32)
    return values / values.sum(1, keepdims=True)


def blocked(matrix: np.ndarray, size: int) -> np.ndarray:
    """The blocks of a matrix, row by row, as a Sum's params."""
    n, m = matrix.shape
    return np.ascontiguousarray(matrix.reshape(n // size, size, m // size, size).swapaxes(1, 2)).reshape(-1, size, size)


def chain(length: int = 3, n: int = 6, v: int = 4, size: int = 2) -> list[dict]:
    """A homogeneous HMM as PyJuice lays it out: inputs, then products and sums from the last position to the root."""
    k = n // size
    shape = {"num_node_blocks": k, "block_size": size}
    pairs = np.stack(np.meshgrid(np.arange(k), np.arange(k), indexing="ij")).reshape(2, -1)
    entries = []
    for t in range(length):
        owned = {"params": rows(n, v, 1).reshape(-1)} if t == length - 1 else {"source_node": length - 1}
        entries.append({"type": "Input", **shape, "chs": (), **owned, "scope": [t], "dist": leaf(v)})
    for t in reversed(range(length)):
        children = (t,) if t == length - 1 else (t, len(entries) - 1)
        edges = np.repeat(np.arange(k)[:, None], len(children), 1)
        entries.append({"type": "Product", **shape, "chs": children, "edge_ids": edges})
        top = {"type": "Sum", "chs": (len(entries) - 1,)}
        if t == 0:
            initial = rows(1, n, 3).reshape(-1, 1, size)
            edges = np.stack([np.zeros(k, np.int64), np.arange(k)])
            entries.append({**top, "num_node_blocks": 1, "block_size": 1, "edge_ids": edges, "params": initial})
        else:
            tied = {"source_node": length + 1} if t < length - 1 else {"params": blocked(rows(n, n, 2), size)}
            entries.append({**top, **shape, "edge_ids": pairs.copy(), **tied})
    return entries


@pytest.mark.parametrize("path", HMMS, ids=lambda p: p.stem)
def test_fixture_reads_back_exactly(path):
    name = path.stem.removesuffix("_numpy1").removesuffix("_legacy")
    truth, facts = load_file(FIXTURES / "hmm" / f"{name}.safetensors"), INDEX[name]
    hmm = read_jpc(path)
    for key in ("initial", "transition", "emission"):
        found = getattr(hmm, key)
        assert found.dtype == torch.float32
        assert found.is_contiguous()
        assert torch.equal(found, truth[key])
    assert hmm.length == facts["seq_length"]
    assert hmm.homogeneous == facts["homogeneous"]
    assert hmm.leaf_class == facts["input_dist"]


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_reads_the_same(read, protocol):
    hmm = read(pickle.dumps(chain(), protocol=protocol))
    assert torch.equal(hmm.initial, torch.from_numpy(rows(1, 6, 3)[0]))
    assert torch.equal(hmm.transition, torch.from_numpy(rows(6, 6, 2)))
    assert torch.equal(hmm.emission, torch.from_numpy(rows(6, 4, 1)))
    assert hmm.length == 3
    assert hmm.homogeneous


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_lengths_and_block_sizes(read, length, size):
    hmm = read(pickle.dumps(chain(length, size=size)))
    assert hmm.length == length
    assert torch.equal(hmm.initial, torch.from_numpy(rows(1, 6, 3)[0]))
    assert torch.equal(hmm.emission, torch.from_numpy(rows(6, 4, 1)))
    assert torch.equal(hmm.transition, torch.from_numpy(rows(6, 6, 2)) if length > 1 else torch.zeros(0, 6, 6))


def test_fortran_order_float64_and_int32(read):
    entries = chain()
    for entry in entries:
        for key, dtype in (("params", np.float64), ("edge_ids", np.int32)):
            if key in entry:
                entry[key] = np.asfortranarray(entry[key].astype(dtype))
    for protocol in (4, 5):
        data = pickle.dumps(entries, protocol=protocol)
        assert torch.equal(read(data).transition, torch.from_numpy(rows(6, 6, 2)))
        assert torch.equal(read(data).emission, torch.from_numpy(rows(6, 4, 1)))


def test_blocks_in_any_order_and_absent_blocks(read):
    entries = chain()
    matrix = rows(6, 6, 2)
    matrix[:2, 2:4] = 0
    matrix /= matrix.sum(1, keepdims=True)
    kept = np.array([8, 0, 3, 2, 7, 5, 4, 6])  # all but block (0, 1), shuffled
    for entry in entries[:-1]:
        if entry["type"] == "Sum":
            entry["edge_ids"] = entry["edge_ids"][:, kept]
            if "params" in entry:
                entry["params"] = blocked(matrix, 2)[kept]
    assert torch.equal(read(pickle.dumps(entries)).transition, torch.from_numpy(matrix))


def test_old_key_names(read):
    groups, nodes = chain(), chain(size=1)
    for entry in groups:
        entry["num_node_groups"], entry["group_size"] = entry.pop("num_node_blocks"), entry.pop("block_size")
    for entry in nodes:
        entry["num_nodes"] = entry.pop("num_node_blocks") * entry.pop("block_size")
    for entries in (groups, nodes):
        assert torch.equal(read(pickle.dumps(entries)).transition, torch.from_numpy(rows(6, 6, 2)))


def test_only_emissions_untied(read):
    entries = chain()
    del entries[0]["source_node"]
    entries[0]["params"] = rows(6, 4, 7).reshape(-1)
    hmm = read(pickle.dumps(entries))
    assert not hmm.homogeneous
    assert hmm.transition.shape == (6, 6)
    assert torch.equal(hmm.emission, torch.from_numpy(np.stack([rows(6, 4, seed) for seed in (7, 1, 1)])))


def test_a_mask_of_zeros_is_ignored(read):
    assert read(pickle.dumps(changed(8, zero_param_mask=np.zeros(3, bool)))).length == 3


@pytest.mark.parametrize("path", MALICIOUS, ids=lambda p: p.stem)
def test_malicious_fixture_is_refused(path, canary):
    with pytest.raises(UnsafePickle, match="it asks for") as caught:
        read_jpc(path)
    assert str(caught.value).startswith(str(path))
    assert not canary.exists()


WATCHER = """
import sys
from codd.circuits.pyjuice import read_jpc
from codd.errors import UnsafePickle
good, *bad = sys.argv[1:]
read_jpc(good)  # whatever is imported or compiled on first use has been now
seen, watched = [], ("import", "compile", "exec", "os.", "subprocess.", "pickle.", "marshal.", "ctypes.", "socket.")
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(watched) else None)
for path in bad:
    try:
        read_jpc(path)
    except UnsafePickle:
        continue
    sys.exit(path + " was read")
sys.exit(", ".join(seen) or 0)
"""


def test_malicious_fixtures_do_nothing_at_all_in_a_process_of_their_own(canary):
    command = [sys.executable, "-c", WATCHER, *map(str, [HMMS[0], *MALICIOUS])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not canary.exists()


def test_the_canary_fires_for_plain_pickle(canary):
    pickle.loads(pickle.dumps(Evil()))
    assert canary.exists()
    canary.unlink()


@pytest.mark.parametrize("key", ["type", "chs", "params", "edge_ids", "scope", "dist", "num_node_blocks", "extra"])
def test_a_harmful_call_anywhere_in_an_entry(read, key):
    entries = chain()
    entries[-1][key] = Evil()
    for protocol in range(6):
        with pytest.raises(UnsafePickle, match=r"'(builtins|__builtin__)\.exec'"):
            read(pickle.dumps(entries, protocol=protocol))


@pytest.mark.parametrize("protocol", range(6))
def test_a_harmful_call_in_nested_dist(read, protocol):
    entries = changed(0, dist=pickle.dumps(Evil(), protocol=protocol))
    with pytest.raises(UnsafePickle, match=r"entry 0 \(Input\): 'dist': it asks for '(builtins|__builtin__)\.exec'"):
        read(pickle.dumps(entries))


@pytest.mark.parametrize("key", [0, -1])
def test_external_params_are_not_supported_and_not_opened(read, key):
    entries = chain()
    entries[key]["external_params"] = pickle.dumps(Evil())
    with pytest.raises(FormatError, match="external_params, which are not supported"):
        read(pickle.dumps(entries))


EMPTY_ARRAY = stack_global("numpy._core.multiarray", "_reconstruct") + stack_global("numpy", "ndarray")
EMPTY_ARRAY += b"K\x00\x85C\x01b\x87R"


def test_leaves_and_arrays_are_only_allowed_in_their_places(read):
    with pytest.raises(UnsafePickle, match="Categorical"):
        read(leaf())
    with pytest.raises(UnsafePickle, match=r"'dist': it asks for 'numpy"):
        read(pickle.dumps(changed(0, dist=b"\x80\x04" + EMPTY_ARRAY + b".")))


NOT_CIRCUITS = {
    "empty": b"",
    "nothing": b"\x80\x04N.",
    "empty list": b"\x80\x04].",
    "list of numbers": b"\x80\x04]K\x01a.",
    "list of an empty dict": b"\x80\x04]}a.",
    "list that holds itself": b"\x80\x04]q\x00h\x00a.",
    "deep lists": b"\x80\x04" + b"]" * 30_000 + b"a" * 29_999 + b".",
    "tuples that double": b"\x80\x04]}" + text("type") + b")" + b"q\x00h\x00\x86" * 100 + b"sa.",
    "array alone": b"\x80\x04" + EMPTY_ARRAY + b".",
}


@pytest.mark.parametrize("data", NOT_CIRCUITS.values(), ids=NOT_CIRCUITS.keys())
def test_not_a_circuit(read, data):
    for content in (data, pickle.dumps(changed(0, dist=data)) if data else b""):
        with pytest.raises(FormatError):
            read(content)


@pytest.mark.parametrize("extra", [b"\0", b".", b"\x80\x04N.", pickle.dumps(Evil())])
def test_trailing_bytes(read, extra):
    with pytest.raises(FormatError, match=f"{len(extra)} bytes follow"):
        read(HMMS[0].read_bytes() + extra)
    entries = chain()
    entries[0]["dist"] += extra
    with pytest.raises(FormatError, match=f"'dist': {len(extra)} bytes follow"):
        read(pickle.dumps(entries))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["hmm_len1", "hmm_n12_legacy", "hmm_sparse"]), st.data())
def test_damaged_files_read_or_raise_our_error(read, name, data):
    content = bytearray((FIXTURES / "hmm" / f"{name}.jpc").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        hmm = read(bytes(content))
    except CoddError:
        return
    assert torch.isfinite(hmm.emission).all()


def test_missing_file_folder_and_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpc")
    for path in (tmp_path / "nothing.jpc", tmp_path, str(tmp_path), tmp_path / "pipe.jpc", tmp_path / ("x" * 5000)):
        with pytest.raises(FormatError, match="cannot be read"):
            read_jpc(path)


def test_out_of_memory_is_told(read, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(pyjuice, "_extract_hmm", fail)
    with pytest.raises(FormatError, match="not enough memory"):
        read(pickle.dumps(chain()))


@pytest.mark.parametrize(
    ("index", "key"),
    [(index, key) for index, entry in enumerate(chain()) for key in entry],
)
def test_missing_or_odd_values(read, index, key):
    cyclic: list = []
    cyclic.append(cyclic)
    for value in (
        None,
        -1,
        99,
        2**20_000,
        True,
        0.5,
        "x",
        b"x",
        (),
        [],
        [7],
        {},
        cyclic,
        (None,),
        (0, "x"),
        np.ones(1),
    ):
        entries = chain()
        if isinstance(value, tuple | list) and key == "chs" and tuple(value) == entries[index][key]:
            continue  # as it should be
        entries[index][key] = value
        if value is None:
            del entries[index][key]
        with pytest.raises(FormatError):
            read(pickle.dumps(entries))


def changed(index: int, **values: object) -> list[dict]:
    entries = chain()
    entries[index].update(values)
    return entries


def tree() -> list[dict]:
    """A Product over two Sums: smooth and decomposable, but no chain."""
    entries = chain(2)
    entries[-2]["chs"] = (len(entries) - 3, len(entries) - 3)
    return entries


def unused_entry() -> list[dict]:
    entries = chain()
    return [*entries[:-1], dict(entries[3]), entries[-1]]


def with_params(index: int, factor: float, at: object = 0, dtype: type = np.float32) -> list[dict]:
    params = chain()[index]["params"].astype(dtype)
    params[at] *= factor
    return changed(index, params=params)


# Entries of chain(): 0-2 inputs, 3 product of the last position, 4 the sum that owns the transition, 5 product, 6 tied
# sum, 7 product, 8 root.
WRONG = {
    "row sum of the initial distribution": (
        with_params(8, 1.01),
        r"entry 8 \(Sum\): the probabilities of node 0 sum to",
    ),
    "transition row": (
        with_params(4, 0.5, (0, 1)),
        r"entry 4 \(Sum\): the probabilities of node 1 sum to 0\.",
    ),
    "emission row": (
        with_params(2, 0, slice(8, 12)),
        r"entry 2 \(Input\): the probabilities of node 2 sum to 0",
    ),
    "negative": (with_params(4, -0.1), "negative or not finite"),
    "nan": (with_params(2, float("nan")), "negative or not finite"),
    "inf": (with_params(8, float("inf")), "negative or not finite"),
    "too large for float32": (with_params(2, 1e300, dtype=np.float64), "negative or not finite"),
    "cycle": (changed(3, chs=(8,)), "indices of earlier entries"),
    "own child": (changed(4, chs=(4,)), "indices of earlier entries"),
    "negative child": (changed(4, chs=(-1,)), "indices of earlier entries"),
    "input with a child": (changed(1, chs=(0,)), "has children"),
    "tied to itself": (changed(0, source_node=0), "index of another entry"),
    "tied to nothing": (changed(0, source_node=9), "index of another entry"),
    "tied to a tied one": (changed(0, source_node=1), "does not own parameters"),
    "tied to another kind": (changed(0, source_node=4), "does not own parameters"),
    "tied to the root": (changed(6, source_node=8), "does not own parameters"),
    "tied with other edges": (changed(6, edge_ids=chain()[6]["edge_ids"][::-1]), "does not own parameters"),
    "tied root": (changed(8, source_node=4), "no parameters of its own"),
    "scope twice": (changed(1, scope=[0]), "position 1 of the chain holds variable 0"),
    "scopes from 1": (changed(0, scope=[3]), "position 0 of the chain holds variable 3"),
    "scope of two": (changed(0, scope=[0, 1]), "'scope' must be a list of one variable"),
    "products of other blocks": (changed(5, edge_ids=np.array([[0, 0], [1, 2], [2, 1]])), "must pair equal blocks"),
    "product edges of another shape": (changed(5, edge_ids=np.arange(3)), "must pair equal blocks"),
    "a pair of blocks twice": (changed(8, edge_ids=np.array([[0, 0, 0], [0, 1, 1]])), "a pair of blocks twice"),
    "blocks that do not exist": (changed(8, edge_ids=np.array([[0, 0, 0], [0, 1, 3]])), "do not exist"),
    "negative blocks": (changed(8, edge_ids=np.array([[0, 0, 0], [0, 1, -1]])), "do not exist"),
    "edges of three rows": (changed(8, edge_ids=np.zeros((3, 3), np.int64)), r"\(2, edges\)"),
    "params of another shape": (changed(8, params=chain()[8]["params"].reshape(-1)), "must have shape"),
    "params of integers": (changed(8, params=np.ones((3, 1, 2), np.int64)), "dtype int64; expected float32"),
    "edges of floats": (changed(8, edge_ids=np.zeros((2, 3))), "dtype float64; expected int64"),
    "emission of another size": (changed(2, params=rows(6, 5, 1).reshape(-1)), "need 'params' of shape"),
    "leaf of another size": (changed(1, dist=leaf(5)), "differ in their leaf class"),
    "leaf without categories": (changed(1, dist=leaf(0)), "not a leaf distribution"),
    "leaf of an unknown class": (changed(1, dist=leaf(4, "Gaussian")), r"asks for .*Gaussian"),
    "root with several nodes": (chain()[:5], "must be a single sum node"),
    "root that is a product": (chain()[:-1], "must be a single sum node"),
    "root with two children": (changed(8, chs=(7, 5)), "must have one child"),
    "root over an input": (changed(8, chs=(0,)), "expected a Product over an Input and a Sum"),
    "sum over a sum": (changed(6, chs=(4,)), "expected a Product over an Input and a Sum"),
    "product over three": (changed(7, chs=(0, 6, 4)), "expected a Product over an Input and a Sum"),
    "tree": (tree(), "expected a Product over an Input and a Sum"),
    "unused entry": (unused_entry(), "take 9 entries, but the file has 10"),
    "shorter than its entries": (changed(8, chs=(5,)), "position 0 of the chain holds variable 1"),
    "sum of another size": (changed(6, num_node_blocks=2), "differ in their blocks"),
    "huge number of blocks": (changed(6, num_node_blocks=2**31), "positive integers"),
    "unknown type": (changed(6, type="Max"), "expected 'Input', 'Product' or 'Sum'"),
}


@pytest.mark.parametrize(("entries", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_not_a_normalised_chain(read, entries, message):
    with pytest.raises(FormatError, match=message):
        read(pickle.dumps(entries))


def test_a_small_file_cannot_ask_for_a_huge_matrix(read):
    n = 20_000
    entries = chain(2, n=4, v=1, size=1)
    for entry in entries[:-1]:
        entry["num_node_blocks"] = n
    for entry in entries:
        if entry["type"] == "Input" and "params" in entry:
            entry["params"] = np.ones(n, np.float32)
        elif entry["type"] == "Product":
            entry["edge_ids"] = np.repeat(np.arange(n)[:, None], len(entry["chs"]), 1)
    entries[3].update(edge_ids=np.stack([np.arange(n)] * 2), params=np.ones((n, 1, 1), np.float32))
    entries[-1].update(edge_ids=np.array([[0], [0]]), params=np.ones((1, 1, 1), np.float32))
    with pytest.raises(FormatError, match="20000 parameters in the file would grow to 400000000"):
        read(pickle.dumps(entries))
