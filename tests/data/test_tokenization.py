import dataclasses
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from codd.backbones.tokenizer import Tokenizer
from codd.data import sources, tokenization
from codd.data.packing import PackedDataset, StreamDataset
from codd.data.sources import (
    CHUNK_CHARACTERS,
    QuestionAnswer,
    Source,
    read_chunks,
    read_pairs,
)
from codd.data.tokenization import (
    DIGESTS,
    TAILS,
    PackingConfig,
    encode_pairs,
    load_source,
    pad_answer,
    token_stream,
)
from codd.errors import FormatError, TextsLeftOut
from codd_lab.pretraining.data import sample_texts
from tests.support.small_runs import small_tokenizer

LAYOUT = PackingConfig(row_length=64, block_length=8, seed=0)
TEXT = Source("text", "prose", path="prose.txt")
QA = Source("qa", "questions", path="qa.jsonl", strip="gsm8k")
DOCUMENTS = ["A first paragraph.\n\nAnd a second one, with 12 apples.\n", "Another document: ünïcode too."]
ZEROS = lzma.compress(b"0" * 10_000_000)


PAIRS = [("How many?", "4 + 5 = <<4+5=9>>9\n#### 9"), ("And then? ", " 12"), ("Why " + "so " * 60, "because")]


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def root(tmp_path):
    (tmp_path / "prose.txt").write_text("".join(DOCUMENTS) * 10, encoding="utf-8")
    write_lines(tmp_path / "qa.jsonl", [{"question": q, "answer": a} for q, a in PAIRS])
    return tmp_path


def write_lines(path, objects) -> None:
    text = "".join(json.dumps(each) + "\n" for each in objects)
    if path.suffix == ".xz":
        with lzma.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)


def examples(source: PackedDataset) -> list[tuple[list[int], list[int]]]:
    """The question and the scored tokens of each text."""
    found = []
    for tokens, segments, scored in zip(*source.rows, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            at = segments == segment
            found.append((tokens[at & ~scored].tolist(), tokens[at & scored].tolist()))
    return found


def test_questions_without_calculator_marks(root):
    assert list(read_pairs(QA, root)) == [
        QuestionAnswer("How many?", "4 + 5 = 9\n#### 9"),
        QuestionAnswer("And then?", "12"),
        QuestionAnswer(("Why " + "so " * 60).strip(), "because"),
    ]


def test_shifts_of_code_are_no_calculator_marks(tmp_path):
    code = "return (x << 3) | (y >> 2)"
    write_lines(tmp_path / "code.jsonl", [{"question": "Mix x and y.", "answer": code}])
    source = Source("qa", "code", path="code.jsonl")
    assert list(read_pairs(source, tmp_path)) == [QuestionAnswer("Mix x and y.", code)]
    stripped = dataclasses.replace(source, strip="gsm8k")
    assert list(read_pairs(stripped, tmp_path)) == [QuestionAnswer("Mix x and y.", "return (x  2)")]


def test_questions_under_other_names_and_not_all_of_them(tmp_path):
    write_lines(tmp_path / "m.jsonl", [{"problem": "p", "solution": "s", "level": 3}] * 5)
    source = Source("qa", "m", path="m.jsonl", fields=("problem", "solution"), count=2)
    assert list(read_pairs(source, tmp_path)) == [QuestionAnswer("p", "s")] * 2


def test_prose_is_one_stream_with_end_marks(tmp_path, tokenizer):
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in [*DOCUMENTS, "<|mask|> is only text"]])
    source = load_source(Source("text", "a", path="a.jsonl"), tmp_path, tokenizer, PackingConfig(8, 4, 0), None)
    assert isinstance(source, StreamDataset)
    ids = source.stream.tolist()
    ends = [i for i, id in enumerate(ids) if id == tokenizer.eos_id]
    assert len(ends) == 3
    assert ends[-1] == len(ids) - 1
    assert tokenizer.mask_id not in ids
    assert tokenizer.decode(ids[: ends[0]]) == DOCUMENTS[0]
    assert tokenizer.decode(ids[ends[0] + 1 : ends[1]]) == DOCUMENTS[1]


