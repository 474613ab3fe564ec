"""Answers that are logged as they come, so that an evaluation goes on where it was stopped."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from codd.decoding import Model, Options
from codd.errors import InvalidInput
from codd.evaluation.answering import Answerer, Item, Line
from codd_lab.runs import Log, Sample

Advance = Callable[[int], None]
"""Called with the number of requests done since the last call."""


class Scored(NamedTuple):
    """The samples of a configuration, and what they are scored by."""

    metric: str | None
    """The metric that decides whether a sample is correct; None for continued text."""
    metrics: Mapping[str, float]
    """The mean of every metric of the task."""
    samples: list[Sample]


class LoggedAnswerer(Answerer):
    """Answers requests in batches, and skips those that the log has answers to."""

    def __init__(
        self,
        model: Model,
        options: Options,
        *,
        seed: int,
        batch: int,
        log: Log,
        advance: Advance = lambda count: None,
        read_only: bool = False,
    ):
        """``log`` holds earlier answers and gets the new ones; ``read_only``: raise InvalidInput if one is missing."""
        super().__init__(model, options, seed=seed, batch=batch)
        self.log, self.advance, self.read_only = log, advance, read_only

    def in_batches(self, asked: Mapping[str, Item], work: Callable[[Sequence[Item]], list[Line]]) -> dict[str, Line]:
        """The lines that the log has, and new ones for the rest, a batch at a time; each batch is logged at once."""
        known = {key: line for key in asked if (line := self.log.get(key))}
        self.advance(len(known))
        todo = {key: item for key, item in asked.items() if key not in known}
        if todo and self.read_only:
            raise InvalidInput(
                f"{len(todo)} of {len(asked)} answers are not there yet. Answer them first (codd eval --stage answer), "
                "on the device of the configuration; after a change of data or chat template prepare them again."
            )
        return known | super().in_batches(todo, work)

    def answered(self, lines: Mapping[str, Line]) -> None:
        """Log a batch at once."""
        self.log.add([*lines.values()])
        self.advance(len(lines))
