import functools
import itertools
import os
import random
import re
import tracemalloc

import numpy as np
import pytest
import torch

from codd.constraints import (
    After,
    Automaton,
    Choice,
    JsonSchema,
    Regex,
    Template,
    Vocabulary,
    cache,
    compilation,
    formulas,
    languages,
    syntax,
)
from codd.errors import InvalidConstraint
from structured_cases import random_regex


@pytest.mark.parametrize("seed", range(20))
def test_every_way_to_write_a_text_is_accepted_and_no_other(seed):
    rng = random.Random(seed)
    pattern, samples = random_regex(rng, depth=2)
    pieces = {sample[a:b] for sample in samples for a in range(len(sample)) for b in range(a + 1, len(sample) + 1)}
    tokens = (*(piece.encode() for piece in rng.sample(sorted(pieces), min(6, len(pieces)))), b"", b"a")
    fits = [
        ids
        for length in range(4)
        for ids in itertools.product(range(len(tokens)), repeat=length)
        if re.fullmatch(pattern, b"".join(tokens[id] for id in ids).decode()) and b"" not in [tokens[id] for id in ids]
    ]
    if not fits:
        return
    automaton = Regex(pattern, unicode=True).compile(Vocabulary(tokens))
    found = [
        ids
        for length in range(4)
        for ids in itertools.product(range(len(tokens)), repeat=length)
        if automaton.accepts(ids)
    ]
    assert found == fits


def same(one: Automaton, other: Automaton) -> bool:
    tensors = ("table", "classes", "accepting")
    return one.start == other.start and all(torch.equal(getattr(one, t), getattr(other, t)) for t in tensors)


def test_what_was_compiled_is_kept_by_content(mini, monkeypatch, tmp_path):
    language = JsonSchema({"type": "object", "properties": {"a": {"type": "integer"}}})
    first = language.compile(mini)
    (file,) = (tmp_path / "cache" / "codd" / "constraints").iterdir()

    def compiled_again(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(languages, "byte_dfa", compiled_again)
    assert language.compile(mini) is first, "in memory"
    cache.forget()
    assert same(language.compile(mini), first), "on disk"
    for other in (Regex("a"), Regex("a", unicode=True)):
        with pytest.raises(AssertionError, match="compiled again"):
            other.compile(mini)
    with pytest.raises(AssertionError, match="compiled again"):
        language.compile(Vocabulary(mini.tokens, strips_space=True))
    assert file.exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "folder", "pipe", "device", "loop", "other"])
def test_a_damaged_or_foreign_file_is_compiled_again(damage, mini, tmp_path):
    first = Regex("[ab]+c").compile(mini)
    (file,) = (tmp_path / "cache" / "codd" / "constraints").iterdir()
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "pipe":
        os.mkfifo(file)
    elif damage in ("device", "loop"):
        file.symlink_to("/dev/zero" if damage == "device" else file)
    elif damage == "other":
        Regex("[ab]+d").compile(mini)
        (other,) = file.parent.iterdir()
        other.rename(file)
    else:
        file.write_bytes({"cut": content[:-9], "flip": content, "empty": b""}[damage])
    cache.forget()
    assert same(Regex("[ab]+c").compile(mini), first)


def test_a_file_of_another_vocabulary_is_not_believed(mini, monkeypatch):
    monkeypatch.setattr(Vocabulary, "digest", "the same")
    Regex("a").compile(mini)
    cache.forget()
    fewer = Vocabulary(mini.tokens[:300])
    assert Regex("a").compile(fewer).vocab_size == 300


def test_a_disk_that_takes_nothing_is_no_error(mini, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Regex("a").compile(mini).num_states == 2


def test_old_files_and_automata_make_room(mini, monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "_ON_DISK", 3)
    monkeypatch.setattr(cache, "_IN_MEMORY", 2)
    for count in range(6):
        Regex("a" * count).compile(mini)
    assert len(list((tmp_path / "cache" / "codd" / "constraints").iterdir())) == 3
    assert len(cache._memory) == 2


def test_no_table_of_all_states_and_tokens_is_made():
    rng = random.Random(0)
    words = {bytes(rng.choices(b"abcdefgh ", k=rng.randint(1, 6))) for _ in range(60_000)}
    vocabulary = Vocabulary((*sorted(words), *(bytes([b]) for b in range(256))))
    _ = vocabulary.characters
    language = Regex(".{0,100}")
    tracemalloc.start()
    automaton = language.compile(vocabulary)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert automaton.num_states > 800
    assert len(vocabulary) * automaton.num_states * 4 > 3 * peak


def test_tables_that_would_be_too_large_are_errors(mini, monkeypatch):
    monkeypatch.setattr(compilation, "_MAX_ENTRIES", 20)
    with pytest.raises(languages.InvalidConstraint, match="entries in its table"):
        Regex(r"[a-z]{5}").compile(mini)


MUTUAL = {
    "$defs": {str(i): {"properties": {str(j): {"$ref": f"#/$defs/{j}"} for j in range(9)}} for i in range(9)},
    "$ref": "#/$defs/0",
}
DOUBLED: dict = functools.reduce(lambda inner, _: {"anyOf": [inner, inner]}, range(60), {})
"""Sixty dicts, which as JSON would be longer than any memory."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: After("x" * 40_000, Regex("a")),
        lambda: After("x", Regex("a"), until="x" * 40_000),
        lambda: Choice(["x" * 3_000_000]),
        lambda: Regex("a" * 3_000_000),
        lambda: Template("x" * 90_000 + "[MASK:2]"),
        lambda: Template("[MASK:2]" * 500_000),
        lambda: JsonSchema(MUTUAL),
        lambda: JsonSchema(DOUBLED),
        lambda: JsonSchema("[" * 3_000_000),
    ],
    ids=["After", "until", "Choice", "Regex", "Template", "slots", "definitions", "doubled", "text"],
)
def test_what_is_too_large_is_refused_before_the_work(make, single_bytes):
    tracemalloc.start()
    with pytest.raises(InvalidConstraint, match=r"too large|at most"):
        make().compile(single_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20


@pytest.mark.parametrize("keyword", ["oneOf", "anyOf"])
def test_long_lists_of_constants_take_work_by_their_length(keyword, single_bytes, monkeypatch):
    made = []
    known = formulas.Formulas._made
    monkeypatch.setattr(formulas.Formulas, "_made", lambda *arguments: made.append(1) or known(*arguments))
    schema = {keyword: [{"const": f"c{i}"} for i in range(1500)]}
    assert JsonSchema(schema).compile(single_bytes).accepts(list(b'"c1499"'))
    assert len(made) < 20 * 1500


def test_letters_of_either_case_are_looked_for_among_those_that_have_one():
    scanned = syntax._scanned.cache_info().misses
    Regex("(?i)" + "".join(chr(0x400 + i) for i in range(200)))
    assert syntax._scanned.cache_info().misses == scanned


def test_compiling_gives_the_same_bytes_each_time(mini):
    first = JsonSchema(True).compile(mini)
    cache.forget()
    for file in cache._folder().iterdir():
        file.unlink()
    assert same(JsonSchema(True).compile(mini), first)
    assert np.all(first.table.numpy() < first.num_states)
