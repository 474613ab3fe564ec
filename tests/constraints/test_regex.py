import itertools
import os
import random
import re

import pytest

from codd.constraints import Choice, Regex
from codd.errors import EmptyLanguage, InvalidConstraint
from structured_cases import random_regex
from tests.support.generators import walk

COUNT = int(os.environ.get("CODD_FUZZ", "30"))
POINTS = sorted(
    {0, 0x1C, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF, 0x212A, 0x2028, 0xFEFF}
    | set(range(0x100))
    | set(random.Random(0).sample(range(0x100, 0x30000), 120)) - set(range(0xD800, 0xE000))
)


@pytest.mark.parametrize(
    "pattern",
    [
        *("a|ab", "(a|ab)(c|bc)", "a*?b??", "(a|b)*a(a|b){2}", "", "(|a)b", "a{0}", "(a{2}){1,2}", "((a?b?){2}c)*"),
        *("^a$", r"\Aa|b\Z", "(^a|b)c*$", "[^a]b", ".b", "(?s).b", "(?i)A+b", "(?i:a)B*", "(?x) a b # c", r"[\d]?a"),
        *("(?P<n>a)+", "[ab-]{2}", r"[^\W]", "(a*)*", "(a*b*)*c", "(?:a|b|ab)+", "a{2,}", "(?i)[^A]", "$", "^^a"),
    ],
)
def test_the_language_is_that_of_fullmatch(pattern, single_bytes):
    automaton = Regex(pattern).compile(single_bytes)
    for length in range(5):
        for letters in itertools.product("abcB\n" if length < 4 else "ab", repeat=length):
            text = "".join(letters)
            assert automaton.accepts(list(text.encode())) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("pattern", [r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", "[^a-z]", "(?i)[k-s]", r"[\W\d]"])
def test_characters_are_those_of_re(pattern, single_bytes):
    whole, narrow = (Regex(pattern, unicode=unicode).compile(single_bytes) for unicode in (True, False))
    for point in POINTS:
        ids = list(chr(point).encode())
        matches = bool(re.fullmatch(pattern, chr(point)))
        assert whole.accepts(ids) == matches, hex(point)
        both = matches and bool(re.fullmatch(pattern, chr(point), re.ASCII))
        if pattern == r"[\W\d]":  # a digit of another script is in it either way, but not for the same reason
            assert both or not narrow.accepts(ids), hex(point)
        elif pattern != "(?i)[k-s]":  # letters are not narrowed
            assert narrow.accepts(ids) == both, hex(point)


def test_ascii_is_asked_for_by_its_flag(single_bytes):
    assert Regex(r"(?a)\W").compile(single_bytes).accepts(list("é".encode()))
    assert not Regex(r"\W").compile(single_bytes).accepts(list("é".encode()))
    assert Regex(r"(?a)(?u:\w)", unicode=True).compile(single_bytes).accepts(list("é".encode()))
    assert not Regex(r"(?a:\w)", unicode=True).compile(single_bytes).accepts(list("é".encode()))


@pytest.mark.parametrize("text", [b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xff"])
def test_only_utf8_is_text(text, single_bytes):
    assert not Regex("(?s).*").compile(single_bytes).accepts(list(text))


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_expressions(seed, bundled, mini):
    rng = random.Random(seed)
    pattern, samples = random_regex(rng)
    automaton = Regex(pattern).compile(mini)
    for text in samples:
        assert re.fullmatch(pattern, text), "the generator is wrong"
        assert automaton.accepts(bundled.encode(text)), text
    for _ in range(3):
        ids = walk(automaton, rng, 30)
        assert automaton.accepts(ids)
        assert re.fullmatch(pattern, bundled.decode(ids)), bundled.decode(ids)


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){25}", ".{20000}", "((){99999}){99999}", r"(\w?){1000}"])
def test_expressions_that_explode_are_errors(pattern, mini):
    with pytest.raises(InvalidConstraint, match="too large: it needs more than"):
        Regex(pattern).compile(mini)


def test_the_limit_is_the_callers(mini):
    date = Regex(r"\d{4}-\d{2}-\d{2}")
    for _ in range(2):  # compiled, and found in the cache
        with pytest.raises(InvalidConstraint, match="10"):
            date.compile(mini, max_states=10)
        assert date.compile(mini).num_states == 11


def test_languages_without_texts_are_errors(single_bytes, mini):
    with pytest.raises(EmptyLanguage, match=r"Regex\(pattern='\[\^.*no sequence"):
        Regex(r"[^\s\S]", unicode=True).compile(single_bytes)
    letters = type(single_bytes)((b"a", b"b"))
    with pytest.raises(EmptyLanguage, match="no sequence of these tokens"):
        Regex("ac").compile(letters)


def test_a_choice_is_one_of_its_texts(bundled, mini):
    texts = ["yes", "no", "yes, but", "a.b", "né", ""]
    automaton = Choice(texts).compile(mini)
    assert all(automaton.accepts(bundled.encode(text)) for text in texts)
    assert not any(automaton.accepts(bundled.encode(text)) for text in ("axb", "yes,", "n", "noyes"))
    rng = random.Random(0)
    assert {bundled.decode(walk(automaton, rng)) for _ in range(200)} == set(texts)


def test_languages_are_keys():
    assert len({Regex("a"), Regex("a"), Regex("b"), Choice(["a"]), Choice(("a",))}) == 3
