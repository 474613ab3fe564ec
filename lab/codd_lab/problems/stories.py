"""The stories of stories.yaml, which says what is in it."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from codd_lab.problems.arithmetic import MOST
from codd_lab.problems.openings import PARTIES, Bill, Comparison
from codd_lab.problems.story import Event, Opening, Story

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def stories() -> tuple[Story, ...]:
    """All stories of stories.yaml; the file is read once."""
    data = yaml.load(files(__package__).joinpath("stories.yaml").read_text(encoding="utf-8"), _Loader)
    return tuple(_story(each, data) for each in data["stories"])


def _story(fields: Mapping[str, Any], shared: Mapping[str, Any]) -> Story:
    events: dict[str, list[Event]] = {}
    for each in _spliced(fields["events"], shared["events"]):
        events.setdefault(each["in"], []).append(_event(each))
    asks = fields["asks"] | shared["asks"].get(fields.get("asks_of"), {})
    return Story(
        fields["name"],
        tuple(_opening(each) for each in fields["openings"]),
        {state: tuple(each) for state, each in events.items()},
        {state: tuple(texts) for state, texts in asks.items()},
        tuple((text, low, high) for text, low, high in _spliced(fields["facts"], shared["facts"])),
        tuple((word, tuple(_named(some, shared["words"]))) for word, some in fields.get("words", {}).items()),
    )


def _spliced(items: Sequence[Any], shared: Mapping[str, Sequence[Any]]) -> list[Any]:
    """A list in which names stand for shared lists."""
    return [one for item in items for one in (shared[item] if isinstance(item, str) else [item])]


def _named(items: str | Sequence[str], shared: Mapping[str, Sequence[str]]) -> Sequence[str]:
    return shared[items] if isinstance(items, str) else items


def _event(fields: Mapping[str, Any]) -> Event:
    source = fields.get("in", "")
    return Event(
        source,
        fields.get("state") or fields.get("to", source),
        fields["kind"],
        tuple(fields["question"]),
        tuple(fields.get("solution", ())),
        fields.get("low", 2),
        fields.get("high", MOST),
        fields.get("limit", MOST),
    )


def _opening(fields: Mapping[str, Any]) -> Opening:
    """An event without a source, a comparison of parties, or a bill."""
    if "kind" in fields:
        return _event(fields)
    if "bill" in fields:
        intro, clause, items, product, summed = (
            tuple(fields[name]) for name in ("intro", "clause", "items", "product", "summed")
        )
        return Bill(intro, clause, items, product, summed, fields["bill"], fields["low"], fields["high"])
    parties = fields["compare"]
    kind, names = (parties, ()) if isinstance(parties, str) else next(iter(parties.items()))
    relations = {relation: tuple(texts) for relation, texts in fields["relations"].items()}
    first, found, both, summed = (tuple(fields[name]) for name in ("first", "found", "both", "summed"))
    limits = fields["low"], fields["high"], fields["limit"]
    return Comparison(PARTIES[kind](*names), first, relations, found, both, summed, *limits)
