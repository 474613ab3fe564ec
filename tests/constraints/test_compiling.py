import itertools
import random
import re
import tracemalloc

import numpy as np
import pytest
import torch

from codd.constraints import Automaton, JsonSchema, Regex, Vocabulary, cache, compilation, languages
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


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "folder"])
def test_a_damaged_file_is_compiled_again(damage, mini, tmp_path):
    first = Regex("[ab]+c").compile(mini)
    (file,) = (tmp_path / "cache" / "codd" / "constraints").iterdir()
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.unlink()
    if damage == "folder":
        file.mkdir()
    else:
        file.write_bytes({"cut": content[:-9], "flip": content, "empty": b""}[damage])
    cache.forget()
    assert same(Regex("[ab]+c").compile(mini), first)


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


def test_compiling_gives_the_same_bytes_each_time(mini):
    first = JsonSchema(True).compile(mini)
    cache.forget()
    for file in cache._folder().iterdir():
        file.unlink()
    assert same(JsonSchema(True).compile(mini), first)
    assert np.all(first.table.numpy() < first.num_states)
