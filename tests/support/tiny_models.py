"""Small networks for the tests of decoding."""

import functools

import torch
from torch import Tensor

from codd.backbones import Backbone, load_checkpoint
from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated
from codd.decoding import Step
from codd.decoding.loop import denoise
from codd.decoding.options import Options
from codd.decoding.runner import runner_for
from codd.decoding.sequence import StopCondition, start_sequences
from tests.support import FIXTURES
from tests.support.checkpoints import random_network

VOCAB, MASK, PAD, EOS = 23, 21, 22, 20


@functools.cache
def fixture(name: str) -> Backbone:
    return load_checkpoint(FIXTURES / name, device="cpu").backbone


@functools.cache
def tiny(
    pad: int | None = PAD,
    vocab: int = VOCAB,
    mask: int = MASK,
    max_length: int = 64,
    block_size: int | None = None,
) -> Backbone:
    ids = {"mask_token_id": mask, "pad_token_id": pad}
    return random_network(vocab_size=vocab, max_length=max_length, block_size=block_size, **ids)


class Biased(Backbone):
    """The same network, with something added to its logits."""

    bias: Tensor

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        return super().logits(states, ids) + self.bias


def biased(backbone: Backbone, bias: Tensor) -> Biased:
    changed = Biased(backbone.spec, backbone.network)
    changed.bias = bias
    return changed


class Stated(Backbone):
    """A network whose logits are the same at every position, whatever it sees: those that the test states."""

    stated: Tensor

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        return self.stated.expand(*states.shape[:2], -1).clone()


def stated(logits: Tensor, mask: int) -> Stated:
    under = tiny(None, len(logits), mask)
    changed = Stated(under.spec, under.network)
    changed.stated = logits
    return changed


def run(
    backbone: Backbone,
    prompts: list[list[int]],
    *,
    circuit: object = None,
    mask_id: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    **options,
) -> list[Step]:
    mask = mask_id if mask_id is not None else backbone.special.mask
    assert mask is not None
    stop = StopCondition(stop_ids)
    chosen = Options.of(**options)
    sequences = start_sequences(backbone, prompts, chosen, mask_id=mask, circuit=circuit, stop=stop)
    return list(denoise(runner_for(backbone, sequences), sequences))


def of(steps: list[Step], sequence: int = 0) -> list[Step]:
    return [step for step in steps if step.sequence == sequence]


def last(steps: list[Step], sequence: int = 0) -> list[int]:
    """The ids of a sequence at the end."""
    return of(steps, sequence)[-1].ids.tolist()


def filled_in(steps: list[Step]) -> list[int]:
    """Of every position, the number of the step that filled it; -1: none did."""
    own = of(steps)
    found = torch.full((int(max(len(step.ids) for step in own)),), -1)
    for step in own:
        assert (found[step.positions] == -1).all()
        found[step.positions] = step.number
    return found.tolist()


def random_hmm(
    states: int = 4, vocab: int = VOCAB, seed: int = 0, window: int | None = None, length: int | None = None
) -> HMM:
    made = HMM.random(states, vocab, seed, scale=2.0, length=length)
    return made if window is None else HMM(made.log_initial, made.log_transition, made.log_emission, window=window)


def modulated(
    hmm: HMM, *, inner_states: int = 0, hidden: int = 0, scale: float = 0.0, seed: int = 0, features: int = 16
) -> Modulated:
    """An HMM with a head whose weights are normal numbers times ``scale``: with 0 it is the HMM."""
    made = Head(HeadConfig(features, hmm.num_states, inner_states, hidden), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for last in (made.latents, made.gates):
            if last is not None:
                last.weight.normal_(0, scale, generator=generator)
                last.bias.normal_(0, scale, generator=generator)
    return Modulated(hmm, made)


def detouring(states: int = 5, inner_states: int = 4, vocab: int = VOCAB, window: int | None = None) -> HMM:
    """An HMM whose steps can be gated."""
    return HMM.from_factors(
        Factors.near_neutral(states, vocab, inner_states=inner_states, noise=2.0, seed=1), window=window
    )
