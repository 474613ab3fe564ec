"""Sequences with settings of their own in one step: each is what it would be alone."""

import pytest
import torch

import codd
from codd.decoding import Options, Step
from codd.decoding.loop import advance
from codd.decoding.runner import FullRecompute
from codd.decoding.sequence import SequenceState
from tests.support.tiny_models import MASK, tiny

VOCAB = tiny().vocab_size
CIRCUIT = codd.HMM.random(num_states=5, vocab_size=VOCAB, seed=3)
MODEL = codd.Model(tiny(), CIRCUIT, None, MASK)
REQUESTS = [
    ([1, 2, 3], {"gen_length": 8, "block_length": 4, "steps": 4, "sampler": "latent", "temperature": 0.7, "seed": 1}),
    ([4], {"gen_length": 6, "block_length": 6, "steps": None, "sampler": "any_order", "seed": 2}),
    ([4, 1, 5, 2, 2], {"gen_length": 5, "mode": "full", "steps": 3, "sampler": "factorized", "temperature": 1.0}),
    ([2, MASK, 3], {"gen_length": 0, "sampler": "any_order", "threshold": 0.3}),
    ([5, 5], {"gen_length": 7, "cfg_scale": 0.5, "steps": 2, "remasking": "random", "seed": 9, "ban": [1, 2]}),
    (
        [3, 1],
        {"gen_length": 9, "block_length": 3, "entropy_budget": 1.5, "circuit_temperature": 0.6, "activation": 0.9},
    ),
]


def started(number: int) -> SequenceState:
    prompt, options = REQUESTS[number]
    [found] = MODEL.start([prompt], Options.of(**options))
    return found


def alone(number: int) -> list[Step]:
    prompt, options = REQUESTS[number]
    return list(MODEL.denoise([prompt], **options))


def same(a: Step, b: Step) -> bool:
    fields = ("positions", "tokens", "scores", "ids")
    rest = ("number", "mask_ratio", "circuit", "window", "finished")
    return all(torch.equal(getattr(a, x), getattr(b, x)) for x in fields) and all(
        getattr(a, x) == getattr(b, x) for x in rest
    )


@pytest.mark.parametrize("one_by_one", [False, True])
def test_sequences_of_all_kinds_share_their_steps_and_are_as_if_alone(one_by_one):
    """They join one after the other while earlier ones are under way, and leave when they are done."""
    waiting = list(range(len(REQUESTS)))
    running: dict[int, SequenceState] = {}
    seen: dict[int, list[Step]] = {number: [] for number in waiting}
    most, runner = 0, FullRecompute(MODEL.backbone, one_by_one=one_by_one)
    while waiting or running:
        if waiting:
            number = waiting.pop(0)
            running[number] = started(number)
        most = max(most, len(running))
        for number, step in zip(running, advance(runner, list(running.values())), strict=True):
            assert isinstance(step, Step)
            seen[number].append(step)
        running = {number: found for number, found in running.items() if not found.finished}
    assert most > 2
    for number, steps in seen.items():
        expected = alone(number)
        assert len(steps) == len(expected)
        assert all(map(same, steps, expected))
