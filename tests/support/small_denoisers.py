"""Small networks for the tests of likelihoods: denoisers, and causal ones of the same tokens."""

import functools

import torch
from torch import Tensor

from codd.backbones import Backbone
from tests.support.checkpoints import random_network
from tests.support.tiny_models import biased

VOCAB, MASK = 7, 5


@functools.cache
def network(*, causal: bool = False, vocab: int = VOCAB, mask: int = MASK, seed: int = 3) -> Backbone:
    return random_network(seed=seed, vocab_size=vocab, max_length=64, causal=causal, mask_token_id=mask)


def silent(under: Backbone) -> Backbone:
    """It gives no numbers."""
    return biased(under, torch.full((under.vocab_size,), torch.nan))


def log_probs(backbone: Backbone, shown: Tensor, place: int, mask: int) -> Tensor:
    """Of one position of one text, in float64, without the mask."""
    return without(backbone(shown[None])[0, place].double(), mask).log_softmax(-1)


def without(logits: Tensor, mask: int) -> Tensor:
    return logits.index_fill(-1, torch.tensor(mask), -torch.inf)


def causal_log_prob(causal: Backbone, row: Tensor, places: list[int], mask: int) -> float:
    """Of some tokens of a text, each given all before it."""
    logits = without(causal(row[None])[0].double(), mask).log_softmax(-1)
    return sum(float(logits[place - 1, row[place]]) for place in places)
