"""Reading the hidden Markov models that PyJuice saves (``.jpc``) without running anything that such a file contains.

A ``.jpc`` is a pickle of a list of dicts, and a pickle is a program that may call whatever it names. `pickles.load`
reads one without running it. What comes out is checked to be a chain, and its matrices to be distributions.
"""

import io
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from codd.circuits.pickles import ARRAY_CALLS, LEAF_CALLS, Array, LeafRecord, is_int, latin1, load
from codd.errors import FormatError
from codd.files import open_regular

_ROW_TOLERANCE = 1e-4
# Tied or sparse nodes may expand on reading. A small file must not be able to ask for all of the memory.
_MAX_EXPANSION, _FREE_EXPANSION = 64, 2**26


@dataclass(frozen=True, eq=False)
class JpcHMM:
    """An HMM as a ``.jpc`` file holds it: probabilities, neither renormalised nor smoothed.

    ``transition`` and ``emission`` have a leading axis of positions where the file does not tie them: entry t of the
    transition leads from position t to t + 1 (for a single position there is none, and the shape is (0, N, N)).
    """

    initial: Float[Tensor, " N"]
    transition: Float[Tensor, "*steps N N"]
    emission: Float[Tensor, "*positions N V"]
    length: int
    homogeneous: bool
    leaf_class: str


def read_jpc(path: str | os.PathLike[str]) -> JpcHMM:
    """Read the HMM in a ``.jpc`` file; whatever the file holds, nothing of it is run.

    Raises UnsafePickle if the file names anything but NumPy arrays and PyJuice's categorical leaves, and FormatError
    if it is damaged or is not a normalised chain.
    """
    path = Path(path)
    file = open_regular(path)
    try:
        with file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            calls = {**ARRAY_CALLS, ("_codecs", "encode"): latin1(len(data))}
            return _extract_hmm(_parse_nodes(load(data, len(data), calls)))
    except FormatError as error:
        raise type(error)(f"{path}: {error}") from error.__cause__
    except MemoryError as error:
        raise FormatError(f"{path}: there is not enough memory for the circuit that it describes.") from error
    except (OSError, ValueError) as error:  # an empty file
        raise FormatError(f"{path}: cannot be read: {error}. Expected a circuit saved by pyjuice.save.") from error


@dataclass(frozen=True, eq=False, slots=True)
class _Node:
    """One entry of the file: a vector of nodes in blocks, with its children and (if not tied) its parameters."""

    index: int
    kind: str
    blocks: int
    block_size: int
    children: tuple[int, ...]
    edges: NDArray[Any] | None
    params: NDArray[Any] | None
    source: int | None
    variable: int | None
    leaf: LeafRecord | None

    @property
    def size(self) -> int:
        return self.blocks * self.block_size

    def __str__(self) -> str:
        return f"entry {self.index} ({self.kind})"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise FormatError(message)


def _parse_nodes(entries: object) -> list[_Node]:
    if not isinstance(entries, list) or not entries or not all(type(entry) is dict for entry in entries):
        raise FormatError("expected a list of dicts, one for each node of a circuit; this is not a PyJuice circuit.")
    leaves: dict[bytes, LeafRecord] = {}
    return [_parse_node(index, entry, len(entries), leaves) for index, entry in enumerate(entries)]


def _parse_node(index: int, entry: dict[str, object], total: int, leaves: dict[bytes, LeafRecord]) -> _Node:
    kind = entry.get("type")
    if not isinstance(kind, str) or kind not in ("Input", "Product", "Sum"):
        raise FormatError(f"entry {index} has no type; expected 'Input', 'Product' or 'Sum'.")
    where = f"entry {index} ({kind})"
    unsupported = "which are not supported. Save the circuit without them."
    _require("external_params" not in entry, f"{where} has external_params, {unsupported}")
    children, source = entry.get("chs"), entry.get("source_node")
    # Children before parents: this also rules out cycles.
    if not isinstance(children, tuple | list) or not all(is_int(c) and 0 <= c < index for c in children):
        raise FormatError(f"{where}: 'chs' must be a tuple of indices of earlier entries.")
    _require(kind != "Input" or not children, f"{where} has children; expected none.")
    if source is not None and not (is_int(source) and 0 <= source < total and source != index):
        raise FormatError(f"{where}: 'source_node' must be the index of another entry.")
    params = _array(entry, "params", where, "f") if kind != "Product" and source is None else None
    blocks, block_size = _sizes(entry, where)
    edges = None if kind == "Input" else _array(entry, "edge_ids", where, "i")
    variable, leaf = (_variable(entry, where, total), _leaf(entry, where, leaves)) if kind == "Input" else (None, None)
    return _Node(index, kind, blocks, block_size, tuple(children), edges, params, source, variable, leaf)


