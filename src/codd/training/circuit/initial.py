"""The circuit that training starts from: near the null circuit, or a saved one, perhaps with fewer states."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import HMM, Circuit, Factors, Head, HeadConfig, Modulated, load_circuit
from codd.data.windows import WindowBatch
from codd.distributed import DistributedContext
from codd.errors import InvalidInput
from codd.training.circuit_recipe import AUTO, CircuitRecipe

USAGE_BATCHES = 22
"""How many batches, those of the first steps, usage is measured on: 8,448 windows where a batch has 384."""

Draw = Callable[[int], WindowBatch]
"""Gives the windows of a step."""


class CircuitSpec(NamedTuple):
    """Sizes of a new circuit, as its backbone or cache gives them, and who trains it."""

    vocab_size: int
    features: int
    """Numbers in a hidden state; 0 if there are none that a head could take."""
    context: DistributedContext
    backbone: Backbone | None = None
    """The backbone, if it is trained jointly with the circuit."""

    @property
    def device(self) -> torch.device:
        """Where the circuit is."""
        return self.context.device


@torch.no_grad()
def state_usage(circuit: HMM | Modulated, draw: Draw, context: DistributedContext) -> Float[Tensor, " N"]:
    """The share of positions that each state has by its posterior; the same in all processes.

    Each position emits once, so that is the flow of a state's emissions. (The posteriors themselves take minutes on a
    CPU, which computes the smallest of them in float64.)
    """
    total = torch.zeros(circuit.num_states, dtype=torch.float64, device=circuit.device)
    for step in range(USAGE_BATCHES):
        windows = draw(step)
        hmm, modulation = circuit.condition_on(windows.features, windows.masked)
        total += hmm.flows(windows.evidence(*modulation)).emission.sum(-1, dtype=torch.float64)
    context.all_reduce([total])
    return total / total.sum()


def initial_circuit(recipe: CircuitRecipe, spec: CircuitSpec, draw: Draw | None) -> tuple[Factors, Head | None]:
    """Factors and head at step 0: near the null circuit, or those of the recipe's ``start``."""
    sizes = recipe.circuit
    if recipe.start not in (None, AUTO):
        return _from_saved(load_circuit(recipe.start, device=spec.device), recipe, spec, draw)
    factors = Factors.near_neutral(
        sizes.num_states,
        spec.vocab_size,
        transition_rank=sizes.transition_rank,
        emission_rank=sizes.emission_rank,
        inner_states=recipe.head.inner_states,
        noise=sizes.noise,
        seed=recipe.seed,
        device=spec.device,
    )
    return factors, _new_head(recipe, spec, sizes.num_states)


def _new_head(recipe: CircuitRecipe, spec: CircuitSpec, num_states: int) -> Head | None:
    """A head whose outputs are zero, if the recipe has one."""
    wanted = recipe.head
    if not wanted.wanted:
        return None
    if not spec.features:
        raise InvalidInput("a head listens to hidden states, which this cache has not: make it with --features.")
    states = num_states if wanted.latents else 0
    config = HeadConfig(spec.features, states, wanted.inner_states, wanted.hidden, wanted.dropout)
    return Head(config, recipe.seed).to(spec.device)


def _from_saved(
    circuit: HMM | Modulated | Circuit, recipe: CircuitRecipe, spec: CircuitSpec, draw: Draw | None
) -> tuple[Factors, Head | None]:
    """Factors and head of a saved circuit; a static one may be given a head, which starts at zero."""
    if isinstance(circuit, Circuit):
        raise InvalidInput(
            f"start: {recipe.start} is a general circuit; training starts from an HMM or a modulated one."
        )
    hmm = circuit.hmm if isinstance(circuit, Modulated) else circuit
    if hmm.vocab_size != spec.vocab_size:
        raise InvalidInput(
            f"start: the circuit {recipe.start} is over {hmm.vocab_size} tokens, the backbone over "
            f"{spec.vocab_size}: they do not belong together."
        )
    if not hmm.homogeneous or (hmm.transition.low_rank and hmm.factors is None):
        raise InvalidInput(f"start: the circuit {recipe.start} has tables that training does not change.")
    factors = hmm.factors
    if factors is None:
        factors = Factors(hmm.log_initial, (hmm.transition.log_factors[0],), (hmm.log_emission.clone(),))
    wanted = recipe.head
    if wanted.inner_states and (factors.detour is None or factors.detour.left.shape[1] != wanted.inner_states):
        raise InvalidInput(
            f"start: the circuit {recipe.start} was not made with {wanted.inner_states} inner states, which cannot be "
            "added: set head.inner_states to 0, or begin anew."
        )
    head = circuit.head if isinstance(circuit, Modulated) else None
    if head is not None and head.config.features != spec.features:
        raise InvalidInput(
            f"start: the circuit {recipe.start} listens to hidden states of {head.config.features} numbers, there are "
            f"{spec.features} (0: a cache made without --features)."
        )
    if recipe.keep_states is not None:
        if recipe.keep_states > circuit.num_states:
            raise InvalidInput(
                f"keep_states: the circuit {recipe.start} has {circuit.num_states} states, fewer than the "
                f"{recipe.keep_states} that are to be kept: lower keep_states, or leave it out."
            )
        assert draw is not None
        used = state_usage(circuit, draw, spec.context).argsort(descending=True, stable=True)  # of equals the first
        kept = used[: recipe.keep_states].sort().values
        factors, head = factors.restricted(kept), None if head is None else head.restricted(kept)
    if head is None:
        head = _new_head(recipe, spec, factors.num_states)
    return factors, None if head is None else head.to(spec.device)
