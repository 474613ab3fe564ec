"""General circuits as tensors: the structure in integers, the parameters in float64, names and variables as text.

M nodes in topological order (children before parents, the root last), F of them leaves, E edges, L variables:

=================  ==========================================================================================
kinds              (M,) 0: leaf, 1: product, 2: mixture
child_counts       (M,) the number of children of each node
children           (E,) the numbers of the children, node after node; each below its parent's: no cycles
leaf_variables     (F,) the position of each leaf's variable
leaf_order         (F,) when each leaf was made, 0 to F - 1: this numbers the latents
variable_sizes     (L,) the number of tokens of each variable
log_probs          the log-probabilities of the leaves, leaf after leaf
log_weights        the log-weights of the mixtures, one for each child, mixture after mixture
names              (bytes,) the names of the nodes as a JSON list in UTF-8
=================  ==========================================================================================

A file that does not hold to this is refused with `FormatError` before anything larger than itself is made of it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from codd.circuits.nodes import Leaf, Mixture, Node, Product, Variable, leaf, mixture, product
from codd.errors import FormatError

_LEAF, _PRODUCT, _MIXTURE = range(3)
_INTEGERS = ("kinds", "child_counts", "children", "leaf_variables", "leaf_order", "variable_sizes")
_DTYPES = {
    **dict.fromkeys(_INTEGERS, torch.int64),
    "log_probs": torch.float64,
    "log_weights": torch.float64,
    "names": torch.uint8,
}
_MAX_EXPANSION, _FREE_EXPANSION = 64, 2**26
"""How many times as many numbers as are stored the padded table of leaves (L, K, V) may have; so many are allowed."""


def to_tensors(
    nodes: Sequence[Node], leaves: Sequence[Sequence[Leaf]], variables: Sequence[Variable]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a circuit; `FormatError` if they could not be read back.

    ``nodes`` in topological order, ``leaves`` of each variable in the order in which they were made.
    """
    number = {node: i for i, node in enumerate(nodes)}
    position = {variable: t for t, variable in enumerate(variables)}
    in_order = [node for node in nodes if isinstance(node, Leaf)]
    made = {node: i for i, node in enumerate(sorted(in_order, key=lambda node: node.created))}
    sizes = [len(same[0].log_probs) for same in leaves]
    _check_table(len(variables), max(map(len, leaves)), max(sizes), sum(len(node.log_probs) for node in in_order))
    integers = {
        "kinds": [_LEAF if isinstance(n, Leaf) else _PRODUCT if isinstance(n, Product) else _MIXTURE for n in nodes],
        "child_counts": [len(node.children) for node in nodes],
        "children": [number[child] for node in nodes for child in node.children],
        "leaf_variables": [position[node.variable] for node in in_order],
        "leaf_order": [made[node] for node in in_order],
        "variable_sizes": sizes,
    }
    names = json.dumps([node.name for node in nodes]).encode()
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in integers.items()}
    tensors["log_probs"] = torch.cat([node.log_probs for node in in_order])
    weights = [node.log_weights for node in nodes if isinstance(node, Mixture)]
    tensors["log_weights"] = torch.cat(weights) if weights else torch.zeros(0, dtype=torch.float64)
    tensors["names"] = torch.frombuffer(bytearray(names), dtype=torch.uint8)
    stored = [variable if isinstance(variable, str) else int(variable) for variable in variables]
    return {"circuit": "graph", "variables": stored}, tensors


def from_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Node, list[Variable]]:
    """The root and the variables in the order of their positions, or `FormatError` with what is wrong."""
    for name, dtype in _DTYPES.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.ndim != 1 or tensor.dtype != dtype:
            shown = "none" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            raise FormatError(f"tensor {name} must be one-dimensional, of {dtype}; found {shown}")
    x = {name: tensors[name].cpu() for name in _DTYPES}
    _check_structure(x)
    variables = _variables(config.get("variables"), len(x["variable_sizes"]))
    names = _names(x["names"], len(x["kinds"]))
    made = _leaves(x, variables, [name for name, kind in zip(names, x["kinds"].tolist(), strict=True) if not kind])
    nodes: list[Node] = []
    in_order, weights = iter(made), 0
    children, edge = x["children"].tolist(), 0
    for kind, count, name in zip(x["kinds"].tolist(), x["child_counts"].tolist(), names, strict=True):
        below = [nodes[child] for child in children[edge : edge + count]]
        edge += count
        if kind == _LEAF:
            nodes.append(next(in_order))
        elif kind == _PRODUCT:
            nodes.append(product(below, name=name))
        else:
            nodes.append(mixture(below, log_weights=x["log_weights"][weights : weights + count], name=name))
            weights += count
    return nodes[-1], variables


