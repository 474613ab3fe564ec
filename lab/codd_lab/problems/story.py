"""What a story is: how one begins, which events may follow, and what is asked in each state."""

from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from codd_lab.problems import arithmetic
from codd_lab.problems.arithmetic import Move
from codd_lab.problems.chance import pick
from codd_lab.problems.world import FEMALE, MALE, NUMBER_WORDS, PARTS, TIMES, Fact

CONNECTIVES = ("", "", "then ", "later, ", "after that, ", "next, ")


class Draft:
    """A problem being written: the two texts so far, the running quantity and the words that templates may use."""

    __slots__ = ("question", "rng", "solution", "state", "steps", "value", "words")

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.words: dict[str, str] = {}
        self.question: list[str] = []
        self.solution: list[str] = []
        self.value = 0
        self.steps = 0
        self.state = ""
        self._cast()

    def _cast(self) -> None:
        # The friend's pronoun always differs from the main person's, so that pronouns are never ambiguous.
        rng, words = self.rng, self.words
        if rng.random() < 0.5:
            words.update(name=pick(rng, FEMALE), friend=pick(rng, MALE), he="she", his="her", him="her")
        else:
            words.update(name=pick(rng, MALE), friend=pick(rng, FEMALE), he="he", his="his", him="him")

    def tell(self, template: str) -> None:
        """Append a sentence to the question."""
        rng, words = self.rng, self.words
        words["who"] = words["he"] if self.question and rng.random() < 0.6 else words["name"]
        words["then"] = pick(rng, CONNECTIVES) if self.question else ""
        self.question.append(sentence(template.format_map(words)))

    def explain(self, template: str) -> None:
        """Append one or more lines to the solution."""
        self.solution.extend(sentence(line) for line in template.format_map(self.words).split("\n"))

    def put(self, move: Move, question: str, solution: str) -> None:
        """Tell an event and explain its equations."""
        rng, words = self.rng, self.words
        n, k = move.n, move.k
        dozen = n == 12 and ("{n} {things}" in question or "{n} more {things}" in question)
        words["n"] = "a dozen" if dozen else str(n)
        words["k"] = NUMBER_WORDS[k] if k and "${k}" not in question and rng.random() < 0.3 else str(k)
        words["m"] = str(move.m)
        words["part"] = PARTS.get(k, "")
        words["times"] = TIMES[k] if k <= 3 or rng.random() < 0.5 else f"{k} times"
        self.tell(question)
        words["n"], words["k"] = str(n), str(k)
        if move.equations:
            words["d"], words["e"] = move.equations[0], move.equations[-1]
            self.explain(solution)
        self.value = move.result
        self.steps += len(move.equations)


def sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[0].upper() + text[1:]


@runtime_checkable
class Opening(Protocol):
    """How a story begins: it sets the state and the running quantity, in at most ``budget`` steps."""

    def begin(self, draft: Draft, budget: int) -> bool:
        """Write the beginning; False if it does not fit."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One thing that happens to the running quantity, in several wordings; as an opening it has no source."""

    source: str
    target: str
    kind: str
    question: tuple[str, ...]
    solution: tuple[str, ...]
    low: int
    high: int
    limit: int

    @property
    def cost(self) -> int:
        """How many equations the event adds to the solution."""
        return arithmetic.COST[self.kind]

    def happen(self, draft: Draft) -> bool:
        """Draw the numbers and write the event; False if no numbers fit."""
        rng = draft.rng
        move = arithmetic.DRAWS[self.kind](rng, draft.value, self.low, self.high, self.limit)
        if move is None:
            return False
        draft.put(move, pick(rng, self.question), pick(rng, self.solution) if self.solution else "")
        draft.state = self.target
        return True

    def begin(self, draft: Draft, budget: int) -> bool:
        """Write the event as the beginning of a story."""
        return self.cost <= budget and self.happen(draft)


@dataclass(frozen=True)
class Story:
    """A story pattern: its openings, the events of each state, the questions of each state, and distractors."""

    name: str
    openings: tuple[Opening, ...]
    events: dict[str, tuple[Event, ...]]
    asks: dict[str, tuple[str, ...]]
    facts: tuple[Fact, ...]
    vocabulary: tuple[tuple[str, tuple[str, ...]], ...]
