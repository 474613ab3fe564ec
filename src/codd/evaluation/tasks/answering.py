"""Answering requests: the part of an evaluation that needs the network, and nothing of the harness."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from codd.decoding import Model, Options
from codd.errors import InvalidInput
from codd.evaluation.runs import Log, Sample
from codd.evaluation.tasks.answers import cut
from codd.evaluation.tasks.joint import ScoringRequest, score_continuations
from codd.validation import Section, Whole

Advance = Callable[[int], None]
"""Called with the number of requests done since the last call."""
Line = dict[str, Any]
"""A line of the log: the answer to one request, or its score."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class Request(Section):
    """A text to be continued, and the strings that end the answer."""

    key: str
    doc_id: Whole
    idx: Whole
    prompt: str
    stops: Sequence[str] = ()


class Scored(NamedTuple):
    """The samples of a configuration, and what they are scored by."""

    metric: str | None
    """The metric that decides whether a sample is correct; None for continued text."""
    metrics: Mapping[str, float]
    """The mean of every metric of the task."""
    samples: list[Sample]


class Answerer:
    """Answers requests in batches, and skips those that the log has answers to.

    An answer depends on the seed and on the problem's number only, never on batches or processes.
    """

    def __init__(
        self,
        model: Model,
        options: Options,
        *,
        seed: int = 0,
        batch: int = 8,
        log: Log | None = None,
        advance: Advance = lambda count: None,
        read_only: bool = False,
    ):
        """``log`` holds earlier answers and gets the new ones; ``read_only``: raise InvalidInput if one is missing."""
        if model.tokenizer is None:
            raise InvalidInput("this checkpoint has no tokenizer: tasks ask in text.")
        self.model, self.tokenizer, self.options = model, model.tokenizer, options
        self.seed, self.batch, self.log, self.advance = seed, batch, log or Log(None), advance
        self.read_only = read_only

    def answers(self, requests: Sequence[Request]) -> dict[str, Line]:
        """By key: text, tokens, calls (network evaluations), seconds, seed. The longest prompts are answered first."""
        ids = {request.key: self._encode(request.prompt) for request in requests}
        order = sorted(requests, key=lambda request: (-len(ids[request.key]), request.doc_id, request.idx))
        return self._logged({request.key: (ids[request.key], request) for request in order}, self._answer)

    def scores(self, requests: Mapping[str, ScoringRequest]) -> dict[str, Line]:
        """By key: log_prob (nats), greedy (whether every token is the most probable one)."""
        return self._logged(
            requests, lambda some: [score._asdict() for score in score_continuations(self.model, some, self.options)]
        )

    def _logged(self, asked: Mapping[str, Item], work: Callable[[Sequence[Item]], list[Line]]) -> dict[str, Line]:
        """The lines that the log has, and new ones for the rest, a batch at a time; each batch is logged at once."""
        known = {key: line for key in asked if (line := self.log.get(key))}
        self.advance(len(known))
        todo = [key for key in asked if key not in known]
        if todo and self.read_only:
            raise InvalidInput(
                f"{len(todo)} of {len(asked)} answers are not there yet. Answer them first (codd eval --stage answer), "
                "on the device of the configuration; after a change of data or chat template prepare them again."
            )
        for begin in range(0, len(todo), self.batch):
            some = todo[begin : begin + self.batch]
            lines = work([asked[key] for key in some])
            fresh = {key: {"key": key, **line} for key, line in zip(some, lines, strict=True)}
            self.log.add([*fresh.values()])
            known |= fresh
            self.advance(len(some))
        return known

    def _encode(self, prompt: str) -> list[int]:
        """The ids of a prompt; of one that is too long the end, where the question is."""
        ids, limit = self.tokenizer.encode(prompt), self.model.backbone.max_length
        room = None if limit is None else limit - self.options.gen_length
        if room is not None and room < 1:
            raise InvalidInput(
                f"gen_length {self.options.gen_length} leaves no room for a prompt: this model was made for {limit} "
                "tokens. Give a smaller --gen-length."
            )
        return ids if room is None else ids[-room:]

    def _answer(self, asked: Sequence[tuple[list[int], Request]]) -> list[Line]:
        seeds = [problem_seed(self.seed, request.doc_id, request.idx) for _, request in asked]
        begun = time.perf_counter()
        made = self.model.generate([ids for ids, _ in asked], self.options.changed(seed=seeds))
        if self.model.backbone.device.type == "cuda":
            torch.cuda.synchronize(self.model.backbone.device)
        each, ends = (time.perf_counter() - begun) / len(asked), self.model.stop_ids
        return [
            {
                "text": cut(self.tokenizer.decode(written), request.stops),
                "tokens": sum(token not in ends for token in written.tolist()),
                "calls": calls,
                "seconds": each,
                "seed": seed,
            }
            for (_, request), written, calls, seed in zip(asked, made.completions, made.steps, seeds, strict=True)
        ]


def problem_seed(seed: int, doc_id: int, idx: int) -> int:
    """The seed of one request: 32 bits of a hash, so that problems do not share random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{doc_id}/{idx}".encode()).digest()[:4])
