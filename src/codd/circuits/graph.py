"""General circuits: smooth, decomposable graphs of leaves, products and mixtures, and their exact queries.

What a circuit is, in float64 logarithms and node by node: for small ones, and as a truth for everything faster.

>>> city = Circuit(mixture([product([leaf(0, [0.9, 0.1]), leaf(1, [0.8, 0.2])]),
...                         product([leaf(0, [0.2, 0.8]), leaf(1, [0.1, 0.9])])], weights=[0.5, 0.5]))

Nodes are immutable and compared by identity; a node with several parents is evaluated once.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import storage
from codd.circuits.evidence import Evidence, Kind, check_fits, check_ids, check_possible, log_ratio
from codd.circuits.incremental import Recomputing
from codd.circuits.ops.path.reference import draw
from codd.circuits.parameters import check_rows
from codd.circuits.results import JointStep, Samples
from codd.errors import FormatError, InvalidCircuit, InvalidEvidence
from codd.files import brief

Variable = int | str
Numbers = Tensor | Sequence[float | int]

_KINDS = ("leaf", "product", "mixture")
_INTEGERS = ("kinds", "child_counts", "children", "leaf_variables", "leaf_order", "variable_sizes")
_FLOATS = ("log_probs", "log_weights")
_NONE = torch.zeros(0, dtype=torch.float64)
_created = itertools.count()


@dataclass(frozen=True, eq=False)
class Node:
    """A node of a circuit; make it with `leaf`, `product` or `mixture`."""

    kind: str
    name: str
    created: int
    children: tuple["Node", ...] = field(default=(), repr=False)
    log_values: Float[Tensor, "*n"] = field(default=_NONE, repr=False)
    """The log-probabilities of a leaf's tokens, or the log-weights of a mixture's children."""
    variable: Variable | None = None


def leaf(
    variable: Variable, probs: Numbers | None = None, *, log_probs: Numbers | None = None, name: str | None = None
) -> Node:
    """A categorical over the tokens 0, 1, ... of a variable, from probabilities or from their logarithms.

    The leaves of a variable are numbered in the order in which they were made.
    """
    return _node("leaf", name, (), _logarithms("probs", probs, log_probs), variable)


def product(children: Iterable[Node], *, name: str | None = None) -> Node:
    """The product of children over disjoint sets of variables."""
    return _node("product", name, children)


def mixture(
    children: Iterable[Node],
    weights: Numbers | None = None,
    *,
    log_weights: Numbers | None = None,
    name: str | None = None,
) -> Node:
    """The sum of children over the same variables, weighted by probabilities or by their logarithms."""
    return _node("mixture", name, children, _logarithms("weights", weights, log_weights))


def _node(kind: str, name: str | None, children: Iterable[Node], *rest: Any) -> Node:
    created, given = next(_created), tuple(children)
    if wrong := [type(child).__name__ for child in given if not isinstance(child, Node)]:
        raise InvalidCircuit(f"a child is a {wrong[0]}: make nodes with leaf, product and mixture")
    return Node(kind, f"{kind}#{created}" if name is None else name, created, given, *rest)


def _logarithms(what: str, plain: Numbers | None, logarithms: Numbers | None) -> Float[Tensor, "*n"]:
    """In float64, in memory that nobody else can change. `Circuit` checks the values."""
    if (plain is None) == (logarithms is None):
        raise InvalidCircuit(f"give {what} or log_{what}, one of the two; found {'none' if plain is None else 'both'}")
    values = torch.as_tensor(logarithms if plain is None else plain, dtype=torch.float64, device="cpu").detach()
    return values.clone() if plain is None else values.log()


class Circuit(storage.HubMixin, Recomputing):
    """A validated circuit over L variables and the exact queries on it, in float64 on the CPU.

    ``variables`` says which variable sits at which position of (B, L) evidence: by default in increasing order when
    all are integers, else in the order of their first appearance (depth first, left to right). Variables may have
    different numbers of tokens; V is the largest. The latent of a position is the number of the leaf that is active
    there, in the order in which the leaves of the variable were made; K is the largest number of leaves.
    """

    kind = "graph"
    device, dtype = torch.device("cpu"), torch.float64
    inner_states = None
    supports_cuda_graphs = False

    def __init__(self, root: Node, variables: Sequence[Variable] | None = None):
        """Validate: smooth, decomposable, normalised; otherwise `InvalidCircuit` names the nodes."""
        self.root = root
        self._nodes = _children_first(root)
        leaves: dict[Any, list[Node]] = {}
        for node in self._nodes:
            _check_node(node)
            if node.kind == "leaf":
                leaves.setdefault(node.variable, []).append(node)
        _check_scopes(self._nodes, list(leaves))
        self.variables = tuple(variables or (sorted(leaves) if all(isinstance(v, int) for v in leaves) else leaves))
        if Counter(self.variables) != Counter(leaves.keys()):
            raise InvalidCircuit(f"variables must name each of {list(leaves)} once, found {list(self.variables)}")
        same = [sorted(leaves[variable], key=lambda node: node.created) for variable in self.variables]
        self._place = {node: (t, k) for t, made in enumerate(same) for k, node in enumerate(made)}
        self._sizes = [len(made[0].log_values) for made in same]
        shape = (len(same), max(map(len, same)), max(self._sizes))
        self._table = torch.full(shape, -math.inf, dtype=torch.float64)
        """Log-probabilities (L, K, V) of the leaves."""
        for node, (t, k) in self._place.items():
            if len(node.log_values) != self._sizes[t]:
                raise InvalidCircuit(f"{node.name} must have {self._sizes[t]} tokens, as {same[t][0].name} has")
            self._table[t, k, : self._sizes[t]] = node.log_values
        self.length, self.num_latents, self.vocab_size = shape
        self.window = self.length

    def __repr__(self) -> str:
        """Sizes in one line."""
        sizes = f"vocab_size={self.vocab_size}, num_latents={self.num_latents}"
        return f"Circuit(variables={self.length}, nodes={len(self._nodes)}, {sizes})"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Circuit":
        """The circuit itself; `InvalidCircuit` for anything but float64 on the CPU."""
        if (device is not None and torch.device(device).type != "cpu") or dtype not in (None, torch.float64):
            raise InvalidCircuit(f"a general circuit computes in float64 on the CPU, not in {dtype} on {device}")
        return self

    # Queries.

    def log_partition(self, ev: Evidence) -> Float[Tensor, " B"]:
        """log Z: the logarithm of the total weight of all strings; -inf for impossible evidence."""
        return self._values(self._log_weights(ev), ev)[self.root]

    def log_prob(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, " B"]:
        """The log-probability of whole strings."""
        return self.log_partition(Evidence(tokens=ids))

    def conditional_log_prob(self, ids: Int[Tensor, "B L"], ev: Evidence) -> Float[Tensor, " B"]:
        """The log-probability of ``ids`` at the positions that are not observed, given the evidence."""
        hard, given = ev.completed(ids, self.vocab_size, torch.float64)
        return log_ratio(self.log_partition(hard) + given, self.log_partition(ev))

    def posterior(self, ev: Evidence) -> Float[Tensor, "B L K"]:
        """The log-probability that leaf k is the active one of its position; -inf for impossible evidence."""
        reach = self._reach(self._values(self._log_weights(ev), ev))
        out = torch.full((*ev.shape, self.num_latents), -math.inf, dtype=torch.float64)
        for node, (t, k) in self._place.items():
            out[:, t, k] = reach[node]
        return out

    def marginals(self, ev: Evidence) -> Float[Tensor, "B L V"]:
        """The log-probability of every token at every position; -inf for impossible evidence."""
        scores = self._log_weights(ev)[:, :, None] + self._table
        shares = log_ratio(scores, scores.logsumexp(-1, keepdim=True))
        return (self.posterior(ev)[..., None] + shares).logsumexp(2)

    def sample(
        self, ev: Evidence, *, generator: torch.Generator | None = None, num_samples: int | None = None
    ) -> Samples:
        """Exact joint samples; with ``num_samples`` they get a leading axis. `ImpossibleEvidence` if there are none."""
        weights = self._log_weights(ev)
        values = self._values(weights, ev)
        check_possible(values[self.root])
        copies, batch = (1 if num_samples is None else num_samples), len(weights)
        sequence = torch.arange(copies * batch) % max(batch, 1)
        latents = torch.zeros(len(sequence), self.length, dtype=torch.int64)
        rows: dict[Node, list[Tensor]] = {node: [] for node in self._nodes}
        rows[self.root].append(torch.arange(len(sequence)))
        for node in reversed(self._nodes):  # the rows that pass through each node
            here = torch.cat(rows[node])
            if node.kind == "leaf":
                t, k = self._place[node]
                latents[here, t] = k
            elif node.kind == "mixture":
                picked = _draw(_edges(node, values)[:, sequence[here]].T, generator)
            for i, child in enumerate(node.children):
                rows[child].append(here if node.kind == "product" else here[picked == i])
        columns = [_draw(weights[sequence, t] + self._table[t, latents[:, t]], generator) for t in range(self.length)]
        tokens, latents = (x.reshape(copies, *ev.shape) for x in (torch.stack(columns, 1), latents))
        if ev.tokens is not None:
            tokens = torch.where(ev.rows(Kind.OBSERVED), ev.tokens, tokens)
        if num_samples is None:
            tokens, latents = tokens[0], latents[0]
        return Samples(tokens, latents, values[self.root])

    def conditional_scores(self, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """The log-weight of every token given the latents: evidence times leaf, observed rows as observed."""
        weights = self._log_weights(ev)
        if latents.shape != ev.shape:
            raise InvalidEvidence(f"latents must be (B, L) = {ev.shape}, found {tuple(latents.shape)}")
        check_ids("latents", latents, self.num_latents)
        scores = weights + self._table[torch.arange(self.length), latents]
        return torch.where(ev.rows(Kind.OBSERVED)[..., None], weights, scores)

    def joint_step(
        self, ev: Evidence, *, generator: torch.Generator | None = None, uniforms: Float[Tensor, "B L"] | None = None
    ) -> JointStep:
        """Latents of their posterior, scores given them, and log Z; zeros and the evidence if any is impossible."""
        log_z, latents = self.log_partition(ev), torch.zeros(ev.shape, dtype=torch.int64)
        if bool((log_z == -math.inf).any()):
            return JointStep(latents, ev.dense_log_weights(self.vocab_size), log_z)
        if uniforms is not None:
            generator = torch.Generator().manual_seed(int(uniforms.double().sum().mul(2**40)))
        latents = self.sample(ev, generator=generator).latents
        return JointStep(latents, self.conditional_scores(ev, latents), log_z)

    # The two passes.

    def _log_weights(self, ev: Evidence) -> Float[Tensor, "B L V"]:
        """The weights of the tokens, or `InvalidEvidence` that says why the evidence does not fit."""
        check_fits(ev, self)
        weights = ev.dense_log_weights(self.vocab_size).detach()
        if not all(bool((x < math.inf).all()) for x in (weights, ev.latent_log_potentials) if x is not None):
            raise InvalidEvidence("the potentials hold NaN or +inf; log-potentials must be finite or -inf")
        return weights

    def _values(self, weights: Float[Tensor, "B L V"], ev: Evidence) -> dict[Node, Float[Tensor, " B"]]:
        """Upward: the logarithm of the weight of each node."""
        sums = (weights[:, :, None] + self._table).logsumexp(-1)
        if ev.latent_log_potentials is not None:
            sums = sums + ev.latent_log_potentials.detach().double()
        values = {node: sums[:, t, k] for node, (t, k) in self._place.items()}
        for node in self._nodes:
            if node.kind == "product":
                values[node] = torch.stack([values[child] for child in node.children]).sum(0)
            elif node.kind == "mixture":
                values[node] = _edges(node, values).logsumexp(0)
        return values

    def _reach(self, values: Mapping[Node, Float[Tensor, " B"]]) -> dict[Node, Float[Tensor, " B"]]:
        """Downward: the log-probability that each node is active, given the evidence; -inf if it is impossible."""
        parts: dict[Node, list[Tensor]] = {node: [] for node in self._nodes}
        parts[self.root].append(log_ratio(values[self.root], values[self.root]))
        reach: dict[Node, Tensor] = {}
        for node in reversed(self._nodes):
            here = reach[node] = torch.stack(parts[node]).logsumexp(0)
            edges = log_ratio(_edges(node, values), values[node]) if node.kind == "mixture" else here.new_zeros(1)
            for child, part in zip(node.children, (here + edges).expand(len(node.children), -1), strict=True):
                parts[child].append(part)
        return reach

    # Storage.

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write config.json and circuit.safetensors, atomically: structure, names and float64 parameters, exactly."""
        number = {node: i for i, node in enumerate(self._nodes)}
        leaves = [node for node in self._nodes if node.kind == "leaf"]
        made = {node: i for i, node in enumerate(sorted(leaves, key=lambda node: node.created))}
        integers = (
            [_KINDS.index(node.kind) for node in self._nodes],
            [len(node.children) for node in self._nodes],
            [number[child] for node in self._nodes for child in node.children],
            [self._place[node][0] for node in leaves],
            [made[node] for node in leaves],
            self._sizes,
        )
        tensors = {name: torch.tensor(x, dtype=torch.int64) for name, x in zip(_INTEGERS, integers, strict=True)}
        for name, kind in zip(_FLOATS, ("leaf", "mixture"), strict=True):
            tensors[name] = torch.cat([_NONE, *(n.log_values for n in self._nodes if n.kind == kind)])
        names = json.dumps([node.name for node in self._nodes]).encode()
        tensors["names"] = torch.frombuffer(bytearray(names), dtype=torch.uint8)
        stored = [variable if isinstance(variable, str) else int(variable) for variable in self.variables]
        return storage.write_folder(folder, {"circuit": "graph", "variables": stored}, tensors)

    @classmethod
    def from_stored(cls, config: dict[str, Any], tensors: dict[str, Tensor], source: str) -> "Circuit":
        """The circuit that a configuration and tensors on the CPU describe; validated as a new one is."""
        try:
            nodes = _nodes_of(tensors, config.get("variables"))
            made = cls(nodes[-1], config["variables"])
            if len(made._nodes) != len(nodes):
                raise FormatError("there are nodes that the last one, the root, does not reach")
        except (FormatError, InvalidCircuit) as error:
            raise FormatError(f"{source}: {error}. Save or download the circuit again") from None
        return made.to(tensors["kinds"].device)


