"""Answering requests: the part of an evaluation that needs the network, and nothing of the harness."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from codd.decoding import Model, Options
from codd.errors import InvalidInput
from codd.evaluation.runs import Log
from codd.evaluation.tasks.answers import cut
from codd.evaluation.tasks.joint import Stretch, score_stretches

Advance = Callable[[int], None]
"""Told how many more requests are done."""
Line = dict[str, Any]
"""What is kept of one request."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class Request:
    """A text to be continued, and the strings that end the answer."""

    key: str
    doc_id: int
    idx: int
    prompt: str
    stops: Sequence[str] = ()


class Answerer:
    """A model that answers a batch at a time, and remembers.

    The seed of an answer depends on the seed and on the problem's number only, never on batches or processes.
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
        closed: bool = False,
    ):
        """``log`` holds what was answered before, and gets what is answered now; ``closed``: nothing more is."""
        if model.tokenizer is None:
            raise InvalidInput("this checkpoint has no tokenizer: tasks ask in text.")
        self.model, self.tokenizer, self.options = model, model.tokenizer, options
        self.seed, self.batch, self.log, self.advance = seed, batch, log or Log(None), advance
        self.closed = closed

    def answers(self, requests: Sequence[Request]) -> dict[str, Line]:
        """By key: text, tokens, calls, seconds, seed. The longest prompts come first."""
        ids = {request.key: self._encode(request.prompt) for request in requests}
        order = sorted(requests, key=lambda request: (-len(ids[request.key]), request.doc_id, request.idx))
        return self._remembered({request.key: (ids[request.key], request) for request in order}, self._answer)

    def scores(self, stretches: Mapping[str, Stretch]) -> dict[str, Line]:
        """By key: log_prob, greedy."""
        return self._remembered(
            stretches, lambda some: [score._asdict() for score in score_stretches(self.model, some, self.options)]
        )

    def _remembered(self, asked: Mapping[str, Item], work: Callable[[Sequence[Item]], list[Line]]) -> dict[str, Line]:
        """What was found before, and for the rest what is found now, a batch at a time; each is kept at once."""
        known = {key: line for key in asked if (line := self.log.get(key))}
        self.advance(len(known))
        todo = [key for key in asked if key not in known]
        if todo and self.closed:
            raise InvalidInput(
                f"{len(todo)} of {len(asked)} answers are not there yet: this cell belongs to another device. Answer "
                "them there (codd eval --stage answer), or give this machine's device with --device."
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
        """The prompt's end, if all of it does not fit: the question stands there."""
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
    """Unlike that of every other problem."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{doc_id}/{idx}".encode()).digest()[:4])
