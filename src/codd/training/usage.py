"""How much a circuit's states are used by the windows that it is to be trained on."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import HMM, Modulated
from codd.training.learners import Share
from codd.training.windows import Windows

BATCHES = 22
"""Those of the first steps: 8,448 windows where a batch has 384."""


@torch.no_grad()
def usage(circuit: HMM | Modulated, draw: Callable[[int], Windows], share: Share) -> Float[Tensor, " N"]:
    """The share of positions that each state has by its posterior; the same in all processes.

    Each position emits once, so that is the flow of a state's emissions. (The posteriors themselves take minutes on a
    CPU, which computes the smallest of them in float64.)
    """
    total = torch.zeros(circuit.num_states, dtype=torch.float64, device=circuit.device)
    for step in range(BATCHES):
        windows = draw(step)
        hmm, modulation = circuit.condition_on(windows.features, windows.masked)
        total += hmm.flows(windows.evidence(*modulation)).emission.sum(-1, dtype=torch.float64)
    share([total])
    return total / total.sum()