def test_answers_end_with_their_block_and_too_long_ones_are_left_out_with_a_warning(root, tokenizer):
    with pytest.warns(TextsLeftOut) as caught:
        source = load_source(QA, root, tokenizer, LAYOUT, None)
    longest = len(encode_pairs([QuestionAnswer(*PAIRS[2])], tokenizer)[0][0]) + len(tokenizer.encode("because")) + 1
    assert [str(each.message) for each in caught] == [
        "source questions: 1 of 3 questions with their answers are longer than row_length, 64 tokens, and were left "
        f"out; the longest takes {longest}. Raise row_length to keep them."
    ]
    found = {tokenizer.decode(answer): (question, answer) for question, answer in examples(source)}
    assert set(found) == {"4 + 5 = 9\n#### 9", "12"}
    for text, (question, answer) in found.items():
        ids = tokenizer.encode(text)
        assert question == tokenizer.encode_chat("How many?" if "9" in text else "And then?")
        assert answer[: len(ids)] == ids
        assert set(answer[len(ids) :]) == {tokenizer.eos_id}
        assert len(answer) % LAYOUT.block_length == 0


@pytest.mark.parametrize(
    ("question", "answer", "extra", "scored"),
    [
        (10, 0, 0, 8),
        (10, 7, 0, 8),
        (10, 8, 0, 16),  # an end mark always follows
        (10, 7, 2, 24),
        (40, 7, 2, 24),
        (41, 7, 2, 16),  # as many further blocks as there is room for
        (57, 3, 2, 7),  # the last block ends with the row
        (57, 6, 0, 7),
        (57, 7, 0, 8),  # too long: no place for the end mark
        (70, 2, 1, 3),
    ],
)
def test_room_of_an_answer(question, answer, extra, scored):
    found = pad_answer(np.full(question, 1, np.uint16), np.full(answer, 2, np.uint16), extra, 9, LAYOUT)
    assert found.prompt == question
    assert found.tokens.tolist() == [1] * question + [2] * answer + [9] * (scored - answer)


def test_answers_sometimes_have_further_blocks_of_end_marks(tmp_path, tokenizer):
    write_lines(tmp_path / "qa.jsonl", [{"question": "q", "answer": "12"}] * 400)
    rows = load_source(QA, tmp_path, tokenizer, LAYOUT, None)
    sizes = [len(answer) for _, answer in examples(rows)]
    assert [sizes.count(size) / 400 for size in (8, 16, 24)] == pytest.approx(TAILS, abs=0.08)


class Made:
    """Counts how often rows are made rather than found."""

    def __init__(self, monkeypatch):
        self.count = 0
        for name in ("_make_packed", "token_stream"):
            monkeypatch.setattr(tokenization, name, self.counting(getattr(tokenization, name)))

    def counting(self, function):
        def counted(*arguments):
            self.count += 1
            return function(*arguments)

        return counted


@pytest.mark.parametrize("source", [TEXT, QA], ids=lambda source: source.kind)
def test_the_cache_is_used_the_second_time(root, tokenizer, tmp_path, monkeypatch, source):
    made, layout = Made(monkeypatch), LAYOUT._replace(row_length=300)
    plain = load_source(source, root, tokenizer, layout, None).take(0, 3)
    first = load_source(source, root, tokenizer, layout, tmp_path / "cache").take(0, 3)
    assert made.count == 2
    other_weight = Source(**{**vars(source), "weight": 7.0})
    second = load_source(other_weight, root, tokenizer, layout, tmp_path / "cache").take(0, 3)
    assert made.count == 2
    for one, two, three in zip(plain, first, second, strict=True):
        assert np.array_equal(one, two)
        assert np.array_equal(two, three)
        assert two.dtype == three.dtype


