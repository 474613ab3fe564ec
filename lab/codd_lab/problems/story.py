"""What a story is: how one begins, which events may follow, and what is asked in each state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from codd_lab.problems import arithmetic
from codd_lab.problems.arithmetic import Move, between, distinct, pick


def words(text: str) -> tuple[str, ...]:
    """Split a text at its commas."""
    return tuple(text.split(","))


FEMALE = words(
    "Mia,Ana,Emma,Olivia,Sofia,Lena,Clara,Nora,Ruth,Ivy,Grace,Hannah,Zoe,Lucy,Maya,Priya,Fatima,Aisha,Yuki,Mei,"
    "Elena,Carmen,Rosa,Ingrid,Freya,Astrid,Chloe,Alice,Julia,Laura,Megan,Naomi,Paula,Quinn,Rachel,Sarah,Tara,Uma,"
    "Vera,Wendy,Yara,Zara,Amara,Bella,Diana,Esther,Gloria,Helen,Irene,Jane,Kate,Linda"
)
MALE = words(
    "Ben,Tom,Sam,Leo,Max,Noah,Liam,Omar,Ravi,Kenji,Diego,Mateo,Luis,Pedro,Hugo,Oscar,Felix,Anton,Boris,Carl,David,"
    "Ethan,Frank,George,Henry,Isaac,Jack,Kevin,Lucas,Martin,Nathan,Owen,Paul,Rob,Simon,Tim,Victor,Walter,Xavier,"
    "Yusuf,Adam,Brian,Chris,Daniel,Eric,Finn,Gabriel,Hassan,Ivan,James,Karl,Jamal"
)
BUYS = (
    "a jacket,groceries,a new lamp,a pair of shoes,a birthday present,school supplies,a cookbook,a concert ticket,"
    "paint,a train ticket,a new backpack,a pair of headphones"
)
GOALS = "a bicycle,a tent,a guitar,a camera,a telescope,a sewing machine,a kayak,a keyboard,a desk,a tablet"
STREETS = ("Maple", "Oak", "Hill", "Park", "River", "Church", "Mill", "Station", "Garden", "Lake")
SHARED_VOCABULARY: dict[str, tuple[str, ...]] = {
    "buy": words(BUYS),
    "goal": words(GOALS),
    "street": STREETS,
}

NUMBER_WORDS = ("", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth", 10: "a tenth"}
TIMES = ("", "", "twice", *(f"{word} times" for word in NUMBER_WORDS[3:]))

Fact = tuple[str, int, int]
"""A distractor with the range of its number, which is drawn so that it occurs nowhere else in the problem."""
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
    question: Sequence[str]
    solution: Sequence[str] = ()
    low: int = 2
    high: int = arithmetic.MOST
    limit: int = arithmetic.MOST

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
    openings: Sequence[Opening]
    events: Mapping[str, Sequence[Event]]
    asks: Mapping[str, Sequence[str]]
    facts: Sequence[Fact]
    vocabulary: Mapping[str, Sequence[str]]


Parties = Callable[[Random, int], list[str]]

# (parties, whether the last is compared with the two before it together, what is asked)
Plan = tuple[int, bool, str]
PLANS: tuple[Plan, ...] = (
    (2, False, "difference"),
    *((parties, joint, asked) for parties in (3, 4, 5) for joint in (False, True) for asked in ("last", "difference")),
    *((parties, False, "total") for parties in (2, 3, 4) for _ in range(3)),
    (3, True, "total"),
    (3, True, "total"),
)


def _cost(plan: Plan) -> int:
    parties, joint, asked = plan
    if asked == "total":
        return 2 * (parties - 1)  # a sum that the last comparison needed is not made again
    return parties - 1 + joint + (asked == "difference")


DIFFERENCES = ("The difference is {e}.", "So the difference between {x} and {y} is {e}.")
AFFORDABLE = {budget: tuple(plan for plan in PLANS if _cost(plan) <= budget) for budget in range(2, 7)}


def people(rng: Random, count: int) -> list[str]:
    """Draw ``count`` different first names."""
    return distinct(rng, FEMALE + MALE, count)


def in_order(*names: str) -> Parties:
    """A function that draws neighbours of these names in their order, such as days of a week, beginning anywhere."""

    def draw(rng: Random, count: int) -> list[str]:
        begin = between(rng, 0, len(names) - count)
        return list(names[begin : begin + count])

    return draw


def shuffled(*names: str) -> Parties:
    """A function that draws some of these names (of people, days, shops, ...) in random order."""

    def draw(rng: Random, count: int) -> list[str]:
        return distinct(rng, names, count)

    return draw


PARTIES: dict[str, Callable[..., Parties]] = {"people": lambda: people, "in_order": in_order, "shuffled": shuffled}
"""Functions that draw names of parties, by the words that stories.yaml has for them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Parties whose quantities are told relative to each other; leads to "last", "total" or "difference".

    ``relations`` maps a kind of event to its wordings: {b} is the new party, {a} the one it is compared with.
    """

    parties: Parties
    first: Sequence[str]
    relations: Mapping[str, Sequence[str]]
    found: Sequence[str]
    both: Sequence[str]
    summed: Sequence[str]
    low: int
    high: int
    limit: int

    def begin(self, draft: Draft, budget: int) -> bool:
        """Write the comparisons and the sums that they call for."""
        rng = draft.rng
        parties, joint, asked = pick(rng, AFFORDABLE[budget])
        names = self.parties(rng, parties)
        first = arithmetic.spread(rng, self.low, self.high)
        draft.words["first"] = draft.words["b"] = names[0]
        draft.put(Move(first, (), n=first), pick(rng, self.first), "")
        values = [first]
        for i in range(1, parties):
            together = joint and i == parties - 1
            # Only a total needs every party anyway; otherwise each comparison must be with the one before.
            reference = between(rng, 0, i - 1) if asked == "total" else i - 1
            if together:
                draft.value = self._sum(draft, names[i - 2 : i], values[i - 2 : i])
                draft.words["a"] = f"{names[i - 2]} and {names[i - 1]} together"
            else:
                draft.value, draft.words["a"] = values[reference], names[reference]
            draft.words["b"] = names[i]
            if not self._relate(draft):
                return False
            values.append(draft.value)
        return self._conclude(draft, names, values, joint, asked)

    def _relate(self, draft: Draft) -> bool:
        rng = draft.rng
        kinds = list(self.relations)
        for kind in distinct(rng, kinds, len(kinds)):
            high = 5 if kind in ("mul", "part") else arithmetic.MOST
            move = arithmetic.DRAWS[kind](rng, draft.value, 2, high, self.limit)
            if move is not None:
                draft.put(move, pick(rng, self.relations[kind]), pick(rng, self.found))
                return True
        return False

    def _sum(self, draft: Draft, names: list[str], values: list[int]) -> int:
        total = values[0] + values[1]
        draft.words.update(a=names[0], b=names[1], e=f"{values[0]} + {values[1]} = {total}")
        draft.explain(pick(draft.rng, self.both))
        draft.steps += 1
        return total

    def _conclude(self, draft: Draft, names: list[str], values: list[int], joint: bool, asked: str) -> bool:
        draft.state = asked
        if asked == "total":
            total = values[0] + values[1] if joint else self._sum(draft, names, values)
            for name, value in zip(names[2:], values[2:], strict=True):
                draft.words.update(c=name, e=f"{total} + {value} = {total + value}")
                draft.explain(pick(draft.rng, self.summed))
                total += value
                draft.steps += 1
            draft.value = total
        elif asked == "difference":
            (less, y), (more, x) = sorted(((values[0], names[0]), (values[-1], names[-1])))
            draft.words.update(x=x, y=y, e=f"{more} - {less} = {more - less}")
            draft.explain(pick(draft.rng, DIFFERENCES))
            draft.steps += 1
            draft.value = more - less
        return 2 <= draft.value <= arithmetic.MOST


@dataclass(frozen=True, slots=True)
class Bill:
    """Some groups of different items, k times m each, summed up; leads to ``state``."""

    intro: Sequence[str]
    clause: Sequence[str]
    items: Sequence[str]
    product: Sequence[str]
    summed: Sequence[str]
    state: str
    low: int
    high: int

    def begin(self, draft: Draft, budget: int) -> bool:
        """Write the items of the bill and their sum; False if it does not fit."""
        rng, words = draft.rng, draft.words
        count = pick(rng, [n for n in (1, 2, 2, 3, 3) if 2 * n - 1 <= budget])
        moves = [arithmetic.groups(rng, 0, self.low, self.high, 330) for _ in range(count)]
        items = distinct(rng, self.items, count)
        template = pick(rng, self.clause)
        clauses = []
        for item, move in zip(items, moves, strict=True):
            if move is None:
                return False
            words.update(item=item, k=str(move.k), m=str(move.m), d=move.equations[0])
            clauses.append(template.format_map(words))
            draft.explain(pick(rng, self.product))
            draft.value += move.result
        listed = clauses[0] if count == 1 else ", ".join(clauses[:-1]) + " and " + clauses[-1]
        draft.tell(pick(rng, self.intro).replace("{list}", listed))
        results = [move.result for move in moves if move is not None]
        total = results[0]
        for result in results[1:]:
            words["e"] = f"{total} + {result} = {total + result}"
            draft.explain(pick(rng, self.summed))
            total += result
        draft.steps += 2 * count - 1
        draft.state = self.state
        return draft.value <= arithmetic.MOST
