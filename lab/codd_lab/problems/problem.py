"""A word problem with its solution, and the way its answer is read back from a text."""

import re
from dataclasses import dataclass

ANSWER = re.compile(r"####\s*\$?(-?\d[\d,]*)")


@dataclass(frozen=True)
class Problem:
    """A word problem with a written-out solution.

    ``solution`` has one line a step, each with its equation, and a last line "#### 42". ``steps`` counts the equations,
    ``pattern`` names the story, and ``distractor`` says whether the question has a number that is not needed.
    """

    question: str
    solution: str
    answer: int
    steps: int
    pattern: str
    distractor: bool


def extract_answer(text: str) -> int | None:
    """The number after the last "####" of a text (thousands may be separated by commas), or None."""
    start = text.rfind("####")
    found = ANSWER.match(text, start) if start >= 0 else None
    return int(found[1].replace(",", "")) if found else None
