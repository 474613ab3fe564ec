"""Random passages of a corpus: a prefix to be continued and its true continuation, the same for every model."""

import re
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from codd.data.sources import Source, read_chunks
from codd.errors import FormatError

SOURCES = {
    ("books", "test"): Source("text", "books", path="books/test.jsonl.xz", fields=("text",)),
    ("books", "validation"): Source("text", "books", path="books/valid.jsonl.xz", fields=("text",)),
    ("wikitext", "test"): Source("text", "wikitext103", path="wikitext103/test.txt.xz"),
    ("wikitext", "validation"): Source("text", "wikitext103", path="wikitext103/valid.txt.xz"),
}
FEWEST, MOST, CONTINUED = 20, 80, 120
"""The fewest and most words of a prefix, and the words of a continuation."""
MOST_CHARACTERS = 2**27
"""The most characters of a corpus, whose documents are in memory together."""
_WORD = re.compile(r"\S+")


class Passage(NamedTuple):
    """A prefix that ends after a word; the continuation begins with the space after it."""

    prefix: str
    continuation: str


def passages(corpus_name: str, root: Path, count: int, *, split: str = "test") -> list[Passage]:
    """Random paragraphs, cut after a random number of words; FormatError if the corpus has fewer than ``count``.

    ``corpus_name`` is one of `SOURCES`, or the name of a file of prose in the folder ``root``. The first passages are
    the same whatever the count. None overlaps another's paragraph.
    """
    source = SOURCES.get((corpus_name, split)) or Source("text", corpus_name, path=corpus_name, fields=("text",))
    documents = _documents(source, root)
    starts = [(d, m.end()) for d, text in enumerate(documents) for m in re.finditer(r"\n\s*\n|\n (?=[^=\s])", text)]
    rng = Random(f"codd-passages/{corpus_name}/{split}/0")
    rng.shuffle(starts)
    chosen: list[Passage] = []
    for document, place in starts:
        if len(chosen) == count:
            return chosen
        passage = _passage(documents[document], place, rng.randint(FEWEST, MOST))
        if passage is not None:
            chosen.append(passage)
    raise FormatError(f"{root / str(source.path)}: has only {len(chosen)} passages, fewer than the {count} asked for.")


def _documents(source: Source, root: Path) -> list[str]:
    """Whole documents of a text source; FormatError if they are more than `MOST_CHARACTERS` together."""
    documents, open_one, taken = list[str](), list[str](), 0
    for text, ends in read_chunks(source, root):
        open_one.append(text)
        taken += len(text)
        if taken > MOST_CHARACTERS:
            raise FormatError(
                f"{root / source.path}: holds more than {MOST_CHARACTERS:,} characters, too many to choose passages "
                "from. Give a part of it."
            )
        if ends:
            documents.append("".join(open_one))
            open_one = []
    return documents


def _passage(text: str, place: int, words: int) -> Passage | None:
    """None where the text ends too early, or is a heading."""
    window = text[place : place + 40 * (MOST + CONTINUED)]
    spans = list(_WORD.finditer(window))
    if len(spans) < MOST + CONTINUED or window.startswith(("=", "#")) or "\n" in window[: spans[FEWEST].end()]:
        return None
    middle, end = spans[words - 1].end(), spans[words + CONTINUED - 1].end()
    begin = spans[0].start()
    return Passage(window[begin:middle], window[middle:end])


def as_documents(chosen: list[Passage]) -> list[dict[str, Any]]:
    """Passages as rows of a task: the prefix is what is asked, the continuation the true answer."""
    return [{"question": passage.prefix, "answer": passage.continuation} for passage in chosen]
