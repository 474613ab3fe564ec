"""Windows of a denoising step, as samplers get them."""

import torch

from codd.decoding.samplers import Noise, WindowInputs
from tests.support.tiny_models import MASK, VOCAB


def heard(seed: int, length: int = 6, share: float = 0.7) -> WindowInputs:
    """A window of which about a share is masked, with hidden states."""
    draw = torch.Generator().manual_seed(seed)
    masked = torch.rand(length, generator=draw) < share
    tokens = torch.where(masked, MASK, torch.randint(MASK, (length,), generator=draw))
    logits = torch.zeros(length, VOCAB)
    logits[masked] = 3 * torch.randn(int(masked.sum()), VOCAB, generator=draw)
    noise = Noise.drawn(length, draw)
    return WindowInputs(tokens, masked, logits, noise, torch.randn(length, 16, generator=draw))
