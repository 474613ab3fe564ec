"""A small block-causal network, and codd's own loop on it."""

import copy
import functools

from codd.backbones import Backbone
from codd.circuits import HMM
from codd.decoding.loop import denoise
from codd.decoding.options import Options
from codd.decoding.runner import runner_for
from codd.decoding.sequence import start_sequences
from tests.support import tiny_models
from tests.support.tiny_models import EOS as EOS
from tests.support.tiny_models import MASK as MASK
from tests.support.tiny_models import VOCAB as VOCAB

SIZE = 8


@functools.cache
def tiny() -> Backbone:
    """In float64, so that no choice hangs on rounding."""
    return copy.deepcopy(tiny_models.tiny(None, block_size=SIZE)).double()


def circuit() -> HMM:
    return HMM.random(5, VOCAB, seed=2, scale=2.0)


def our_own(prompt: list[int], masks: int, hmm: HMM | None, **options) -> list[list[int]]:
    """The sequence after each step of codd's loop."""
    wanted = Options.of(**options, gen_length=masks, block_length=SIZE, stop=False)
    states = start_sequences(tiny(), [prompt], wanted, mask_id=MASK, circuit=hmm)
    return [step.ids.tolist() for step in denoise(runner_for(tiny(), states), states)]
