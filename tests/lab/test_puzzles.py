"""Puzzles with exact rules: which answers are right is counted by enumeration."""

import math
from itertools import permutations, product

import pytest

from codd_lab.puzzles import FEWEST, KINDS, LINES, MOST, OPEN, SIZE, SQUARES, Puzzle, puzzle, puzzles

LINE = ("Ada", "Ben", "Cara", "Dan")
COUNTS = {"insert_any": 5, "remove_any": 4, "replace_any": 4, "shuffle": math.factorial(4) - 1}


@pytest.mark.parametrize("kind", LINES)
def test_of_all_lines_those_and_only_those_are_accepted(kind):
    made = Puzzle(kind, "", LINE, place=1, name="Eva")
    rows = [row for size in (3, 4, 5) for row in product((*LINE, "Eva"), repeat=size)]
    accepted = [row for row in rows if made.accepts(", ".join(row))]
    assert len(accepted) == COUNTS.get(kind.removeprefix("lines_"), 1)
    assert sorted(accepted) == sorted(made.answers)


def test_lines_by_hand():
    made = {kind: Puzzle(kind, "", ("Tom", "Ada", "Ben"), place=1, name="Eva") for kind in LINES}
    for kind, text in {
        "lines_copy": "Tom, Ada, Ben",
        "lines_reverse": "Ben, Ada, Tom",
        "lines_sort": "Ada, Ben, Tom",
        "lines_insert": "Tom, Eva, Ada, Ben",
        "lines_remove": "Tom, Ben",
        "lines_replace": "Tom, Eva, Ben",
        "lines_insert_any": "Tom, Ada, Ben, Eva",
        "lines_remove_any": "Tom, Ada",
        "lines_replace_any": "Tom, Ada, Eva",
        "lines_shuffle": "Tom, Ben, Ada",
    }.items():
        assert made[kind].accepts(text), kind
        assert not made[kind].accepts(f"{text}, {text}"), kind
    assert made["lines_copy"].accepts("I think that it stays.\nThe line: Tom, Ada, Ben.\n")
    assert not made["lines_copy"].accepts("Tom, Ada, Ben\nThat is the line.")
    assert not made["lines_copy"].accepts("")


def groups(square, quarters):
    """The rows, the columns and, if they count, the quarters, each as a set."""
    corners = [(i, j) for i in (0, 2) for j in (0, 2)] if quarters else []
    boxes = [{square[i + a][j + b] for a in (0, 1) for b in (0, 1)} for i, j in corners]
    return [*map(set, square), *map(set, zip(*square, strict=True)), *boxes]


@pytest.mark.parametrize(("kind", "count"), [("latin_square", 576), ("sudoku", 288)])
def test_of_all_squares_those_and_only_those_are_accepted(kind, count):
    """The two counts are known; squares whose first row is given are one of 24."""
    assert len(Puzzle(kind, "", (OPEN * SIZE,) * SIZE, name="ABCD").answers) == count
    made = Puzzle(kind, "", ("ABCD", *(OPEN * SIZE,) * (SIZE - 1)), name="ABCD")
    rows = ["".join(row) for row in permutations("ABCD")]
    right = [("ABCD", *rest) for rest in product(rows, repeat=3)]
    right = [square for square in right if all(len(group) == 4 for group in groups(square, kind == "sudoku"))]
    assert sorted(right) == sorted(made.answers)
    assert len(right) == count // 24
    assert made.accepts("\n".join(" ".join(row) for row in right[0]))
    assert made.accepts("Here it is:\n" + "\n".join(right[0]))
    assert not made.accepts("\n".join((right[0][1], right[0][0], *right[0][2:])))  # the clue is not kept
    assert not made.accepts("\n".join(right[0][:3]))


@pytest.mark.parametrize("kind", KINDS)
def test_puzzles_are_a_function_of_seed_and_number_and_can_be_solved(kind):
    made = list(puzzles(kind, 50, seed=3))
    assert made == [puzzle(kind, number, seed=3) for number in range(50)]
    assert len({each.question for each in made}) > 45
    assert not {each.question for each in made} & {each.question for each in puzzles(kind, 50, seed=4)}
    for each in made:
        assert each.accepts(each.answer)
        shown = each.given if kind in LINES else [" ".join(row) for row in each.given]
        assert all(part in each.question for part in shown)
        if kind in LINES:
            assert FEWEST <= len(each.given) <= MOST
            assert len({*each.given, each.name}) == len(each.given) + 1
            assert all(row != each.given for row in each.answers) or kind in ("lines_copy", "lines_sort")
    if kind in SQUARES:
        assert len({each.name for each in made}) > 25  # other letters
