"""What is sent back: OpenAI's response objects, the events of /v1/denoise, and how both are written."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from codd.backbones import Tokenizer
from codd.decoding import Model, Step

Json = dict[str, Any]
Reason = Literal["stop", "length"]

SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
"""Of an answer that is a stream of events: proxies must not collect it."""
DONE = b"data: [DONE]\n\n"
"""How OpenAI's streams end."""


def dump(value: Any) -> bytes:
    """JSON that every reader takes: what is not finite is null, and all of it is ASCII.

    Escapes can also say what UTF-8 cannot (half of a surrogate pair), and no separator of lines that a client may
    stumble over (U+2028) stands in an event as it is.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event; OpenAI's have no name."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dump(value) + b"\n\n"


@dataclass(frozen=True)
class Cost:
    """What an answer took; of several sequences, all together."""

    prompt_tokens: int
    completion_tokens: int
    steps: int
    """Evaluations of the network."""
    circuit_steps: int
    """In how many of them the circuit acted."""
    seconds: float
    """From the first step on."""
    queued_seconds: float

    def usage(self) -> Json:
        """As OpenAI has it, and what it does not know of."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "codd": {
                "steps": self.steps,
                "circuit_steps": self.circuit_steps,
                "seconds": self.seconds,
                "queued_seconds": self.queued_seconds,
            },
        }


@dataclass(frozen=True)
class Envelope:
    """What all objects of one answer have in common, and the objects themselves."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    chat: bool
    """Whether this is chat.completions or completions."""
    include_usage: bool = False
    """Whether a stream ends with what it cost."""

    def whole(self, texts: Sequence[tuple[str, Reason]], cost: Cost) -> Json:
        """The answer in one piece: a choice for each text."""
        choices = [
            {"index": index, **self._said(text), "logprobs": None, "finish_reason": reason}
            for index, (text, reason) in enumerate(texts)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": cost.usage()}

    def first(self, index: int) -> Json | None:
        """What a choice begins with: in a chat, who speaks."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) if self.chat else None

    def delta(self, index: int, text: str) -> Json:
        """More of a choice."""
        return self._chunk(index, {"delta": {"content": text}} if self.chat else {"text": text})

    def last(self, index: int, reason: Reason) -> Json:
        """A choice is complete."""
        return self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, reason)

    def usage(self, cost: Cost) -> Json | None:
        """What it cost, after all choices, if the client asked for it."""
        if not self.include_usage:
            return None
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": cost.usage()}

    def _head(self, kind: str) -> Json:
        kind = kind if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _said(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}

    def _chunk(self, index: int, said: Json, reason: Reason | None = None) -> Json:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        expected = {"usage": None} if self.include_usage else {}  # a null in every chunk but the last, as OpenAI does
        return {**self._head("chat.completion.chunk"), "choices": [choice], **expected}


class Pieces:
    """The text of single tokens, as they look in the middle of a text; each is worked out once."""

    def __init__(self, model: Model):
        """Without a tokenizer, tokens are shown as their numbers."""
        self._mask_id, self._tokenizer = model.mask_id, model.tokenizer
        self._known: dict[int, str] = {}
        self._before = None if self._tokenizer is None else _plain_token(self._tokenizer)

    def __call__(self, ids: Sequence[int]) -> list[str | None]:
        """Of each id its text, special tokens by their names, half a character as U+FFFD; None for the mask."""
        return [None if token == self._mask_id else self.of(token) for token in ids]

    def of(self, token: int) -> str:
        """Of one id."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token) if self._tokenizer is not None else None
        if self._tokenizer is None or name is None:
            return f"<{token}>"
        if token in self._tokenizer.special_ids:
            return name
        if self._before is not None:  # at the beginning of a text, decoders drop spaces, or show marks of their own
            first = self._tokenizer.decode([self._before])
            both = self._tokenizer.decode([self._before, token])
            if both.startswith(first):
                return both[len(first) :]
        return self._tokenizer.decode([token])


def _plain_token(tokenizer: Tokenizer) -> int | None:
    """A token that is letters and nothing else."""
    return next((id for id in range(tokenizer.vocab_size) if (tokenizer.id_to_token(id) or "-").isalpha()), None)


def start_event(
    *, id: str, model: str, ids: Sequence[int], prompt_length: int, options: Json, ahead: int, pieces: Pieces
) -> Json:
    """The first event of /v1/denoise; ``ids`` are those of the prompt and the masks after it."""
    return {
        "id": id,
        "model": model,
        "prompt_length": prompt_length,
        "ids": list(ids),
        "pieces": pieces(ids),
        "options": options,
        "ahead": ahead,
    }


def step_event(step: Step, pieces: Callable[[Sequence[int]], list[str | None]]) -> Json:
    """One evaluation of the network."""
    tokens = step.tokens.tolist()
    return {
        "number": step.number,
        "positions": step.positions.tolist(),
        "tokens": tokens,
        "pieces": pieces(tokens),
        "scores": step.scores.tolist(),
        "circuit": step.circuit,
        "window": list(step.window),
        "mask_ratio": step.mask_ratio,
        "length": len(step.ids),
        "finished": step.finished,
    }


def done_event(text: str | None, reason: Reason, cost: Cost) -> Json:
    """The last event; ``text`` is None if the model has no tokenizer."""
    return {
        "text": text,
        "finish_reason": reason,
        "steps": cost.steps,
        "circuit_steps": cost.circuit_steps,
        "tokens": cost.completion_tokens,
        "seconds": cost.seconds,
        "queued_seconds": cost.queued_seconds,
    }