def _check_structure(x: Mapping[str, Tensor]) -> None:
    """Sizes that fit together, children before parents, and nothing that is used by nothing."""
    kinds, counts, children, total = x["kinds"], x["child_counts"], x["children"], len(x["kinds"])
    if not total or len(counts) != total:
        raise FormatError(f"kinds and child_counts must have one entry for each node, found {total} and {len(counts)}")
    _check_range("kinds", kinds, 0, _MIXTURE)
    _check_range("child_counts", counts, 0, len(children))
    if bool((counts[kinds == _LEAF] != 0).any()) or bool((counts[kinds != _LEAF] == 0).any()):
        raise FormatError("child_counts must be 0 for leaves, and at least 1 for products and mixtures")
    # Python's sums: entries of a hostile file could overflow 64 bits together.
    if sum(counts.tolist()) != len(children):
        raise FormatError(f"child_counts must add up to the {len(children)} children")
    parents = torch.repeat_interleave(torch.arange(total), counts)
    _check_range("children", children, 0, total - 1)
    if bool((children >= parents).any()):
        raise FormatError("children must come before their parents: the stored graph has a cycle")
    used = torch.zeros(total, dtype=torch.bool)
    used[children] = True
    if not bool(used[:-1].all()):
        raise FormatError(f"node {int((~used).nonzero()[0])} has no parent, and is not the root, which comes last")
    leaves, mixtures = int((kinds == _LEAF).sum()), int(counts[kinds == _MIXTURE].sum())
    sizes, places = x["variable_sizes"], x["leaf_variables"]
    if len(places) != leaves or sorted(x["leaf_order"].tolist()) != list(range(leaves)):
        raise FormatError(f"leaf_variables and leaf_order must number each of the {leaves} leaves, the latter once")
    _check_range("variable_sizes", sizes, 1, len(x["log_probs"]))
    _check_range("leaf_variables", places, 0, len(sizes) - 1)
    per_variable = torch.bincount(places, minlength=len(sizes))
    stored = sum(size * count for size, count in zip(sizes.tolist(), per_variable.tolist(), strict=True))
    if stored != len(x["log_probs"]) or mixtures != len(x["log_weights"]):
        raise FormatError(
            f"log_probs and log_weights must have {stored} and {mixtures} entries, one for each token of each leaf and "
            f"each child of each mixture; found {len(x['log_probs'])} and {len(x['log_weights'])}"
        )
    _check_table(len(sizes), int(per_variable.max()), int(sizes.max()), stored)


def _check_range(name: str, values: Tensor, low: int, high: int) -> None:
    wrong = values[(values < low) | (values > high)]
    if len(wrong):
        raise FormatError(f"{name} must be in {low}..{high}, found {int(wrong[0])}")


def _check_table(variables: int, leaves: int, tokens: int, stored: int) -> None:
    """Leaves are computed with as one padded table: a small file may not ask for a huge one."""
    needed = variables * leaves * tokens
    if needed > max(_MAX_EXPANSION * stored, _FREE_EXPANSION):
        raise FormatError(
            f"{stored} parameters of leaves would grow to a table of {variables} variables x {leaves} leaves x "
            f"{tokens} tokens; codd stops at {_MAX_EXPANSION} times. Make the variables more alike"
        )


def _variables(given: object, count: int) -> list[Variable]:
    if not isinstance(given, list) or len(given) != count or any(type(v) not in (int, str) for v in given):
        raise FormatError(f"config.json must list its {count} variables, as whole numbers or text")
    return list(given)


def _names(text: Tensor, count: int) -> list[str]:
    try:
        names = json.loads(bytes(text.numpy()))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the names of the nodes are not JSON ({type(error).__name__})") from None
    if not isinstance(names, list) or len(names) != count or not all(isinstance(name, str) for name in names):
        raise FormatError(f"the names must be a list of {count} texts, one for each node")
    return names


def _leaves(x: Mapping[str, Tensor], variables: Sequence[Variable], names: Sequence[str]) -> list[Leaf]:
    """The leaves in the order of the nodes, made in the order in which they were made first."""
    places = x["leaf_variables"]
    rows = torch.split(x["log_probs"], x["variable_sizes"][places].tolist())
    made: dict[int, Leaf] = {}
    for i in x["leaf_order"].argsort().tolist():
        made[i] = leaf(variables[int(places[i])], log_probs=rows[i], name=names[i])
    return [made[i] for i in range(len(rows))]
