"""A small block-causal network, and codd's own loop on it."""

import functools

import torch

from codd.backbones import Backbone, mini
from codd.backbones.config import Config
from codd.backbones.transformer import initialise
from codd.circuits import HMM
from codd.decoding.loop import denoise
from codd.decoding.options import Options
from codd.decoding.runner import runner_for
from codd.decoding.sequence import start_sequences

SIZE, VOCAB, MASK, EOS = 8, 23, 21, 20


@functools.cache
def tiny() -> Backbone:
    """Random weights, large enough that tokens and confidences vary; float64, so that no choice hangs on rounding."""
    sizes = {"vocab_size": VOCAB, "width": 16, "layers": 1, "heads": 2, "mlp_width": 16, "max_length": 64}
    built = mini.build(Config({**sizes, "mask_token_id": MASK, "block_size": SIZE}, "a test"))
    initialise(built.network, generator=torch.Generator().manual_seed(3), std=0.5)
    return built.double().eval().requires_grad_(False)


def circuit() -> HMM:
    return HMM.random(5, VOCAB, seed=2, scale=2.0)


def our_own(prompt: list[int], masks: int, hmm: HMM | None, **options) -> list[list[int]]:
    """The sequence after each step of codd's loop."""
    wanted = Options.of(**options, gen_length=masks, block_length=SIZE, stop=False)
    states = start_sequences(tiny(), [prompt], wanted, mask_id=MASK, circuit=hmm)
    return [step.ids.tolist() for step in denoise(runner_for(tiny(), states), states)]
