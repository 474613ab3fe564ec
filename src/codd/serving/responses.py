"""Response bodies: OpenAI's objects and chunks, and the events of /v1/denoise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np

from codd.backbones import Tokenizer
from codd.constraints import Automaton
from codd.constraints.tables import distances, edges
from codd.decoding import Model, Step
from codd.decoding.decisions import Decision
from codd.decoding.inspect import Beliefs, Inspection
from codd.errors import CoddError
from codd.serving.encoding import Json
from codd.serving.tools import Calls

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class OpenAIFormat:
    """Builds the objects of one response in OpenAI's format; the fields are what they have in common."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    chat: bool
    """Whether this is /v1/chat/completions or /v1/completions."""
    include_usage: bool = False
    """Whether a stream ends with a usage chunk."""
    calls: Calls | None = None
    """How answers call functions."""
    provisional: bool = False
    """Whether a stream also says the provisional text behind the settled prefix."""

    def full(self, texts: Sequence[tuple[str, FinishReason, Json | None]], usage: Json) -> Json:
        """A response that is not streamed: one choice for each text, with its log-probabilities if they are wanted."""
        choices = []
        for index, (text, reason, logprobs) in enumerate(texts):
            calls = self.calls_in(index, text)
            said = {"content": None, "tool_calls": calls} if calls else {"content": text}
            content = {"message": {"role": "assistant", "refusal": None, **said}} if self.chat else {"text": text}
            finish = "tool_calls" if calls else reason
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": finish})
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def chunk(
        self, index: int, content: Json, reason: FinishReason | None = None, logprobs: Json | None = None
    ) -> Json:
        """A chunk of a choice; the last one says why it ends."""
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.include_usage else {}  # a null in every chunk but the last, as OpenAI does
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk after all choices."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def text(self, text: str | None = None) -> Json:
        """What a chunk with more text holds, or one without."""
        if self.chat:
            return {"delta": {} if text is None else {"content": text}}
        return {"text": text or ""}

    def calls_in(self, index: int, text: str) -> list[Json]:
        """The calls of functions that a whole text of a choice is; none if it is a text."""
        found = [] if self.calls is None else self.calls.found_in(text)
        return [
            {"id": f"call_{self.id}_{index}_{number}", "type": "function", "function": call}
            for number, call in enumerate(found)
        ]

    def _head(self, kind: str) -> Json:
        kind = kind if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class TokenPieces:
    """The text of single tokens as they look in the middle of a text; each is computed once."""

    def __init__(self, model: Model):
        """Without a tokenizer, tokens are shown as their ids."""
        self._mask_id, self._tokenizer, self._model = model.mask_id, model.tokenizer, model
        self._context = None if self._tokenizer is None else _plain_token(self._tokenizer)
        self.of = cache(self._decode)
        """The text of one id."""

    def __call__(self, ids: Sequence[int]) -> list[str | None]:
        """The text of each id: special tokens by their names, incomplete characters as U+FFFD, None for the mask."""
        return [None if token == self._mask_id else self.of(token) for token in ids]

    def provisional(self, ids: Sequence[int]) -> list[str | None]:
        """The same for readers of a text: special tokens write nothing."""
        special = set() if self._tokenizer is None else self._tokenizer.special_ids
        return [
            "" if token in special and token != self._mask_id else piece
            for token, piece in zip(ids, self(ids), strict=True)
        ]

    def bytes_of(self, token: int) -> bytes:
        """What one id writes, in bytes: nothing if it is special, all of them where a character takes several ids."""
        return self._vocabulary[token]

    @cached_property
    def _vocabulary(self) -> Sequence[bytes]:
        try:
            return self._model.vocabulary.tokens
        except CoddError:  # the text of a token depends on its neighbours: as it looks in the middle of a text
            special = set() if self._tokenizer is None else set(self._tokenizer.special_ids)
            ids = range(self._model.backbone.vocab_size)
            return [b"" if id in special else self.of(id).encode(errors="replace") for id in ids]

    def _decode(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token) if self._tokenizer is not None else None
        if self._tokenizer is None or name is None:
            return f"<{token}>"
        if token in self._tokenizer.special_ids:
            return name
        if self._context is not None:  # at the beginning of a text, decoders drop spaces, or show marks of their own
            before = self._tokenizer.decode([self._context])
            both = self._tokenizer.decode([self._context, token])
            if both.startswith(before):
                return both[len(before) :]
        return self._tokenizer.decode([token])


def _plain_token(tokenizer: Tokenizer) -> int | None:
    """A token that is letters and nothing else; None if there is none."""
    return next((id for id in range(tokenizer.vocab_size) if (tokenizer.id_to_token(id) or "-").isalpha()), None)


def step_event(step: Step, pieces: Callable[[Sequence[int]], list[str | None]]) -> Json:
    """The event of one denoising step; the last ``edited`` of its tokens replace others."""
    tokens = [*step.tokens.tolist(), *step.edits.tokens.tolist()]
    return {
        "number": step.number,
        "positions": [*step.positions.tolist(), *step.edits.positions.tolist()],
        "tokens": tokens,
        "pieces": pieces(tokens),
        "scores": [*step.scores.tolist(), *step.edits.scores.tolist()],
        "edited": len(step.edits.tokens),
        "circuit": step.circuit,
        "window": list(step.window),
        "mask_ratio": step.mask_ratio,
        "length": len(step.ids),
        "drafted": step.drafted,
        "accepted": step.accepted,
        "computed": step.computed,
        "cached": step.cached,
        "finished": step.finished,
    }


def constraint_body(automaton: Automaton) -> Json:
    """The response of /v1/constraint: its size, and the fewest tokens that a text of it has."""
    source, target = edges(automaton.table.numpy())
    found = distances(source, target, np.arange(automaton.num_states) == automaton.start)
    shortest = int(found[automaton.accepting.numpy()].min())
    return {"states": automaton.num_states, "classes": automaton.num_classes, "shortest": shortest}


def decision_body(found: Decision) -> Json:
    """The response of /v1/decisions."""
    joint = [
        {"values": dict(zip(found.marginals, values, strict=True)), "probability": probability}
        for values, probability in found.joint.items()
    ]
    whole = {"best": found.best, "probability": found.probability, "mass": found.mass}
    return {"object": "decision", **whole, "joint": joint, "marginals": found.marginals}


def inspect_body(inspection: Inspection, pieces: TokenPieces) -> Json:
    """The response of /v1/inspect."""
    information = inspection.mutual_information
    return {
        "window": list(inspection.window),
        "positions": inspection.positions.tolist(),
        "network": _candidates(inspection.network, pieces),
        "joint": _candidates(inspection.joint, pieces),
        "network_entropy": inspection.network.entropies.tolist(),
        "joint_entropy": inspection.joint.entropies.tolist(),
        "mutual_information": None if information is None else information.tolist(),
        "circuit": inspection.circuit,
        "aside": inspection.aside,
    }


def _candidates(beliefs: Beliefs, pieces: TokenPieces) -> list[list[Json]]:
    """For each position its most probable tokens."""
    return [
        [
            {"token": token, "piece": pieces.of(token), "probability": probability, "allowed": fine}
            for token, probability, fine in zip(*row, strict=True)
        ]
        for row in zip(beliefs.tokens.tolist(), beliefs.probabilities.tolist(), beliefs.allowed.tolist(), strict=True)
    ]
