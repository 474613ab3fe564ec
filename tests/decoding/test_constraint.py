"""What is written under a constraint is in the language, whatever the mode, sampler, order and pace."""

from itertools import product

import numpy as np
import pytest

import codd
from codd.circuits import HMM
from codd.constraints import Automaton
from codd.decoding import Step
from tests.support.tiny_models import EOS, MASK, PAD, VOCAB, modulated, tiny

WORDS = [token for token in range(VOCAB) if token not in (EOS, MASK, PAD)]


def random_automaton(seed: int, states: int = 5, ways: float = 0.4) -> Automaton:
    """Some tokens lead on from every state; texts of any length from 2 on are accepted."""
    draw = np.random.default_rng(seed)
    table = np.where(draw.random((states, VOCAB)) < ways, draw.integers(0, states, (states, VOCAB)), -1)
    table[:, [EOS, MASK, PAD]] = -1
    table[:, seed % len(WORDS)] = (np.arange(states) + 1) % states  # so that no state is a dead end
    return Automaton(table, start=0, accepting=[1, states - 1])


def model(circuit: object = None, **sizes) -> codd.Model:
    return codd.Model(tiny(**sizes), circuit, None, MASK)  # type: ignore[arg-type]


def read(written: codd.Generation, automaton: Automaton) -> list[bool]:
    return [automaton.accepts(ids) for ids in written.completions]


CIRCUITS = {
    "none": None,
    "null": HMM.neutral(1, VOCAB),
    "hmm": HMM.random(4, VOCAB, seed=1),
    "modulated": modulated(HMM.random(4, VOCAB, seed=1), scale=0.5, features=16),
}
WAYS = [
    {},
    {"steps": 4},
    {"sampler": "latent", "steps": 3},
    {"sampler": "factorized"},
    {"sampler": "factorized", "steps": 5, "remasking": "random"},
    {"entropy_budget": 1.0, "remasking": "entropy"},
    {"remasking": "left_to_right", "steps": 6},
    {"mode": "full", "steps": 5},
    {"mode": "full", "sampler": "latent", "steps": 4, "block_length": 6},
    {"mode": "full", "block_length": 6},
    {"mode": "full", "sampler": "factorized", "remasking": "margin"},
    {"cfg_scale": 1.0, "steps": 6},
    {"activation": 0.5},
    {"top_k": 2},
]


@pytest.mark.parametrize(("number", "way"), list(enumerate(WAYS)), ids=str)
def test_every_way_of_decoding_writes_texts_of_the_language(number, way):
    """Greedily with what a circuit adds, and drawn with one circuit or the other, or none."""
    automaton = random_automaton(number)
    drawn = ("none", "hmm", "null", "modulated")[number % 4]
    for circuit, temperature in (("hmm", "modulated")[number % 2], 0.0), (drawn, 1.0):
        told = {"gen_length": 14, "block_length": 8, "temperature": temperature, "seed": number, **way}
        written = model(CIRCUITS[circuit]).generate([[1, 2, 3], [4]], constraint=automaton, **told)
        assert read(written, automaton) == [True, True]
        assert all(len(ids) == 14 for ids in written.completions)


@pytest.mark.parametrize("length", [1, 3, 7, 8])
def test_blocks_of_a_block_causal_network_that_begin_in_the_prompt(length):
    automaton = random_automaton(3)
    written = model(CIRCUITS["hmm"], block_size=8).generate(
        [list(range(1, 1 + length))], constraint=automaton, gen_length=12
    )
    assert read(written, automaton) == [True]


@pytest.mark.parametrize("told", [{"cache": "prefix"}, {"cache": "dual", "refresh": 2}], ids=str)
def test_with_a_cache(told):
    automaton = random_automaton(1)
    written = model(CIRCUITS["modulated"]).generate([[1, 2], [3]], constraint=automaton, gen_length=16, **told)
    assert read(written, automaton) == [True, True]


def assert_same_until_a_tie(one: list[Step], other: list[Step]) -> None:
    """The same tokens with the same probabilities, one after another.

    The two runs sum in different orders, so where two choices are nearly equal each may take another one: then the
    probabilities of what they took must be equal, and what follows may differ.
    """
    first, second = ([commit for step in steps for commit in _commits(step)] for steps in (one, other))
    assert len(first) == len(second)
    for (place, token, score), (other_place, other_token, other_score) in zip(first, second, strict=True):
        assert score == pytest.approx(other_score, rel=1e-4, abs=1e-5)
        if (place, token) != (other_place, other_token):
            return


def _commits(step: Step) -> list[tuple[int, int, float]]:
    return list(zip(step.positions.tolist(), step.tokens.tolist(), step.scores.tolist(), strict=True))


def test_a_language_of_everything_changes_nothing():
    """But the draws of the latent sampler, whose path is drawn together with the automaton's: by other numbers."""
    table = np.zeros((1, VOCAB), int)
    table[0, MASK] = -1
    everything = Automaton(table, accepting=[0])
    for circuit, way in product(("hmm", "modulated"), ({}, {"steps": 6})):
        run, told = model(CIRCUITS[circuit]), {"gen_length": 24, "block_length": 8, **way}
        free, bound = (list(run.denoise([[5, 6]], **told, **more)) for more in ({}, {"constraint": everything}))
        assert_same_until_a_tie(free, bound)


def test_tokens_that_the_language_makes_certain_take_no_step():
    """Four free tokens among twelve: with a token a step there are four steps, or few more where windows decide."""
    table = np.full((13, VOCAB), -1)
    for state in range(12):
        table[state, WORDS if state % 3 == 1 else [state]] = state + 1
    automaton = Automaton(table, accepting=[12])
    for way, steps in (({}, 4), ({"mode": "full"}, 6)):
        told = {"gen_length": 12, "block_length": 12, "steps": 12, **way}
        written = model(CIRCUITS["hmm"]).generate([[1, 2]], constraint=automaton, **told)
        assert read(written, automaton) == [True]
        assert 4 <= written.steps[0] <= steps


def test_masks_in_the_middle_of_a_text():
    """The automaton reads from the first mask to the last, given tokens between them included."""
    automaton = random_automaton(4)
    for middle in ([], [WORDS[4]], [WORDS[7], WORDS[4]]):
        prompt = [1, 2, MASK, MASK, MASK, *middle, MASK, MASK, 3, 4, 5]
        written = model(CIRCUITS["hmm"]).generate([prompt], constraint=automaton, gen_length=0, block_length=4)
        ids = written.sequences[0].tolist()
        assert ids[:2] + ids[-3:] == [1, 2, 3, 4, 5]
        assert ids[5 : 5 + len(middle)] == middle
        assert automaton.accepts(ids[2:-3])


def test_texts_may_end_early_and_padding_follows_the_end():
    backbone = tiny()
    three = Automaton([[1 if token in WORDS else -1 for token in range(VOCAB)], [-1] * VOCAB], accepting=[1])
    ended = three.with_end([EOS], [PAD])
    written = codd.Model(backbone, CIRCUITS["hmm"], None, MASK).generate([[1]], constraint=ended, gen_length=6)
    [ids] = written.completions
    assert int(ids[0]) in WORDS
    assert int(ids[1]) == EOS
    assert set(ids[2:].tolist()) <= {EOS, PAD}


def test_banned_tokens_are_not_in_the_language_either():
    automaton, banned = random_automaton(0), WORDS[1::2]
    written = model().generate([[1, 2]], constraint=automaton, ban=banned, gen_length=10)
    assert read(written, automaton) == [True]
    assert not set(banned) & set(written.completions[0].tolist())
