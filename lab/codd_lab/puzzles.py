"""Short puzzles whose tokens depend on each other, generated from a seed: lines of names, and squares of letters.

They are of the kinds that ParallelBench (Kang et al. 2025, arXiv 2510.04767) found hard to decode in parallel; wording,
names and generators are ours. A person solves them at a glance. Where several answers are right, each token by itself
may be one of many, and only together they are right or wrong: a sampler that draws them independently fails.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations
from random import Random
from typing import NamedTuple

NAMES = """Ada Alan Amir Anna Ben Bill Cara Chen Clara Dan David Diana Emma Eric Eva Finn Frank Grace Hana Helen Henry
Ida Ivan Jack James Jane John Julia Karl Kate Laura Leo Lily Lucas Maria Mark Mina Nina Noah Oscar Paul Peter Rosa Ruth
Sam Sara Sofia Tom Vera Will""".split()  # noqa: SIM905 a list of literals would take fifty lines
FEWEST, MOST = 4, 7
"""The smallest and largest number of names in a line."""
SIZE = 4
"""Rows and columns of a square."""
LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"
OPEN = "."
"""A field of a square that is not given."""
CLUES = {"latin_square": 2, "sudoku": 6}
"""Letters of a square that are given."""

Words = tuple[str, ...]


def _changed(line: Words, place: int, new: str = "", leaving: int = 0) -> Words:
    return (*line[:place], *([new] if new else []), *line[place + leaving :])


def _anywhere(line: Words, new: str, leaving: int) -> list[Words]:
    return [_changed(line, place, new, leaving) for place in range(len(line) + 1 - leaving)]


LINES: dict[str, tuple[str, Callable[[Words, int, str], Sequence[Words]]]] = {
    "lines_copy": ("Nothing changes.", lambda line, i, new: [line]),
    "lines_reverse": ("The line turns around: the last is now the first.", lambda line, i, new: [line[::-1]]),
    "lines_sort": ("They line up in alphabetical order.", lambda line, i, new: [tuple(sorted(line))]),
    "lines_shuffle": ("They change their order, to any but this.", lambda line, i, new: [*permutations(line)][1:]),
    "lines_insert": ("{name} joins the line as number {number}.", lambda line, i, new: [_changed(line, i, new)]),
    "lines_insert_any": ("{name} joins, anywhere in the line.", lambda line, i, new: _anywhere(line, new, 0)),
    "lines_remove": ("Number {number} leaves.", lambda line, i, new: [_changed(line, i, "", 1)]),
    "lines_remove_any": ("One of them leaves, whoever it may be.", lambda line, i, new: _anywhere(line, "", 1)),
    "lines_replace": ("{name} takes the place of number {number}.", lambda line, i, new: [_changed(line, i, new, 1)]),
    "lines_replace_any": ("{name} takes the place of one of them.", lambda line, i, new: _anywhere(line, new, 1)),
}
"""The sentence that states a change, and all lines that it may lead to, given line, place (from 0) and new name."""
_FILL = "in a square of 4 by 4 with the letters {letters}, so that every row"
SQUARES = {
    "latin_square": "Fill the fields with a point " + _FILL + " and every column has each letter once:\n{given}",
    "sudoku": "Fill the fields with a point " + _FILL + ", every column and every quarter of 2 by 2 has each letter "
    "once:\n{given}",
}
KINDS = (*LINES, *SQUARES)


class Puzzle(NamedTuple):
    """A puzzle: what is asked, and what all right answers follow from."""

    kind: str
    """One of `KINDS`."""
    question: str
    given: Words
    """The names of the line, or the rows of the square, with points for open fields."""
    place: int = 0
    """A place in the line, from 0."""
    name: str = ""
    """The name that comes in, or the letters of the square."""

    @property
    def answers(self) -> Sequence[Words]:
        """All right answers: the names of a line, or the rows of a square."""
        if self.kind in LINES:
            return LINES[self.kind][1](self.given, self.place, self.name)
        fields = "".join(self.given)
        return [
            square
            for square in _squares(self.name, self.kind)
            if all(field in (OPEN, letter) for field, letter in zip(fields, "".join(square), strict=True))
        ]

    @property
    def answer(self) -> str:
        """One right answer, as it should be written; the first one."""
        first = self.answers[0]
        return ", ".join(first) if self.kind in LINES else "\n".join(" ".join(row) for row in first)

    def accepts(self, text: str) -> bool:
        """Whether a text ends with a right answer: words in its last line, or letters in its last four."""
        lines = [line.rpartition(":")[2] for line in text.splitlines() if line.strip()]
        rows = [tuple(re.findall(r"[^\W_]+", line)) for line in lines]
        if self.kind in LINES:
            return bool(rows) and rows[-1] in self.answers
        return tuple("".join(row) for row in rows[-SIZE:]) in self.answers


def _squares(letters: str, kind: str) -> list[Words]:
    """All squares of a kind in four letters, as their rows."""
    table = str.maketrans(LETTERS[:SIZE], letters)
    return [tuple(row.translate(table) for row in rows) for rows in _first_squares(kind)]


@cache
def _first_squares(kind: str) -> list[Words]:
    """All squares of a kind in the first four letters."""
    lines = ["".join(row) for row in permutations(LETTERS[:SIZE])]
    squares: list[Words] = [()]
    for _ in range(SIZE):
        squares = [(*above, row) for above in squares for row in lines if all(_differ(row, each) for each in above)]
    if kind == "latin_square":
        return squares
    corners = [(i, j) for i in (0, 2) for j in (0, 2)]
    return [
        rows for rows in squares if all(len({*rows[i][j : j + 2], *rows[i + 1][j : j + 2]}) == 4 for i, j in corners)
    ]


def _differ(row: str, other: str) -> bool:
    return all(map(str.__ne__, row, other))


def puzzle(kind: str, index: int, seed: int = 0) -> Puzzle:
    """The puzzle of a number: a function of kind (one of `KINDS`), number and seed only."""
    rng = Random(f"codd-puzzles/{kind}/{seed}/{index}")
    if kind in SQUARES:
        letters = "".join(sorted(rng.sample(LETTERS, SIZE)))
        full = "".join(rng.choice(_squares(letters, kind)))
        shown = set(rng.sample(range(len(full)), CLUES[kind]))
        fields = "".join(letter if i in shown else OPEN for i, letter in enumerate(full))
        rows = tuple(fields[i : i + SIZE] for i in range(0, len(full), SIZE))
        asked = SQUARES[kind].format(letters=", ".join(letters), given="\n".join(" ".join(row) for row in rows))
        question = f"{asked}\nWrite the four rows and nothing else, letters with spaces between them."
        return Puzzle(kind, question, rows, name=letters)
    *line, name = rng.sample(NAMES, rng.randint(FEWEST, MOST) + 1)
    place = rng.randrange(len(line))
    told = LINES[kind][0].format(name=name, number=place + 1)
    question = f"People wait in a line: {', '.join(line)}.\n{told}\nWrite the names in the line now, with commas."
    return Puzzle(kind, question, tuple(line), place, name)


def puzzles(kind: str, count: int, seed: int = 0) -> Iterator[Puzzle]:
    """The first ``count`` puzzles of a kind."""
    return (puzzle(kind, index, seed) for index in range(count))
