"""Word problems that the bundled model was not trained on: what the demo asks."""

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("questions.jsonl")
ANSWER = re.compile(r"####\s*\$?(-?\d[\d,]*)")


class Question(NamedTuple):
    """A word problem, its written-out solution, and the number that is right."""

    question: str
    answer: str
    result: int


def questions(seed: int) -> list[Question]:
    """All problems of the file, in an order that the seed decides; 0: as they stand there."""
    found = [Question(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]
    if seed:
        random.Random(seed).shuffle(found)
    return found


def extract_answer(text: str) -> int | None:
    """The number after the last "####" of a text (thousands may be separated by commas), or None."""
    start = text.rfind("####")
    found = ANSWER.match(text, start) if start >= 0 else None
    return int(found[1].replace(",", "")) if found else None
