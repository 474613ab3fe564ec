"""Openings of several sentences: a comparison of some parties, and a list of groups that is summed up."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from codd_lab.problems import arithmetic
from codd_lab.problems.arithmetic import Move
from codd_lab.problems.chance import between, distinct, pick
from codd_lab.problems.story import Draft
from codd_lab.problems.world import FEMALE, MALE

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
    first: tuple[str, ...]
    relations: dict[str, tuple[str, ...]]
    found: tuple[str, ...]
    both: tuple[str, ...]
    summed: tuple[str, ...]
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

    intro: tuple[str, ...]
    clause: tuple[str, ...]
    items: tuple[str, ...]
    product: tuple[str, ...]
    summed: tuple[str, ...]
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
