"""Writes one problem: draws a story, walks through its events to the wanted number of steps, and asks."""

import re
from random import Random

from codd_lab.problems.chance import between, distinct, pick
from codd_lab.problems.problem import Problem
from codd_lab.problems.story import Draft, Event, Story, sentence
from codd_lab.problems.world import SHARED_VOCABULARY

STEPS = (2, 3, 4, 5, 6)
DISTRACTOR_SHARE = 0.25
ATTEMPTS = 12
NUMBER = re.compile(r"\d+")


def write(rng: Random, stories: tuple[Story, ...]) -> Problem:
    """A problem of one of the stories; every random choice is made with ``rng``."""
    steps = pick(rng, STEPS)
    for _ in range(ATTEMPTS):
        tale = pick(rng, stories)
        for _ in range(ATTEMPTS):
            draft = _attempt(rng, tale, steps)
            if draft is not None:
                return _finish(draft, tale)
    raise RuntimeError(f"no story of {steps} steps was found in {ATTEMPTS * ATTEMPTS} attempts")


def _attempt(rng: Random, tale: Story, steps: int) -> Draft | None:
    """A draft with exactly so many steps, or None where the drawn events lead nowhere."""
    draft = Draft(rng)
    for key, options in tale.vocabulary:
        draft.words[key] = pick(rng, options)
    for key, options in SHARED_VOCABULARY.items():
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
