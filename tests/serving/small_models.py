"""A real checkpoint in miniature, with a circuit, for tests of what is around the model."""

from functools import cache
from pathlib import Path

import codd

FIXTURES = Path(__file__).parent.parent / "fixtures"


@cache
def small() -> codd.Model:
    """LLaDA's format; it takes ids, a step takes a millisecond or two."""
    model = codd.load(FIXTURES / "llada_mha", circuit=None, device="cpu")
    return model.with_circuit(codd.HMM.random(num_states=6, vocab_size=model.backbone.vocab_size, seed=2))
