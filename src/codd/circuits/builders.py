"""Circuits of well-known shapes: the chain of an HMM, a balanced tree of latents, a mixture of independents.

In all of them leaf k of every position belongs to latent state (or component) k, because the leaves are made position
by position or component by component in the order of the states.
"""

from jaxtyping import Float
from torch import Tensor

from codd.circuits.graph import Circuit
from codd.circuits.nodes import Leaf, Mixture, Node, leaf, mixture, product
from codd.errors import InvalidCircuit


def chain(
    log_initial: Float[Tensor, " N"],
    log_transition: Float[Tensor, "*steps N N"],
    log_emission: Float[Tensor, "*positions N V"],
    length: int,
) -> Circuit:
    """A hidden Markov model of ``length`` positions as a circuit over the variables 0 to length - 1.

    All parameters are logarithms; row i of a transition is the distribution of the next state after state i.
    Transitions are shared (N, N) or one a step (length - 1, N, N), emissions shared (N, V) or one a position
    (length, N, V).
    """
    states = _num_states("log_initial", log_initial, length)
    transition = _per_step("log_transition", log_transition, length - 1, (states, states))
    leaves = _emissions(log_emission, length, states)
    tails: list[Node] = list(leaves[-1])
    for t in reversed(range(length - 1)):
        # Made from the right: tails[i] is everything from the next position on, given its state i.
        arrivals = _mixtures(tails, transition[t])
        tails = [product([here, after]) for here, after in zip(leaves[t], arrivals, strict=True)]
    return Circuit(mixture(tails, log_weights=log_initial))


def balanced_tree(
    log_root: Float[Tensor, " N"],
    log_transition: Float[Tensor, "*edges N N"],
    log_emission: Float[Tensor, "*positions N V"],
    length: int,
) -> Circuit:
    """A balanced binary tree of latents over the variables 0 to length - 1, as a circuit.

    The latent of an inner node covers a range of positions and conditions the latents of its left half (the longer
    one if the range is odd) and of its right half; the latent of a single position emits its token. All parameters
    are logarithms. Transitions are shared (N, N) or one an edge (2 * length - 2, N, N), where the edges are numbered
    by the node that they lead to, in preorder (node, left subtree, right subtree; the root has no edge).
    """
    states = _num_states("log_root", log_root, length)
    transition = _per_step("log_transition", log_transition, 2 * length - 2, (states, states))
    leaves = _emissions(log_emission, length, states)

    def subtree(start: int, stop: int, number: int) -> list[Node]:
        """One node a state of the latent that covers [start, stop) and has this number in preorder."""
        if stop - start == 1:
            return list(leaves[start])
        middle = start + (stop - start + 1) // 2
        left, right = number + 1, number + 2 * (middle - start)  # a subtree over n positions has 2n - 1 latents
        below = zip(
            _mixtures(subtree(start, middle, left), transition[left - 1]),
            _mixtures(subtree(middle, stop, right), transition[right - 1]),
            strict=True,
        )
        return [product(pair) for pair in below]

    return Circuit(mixture(subtree(0, length, 0), log_weights=log_root))


def independent_mixture(weights: Float[Tensor, " K"], probs: Float[Tensor, "K L V"]) -> Circuit:
    """A mixture of K strings of independent tokens, from probabilities; the latent of a position is its component."""
    if probs.ndim != 3 or 0 in probs.shape or weights.shape != probs.shape[:1]:
        raise InvalidCircuit(
            "weights must be (K,) and probs (K, L, V), none of them empty, "
            f"found {tuple(weights.shape)} and {tuple(probs.shape)}"
        )
    components = [product([leaf(t, row) for t, row in enumerate(component)]) for component in probs]
    return Circuit(mixture(components, weights=weights))


def _mixtures(children: list[Node], log_weights: Float[Tensor, "N C"]) -> list[Mixture]:
    """One mixture a row of weights, all over the same children."""
    return [mixture(children, log_weights=row) for row in log_weights]


def _emissions(log_emission: Tensor, length: int, states: int) -> list[list[Leaf]]:
    """A leaf for every position and state, made in this order so that leaf k is state k."""
    if log_emission.ndim not in (2, 3) or log_emission.shape[-1] == 0:
        raise InvalidCircuit(
            f"log_emission must be (N, V) or (length, N, V) with V > 0, found {tuple(log_emission.shape)}"
        )
    tables = _per_step("log_emission", log_emission, length, (states, log_emission.shape[-1]))
    return [[leaf(t, log_probs=row) for row in table] for t, table in enumerate(tables)]


def _num_states(name: str, log_initial: Tensor, length: int) -> int:
    if length < 1:
        raise InvalidCircuit(f"length must be at least 1, found {length}")
    if log_initial.ndim != 1 or len(log_initial) == 0:
        raise InvalidCircuit(f"{name} must be (N,) with N > 0, found {tuple(log_initial.shape)}")
    return len(log_initial)


def _per_step(name: str, table: Tensor, steps: int, shape: tuple[int, int]) -> Tensor:
    """(steps, rows, columns), whether the table is shared by the steps or not."""
    if tuple(table.shape) not in (shape, (steps, *shape)):
        raise InvalidCircuit(
            f"{name} must be {shape}, shared by all, or {(steps, *shape)}, one each; found {tuple(table.shape)}"
        )
    return table.expand(steps, *shape)
