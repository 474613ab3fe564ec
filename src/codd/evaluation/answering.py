"""Answering requests in batches: what an evaluation needs of a model, whoever asks the questions."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from codd.decoding import Model, Options
from codd.errors import InvalidInput
from codd.evaluation.continuations import ScoringRequest, score_continuations
from codd.validation import Section, Whole

Line = dict[str, Any]
"""The answer to one request, or its score."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class Request(Section):
    """A text to be continued, and the strings that end the answer."""

    key: str
    doc_id: Whole
    idx: Whole
    prompt: str
    stops: Sequence[str] = ()


class Answerer:
    """Answers requests in batches; an answer depends on the seed and on the problem's number, never on its batch."""

    def __init__(self, model: Model, options: Options, *, seed: int = 0, batch: int = 8):
        """InvalidInput if the model has no tokenizer."""
        if model.tokenizer is None:
            raise InvalidInput("this checkpoint has no tokenizer: tasks ask in text.")
        self.model, self.tokenizer, self.options = model, model.tokenizer, options
        self.seed, self.batch = seed, batch

    def answers(self, requests: Sequence[Request]) -> dict[str, Line]:
        """By key: text, tokens, calls (network evaluations), seconds, seed. The longest prompts are answered first."""
        ids = {request.key: self._encode(request.prompt) for request in requests}
        order = sorted(requests, key=lambda request: (-len(ids[request.key]), request.doc_id, request.idx))
        return self.in_batches({request.key: (ids[request.key], request) for request in order}, self._answer)

    def scores(self, requests: Mapping[str, ScoringRequest]) -> dict[str, Line]:
        """By key: log_prob (nats), greedy (whether every token is the most probable one)."""
        return self.in_batches(
            requests, lambda some: [score._asdict() for score in score_continuations(self.model, some, self.options)]
        )

    def in_batches(self, asked: Mapping[str, Item], work: Callable[[Sequence[Item]], list[Line]]) -> dict[str, Line]:
        """The line of each request by its key, made a batch at a time."""
        keys, lines = list(asked), {}
        for begin in range(0, len(keys), self.batch):
            some = keys[begin : begin + self.batch]
            made = work([asked[key] for key in some])
            fresh = {key: {"key": key, **line} for key, line in zip(some, made, strict=True)}
            self.answered(fresh)
            lines.update(fresh)
        return lines

    def answered(self, lines: Mapping[str, Line]) -> None:
        """Take notice of a batch that is done; nothing here."""

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


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings; an empty one stops nothing."""
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