def _nodes_of(tensors: Mapping[str, Tensor], variables: Any) -> list[Node]:
    """The nodes that stored tensors describe, children before parents; `FormatError` if they describe none.

    ``kinds`` and ``child_counts`` have an entry for each node, ``children`` the numbers of their children one after the
    other, ``leaf_variables`` and ``leaf_order`` an entry for each leaf: its position, and when it was made.
    ``variable_sizes`` are the numbers of tokens; ``names`` the names of the nodes as a JSON list in UTF-8.
    """
    for name in (*_INTEGERS, *_FLOATS, "names"):
        dtype = torch.int64 if name in _INTEGERS else torch.float64 if name in _FLOATS else torch.uint8
        found = tensors.get(name)
        if found is None or found.ndim != 1 or found.dtype != dtype:
            raise FormatError(f"a circuit needs a one-dimensional tensor {name} of {dtype}")
    kinds, counts, children, places, order, sizes = (tensors[name].tolist() for name in _INTEGERS)
    try:
        names, created = json.loads(bytes(tensors["names"].tolist())), [next(_created) for _ in order]
        fits = isinstance(variables, list) and all(type(v) in (int, str) for v in variables)
        fits = fits and all(isinstance(name, str) for name in names)
        fits = fits and sorted(order) == list(range(len(order))) and set(places) == set(range(len(variables)))
        fits = fits and len(sizes) == len(variables) and min(sizes) > 0 <= min(children, default=0)
        tokens = [sizes[t] for t in places]
        # Leaves are computed with as one padded table: a small file may not ask for a huge one.
        fits = fits and len(sizes) * max(Counter(places).values()) * max(sizes) <= max(64 * sum(tokens), 2**26)
        leaves = zip(torch.split(tensors["log_probs"].cpu(), tokens), places, order, strict=True)
        choices = [count for kind, count in zip(kinds, counts, strict=True) if kind == 2]
        edges, weights = iter(children), iter(torch.split(tensors["log_weights"].cpu(), choices))
        nodes: list[Node] = []
        for kind, count, name in zip(kinds, counts, names, strict=True):
            below = tuple(nodes[child] for child in itertools.islice(edges, count))
            fits = fits and (kind == 0) == (count == 0)
            values, t, rank = next(leaves) if kind == 0 else (next(weights) if kind == 2 else _NONE, 0, 0)
            nodes.append(Node(_KINDS[kind], name, created[rank], below, values, None if below else variables[t]))
    except (LookupError, RecursionError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise FormatError(f"its tensors, names and variables do not fit together ({brief(error)})") from None
    if not fits or [*edges, *leaves, *weights]:
        raise FormatError("its tensors, names and variables do not fit together")
    return nodes


def _edges(node: Node, values: Mapping[Node, Float[Tensor, " B"]]) -> Float[Tensor, "C B"]:
    return torch.stack([values[child] for child in node.children]) + node.log_values[:, None]


def _draw(scores: Float[Tensor, "R C"], generator: torch.Generator | None) -> Int[Tensor, " R"]:
    """One category a row with probability proportional to exp(score); the last one in rows of -inf."""
    uniforms = torch.rand(len(scores), dtype=torch.float64, generator=generator)
    return draw(scores.softmax(-1).nan_to_num(0.0), uniforms)


def _children_first(root: Node) -> list[Node]:
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


def _check_node(node: Node) -> None:
    """Children, and parameters that are a distribution; `InvalidCircuit` names the node."""
    values, count = node.log_values, len(node.children)
    if node.kind != "leaf" and not count:
        raise InvalidCircuit(f"{node.name} has no children: an inner node needs at least one")
    if values.ndim != 1 or (node.kind == "mixture" and len(values) != count):
        wanted = "one-dimensional" if node.kind == "leaf" else f"one for each of its {count} children"
        raise InvalidCircuit(f"the parameters of {node.name} must be {wanted}, found shape {tuple(values.shape)}")
    if node.kind != "product":
        check_rows(node.name, values)


def _check_scopes(nodes: Sequence[Node], variables: Sequence[Variable]) -> None:
    """Check that the circuit is smooth and decomposable; `InvalidCircuit` names the nodes.

    A scope is a set of bits: sets of names would be quadratic in a long chain.
    """
    scope: dict[Node, int] = {}

    def shown(node: Node) -> str:
        names = [repr(v) for i, v in enumerate(variables) if scope[node] >> i & 1]
        return f"{node.name} has {{{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}}}"

    for node in nodes:
        union = 1 << variables.index(node.variable) if node.kind == "leaf" else 0
        for child in node.children:
            if node.kind == "mixture" and scope[child] != scope[node.children[0]]:
                other, problem, wanted = node.children[0], "smooth", "a mixture must have the same variables"
            elif node.kind == "product" and scope[child] & union:
                other = next(c for c in node.children if scope[c] & scope[child])
                problem, wanted = "decomposable", "a product must have no variable in common"
            else:
                union |= scope[child]
                continue
            raise InvalidCircuit(
                f"{node.name} is not {problem}: the children of {wanted}, but {shown(other)} and {shown(child)}"
            )
        scope[node] = union
