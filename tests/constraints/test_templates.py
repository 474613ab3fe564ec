import random
import re

import pytest

from codd.constraints import Choice, Regex, Template, Vocabulary
from codd.errors import EmptyLanguage, InvalidConstraint
from tests.support.generators import walk


def test_slots_are_bounded_and_fixed_text_stands(bundled, mini):
    template = Template("Name: [MASK:3], age: [MASK:2]", patterns={1: Regex(r"\d+")})
    automaton = template.compile(mini)
    rng = random.Random(0)
    fixed = [bundled.encode(text) for text in ("Name: ", ", age: ")]
    lengths = set()
    for _ in range(60):
        ids = walk(automaton, rng, 40)
        assert re.fullmatch(r"Name: [^\n]+, age: \d+", bundled.decode(ids)), bundled.decode(ids)
        assert ids[: len(fixed[0])] == fixed[0]
        lengths.add(len(ids))
    base = sum(map(len, fixed))
    assert lengths <= set(range(base + 2, base + 6))
    assert len(lengths) > 2
    assert automaton.accepts(fixed[0] + bundled.encode("Ada") + fixed[1] + bundled.encode("36"))


def test_a_slot_may_hold_what_follows_it():
    """Where the slot ends is not known before the end: all ways to read a text count."""
    letters = Vocabulary((b"a", b"b", b"aa"), encode=lambda text: [0] * len(text))
    automaton = Template("[MASK:3]a[MASK:1]", [Regex("[ab]*"), Regex("[ab]?")]).compile(letters)
    for ids in ([0], [0, 0], [1, 0], [0, 1, 0, 1], [0, 0, 0, 0, 0], [2, 2, 2, 0], [1, 1, 1, 0, 1]):
        assert automaton.accepts(ids), ids
    for ids in ([], [1], [1, 1], [2], [0, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0]):
        assert not automaton.accepts(ids), ids


def test_slots_side_by_side_and_empty_ones(bundled, mini):
    automaton = Template("[MASK:1][MASK:1]!", [Choice(["a", ""]), Choice(["b"])]).compile(mini)
    assert automaton.accepts(bundled.encode("a") + bundled.encode("b") + bundled.encode("!"))
    assert automaton.accepts(bundled.encode("b") + bundled.encode("!"))
    assert not automaton.accepts(bundled.encode("a") + bundled.encode("!"))
    assert automaton.possible(3)[:, automaton.start].tolist() == [False, False, True, True]


def test_what_a_slot_cannot_hold_is_an_error(mini):
    with pytest.raises(EmptyLanguage):
        Template("x[MASK:2]", [Regex(r"\d{9}")]).compile(mini)
    with pytest.raises(InvalidConstraint, match="too large"):
        Template("x[MASK:200].", [Regex(".+")]).compile(mini, max_states=500)


def test_templates_are_keys():
    assert Template("[MASK:2]", [r"\d+"]) == Template("[MASK:2]", [Regex(r"\d+")])
    assert len({Template("[MASK:2]"), Template("[MASK:2]", [None]), Template("[MASK:3]")}) == 2
