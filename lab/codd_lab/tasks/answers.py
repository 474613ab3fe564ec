"""How an answer is read from what a model wrote."""

import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import NamedTuple

from codd.errors import InvalidInput
from codd_lab.problems import extract_answer

FENCE = "```"
_LANGUAGE = re.compile(r"```(?:(?:python3?|py)\b)?", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])-?\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?")
_BRACKETED = re.compile(r"\(([A-Z])\)")
_LETTER = re.compile(r"\b([B-HJ-Z]|[AI](?!'|\s+[a-z]))\b")
"""A capital letter that stands alone; A and I before a small letter are words."""
RULES = "last-number, letter, exact or regex:PATTERN"


class AnswerRule(NamedTuple):
    """How an answer is read, and what it looks like: two answers are the same if what is read of them is equal."""

    name: str
    read: Callable[[str], str | None]
    """The answer in a text, in a normal form; None if there is none."""


def answer_rule(name: str) -> AnswerRule:
    """The rule of a name: one of `RULES`; InvalidInput for others, and for a pattern that is no regular expression.

    ``last-number``: the last number of a text, by value (1,000 is 1000.0). ``letter``: the last capital letter in
    brackets, or else the last that stands alone. ``exact``: the whole text. ``regex:PATTERN``: the first group of the
    last match, or all of it. Texts are compared without case, space at their ends, and a full stop at the end.
    """
    if name.startswith("regex:"):
        try:
            pattern = re.compile(name.removeprefix("regex:"))
        except re.error as error:
            raise InvalidInput(f"the answer rule {name!r} has no regular expression ({error}).") from error
        return AnswerRule(name, lambda text: _matched(pattern, text))
    if name not in _READERS:
        raise InvalidInput(f"there is no answer rule {name!r}; give {RULES}.")
    return AnswerRule(name, _READERS[name])


def default_rule(answers: Iterable[str]) -> str:
    """The rule that fits all right answers of a task: last-number, letter, or else exact."""
    known = list(answers)
    if all(_NUMBER.fullmatch(answer.strip()) for answer in known):
        return "last-number"
    if all(re.fullmatch(r"[A-Z]|\([A-Z]\)", answer.strip()) for answer in known):
        return "letter"
    return "exact"


def _last_number(text: str) -> str | None:
    numbers = [match[0] for match in _NUMBER.finditer(text)]
    if not numbers:
        return None
    value = Decimal(numbers[-1].replace(",", "").replace("$", ""))
    return f"{value.normalize():f}" if value else "0"


def _marked_number(text: str) -> str | None:
    number = extract_answer(text)
    return None if number is None else str(number)


def _letter(text: str) -> str | None:
    letters: list[str] = _BRACKETED.findall(text) or _LETTER.findall(text)
    return letters[-1] if letters else None


def _exact(text: str) -> str:
    return text.strip().removesuffix(".").rstrip().casefold()


def _matched(pattern: re.Pattern[str], text: str) -> str | None:
    matches = [match[1 if pattern.groups else 0] or "" for match in pattern.finditer(text)]
    return _exact(matches[-1]) if matches else None


_READERS = {"last-number": _last_number, "letter": _letter, "exact": _exact}
MARKED_NUMBER = AnswerRule("marked-number", _marked_number)
"""The number after the last ####, as our word problems write it."""


def extract_code(text: str) -> str:
    """The program in a text whose first fence may stand in the prompt already.

    A text that begins with a fence: what is between it and the next one. Else: with an odd number of fences, all before
    the last (the prompt opened it); with an even number, what is between the first two; without any, everything.
    """
    text = text.strip()
    opened = _LANGUAGE.match(text)
    if opened:
        return text[opened.end() :].split(FENCE, 1)[0].strip("\n")
    text = _LANGUAGE.sub(FENCE, text)
    fences = text.count(FENCE)
    if fences % 2:
        return text.rsplit(FENCE, 1)[0].strip("\n")
    return text.split(FENCE, 2)[1].strip("\n") if fences else text
