"""Problems by index: a pure function of the split, the seed and the index.

A problem is written by drawing a story, walking through its events to the wanted number of steps, and asking.
"""

import json
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from random import Random
from typing import Literal, get_args
from zlib import crc32

from codd.errors import InvalidInput, shown
from codd_lab.problems.arithmetic import between, distinct, pick
from codd_lab.problems.stories import stories
from codd_lab.problems.story import SHARED_VOCABULARY, Draft, Event, Story, sentence

Split = Literal["train", "test"]

STORIES = stories()
PATTERNS: tuple[str, ...] = tuple(each.name for each in STORIES)
TEST_ONE_IN = 16
SPLIT_ATTEMPTS = 1000
STEPS = (2, 3, 4, 5, 6)
DISTRACTOR_SHARE = 0.25
ATTEMPTS = 12
NUMBER = re.compile(r"\d+")
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


def generate(index: int, *, split: Split = "train", seed: int = 0) -> Problem:
    """The problem with this index.

    The two splits never share a question, whatever the seeds: the checksum of its text says which one it belongs to.
    """
    rng = Random(f"codd-problems/{split}/{seed}/{index}")
    for _ in range(SPLIT_ATTEMPTS):
        problem = write(rng, STORIES)
        if (crc32(problem.question.encode()) % TEST_ONE_IN == 0) == (split == "test"):
            return problem
    raise RuntimeError(f"no problem of the {split} split was found in {SPLIT_ATTEMPTS} attempts")


def problems(count: int, *, split: Split = "train", seed: int = 0, start: int = 0) -> Iterator[Problem]:
    """The problems with the indices from ``start`` to ``start + count - 1``, one by one.

    InvalidInput for a split that is neither "train" nor "test", and for a count that is no whole number from 0 on.
    """
    if split not in get_args(Split):
        raise InvalidInput(f"split must be one of {', '.join(map(repr, get_args(Split)))}, found {shown(split)}.")
    number: object = count  # NumPy's whole numbers are some, too
    if not isinstance(number, Integral) or count < 0:
        raise InvalidInput(f"count must be a whole number of at least 0, found {shown(count)}.")
    return (generate(index, split=split, seed=seed) for index in range(start, start + count))


def write_problems(path: Path, count: int, *, split: Split = "train", seed: int = 0) -> None:
    """Write problems as JSON lines (.jsonl, .jsonl.xz): question, answer (the written-out solution), result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (lzma.open if path.suffix == ".xz" else open)(path, "wt", encoding="utf-8") as file:
        for each in problems(count, split=split, seed=seed):
            fields = {"question": each.question, "answer": each.solution, "result": each.answer}
            file.write(json.dumps(fields) + "\n")


def write(rng: Random, tales: Sequence[Story]) -> Problem:
    """A problem of one of the stories; every random choice is made with ``rng``."""
    steps = pick(rng, STEPS)
    for _ in range(ATTEMPTS):
        tale = pick(rng, tales)
        for _ in range(ATTEMPTS):
            draft = _attempt(rng, tale, steps)
            if draft is not None:
                return _finish(draft, tale)
    raise RuntimeError(f"no story of {steps} steps was found in {ATTEMPTS * ATTEMPTS} attempts")


def _attempt(rng: Random, tale: Story, steps: int) -> Draft | None:
    """A draft with exactly so many steps, or None where the drawn events lead nowhere."""
    draft = Draft(rng)
    for key, options in (*tale.vocabulary.items(), *SHARED_VOCABULARY.items()):
        draft.words[key] = pick(rng, options)
    if not pick(rng, tale.openings).begin(draft, steps):
        return None
    used: set[Event] = set()
    while draft.steps < steps:
        if not _continue(draft, tale, steps - draft.steps, used):
            return None
    return draft


def _continue(draft: Draft, tale: Story, budget: int, used: set[Event]) -> bool:
    """Let one more event happen, of at most so many steps; False if none fits."""
    candidates = [
        each
        for each in tale.events.get(draft.state, ())
        if each not in used and (each.cost == budget or (each.cost < budget and each.target in tale.events))
    ]
    candidates = distinct(draft.rng, candidates, len(candidates))
    # Divisions fit rarely, so they are tried first half of the time; changes of unit likewise make better stories.
    if draft.rng.random() < 0.5:
        candidates.sort(key=lambda each: each.kind not in ("div", "part", "cut") and each.target == each.source)
    for each in candidates:
        if each.happen(draft):
            used.add(each)
            return True
    return False


def _finish(draft: Draft, tale: Story) -> Problem:
    """Ask the question, and slip in a distractor now and then."""
    rng = draft.rng
    asked = sentence(pick(rng, tale.asks[draft.state]).format_map(draft.words))
    distractor = rng.random() < DISTRACTOR_SHARE and _distract(draft, tale)
    question = " ".join((*draft.question, asked))
    solution = "\n".join((*draft.solution, f"#### {draft.value}"))
    return Problem(question, solution, draft.value, draft.steps, tale.name, distractor)


def _distract(draft: Draft, tale: Story) -> bool:
    """Insert a fact whose number occurs nowhere else; False if no such number was found."""
    rng = draft.rng
    taken = set(NUMBER.findall(" ".join((*draft.question, *draft.solution))))
    template, low, high = pick(rng, tale.facts)
    for _ in range(ATTEMPTS):
        number = str(between(rng, low, high))
        if number not in taken:
            draft.words["n"] = number
            # A fact about a person may come first; one about "the building" needs the building to be known.
            first = 0 if "{name}" in template else 1
            place = between(rng, first, max(first, len(draft.question) - 1))
            draft.question.insert(place, sentence(template.format_map(draft.words)))
            return True
    return False
