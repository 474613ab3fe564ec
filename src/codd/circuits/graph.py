"""General circuits: smooth, decomposable graphs of leaves, products and mixtures, and their exact queries.

The definition of what a circuit is, and the float64 truth for everything faster:

>>> city = Circuit(mixture([product([leaf(0, [0.9, 0.1]), leaf(1, [0.8, 0.2])]),
...                         product([leaf(0, [0.2, 0.8]), leaf(1, [0.1, 0.9])])], weights=[0.5, 0.5]))

Nodes are immutable and compared by identity; a node with several parents is evaluated once.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits import graph_storage, pairwise, storage, traversal
from codd.circuits.evidence import Evidence, Kind, Modulation
from codd.circuits.incremental import RecomputingConditioner
from codd.circuits.nodes import Leaf, Mixture, Node, Variable, check_nodes, check_scopes, topological_order
from codd.circuits.results import BestPath, JointStep, Samples
from codd.circuits.traversal import Program, Step, Values
from codd.errors import FormatError, ImpossibleEvidence, InvalidCircuit, InvalidEvidence


@dataclass(frozen=True, eq=False)
class CircuitFlows:
    """Expected counts of a circuit, summed over the batch: the gradient of log Z in the logarithms of the parameters.

    For every mixture how often each child is chosen, for every leaf how often it yields each token.
    """

    mixtures: dict[Mixture, Float[Tensor, " C"]]
    leaves: dict[Leaf, Float[Tensor, " V"]]


class Circuit(storage.HubMixin):
    """A validated circuit over L variables and the exact queries on it, in float64 on the CPU.

    ``variables`` says which variable sits at which position of (B, L) evidence: by default in increasing order when
    all are integers, else in the order of their first appearance (depth first, left to right). Variables may have
    different numbers of tokens; V is the largest. The latent of a position is the number of the leaf that is active
    there, in the order in which the leaves of the variable were made; K is the largest number of leaves.
    """

    def __init__(self, root: Node, variables: Sequence[Variable] | None = None):
        """Validate: smooth, decomposable, normalised; otherwise `InvalidCircuit` names the nodes."""
        self.root = root
        self._nodes = topological_order(root)
        check_nodes(self._nodes)
        leaves = _leaves_by_variable(self._nodes)
        check_scopes(self._nodes, list(leaves))
        self.variables = _positions(list(leaves), variables)
        self._leaves = [leaves[v] for v in self.variables]
        self._program = _compile(self._nodes, self._leaves)
        # The inner nodes of the order are the steps of the program, one to one.
        self._inner = [n for n in self._nodes if not isinstance(n, Leaf)]

    @property
    def length(self) -> int:
        """L, the number of variables."""
        return len(self.variables)

    @property
    def window(self) -> int:
        """L: it serves no other length."""
        return self.length

    @property
    def device(self) -> torch.device:
        """The CPU: general circuits are nowhere else."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The type of results: float64."""
        return torch.float64

    @property
    def feature_width(self) -> None:
        """None: it needs no hidden states."""
        return None

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether queries can be captured in a CUDA graph: no."""
        return False

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens of the largest variable."""
        return self._program.leaf_log_probs.shape[2]

    @property
    def num_latents(self) -> int:
        """K, the largest number of leaves of a variable."""
        return self._program.leaf_log_probs.shape[1]

    @property
    def leaf_log_probs(self) -> Float[Tensor, "L K V"]:
        """The log-probabilities of the leaves of each position, with -inf where a variable has fewer of them."""
        return self._program.leaf_log_probs

    def __repr__(self) -> str:
        """Sizes in one line."""
        edges = sum(len(n.children) for n in self._nodes)
        return (
            f"Circuit(variables={self.length}, nodes={len(self._nodes)}, edges={edges}, "
            f"vocab_size={self.vocab_size}, num_latents={self.num_latents})"
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Circuit":
        """The circuit itself; `InvalidCircuit` for anything but float64 on the CPU."""
        if (device is not None and torch.device(device).type != "cpu") or dtype not in (None, torch.float64):
            raise InvalidCircuit(
                f"a general circuit computes in float64 on the CPU, found device={device}, dtype={dtype}: "
                "leave it there, and give it evidence on the CPU"
            )
        return self

    def condition_on(
        self, features: Float[Tensor, "B L d"] | None, masked: Bool[Tensor, "B L"]
    ) -> tuple["Circuit", Modulation]:
        """The circuit itself and no modulation: it does not depend on hidden states."""
        return self, Modulation()

    def log_partition(self, ev: Evidence) -> Float[Tensor, " B"]:
        """log Z: the logarithm of the total weight of all strings; -inf for impossible evidence."""
        return self._evaluate(ev, traversal.log_sum).root

    def log_prob(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, " B"]:
        """The log-probability of whole strings."""
        return self.log_partition(Evidence(tokens=ids))

    def conditional_log_prob(self, ids: Int[Tensor, "B L"], ev: Evidence) -> Float[Tensor, " B"]:
        """The log-probability of ``ids`` at the positions that are not observed, given the evidence.

        ``ids`` at observed positions are ignored (they may hold a mask id); impossible evidence gives -inf.
        """
        values = self._evaluate(ev, traversal.log_sum)
        if ids.shape != ev.shape:
            raise InvalidEvidence(f"ids must be (B, L) = {ev.shape} like the evidence, found {tuple(ids.shape)}")
        completed = ids if ev.tokens is None else torch.where(ev.rows(Kind.OBSERVED), ev.tokens, ids)
        whole = self.log_partition(Evidence(tokens=completed, latent_log_potentials=ev.latent_log_potentials))
        # The weight of an observed token is one, so all positions may be added.
        weight = values.log_weights.gather(-1, completed.long().unsqueeze(-1)).squeeze(-1).sum(-1)
        return traversal.log_ratio(whole + weight, values.root)

    def posterior(self, ev: Evidence) -> Float[Tensor, "B L K"]:
        """The log-probability that leaf k is the active one of its position; -inf for impossible evidence."""
        values = self._evaluate(ev, traversal.log_sum)
        return self._leaf_reach(values)

    def marginals(self, ev: Evidence) -> Float[Tensor, "B L V"]:
        """The log-probability of every token at every position; -inf for impossible evidence."""
        values = self._evaluate(ev, traversal.log_sum)
        reach = self._leaf_reach(values)
        rows = [
            (reach[:, t, :, None] + traversal.log_token_shares(self._program, values, t)).logsumexp(1)
            for t in range(self.length)
        ]
        return torch.stack(rows, 1)

    def sample(
        self,
        ev: Evidence,
        generator: torch.Generator | None = None,
        num_samples: int | None = None,
        check: bool = True,
    ) -> Samples:
        """Exact joint samples of tokens and latents; with ``num_samples`` the result has a leading sample axis.

        Impossible evidence raises `ImpossibleEvidence`; with ``check=False`` it yields arbitrary tokens instead.
        """
        values = self._evaluate(ev, traversal.log_sum)
        impossible = values.root == -math.inf
        if check and bool(impossible.any()):
            raise ImpossibleEvidence(impossible.nonzero().flatten().tolist())
        copies = 1 if num_samples is None else num_samples
        tokens, latents = self._choose(ev, values, copies, lambda scores: traversal.draw(scores, generator))
        if num_samples is None:
            tokens, latents = tokens[0], latents[0]
        return Samples(tokens, latents, values.root)

    def sample_unconditional(self, num_samples: int, generator: torch.Generator | None = None) -> Samples:
        """Samples of whole strings from the circuit itself, (num_samples, L)."""
        nothing = Evidence(missing=torch.ones(1, self.length, dtype=torch.bool))
        drawn = self.sample(nothing, generator, num_samples)
        return Samples(drawn.tokens[:, 0], drawn.latents[:, 0], drawn.log_partition.expand(num_samples))

    def max_product(self, ev: Evidence) -> BestPath:
        """The heaviest assignment of tokens and of all mixture choices together (not the heaviest string).

        For impossible evidence the value is -inf and the tokens that are not observed mean nothing.
        """
        values = self._evaluate(ev, traversal.log_max)
        tokens, latents = self._choose(ev, values, 1, traversal.best)
        return BestPath(tokens[0], latents[0], values.root)

    def flows(self, ev: Evidence, weights: Float[Tensor, " B"] | None = None) -> CircuitFlows:
        """Expected counts, summed over the batch with one weight a sequence; impossible sequences count nothing."""
        values = self._evaluate(ev, traversal.log_sum)
        reach = traversal.log_reach(self._program, values)
        factor = torch.ones(ev.shape[0]) if weights is None else weights
        if factor.shape != ev.shape[:1]:
            raise InvalidEvidence(f"weights must be (B,) = ({ev.shape[0]},), found {tuple(factor.shape)}")
        factor = factor.detach().to("cpu", torch.float64)
        mixtures = {
            node: (reach[step.slot] + traversal.log_shares(step, values)).exp() @ factor
            for node, step in zip(self._inner, self._program.steps, strict=True)
            if isinstance(node, Mixture)
        }
        leaves: dict[Leaf, Tensor] = {}
        posterior = traversal.log_leaf_reach(self._program, reach, ev.shape[0])
        for t, numbered in enumerate(self._leaves):
            joint = (posterior[:, t, :, None] + traversal.log_token_shares(self._program, values, t)).exp()
            counts = torch.einsum("b,bkv->kv", factor, joint)
            leaves |= {node: counts[k, : len(node.log_probs)].clone() for k, node in enumerate(numbered)}
        return CircuitFlows(mixtures, leaves)

    def conditional_scores(self, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """The log-weight of every token given the latents: evidence times leaf, observed rows as observed."""
        log_weights = traversal.fitting_log_weights(self._program, ev)
        if latents.shape != ev.shape:
            raise InvalidEvidence(f"latents must be (B, L) = {ev.shape}, found {tuple(latents.shape)}")
        counts = torch.tensor([len(numbered) for numbered in self._leaves])
        wrong = (latents < 0) | (latents >= counts)
        if bool(wrong.any()):
            b, t = wrong.nonzero()[0].tolist()
            raise InvalidEvidence(
                f"latents[{b}, {t}] = {int(latents[b, t])}, but the variable {self.variables[t]!r} at position {t} has "
                f"{int(counts[t])} leaves, numbered from 0: use the latents of sample or max_product"
            )
        rows = self.leaf_log_probs[torch.arange(self.length), latents.long()]
        return torch.where(ev.rows(Kind.OBSERVED)[..., None], log_weights, log_weights + rows)

    def joint_step(
        self, ev: Evidence, *, generator: torch.Generator | None = None, uniforms: Float[Tensor, "B L"] | None = None
    ) -> JointStep:
        """Latents from their posterior, the scores of all tokens given them, and log Z.

        ``uniforms`` seed a generator of their own. If any sequence is impossible, the latents are zeros and the scores
        the evidence alone.
        """
        log_z = self.log_partition(ev)
        if bool((log_z == -math.inf).any()):
            latents = torch.zeros(ev.shape, dtype=torch.int64)
            return JointStep(latents, ev.dense_log_weights(self.vocab_size), log_z)
        if uniforms is not None:
            generator = torch.Generator().manual_seed(int(uniforms.double().sum().mul(2**40)))
        latents = self.sample(ev, generator=generator).latents
        return JointStep(latents, self.conditional_scores(ev, latents), log_z)

    def pairwise(self, ev: Evidence, candidates: Int[Tensor, "B L K"]) -> Float[Tensor, "B L L C C"]:
        """p(class at s, class at t | evidence) of every two positions: each candidate, and last all other tokens."""
        return pairwise.by_conditioning(self, ev, candidates.long())

    def incremental(self, ev: Evidence, candidates: int | None = None) -> RecomputingConditioner:
        """Marginals of all tokens while tokens are committed one by one; fewer ``candidates`` would save no work."""
        return RecomputingConditioner(self, ev)

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write config.json and circuit.safetensors, atomically: structure, names and float64 parameters, exactly."""
        return storage.write_folder(folder, *graph_storage.to_tensors(self._nodes, self._leaves, self.variables))

    @classmethod
    def load(
        cls,
        source: str | PathLike[str],
        *,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        check: bool = True,
    ) -> "Circuit":
        """Read a folder or a hub id written by ``save``; `FormatError` says what is wrong with a damaged one.

        ``check``: compare the stated digests, too.
        """
        stored = storage.read_folder(source, device=device, revision=revision, check=check, kind="graph")
        return cls.from_stored(*stored, str(source))

    @classmethod
    def from_stored(cls, config: dict[str, Any], tensors: dict[str, Tensor], source: str) -> "Circuit":
        """The circuit that a configuration and tensors on the CPU describe; validated as a new one is."""
        try:
            made = cls(*graph_storage.from_tensors(config, tensors))
        except (FormatError, InvalidCircuit) as error:
            raise FormatError(f"{source}: {error}. Save or download the circuit again") from None
        return made.to(tensors["kinds"].device)

    def _evaluate(self, ev: Evidence, reduce: traversal.Reduce) -> Values:
        log_weights = traversal.fitting_log_weights(self._program, ev)
        latent = ev.latent_log_potentials
        return traversal.upward(
            self._program, log_weights, None if latent is None else latent.detach().double(), reduce
        )

    def _leaf_reach(self, values: Values) -> Float[Tensor, "B L K"]:
        reach = traversal.log_reach(self._program, values)
        return traversal.log_leaf_reach(self._program, reach, len(values.root))

    def _choose(
        self, ev: Evidence, values: Values, copies: int, choose: traversal.Choose
    ) -> tuple[Int[Tensor, "S B L"], Int[Tensor, "S B L"]]:
        """Leaves, then tokens, ``copies`` times for every sequence; observed tokens are kept even if impossible."""
        latents = traversal.choose_leaves(self._program, values, copies * ev.shape[0], choose)
        tokens = traversal.choose_tokens(self._program, values, latents, choose).reshape(copies, *ev.shape)
        if ev.tokens is not None:
            tokens = torch.where(ev.rows(Kind.OBSERVED), ev.tokens.long(), tokens)
        return tokens, latents.reshape(copies, *ev.shape)


def _leaves_by_variable(nodes: Sequence[Node]) -> dict[Variable, list[Leaf]]:
    """The leaves of each variable in the order of creation; the variables in the order of first appearance."""
    leaves: dict[Variable, list[Leaf]] = {}
    for node in nodes:
        if not isinstance(node, Leaf):
            continue
        same = leaves.setdefault(node.variable, [])
        if same and len(same[0].log_probs) != len(node.log_probs):
            raise InvalidCircuit(
                f"the leaves of variable {node.variable!r} must have the same number of tokens, but {same[0].name} has "
                f"{len(same[0].log_probs)} and {node.name} has {len(node.log_probs)}: pad the shorter one with zeros"
            )
        same.append(node)
    return {variable: sorted(same, key=lambda n: n.created) for variable, same in leaves.items()}


def _positions(present: list[Variable], wanted: Sequence[Variable] | None) -> tuple[Variable, ...]:
    """Which variable sits at which position."""
    if wanted is None:
        numbers = [v for v in present if isinstance(v, int)]
        return tuple(sorted(numbers)) if len(numbers) == len(present) else tuple(present)
    missing = [v for v in present if v not in wanted]
    unknown = [v for v in wanted if v not in present]
    twice = [v for v, times in Counter(wanted).items() if times > 1]
    if missing or unknown or twice:
        raise InvalidCircuit(
            "variables must name each variable of the circuit exactly once: "
            f"missing {missing}, not in the circuit {unknown}, named twice {twice}"
        )
    return tuple(wanted)


def _compile(nodes: Sequence[Node], leaves: Sequence[Sequence[Leaf]]) -> Program:
    """Slots for all nodes, the leaves stacked and padded with -inf."""
    num_leaves = max(map(len, leaves))
    vocab_size = max(len(numbered[0].log_probs) for numbered in leaves)
    table = torch.full((len(leaves), num_leaves, vocab_size), -math.inf, dtype=torch.float64)
    slot: dict[Node, int] = {}
    for t, numbered in enumerate(leaves):
        for k, node in enumerate(numbered):
            table[t, k, : len(node.log_probs)] = node.log_probs
            slot[node] = t * num_leaves + k
    steps: list[Step] = []
    for inner in nodes:
        if isinstance(inner, Leaf):
            continue
        slot[inner] = len(leaves) * num_leaves + len(steps)
        children = torch.tensor([slot[child] for child in inner.children])
        steps.append(Step(slot[inner], children, inner.log_weights if isinstance(inner, Mixture) else None))
    return Program(table, tuple(steps), slot[nodes[-1]])
