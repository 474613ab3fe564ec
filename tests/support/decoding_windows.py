"""Windows of a denoising step, as samplers get them."""

import torch
from torch import Tensor

from codd.decoding.ranking import Noise
from codd.decoding.samplers import WindowInputs
from tests.support.tiny_models import MASK, VOCAB


def heard(seed: int, length: int = 6, share: float = 0.7) -> WindowInputs:
    """A window of which about a share is masked, with hidden states."""
    draw = torch.Generator().manual_seed(seed)
    masked = torch.rand(length, generator=draw) < share
    places = masked.nonzero()[:, 0]
    tokens = torch.where(masked, MASK, torch.randint(MASK, (length,), generator=draw))
    logits = 3 * torch.randn(len(places), VOCAB, generator=draw)
    noise = Noise.drawn(length, draw)
    return WindowInputs(tokens, masked, places, logits, noise, torch.randn(length, 16, generator=draw), masked)


def written(window: WindowInputs, positions: Tensor, tokens: Tensor) -> WindowInputs:
    """The window once tokens stand at some of its masked positions, with the hidden states of before."""
    left = ~torch.isin(window.positions, positions)
    return window._replace(
        tokens=window.tokens.scatter(0, positions, tokens),
        masked=window.masked.scatter(0, positions, False),
        positions=window.positions[left],
        logits=window.logits[left],
    )
