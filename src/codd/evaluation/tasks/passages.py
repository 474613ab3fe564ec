"""Beginnings of texts to be continued, and how they really go on; drawn by chance, the same for every model."""

import re
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from codd.errors import FormatError
from codd.training import corpus
from codd.training.recipe import Source

SOURCES = {
    ("books", "test"): Source("text", "books", path="books/test.jsonl.xz", fields=("text",)),
    ("books", "validation"): Source("text", "books", path="books/valid.jsonl.xz", fields=("text",)),
    ("wikitext", "test"): Source("text", "wikitext103", path="wikitext103/test.txt.xz"),
    ("wikitext", "validation"): Source("text", "wikitext103", path="wikitext103/valid.txt.xz"),
}
FEWEST, MOST, CONTINUED = 20, 80, 120
"""Words of a beginning, and of what follows it."""
_WORD = re.compile(r"\S+")


class Passage(NamedTuple):
    """A beginning ends after a word; what follows begins with the space after it."""

    prefix: str
    continuation: str


def passages(corpus_name: str, root: Path, count: int, *, split: str = "test", seed: int = 0) -> list[Passage]:
    """Truncated at random: paragraphs by chance, of each a number of words by chance.

    The first passages are the same whatever the count. None overlaps another's paragraph.
    """
    source = SOURCES[corpus_name, split]
    documents = list(corpus.texts(source, root))
    starts = [(d, m.end()) for d, text in enumerate(documents) for m in re.finditer(r"\n\s*\n|\n (?=[^=\s])", text)]
    rng = Random(f"codd-passages/{corpus_name}/{split}/{seed}")
    rng.shuffle(starts)
    found: list[Passage] = []
    for document, place in starts:
        if len(found) == count:
            return found
        passage = _passage(documents[document], place, rng.randint(FEWEST, MOST))
        if passage is not None:
            found.append(passage)
    raise FormatError(f"{root / str(source.path)}: has only {len(found)} passages, fewer than the {count} asked for.")


def _passage(text: str, place: int, words: int) -> Passage | None:
    """None where the text ends too early, or is a heading."""
    window = text[place : place + 40 * (MOST + CONTINUED)]
    found = list(_WORD.finditer(window))
    if len(found) < MOST + CONTINUED or window.startswith(("=", "#")) or "\n" in window[: found[FEWEST].end()]:
        return None
    middle, end = found[words - 1].end(), found[words + CONTINUED - 1].end()
    begin = found[0].start()
    return Passage(window[begin:middle], window[middle:end])


def as_documents(found: list[Passage]) -> list[dict[str, Any]]:
    """For a data set."""
    return [passage._asdict() for passage in found]
