"""How an answer is read from what a model wrote."""

import re
from collections.abc import Sequence

FENCE = "```"
_LANGUAGE = re.compile(r"```(?:(?:python3?|py)\b)?", re.IGNORECASE)


def cut(text: str, stops: Sequence[str]) -> str:
    """Up to the first of the stop strings; an empty one stops nothing."""
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


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
