"""Free text, a trigger, and a language after it."""

import re

import numpy as np
import pytest

from codd.constraints import After, Choice, Regex, Vocabulary

LETTERS = Vocabulary((*(bytes([byte]) for byte in range(256)), b"ab", b"aab", b"b1", "é".encode(), b""))


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("trigger", ["aab", "abab", "é", "x"])
def test_the_language_begins_where_the_trigger_first_ends(trigger):
    automaton = After(trigger, Regex("[0-9ab]+")).compile(LETTERS)
    draw = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(draw.choice(list("ab1éx"), 9))
        _, found, rest = text.partition(trigger)
        assert automaton.accepts(ids(text)) == bool(found and re.fullmatch("[0-9ab]+", rest)), text


def test_tokens_may_hold_the_trigger_and_more():
    automaton = After("ab", Choice(["1"])).compile(LETTERS)
    for tokens in ([256, *ids("1")], [*ids("xa"), 258], [257, *ids("1")], [*ids("éa"), 258]):
        assert automaton.accepts(tokens)
    assert not automaton.accepts([256, 258])


def test_free_text_is_whole_characters():
    automaton = After("x", Choice(["1"])).compile(LETTERS)
    assert automaton.accepts([*"é".encode(), *ids("x1")])
    assert not automaton.accepts(["é".encode()[0], *ids("x1")])


def test_what_follows_the_language():
    automaton = After("<", Regex("[0-9]+"), until=">").compile(LETTERS)
    assert automaton.accepts(ids("so <12> it is < > 3"))
    assert not automaton.accepts(ids("so <12"))
    assert not automaton.accepts(ids("so <a>"))
