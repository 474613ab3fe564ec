"""Files and sources that cannot be used: each is refused in one line that says where and why."""

import lzma
import os
import zlib

import pytest

from codd.backbones import Tokenizer
from codd.data.sources import Source, find_sources
from codd.data.text_files import LONGEST_LINE
from codd.data.tokenization import PackingConfig, load_source
from codd.errors import FormatError
from codd_lab.pretraining.bpe import train_bpe
from tests.support.small_runs import small_tokenizer

LAYOUT = PackingConfig(row_length=64, block_length=8, seed=0)
PAIR = b'{"question": "q", "answer": "a"}\n'
ZEROS = lzma.compress(b"0" * 10_000_000)


def with_dictionary(content: bytes, code: int) -> bytes:
    """An xz file that asks for another dictionary; 40 is 4 GiB."""
    size = (content[12] + 1) * 4
    head = bytearray(content[12 : 12 + size - 4])
    head[head.index(b"\x21\x01") + 2] = code
    return content[:12] + head + zlib.crc32(head).to_bytes(4, "little") + content[12 + size :]


FILES = [
    ("qa", "a.jsonl", PAIR + b"{broken", "a.jsonl: line 2 is not JSON"),
    ("qa", "a.jsonl", b"[1, 2]\n", "a.jsonl: line 1 is not a JSON object"),
    ("qa", "a.jsonl", PAIR + b'{"question": "q"}\n', "a.jsonl: line 2: expected a text under 'an"),
    ("qa", "a.jsonl", b'{"question": "q", "answer": 5}\n', "line 1: expected a text under 'answer', found the keys"),
    ("qa", "a.jsonl", b'{"question": "\xff"}\n', "a.jsonl: cannot be read as UTF-8 text"),
    ("qa", "a.jsonl", b"", "source a: holds no questions with answers"),
    ("qa", "a.jsonl", b"[" * 100_000, "a.jsonl: line 1 is not JSON (RecursionError"),
    ("qa", "a.jsonl", b'{"question": ' + b"9" * 5000 + b"}", "a.jsonl: line 1 is not JSON (ValueError"),
    ("qa", "a.jsonl", b'{"question": "\\ud800", "answer": "a"}', "line 1: 'question' holds half a character"),
    ("qa", "a.jsonl", b'{"question": "q\x00", "answer": "a"}', "a.jsonl: line 1 is not JSON"),
    ("qa", "a.jsonl", b'{"' + b"k" * 5000 + b'": 1}', "expected a text under 'question', found the keys kk"),
    ("qa", "a.jsonl", b"x" * (LONGEST_LINE + 1), "a.jsonl: line 1 is longer than 16,777,216 characters"),
    ("qa", "a.jsonl.xz", b"this is not xz", "a.jsonl.xz: cannot be read"),
    ("qa", "a.jsonl.xz", b"", "a.jsonl.xz: cannot be read as UTF-8 text (EOFError: the file is empty)"),
    ("qa", "a.jsonl.xz", lzma.compress(PAIR * 99)[:-20], "a.jsonl.xz: cannot be read"),
    ("qa", "a.jsonl.xz", ZEROS * 30, "expand to more than 100 times as many, which text does not"),
    ("qa", "a.jsonl.xz", with_dictionary(lzma.compress(PAIR), 40), "(LZMAError: Memory usage limit exceeded)"),
    ("qa", "a.json", b'[{"question": "q", "answer": "a"}, 2]', "a.json: entry 2 is not a JSON object"),
    ("qa", "a.json", b"[" + PAIR + b', {"a": ', "a.json: entry 2 is not JSON (JSONDecodeError"),
    ("qa", "a.json", b"[" + PAIR + b",", "a.json: ends before its array does"),
    ("qa", "a.json", b"[" + PAIR, "a.json: ends before its array does"),
    ("qa", "a.json", b'"text"', "a.json: entry 1 is not a JSON object"),
    ("qa", "a.json", b'[{"a": ' + b"[" * 100_000, "a.json: entry 1 is not JSON (RecursionError"),
    ("qa", "a.parquet", b"PAR1" + bytes(40), "a.parquet: cannot be read as parquet"),
    ("qa", "a.csv", b"q,a\n", "a.csv: codd does not read .csv files"),
    ("qa", "a.txt", b"prose", "a.txt: has no fields to find questions and answers in"),
    ("text", "a.gz", b"\x1f\x8b", "a.gz: codd does not read .gz files"),
    ("text", "a.txt", b"\xff\xfe\x00", "a.txt: cannot be read as UTF-8 text"),
    ("text", "a.txt.xz", b"\xfd7zXZ\x00", "a.txt.xz: cannot be read"),
    ("text", "a.txt", b"short", "tokens do not fill a row of 64"),
    ("text", "a.jsonl", b'{"body": "x"}\n', "a.jsonl: line 1: expected a text under 'text', found the keys body"),
]


def refused(source: Source, root, words: str, tokenizer=None) -> None:
    with pytest.raises(FormatError) as caught:
        load_source(source, root, tokenizer or small_tokenizer(), LAYOUT, root / "cache")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not (root / "cache").exists()


@pytest.mark.parametrize(("kind", "name", "content", "words"), FILES)
def test_files(tmp_path, kind, name, content, words):
    (tmp_path / name).write_bytes(content)
    refused(Source(kind, "a", path=name), tmp_path, words)


def test_sources(tmp_path):
    (tmp_path / "qa.jsonl").write_bytes(PAIR)
    (tmp_path / "prose.txt").write_text("Some words. " * 20)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("no.jsonl", "pipe.jsonl", "n" * 300, "a\0b", "/dev/zero"):
        refused(Source("qa", "a", path=name), tmp_path, "there is no such file (source a)")
    refused(Source("text", "a", path="."), tmp_path, "--data")
    refused(Source("qa", "a", path="qa.jsonl", fields=("q",)), tmp_path, "fields must name the question's and")
    bare = Tokenizer(train_bpe(["Some words."], vocab_size=300).backend, special={"mask_token": "<|mask|>"})
    refused(Source("text", "a", path="prose.txt"), tmp_path, "the tokenizer has no eos token", bare)
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (source,) = find_sources([tmp_path / "loop.txt"], None)
    refused(source, tmp_path, "loop.txt: there is no such file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"holds no \.jsonl"):
        find_sources([tmp_path / "empty"], None)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nothing", "question,answer\n", r"its name does not say what it holds. Rename it to .txt, .jsonl"),
        ("a.csv.xz", "", "codd does not read .csv files"),
        ("a.json", " [\n]\n", "a.json: is empty"),
        ("a.json", "", "a.json: is empty"),
        ("a.json", '[{"body": "x"}]', "has the keys body; say with --fields which of them to use"),
    ],
)
def test_files_whose_kind_is_to_be_found(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(FormatError) as caught:
        find_sources([tmp_path / name], None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
