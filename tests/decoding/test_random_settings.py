"""Random decoding settings, sensible and absurd: a run ends as it should, or an error names the option.

120 of them in CI; ``CODD_FUZZ=5000 pytest tests/decoding/test_random_settings.py`` by hand.
"""

import functools
import os
import random
import warnings
from typing import Any

import pytest
import torch

from codd.backbones import Backbone
from codd.circuits import HMM
from codd.decoding.loop import denoise
from codd.decoding.options import OPTIONS, Options
from codd.decoding.runner import FullRecompute
from codd.decoding.sequence import SequenceState, StopCondition, start_sequences
from codd.errors import CircuitSteppedAside, CoddError
from tests.support.tiny_models import EOS, MASK, PAD, detouring, modulated, random_hmm, tiny

COUNT = int(os.environ.get("CODD_FUZZ", "120"))
BATCHES = 6
"""Tests, so that two processes share the work."""
LARGE_VOCAB = 301
"""Larger than one block of the sampler's two-level draw."""


@functools.cache
def circuit(name: str, vocab: int) -> Any:
    return {
        "none": lambda: None,
        "null": lambda: HMM.neutral(1, vocab),
        "random": lambda: random_hmm(vocab=vocab),
        "window": lambda: random_hmm(vocab=vocab, window=5),
        "fixed": lambda: random_hmm(vocab=vocab, length=8),
        "narrow": lambda: narrow(vocab),
        "modulated": lambda: modulated(detouring(vocab=vocab), inner_states=4, scale=1.0),
    }[name]()


def narrow(vocab: int) -> HMM:
    """One that excludes half of the vocabulary."""
    made = random_hmm(vocab=vocab)
    emission = made.log_emission.detach().clone()
    emission[:, ::2] = -torch.inf
    return HMM(made.log_initial, made.log_transition, emission.log_softmax(-1))


@functools.cache
def network(vocab: int, block_size: int | None = None) -> Backbone:
    return tiny(vocab=vocab, max_length=64, block_size=block_size)


EXTREMES = (3e-39, 1e-30, 1e-6, 2.5, 999)
REFUSED = (1e6, 1e39, 1e300, 10**400, 10**5000, -1.0, float("nan"), float("inf"), "1", [])


def extreme(rng: random.Random, ordinary: float) -> Any:
    kind = rng.random()
    return rng.choice(EXTREMES) if kind < 0.25 else rng.choice(REFUSED) if kind < 0.28 else ordinary


def settings(rng: random.Random) -> dict[str, Any]:
    """Options; mostly ones that are allowed together."""
    made: dict[str, Any] = {
        "gen_length": rng.choice((0, 1, 3, 4, 8, 16)),
        "block_length": rng.choice((1, 4, 8, 8, 10**9)),
        "mode": rng.choice(("block", "full")),
        "sampler": rng.choice(("latent", "any_order", "factorized")),
        "remasking": rng.choice(("low_confidence", "margin", "entropy", "random", "left_to_right")),
        "seed": rng.choice((0, 1, -5, 10**40, rng.randrange(10**6))),
    }
    paces = {
        "steps": rng.choice((None, 4, 8, 16, 10**9)),
        "threshold": rng.choice((0.0, 0.05, 0.3, 0.9, 1.0)),
        "entropy_budget": rng.choice((0.0, 1e-30, 1.0, 5.0, 1e39)),
    }
    names = ("steps", "default") if made["sampler"] == "latent" and rng.random() < 0.9 else (*paces, "default")
    pace = rng.choice(names)
    made |= {pace: paces[pace]} if pace in paces else {}
    if pace != "steps" and rng.random() < 0.5:
        made |= {"min_tokens": rng.choice((1, 2, 5, 10**9)), "blocks": rng.choice(("fixed", "sliding"))}
    some = {
        "temperature": lambda: extreme(rng, rng.choice((0.0, 0.5, 1.0))),
        "top_p": lambda: rng.choice((None, 0.0, 1e-30, 0.5, 0.95, 1.0)),
        "top_k": lambda: rng.choice((None, 1, 3, 10**9)),
        "cfg_scale": lambda: extreme(rng, rng.choice((0.0, 1.5))),
        "circuit_temperature": lambda: extreme(rng, rng.choice((1.0, 0.2, 3.0))),
        "tempering": lambda: rng.choice(("published", "paper")),
        "activation": lambda: rng.choice((None, 0.0, 0.5, 1e300)),
        "activation_scope": lambda: rng.choice(("window", "sequence")),
        "activation_targets": lambda: rng.choice((1, 2, 5)),
        "outside": lambda: rng.choice(("factorized", "defer")),
        "editing_threshold": lambda: rng.choice((None, 0.0, 0.2, 0.5, 1.0)),
        "max_post_steps": lambda: rng.choice((0, 1, 16)),
        "ban": lambda: rng.choice(((), (3,), (3, 5, 7), tuple(range(19)), (10**30,))),
        "stop": lambda: rng.choice((True, False)),
    }
    for name, value in some.items():
        if rng.random() < 0.35:
            made[name] = value()
    if rng.random() < 0.2:
        made["preset"] = "reference"
        made["block_length"] = 4
        made["gen_length"] = rng.choice((4, 8))
        made["remasking"] = rng.choice(("low_confidence", "random", "entropy", "margin", "origin", "topprob"))
        made["sampler"] = rng.choice(("latent", "factorized"))
        of_activation = ("activation_scope", "activation_targets")
        for foreign in (
            "threshold",
            "entropy_budget",
            "min_tokens",
            "blocks",
            "tempering",
            "outside",
            "editing_threshold",
            *of_activation,
        ):
            made.pop(foreign, None)
        made["steps"] = rng.choice((4, 8, 16))
    return made


