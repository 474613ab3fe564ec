"""The nodes of a circuit, and the checks that make a graph of them a valid circuit."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from codd.errors import InvalidCircuit

Variable = int | str
Numbers = Tensor | Sequence[float | int]

TOLERANCE = 1e-4
_created = itertools.count()


@dataclass(frozen=True, eq=False, repr=False)
class Leaf:
    """A categorical distribution over the tokens of one variable; make it with `leaf`."""

    variable: Variable
    log_probs: Float[Tensor, " V"]
    name: str
    created: int

    @property
    def children(self) -> tuple["Node", ...]:
        """Empty: a leaf has no children."""
        return ()

    def __repr__(self) -> str:
        """Name, variable and size."""
        return f"Leaf({self.name!r}, variable={self.variable!r}, vocab_size={len(self.log_probs)})"


@dataclass(frozen=True, eq=False, repr=False)
class Product:
    """Independent children over disjoint variables; make it with `product`."""

    children: tuple["Node", ...]
    name: str

    def __repr__(self) -> str:
        """Name and fan-in: never the children, a shared graph would unroll into a tree."""
        return f"Product({self.name!r}, children={len(self.children)})"


@dataclass(frozen=True, eq=False, repr=False)
class Mixture:
    """A weighted sum of children over the same variables; make it with `mixture`."""

    children: tuple["Node", ...]
    log_weights: Float[Tensor, " C"]
    name: str

    def __repr__(self) -> str:
        """Name and fan-in."""
        return f"Mixture({self.name!r}, children={len(self.children)})"


Node = Leaf | Product | Mixture


def leaf(
    variable: Variable, probs: Numbers | None = None, *, log_probs: Numbers | None = None, name: str | None = None
) -> Leaf:
    """A categorical over the tokens 0, 1, ... of a variable, from probabilities or from their logarithms.

    The leaves of a variable are numbered in the order in which they were made.
    """
    number = next(_created)
    name = f"leaf#{number}" if name is None else name
    return Leaf(variable, _log_parameters(name, "probs", probs, log_probs), name, number)


def product(children: Iterable[Node], *, name: str | None = None) -> Product:
    """The product of children over disjoint sets of variables."""
    name = f"product#{next(_created)}" if name is None else name
    return Product(_nodes(name, children), name)


def mixture(
    children: Iterable[Node],
    weights: Numbers | None = None,
    *,
    log_weights: Numbers | None = None,
    name: str | None = None,
) -> Mixture:
    """The sum of children over the same variables, weighted by probabilities or by their logarithms."""
    name = f"mixture#{next(_created)}" if name is None else name
    return Mixture(_nodes(name, children), _log_parameters(name, "weights", weights, log_weights), name)


def topological_order(root: Node) -> list[Node]:
    """Every node once, children before parents, in the order of a depth-first traversal from left to right."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children) if child not in seen)
    return order


def _nodes(name: str, children: Iterable[Node]) -> tuple[Node, ...]:
    given = tuple(children)
    for child in given:
        if not isinstance(child, Leaf | Product | Mixture):
            raise InvalidCircuit(
                f"a child of {name} is a {type(child).__name__}, not a node: make nodes with leaf, product and mixture"
            )
    return given


def _log_parameters(name: str, what: str, probs: Numbers | None, log_probs: Numbers | None) -> Float[Tensor, " n"]:
    """Logarithms in float64, in memory that nobody else can change. Their values are checked by `Circuit`."""
    if (probs is None) == (log_probs is None):
        given = "none" if probs is None else "both"
        raise InvalidCircuit(f"{name} needs {what} or log_{what}, one of the two, found {given}")
    values = torch.as_tensor(log_probs if probs is None else probs, dtype=torch.float64, device="cpu").detach()
    if values.ndim != 1:
        raise InvalidCircuit(f"the {what} of {name} must be one-dimensional, found shape {tuple(values.shape)}")
    return values.clone() if probs is None else values.log()


def check_nodes(nodes: Sequence[Node]) -> None:
    """Check each node by itself, children and normalised parameters; `InvalidCircuit` names the node."""
    for node in nodes:
        if isinstance(node, Leaf):
            _check_normalised(node.name, "probs", node.log_probs)
            continue
        if not node.children:
            raise InvalidCircuit(f"{node.name} has no children: an inner node needs at least one")
        if isinstance(node, Mixture):
            if len(node.log_weights) != len(node.children):
                raise InvalidCircuit(
                    f"{node.name} must have one weight for each of its {len(node.children)} children, "
                    f"found {len(node.log_weights)}"
                )
            _check_normalised(node.name, "weights", node.log_weights)


def _check_normalised(name: str, what: str, log_values: Float[Tensor, " n"]) -> None:
    wrong = (log_values.isnan() | (log_values == math.inf)).nonzero()
    if len(wrong):
        raise InvalidCircuit(
            f"the {what} of {name} must be finite, non-negative numbers; entry {int(wrong[0])} is negative, NaN or "
            "infinite. Zero is allowed"
        )
    total = float(log_values.exp().sum())
    if abs(total - 1.0) > TOLERANCE:
        raise InvalidCircuit(
            f"the {what} of {name} must sum to 1 (within {TOLERANCE:g}), found {total:.8g}: divide them by their sum"
        )


def check_scopes(nodes: Sequence[Node], variables: list[Variable]) -> None:
    """Check that the circuit is smooth and decomposable; `InvalidCircuit` names the node.

    A scope is a set of bits: sets of names would be quadratic in a long chain.
    """
    bit = {variable: 1 << i for i, variable in enumerate(variables)}
    scope: dict[Node, int] = {}
    for node in nodes:
        if isinstance(node, Leaf):
            scope[node] = bit[node.variable]
            continue
        first, union = node.children[0], 0
        for child in node.children:
            if isinstance(node, Mixture) and scope[child] != scope[first]:
                raise InvalidCircuit(
                    f"{node.name} is not smooth: the children of a mixture must have the same scope, but {first.name} "
                    f"has {_show(scope[first], variables)} and {child.name} has {_show(scope[child], variables)}. "
                    "Multiply what is missing into each child, as a product with a leaf"
                )
            if isinstance(node, Product) and scope[child] & union:
                other = next(c for c in node.children if scope[c] & scope[child])
                raise InvalidCircuit(
                    f"{node.name} is not decomposable: the children of a product must have disjoint scopes, but "
                    f"{other.name} has {_show(scope[other], variables)} and {child.name} has "
                    f"{_show(scope[child], variables)}, which share {_show(scope[other] & scope[child], variables)}"
                )
            union |= scope[child]
        scope[node] = union


def _show(scope: int, variables: list[Variable], limit: int = 8) -> str:
    names = [repr(v) for i, v in enumerate(variables) if scope >> i & 1]
    more = f", ... ({len(names)} in all)" if len(names) > limit else ""
    return "{" + ", ".join(names[:limit]) + more + "}"