def _sizes(entry: dict[str, object], where: str) -> tuple[int, int]:
    """The number of blocks and their size, under the names of today's PyJuice or of an older one."""
    blocks: object = entry.get("num_nodes")
    size: object = 1
    for blocks_key, size_key in (("num_node_groups", "group_size"), ("num_node_blocks", "block_size")):
        if blocks_key in entry:
            blocks, size = entry[blocks_key], entry.get(size_key)
    if not (is_int(blocks) and is_int(size) and 0 < blocks < 2**31 and 0 < size < 2**31):
        raise FormatError(f"{where}: 'num_node_blocks' and 'block_size' must be there, as positive integers.")
    return blocks, size


def _array(entry: dict[str, object], key: str, where: str, kind: str) -> NDArray[Any]:
    value = entry.get(key)
    if not isinstance(value, Array):
        raise FormatError(f"{where}: {key!r} is missing or is not an array.")
    array, wanted = value.numpy(), {"f": "float32", "i": "int64"}[kind]
    _require(array.dtype.kind == kind, f"{where}: {key!r} has dtype {array.dtype}; expected {wanted}.")
    return array


def _variable(entry: dict[str, object], where: str, total: int) -> int:
    scope = entry.get("scope")
    if not isinstance(scope, tuple | list) or len(scope) != 1 or not (is_int(scope[0]) and 0 <= scope[0] < total):
        raise FormatError(f"{where}: 'scope' must be a list of one variable, below the number of entries.")
    return scope[0]


def _leaf(entry: dict[str, object], where: str, leaves: dict[bytes, LeafRecord]) -> LeafRecord:
    dist = entry.get("dist")
    if not isinstance(dist, bytes):
        raise FormatError(f"{where}: 'dist' is missing or is not bytes.")
    if dist not in leaves:
        try:
            leaf = load(io.BytesIO(dist), len(dist), LEAF_CALLS)
        except FormatError as error:
            raise type(error)(f"{where}: 'dist': {error}") from error.__cause__
        if not isinstance(leaf, LeafRecord) or leaf.num_cats is None or not 0 < leaf.num_cats < 2**31:
            raise FormatError(f"{where}: 'dist' is not a leaf distribution with a number of categories.")
        leaves[dist] = leaf
    return leaves[dist]


def _extract_hmm(nodes: list[_Node]) -> JpcHMM:
    inputs, sums = _follow_chain(nodes)
    emitters, movers = ([_owner(nodes, node) for node in some] for some in (inputs, sums))
    emissions = {node.index: _emission(node) for node in set(emitters)}
    transitions = {node.index: _dense(node, _only_child(nodes, node)) for node in set(movers)}
    initial = _dense(nodes[-1], _only_child(nodes, nodes[-1]))
    n, leaf = initial.shape[1], inputs[0].leaf
    assert leaf is not None
    return JpcHMM(
        initial=torch.from_numpy(initial[0]),
        transition=_join(transitions, movers) if movers else torch.zeros(0, n, n),
        emission=_join(emissions, emitters),
        length=len(inputs),
        homogeneous=len(transitions) <= 1 and len(emissions) == 1,
        leaf_class=leaf.class_name,
    )


def _follow_chain(nodes: list[_Node]) -> tuple[list[_Node], list[_Node]]:
    """The inputs of all positions and the sums between them, from the root on; FormatError if it is not a chain."""
    root = nodes[-1]
    inputs: list[_Node] = []
    sums: list[_Node] = []
    single = root.kind == "Sum" and root.size == 1
    _require(single, f"not an HMM: the root, {root}, must be a single sum node, but has {root.size} node(s).")
    product = _only_child(nodes, root)
    while True:
        children = {child.kind: child for child in (nodes[child] for child in product.children)}
        kinds = sorted(nodes[child].kind for child in product.children)
        if product.kind != "Product" or kinds not in (["Input"], ["Input", "Sum"]):
            shown = f"{product} over {', '.join(kinds[:4]) or 'nothing'}"
            raise FormatError(
                f"not a chain: expected a Product over an Input and a Sum (or the last Input), found {shown}."
            )
        _check_product(product, list(children.values()))
        inputs.append(children["Input"])
        if "Sum" not in children:
            break
        sums.append(children["Sum"])
        above, product = sums[-1], _only_child(nodes, sums[-1])
        sizes = f"{above} has {above.size} nodes, but {product} below has {product.size}"
        _require(product.size == above.size, f"not an HMM: {sizes}.")
    _check_inputs(inputs)
    entries = f"{len(inputs)} positions take {3 * len(inputs)} entries, but the file has {len(nodes)}"
    _require(len(nodes) == 3 * len(inputs), f"not a chain: {entries}.")
    return inputs, sums


def _only_child(nodes: list[_Node], node: _Node) -> _Node:
    count = len(node.children)
    _require(count == 1, f"not a chain: {node} must have one child, a Product, but has {count} children.")
    return nodes[node.children[0]]


def _check_product(product: _Node, children: list[_Node]) -> None:
    """Node i of the product must multiply the nodes i of its children."""
    for child in children:
        same = (child.blocks, child.block_size) == (product.blocks, product.block_size)
        _require(same, f"not an HMM: {product} and its child, {child}, differ in their blocks.")
    edges, shape = product.edges, (product.blocks, len(children))
    assert edges is not None
    equal = edges.shape == shape and bool((edges == np.arange(product.blocks)[:, None]).all())
    _require(equal, f"not an HMM: 'edge_ids' of {product} must pair equal blocks, in an array of shape {shape}.")