def prompts_for(rng: random.Random, vocab: int) -> list[list[int]]:
    masks = rng.random() < 0.3
    ids = [token for token in range(vocab) if token not in (MASK, PAD, EOS)]
    return [
        [MASK if masks and rng.random() < 0.3 else rng.choice(ids) for _ in range(rng.randrange(7))]
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]


def run(
    prompts: list[list[int]], options: Options, name: str, vocab: int, size: int | None = None
) -> list[SequenceState]:
    sequences = start_sequences(
        network(vocab, size),
        prompts,
        options,
        mask_id=MASK,
        circuit=circuit(name, vocab),
        stop=StopCondition(frozenset({EOS})),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CircuitSteppedAside)
        for _ in denoise(FullRecompute(network(vocab, size)), sequences):
            pass
    return sequences


def ids_of(sequences: list[SequenceState]) -> list[list[int]]:
    return [state.ids.tolist() for state in sequences]


def null_is_the_network(options: Options) -> bool:
    """Where the null circuit promises the network's own text: docs/decoding.md says why not elsewhere.

    Nothing but masks is left out as well: this network takes them for the same, and rounding settles which is first.
    """
    if options.circuit_temperature != 1 or (options.mode == "full" and options.outside == "defer"):
        return False
    return not (options.published or (options.mode == "full" and options.entropy_budget is not None))


def check_finished(state: SequenceState, prompt: list[int], options: Options, vocab: int) -> None:
    ids, given = state.ids, torch.tensor(prompt)
    assert state.finished
    assert bool(((ids >= 0) & (ids < vocab)).all())
    known = given[given != MASK]
    assert torch.equal(ids[: len(prompt)][given != MASK][: len(known)], known[: len(ids)])
    written = ids[state.masked.logical_not() & ~state.given[: len(ids)]]
    assert not set(written.tolist()) & set(options.ban)
    if not options.published:
        assert not bool(state.masked.any())
        assert len(ids) == len(prompt) + options.gen_length or ids[-1] == EOS


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_run_ends_as_it_should_or_an_error_names_the_option(batch):
    finished = 0
    for number in range(batch, COUNT, BATCHES):
        rng = random.Random(number)
        vocab = rng.choice((23, 23, LARGE_VOCAB))
        given, prompts = settings(rng), prompts_for(rng, vocab)
        size = rng.choice((None, None, None, 4))
        if size is not None:
            given |= {"mode": "block", "block_length": rng.choice((1, 2, 4))}
        name = rng.choice(("none", "null", "random", "window", "fixed", "narrow", "modulated"))
        try:
            try:
                options = Options.of(**given)
                sequences = run(prompts, options, name, vocab, size)
            except CoddError as error:
                if any(option in str(error) for option in (*OPTIONS, "prompt")):
                    continue
                raise
            finished += 1
            for state, prompt in zip(sequences, prompts, strict=True):
                check_finished(state, prompt, options, vocab)
            assert ids_of(run(prompts, options, name, vocab, size)) == ids_of(sequences), "the same again"
            alone = [ids_of(run([prompt], options, name, vocab, size))[0] for prompt in prompts]
            assert alone == ids_of(sequences), "batch and alone"
            if all(any(token != MASK for token in prompt) for prompt in prompts) and null_is_the_network(options):
                both = [ids_of(run(prompts, options, each, vocab, size)) for each in ("null", "none")]
                assert both[0] == both[1], "the null circuit and none"
        except Exception as error:
            raise AssertionError(
                f"settings {number}: {given}, {name}, vocabulary {vocab}, blocks {size}, {prompts}"
            ) from error
    assert finished * 3 >= len(range(batch, COUNT, BATCHES)), "most settings are to be run, not refused"
