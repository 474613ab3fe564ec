import itertools

import numpy as np
import pytest
import torch

from codd.constraints import Automaton
from codd.errors import EmptyLanguage


def random_table(rng: np.random.Generator) -> tuple[np.ndarray, int, list[int]]:
    states, vocab = rng.integers(1, 7), rng.integers(1, 6)
    table = rng.integers(0, states, (states, vocab))
    table[rng.random(table.shape) < rng.random()] = -1
    return table, int(rng.integers(states)), np.flatnonzero(rng.random(states) < 0.4).tolist()


def end_of(table: np.ndarray, state: int, tokens: tuple[int, ...]) -> int:
    for token in tokens:
        state = table[state, token] if state >= 0 else -1
    return state


@pytest.mark.parametrize("seed", range(25))
def test_queries_are_those_of_the_table(seed):
    table, start, accepting = random_table(np.random.default_rng(seed))
    automaton = Automaton(table, start=start, accepting=accepting)
    states, vocab = table.shape
    assert (automaton.num_states, automaton.vocab_size) == (states, vocab)
    assert automaton.num_classes == len({tuple(column) for column in table.T})
    assert np.array_equal(automaton.table[:, automaton.classes].numpy(), table)
    possible = automaton.possible(4)
    for length in range(5):
        texts = list(itertools.product(range(vocab), repeat=length))
        for state in range(states):
            ends = [end_of(table, state, text) for text in texts]
            assert bool(possible[length, state]) == any(end in accepting for end in ends)
        for text in texts[:200]:
            assert automaton.after(text) == end_of(table, start, text)
            assert automaton.accepts(torch.tensor(text, dtype=torch.long)) == (end_of(table, start, text) in accepting)


@pytest.mark.parametrize("seed", range(25))
def test_trimming_keeps_the_language_and_only_states_that_differ(seed):
    table, start, accepting = random_table(np.random.default_rng(seed))
    automaton = Automaton(table, start=start, accepting=accepting)
    depth = min(4, 6 - table.shape[1] // 2)
    texts = [text for n in range(depth + 1) for text in itertools.product(range(table.shape[1]), repeat=n)]
    if not automaton.possible(len(table))[:, start].any():
        with pytest.raises(EmptyLanguage, match="empty"):
            automaton.trimmed()
        return
    small = automaton.trimmed()
    assert all(small.accepts(text) == automaton.accepts(text) for text in texts)
    length = small.num_states
    assert small.possible(length).any(dim=0).all(), "a state that cannot accept"
    answers = {
        tuple(end_of(small.table[:, small.classes].numpy(), state, text) in _ends(small) for text in texts)
        for state in range(small.num_states)
    }
    assert len(answers) == small.num_states or depth < small.num_states
    again = small.trimmed()
    assert (again.num_states, again.num_classes) == (small.num_states, small.num_classes)


def _ends(automaton: Automaton) -> list[int]:
    return torch.nonzero(automaton.accepting).flatten().tolist()


def test_the_end_of_text_is_an_edge():
    word = Automaton([[1, -1, 0, 0, 0], [-1, 1, -1, -1, -1]], accepting=[1])  # 0 then any number of 1
    ended = word.with_end([3], [4])
    assert ended.num_states == 3
    assert _ends(ended) == [1, 2]
    assert ended.accepts([0, 1, 1, 3])
    assert ended.accepts([0, 3, 4, 3, 4])
    assert ended.accepts([0, 1]), "a text may fill all the room there is"
    assert ended.after([3]) == ended.after([4]) == -1, "an end within the text, which the table had as a token"
    assert ended.after([0, 4]) == -1, "padding before the end"
    assert ended.after([0, 3, 1]) == -1, "text after the end"
    both = word.with_end([3, 4], [4])
    assert both.accepts([0, 4, 3])


def test_tokens_can_be_left_out():
    word = Automaton([[1, 1, -1], [-1, 1, 2], [-1, -1, -1]], accepting=[1, 2])
    fewer = word.without([2])
    assert fewer.accepts([0, 1])
    assert not fewer.accepts([0, 2])
    assert word.without([]) is word
    with pytest.raises(EmptyLanguage):
        word.without([0, 1])


def test_classes_that_no_state_takes_are_allowed():
    automaton = Automaton.from_classes([[0, -1]], [0, 1, 0], accepting=[0])
    assert automaton.accepts([0, 2])
    assert not automaton.accepts([1])
    assert automaton.trimmed().num_classes == 2