def _check_inputs(inputs: list[_Node]) -> None:
    for position, node in enumerate(inputs):
        _require(
            node.variable == position,
            f"not an HMM from left to right: position {position} of the chain holds variable {node.variable}; "
            f"expected the variables 0 to {len(inputs) - 1} in order, each once.",
        )
    if len({(node.leaf.class_name, node.leaf.num_cats) for node in inputs if node.leaf}) != 1:
        raise FormatError("the inputs differ in their leaf class or number of categories; expected one kind of leaf.")


def _owner(nodes: list[_Node], node: _Node) -> _Node:
    """The node whose parameters ``node`` uses: itself, unless it is tied."""
    if node.source is None:
        return node
    owner = nodes[node.source]
    below = [[(nodes[c].blocks, nodes[c].block_size) for c in end.children] for end in (node, owner)]
    same = (
        owner.params is not None
        and (owner.kind, owner.blocks, owner.block_size) == (node.kind, node.blocks, node.block_size)
        and below[0] == below[1]
        and (node.edges is None or owner.edges is None or np.array_equal(node.edges, owner.edges))
    )
    _require(same, f"{node} is tied to {owner}, which does not own parameters for the same edges.")
    return owner


def _emission(node: _Node) -> NDArray[np.float32]:
    assert node.params is not None
    assert node.leaf is not None
    assert node.leaf.num_cats is not None
    n, v, found = node.size, node.leaf.num_cats, node.params.shape
    needed = f"{n} states over {v} categories need 'params' of shape {(n * v,)}"
    _require(found == (n * v,), f"{node}: {needed}; found {found}.")
    return _checked_rows(np.empty((n, v), dtype=np.float32), ..., node.params.reshape(n, v), node)


def _dense(node: _Node, child: _Node) -> NDArray[np.float32]:
    """The whole matrix of a sum: the file has its blocks, and blocks that are not there are zero."""
    edges, params = node.edges, node.params
    if params is None:
        raise FormatError(f"{node} has no parameters of its own; expected 'params'.")
    assert edges is not None
    flat = edges.ndim == 2 and len(edges) == 2
    _require(flat, f"{node}: 'edge_ids' must have shape (2, edges); found {edges.shape}.")
    shape = (edges.shape[1], node.block_size, child.block_size)
    _require(params.shape == shape, f"{node}: 'params' must have shape {shape}; found {params.shape}.")
    rows, columns = edges.astype(np.int64)
    there = min(rows.min(), columns.min()) >= 0 and rows.max() < node.blocks and columns.max() < child.blocks
    _require(there, f"{node}: 'edge_ids' points at blocks that do not exist.")
    distinct = len(np.unique(rows * child.blocks + columns)) == len(rows)
    _require(distinct, f"{node}: 'edge_ids' has a pair of blocks twice.")
    _check_expansion(node.size * child.size, params.size)
    matrix = np.zeros((node.blocks, node.block_size, child.blocks, child.block_size), dtype=np.float32)
    return _checked_rows(matrix, (rows, slice(None), columns), params, node).reshape(node.size, child.size)


def _checked_rows(matrix: NDArray[np.float32], where: Any, values: NDArray[Any], node: _Node) -> NDArray[np.float32]:
    """The matrix of n rows with these values in it, which have to make each row a distribution."""
    with np.errstate(over="ignore"):  # a float64 that is too large becomes inf, and is then refused as not finite
        matrix[where] = values
    possible = bool(np.isfinite(matrix).all()) and not bool((matrix < 0).any())
    _require(possible, f"{node}: 'params' has values that are negative or not finite; expected probabilities.")
    sums = matrix.reshape(node.size, -1).sum(axis=-1, dtype=np.float64)
    worst = int(np.abs(sums - 1).argmax())
    _require(
        abs(sums[worst] - 1) <= _ROW_TOLERANCE,
        f"{node}: the probabilities of node {worst} sum to {sums[worst]:.6g}; expected 1 within {_ROW_TOLERANCE:g}. "
        "Normalise the circuit in PyJuice and save it again.",
    )
    return matrix


def _join(matrices: dict[int, NDArray[np.float32]], owners: list[_Node]) -> Tensor:
    """One matrix if all positions share it, otherwise one for each position."""
    steps = [matrices[owner.index] for owner in owners]
    if len(matrices) == 1:
        return torch.from_numpy(steps[0])
    size = steps[0].size
    _check_expansion(len(steps) * size, len(matrices) * size)
    return torch.from_numpy(np.stack(steps))


def _check_expansion(needed: int, stored: int) -> None:
    _require(
        needed <= max(_MAX_EXPANSION * stored, _FREE_EXPANSION),
        f"{stored} parameters in the file would grow to {needed}; codd holds matrices densely and stops at "
        f"{_MAX_EXPANSION} times.",
    )