@pytest.mark.filterwarnings("ignore::codd.errors.TextsLeftOut")
def test_the_cache_is_not_used_when_something_changed(root, tokenizer, tmp_path, monkeypatch):
    made, cache = Made(monkeypatch), tmp_path / "cache"
    load_source(QA, root, tokenizer, LAYOUT, cache)
    load_source(QA, root, small_tokenizer(380), LAYOUT, cache)
    assert made.count == 2
    load_source(QA, root, tokenizer, LAYOUT._replace(row_length=60), cache)
    assert made.count == 3
    path = root / "qa.jsonl"
    path.write_text(path.read_text().replace("How many", "How much"))  # of the same size
    changed = load_source(QA, root, tokenizer, LAYOUT, cache)
    assert made.count == 4
    assert "How much" in "".join(tokenizer.decode(question) for question, _ in examples(changed))


@pytest.mark.filterwarnings("ignore::codd.errors.TextsLeftOut")
def test_remains_of_a_killed_process_do_not_disturb_the_cache(root, tokenizer, tmp_path, monkeypatch):
    cache, saves = tmp_path / "cache", []

    def killed(path, array):
        saves.append(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            load_source(QA, root, tokenizer, LAYOUT, cache)
    assert saves
    assert len(load_source(QA, root, tokenizer, LAYOUT, cache)) > 0


def words(count: int) -> Tokenizer:
    """A tokenizer whose tokens are numbers, with a vocabulary of any size."""
    vocabulary = {"<|eos|>": 0, "?": 1, **{str(number): number + 2 for number in range(count - 2)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(backend, special={"eos_token": "<|eos|>"}, chat_template="{{ messages[0].content }}")


@pytest.mark.parametrize(("size", "kind"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_a_large_vocabulary_needs_larger_numbers(tmp_path, size, kind):
    tokenizer, last = words(size), size - 3
    (tmp_path / "prose.txt").write_text(f"{last} 5 " * 100)
    write_lines(tmp_path / "qa.jsonl", [{"question": f"7 {last}", "answer": f"{last} 8"}] * 3)
    prose = load_source(TEXT, tmp_path, tokenizer, LAYOUT, tmp_path / "cache").take(0, 2).tokens
    assert prose.dtype == kind
    assert set(prose.flatten().tolist()) == {size - 1, 7}
    answers = load_source(QA, tmp_path, tokenizer, LAYOUT, tmp_path / "cache").take(0, 1)
    assert answers.tokens.dtype == kind
    assert answers.tokens[0, :4].tolist() == [9, size - 1, size - 1, 10]
    assert (answers.tokens[answers.segments == 0] == 0).all()  # it has no padding, and nobody looks


def test_samples_for_a_tokenizer_follow_the_weights(root):
    (root / "long.txt").write_text("x" * 3_000_000)
    write_lines(root / "many.jsonl", [{"question": "q" * 99, "answer": "a" * 900}] * 3000)
    sources = [Source("text", "t", "long.txt", 3.0), Source("qa", "q", "many.jsonl", 1.0)]
    sample = "".join(sample_texts(sources, root, megabytes=2))
    assert sample.count("x") == 1_500_000
    assert 490_000 < len(sample) - 1_500_000 <= 500_000
    assert "".join(sample_texts([TEXT], root, megabytes=2)) == (root / "prose.txt").read_text(encoding="utf-8")


def test_a_source_of_which_nothing_fits_names_row_length(root, tokenizer):
    encoded = encode_pairs(list(read_pairs(QA, root)), tokenizer)
    sizes = [len(question) + len(answer) + 1 for question, answer in encoded]
    with pytest.raises(FormatError) as caught:
        load_source(QA, root, tokenizer, LAYOUT._replace(row_length=min(sizes) - 1), None)
    assert str(caught.value) == (
        f"source questions: none of its 3 questions fits a row with its answer: row_length is {min(sizes) - 1} tokens, "
        f"and the shortest takes {min(sizes)}. Raise row_length."
    )


def test_streams_one_after_the_other_and_repetitive_text_are_read(tmp_path):
    parts = [f"{number}\n" * 1000 for number in range(3)]
    content = b"\0\0\0\0".join(lzma.compress(part.encode()) for part in parts)
    (tmp_path / "a.txt.xz").write_bytes(content + bytes(200_000))
    chunks = read_chunks(Source("text", "a", path="a.txt.xz"), tmp_path)
    assert "".join(chunk.text for chunk in chunks) == "".join(parts)


def test_no_more_is_read_than_is_needed(tmp_path, tokenizer):
    whole = b'{"question": "q", "answer": "aaaaaaaaa", "text": "0123456789"}\n' * 100
    (tmp_path / "a.jsonl").write_bytes(whole + b"broken\n" + whole)
    (tmp_path / "a.txt").write_bytes(b"0123456789" * CHUNK_CHARACTERS + b"\xff")
    assert len(list(read_pairs(Source("qa", "a", path="a.jsonl"), tmp_path, most=995))) == 100
    assert len(list(read_chunks(Source("text", "a", path="a.jsonl"), tmp_path, most=1000))) == 100
    assert (
        sum(len(piece.text) for piece in read_chunks(Source("text", "a", path="a.txt"), tmp_path, most=2))
        == CHUNK_CHARACTERS
    )
    some = load_source(Source("qa", "a", path="a.jsonl"), tmp_path, tokenizer, LAYOUT._replace(characters=50), None)
    assert sum(len(answer) > 0 for _, answer in examples(some)) == 5


@pytest.mark.parametrize(
    "text",
    ["word " * 300, "".join(DOCUMENTS) * 20, "x" * 999, "", "a\n\n" * 200, " = a = \n \n b  c \n" * 99, "\n" * 500],
)
def test_long_texts_are_cut_where_no_token_is(tmp_path, tokenizer, monkeypatch, text):
    (tmp_path / "prose.txt").write_text(text)
    monkeypatch.setattr(sources, "CHUNK_CHARACTERS", 200)
    cut = list(read_chunks(TEXT, tmp_path))
    assert "".join(piece.text for piece in cut) == text
    assert [piece.ends for piece in cut] == [False] * (len(cut) - 1) + [True]
    assert max(len(piece.text) for piece in cut) <= 200
    if " " in text or "\n" in text.strip():
        assert token_stream(TEXT, tmp_path, tokenizer).tolist() == [*tokenizer.encode(text), tokenizer.eos_id]


@pytest.mark.filterwarnings("ignore::codd.errors.TextsLeftOut")
def test_what_another_process_kept_in_the_meantime_is_used(root, tokenizer, tmp_path, monkeypatch):
    make, kept = tokenization._make_packed, []

    def slowly(*given):
        monkeypatch.setattr(tokenization, "_make_packed", make)
        load_source(QA, root, tokenizer, LAYOUT, tmp_path)
        kept.extend(path.stat().st_ino for path in tmp_path.iterdir())
        return make(*given)

    monkeypatch.setattr(tokenization, "_make_packed", slowly)
    assert len(load_source(QA, root, tokenizer, LAYOUT, tmp_path))
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == kept


def flipped(content: bytes) -> bytes:
    """One bit of the last number is another: an id that no vocabulary has."""
    return content[:-1] + bytes([content[-1] ^ 0x80])


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.filterwarnings("ignore::codd.errors.TextsLeftOut")
@pytest.mark.parametrize("name", ["tokens.npy", DIGESTS])
def test_kept_rows_that_are_damaged_are_made_again(root, tokenizer, tmp_path, name):
    load_source(QA, root, tokenizer, LAYOUT, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    whole = {path.name: path.read_bytes() for path in kept.iterdir()}
    damaged = (b"", whole[name][:-1], flipped(whole[name]), whole[name] + b"x")
    ways = [*(lambda path, content=content: path.write_bytes(content) for content in damaged), Path.unlink, as_pipe]
    for harm in ways:
        harm(kept / name)
        load_source(QA, root, tokenizer, LAYOUT, tmp_path / "cache").take(0, 3)
        assert {path.name: path.read_bytes() for path in kept.iterdir()} == whole
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept.name]
