"""The stories of stories.yaml, which says what is in it."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from codd_lab.problems.story import PARTIES, Bill, Comparison, Event, Opening, Story

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def stories() -> list[Story]:
    """All stories of stories.yaml; the file is read once."""
    data = yaml.load(files(__package__).joinpath("stories.yaml").read_text(encoding="utf-8"), _Loader)
    return [_story(each, data) for each in data["stories"]]


def _story(fields: Mapping[str, Any], shared: Mapping[str, Any]) -> Story:
    events: dict[str, list[Event]] = {}
    for each in _spliced(fields["events"], shared["events"]):
        events.setdefault(each["in"], []).append(_event(each))
    words = {
        word: shared["words"][some] if isinstance(some, str) else some for word, some in fields.get("words", {}).items()
    }
    return Story(
        fields["name"],
        [_opening(each) for each in fields["openings"]],
        events,
        fields["asks"] | shared["asks"].get(fields.get("asks_of"), {}),
        [tuple(each) for each in _spliced(fields["facts"], shared["facts"])],
        words,
    )


def _spliced(items: Sequence[Any], shared: Mapping[str, Sequence[Any]]) -> list[Any]:
    """A list in which names stand for shared lists."""
    return [one for item in items for one in (shared[item] if isinstance(item, str) else [item])]


def _event(fields: Mapping[str, Any]) -> Event:
    named = {name: value for name, value in fields.items() if name not in ("in", "to", "state")}
    source = fields.get("in", "")
    return Event(source, fields.get("state") or fields.get("to", source), **named)


def _opening(fields: Mapping[str, Any]) -> Opening:
    """An event without a source, a comparison of parties, or a bill."""
    if "kind" in fields:
        return _event(fields)
    named = {name: value for name, value in fields.items() if name not in ("bill", "compare")}
    if "bill" in fields:
        return Bill(state=fields["bill"], **named)
    parties = fields["compare"]
    kind, names = (parties, ()) if isinstance(parties, str) else next(iter(parties.items()))
    return Comparison(PARTIES[kind](*names), **named)
