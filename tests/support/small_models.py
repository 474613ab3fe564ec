"""A real checkpoint in miniature, with a circuit, for tests of what is around the model."""

import threading
from functools import cache

import torch

import codd
from tests.support import FIXTURES


@cache
def small() -> codd.Model:
    """LLaDA's format; it takes ids, a step takes a millisecond or two."""
    model = codd.load(FIXTURES / "llada_mha", circuit=None, device="cpu")
    return model.with_circuit(codd.HMM.random(num_states=6, vocab_size=model.backbone.vocab_size, seed=2))


class Gate:
    """A hook that holds every step it is in until it is let go."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Shut it again, and forget who came; only while no step is in it."""
        self.reached, self.open = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.reached.release()
        assert self.open.acquire(timeout=180)
        return logits
