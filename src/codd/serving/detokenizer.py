"""Incremental detokenization: masks are filled in any order, but clients read from left to right.

What is written from the beginning without a gap, the settled prefix, does not change any more, so it can be sent (with
editing, that is what precedes the block in progress). A
`Detokenizer` follows the steps of one sequence and returns the text that each of them settles; all of it together is
what `codd.Model.text` gives of the whole sequence, or less if a stop string comes first.

`TokenLogprobs` follows them, too. It has of each token the probability under the distribution that it was taken from:
the joint of network and circuit, given the tokens before it in the order of commitment, which is not that of the text.
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from codd.decoding import Model, Step
from codd.decoding.sequence import first_stop
from codd.serving.encoding import Json
from codd.serving.prompts import GenerationRequest
from codd.serving.responses import FinishReason, TokenPieces

LEAST = -9999.0
"""What OpenAI's servers say for a probability of zero, which JSON cannot say."""
INCOMPLETE = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""


class Detokenizer:
    """The text of one sequence as far as it is settled."""

    def __init__(self, generation: GenerationRequest, model: Model):
        """Nothing is sent yet, not even the echo of the prompt."""
        self.text = ""
        """All text returned so far."""
        self.tokens = 0
        """How many of the settled tokens were written by the model."""
        self.finished = False
        """Whether no more text follows: the rest of the run, if there is any, can be cancelled."""
        self.reason: FinishReason = "length"
        """Why the text ends where it ends."""
        self._generation, self._model = generation, model
        self._echo = generation.echo
        self._sent = ""
        self.held = ""
        """Text that is settled and held back: it may be the beginning of a stop string."""
        self.settled = -1
        """One beyond the last position that does not change any more; of the text's own, if a suffix follows."""
        given = generation.ids[generation.begin_text : self._first_mask(generation.ids)]
        self._given = len(self._decode(given).rstrip(INCOMPLETE))
        """Characters at the beginning that the client gave: stop strings in them do not count."""

    def add(self, ids: Int[Tensor, " L"], finished: bool, settled: int | None = None) -> str:
        """The text that a step adds, which may be empty.

        ``ids``: the sequence after the step; ``finished``: whether this was its last; ``settled``: how many of the ids
        cannot change any more (None: those before the first mask).
        """
        if self.finished:
            return ""
        own = ids[: self._generation.end_text].tolist()
        end = len(own) if finished else self._first_mask(own[:settled])
        if end == self.settled and not finished:
            return ""
        self.settled = end
        self._count(own[:end])
        text = self._decode(own[self._generation.begin_text : end])
        ready = self._ready(text, finished)
        if finished and not self.finished:
            self.finished, self.reason = True, self._finish_reason(ids)
        new = self._send(ready)
        self.held = text[len(self._sent) :].rstrip(INCOMPLETE)
        return new

    def _first_mask(self, ids: Sequence[int]) -> int:
        begin = self._generation.begin_text
        return next((p for p in range(begin, len(ids)) if ids[p] == self._model.mask_id), len(ids))

    def _count(self, ids: Sequence[int]) -> None:
        prompt, mask = self._generation.ids, self._model.mask_id
        self.tokens = sum(p >= len(prompt) or prompt[p] == mask for p in range(self._generation.begin_text, len(ids)))

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode as `Model.text` does; ids that the tokenizer does not know give nothing."""
        tokenizer = self._model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(list(ids))

    def _ready(self, text: str, finished: bool) -> str:
        """The part of the text that nothing can change any more; ends the text at the first stop string."""
        if not finished:
            text = text.rstrip(INCOMPLETE)
        stops = self._generation.stops
        cut = first_stop(text, stops, self._given)
        if cut is not None:
            self.finished, self.reason = True, "stop"
            return text[:cut]
        return text if finished else text[: len(text) - _held_back(text, stops, self._given)]

    def _send(self, ready: str) -> str:
        """The part of the text that is new. If a decoder takes back what was sent, nothing is sent until the end."""
        if not (self.finished or ready.startswith(self._sent)):
            return ""
        new = ready[len(self._sent) :]
        self._sent += new
        if new or self.finished:
            new, self._echo = self._echo + new, ""
        self.text += new
        return new

    def _finish_reason(self, ids: Int[Tensor, " L"]) -> FinishReason:
        """Whether an end-of-text token ended the sequence; it counts where the loop looks for it: after the prompt.

        A text under a constraint is complete, whatever its length.
        """
        options = self._generation.options
        if options.constraint is not None:
            return "stop"
        looked_for = options.stops and len(ids) > len(self._generation.ids)
        return "stop" if looked_for and int(ids[-1]) in self._model.stop_ids else "length"


def _held_back(text: str, stops: Sequence[str], begin: int) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text) - begin), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops if len(stop) > size):
            return size
    return 0


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the response."""

    token: int
    logprob: float
    offset: int
    """Characters of the response before it."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens there, with their log-probabilities."""


class TokenLogprobs:
    """The log-probabilities of one sequence, as its text settles."""

    def __init__(self, generation: GenerationRequest, pieces: TokenPieces):
        """``pieces``: what tokens write."""
        self._generation, self._pieces = generation, pieces
        self._found: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = {}
        self._next = generation.begin_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = len(generation.echo)
        self._ready: list[TokenLogprob] = []
        """Settled, but their text is held back."""

    def add(self, step: Step) -> None:
        """Note what a step wrote."""
        top = step.alternatives
        for i, (position, score) in enumerate(zip(step.positions.tolist(), step.scores.tolist(), strict=True)):
            others = () if top is None else zip(top.tokens[i].tolist(), top.log_probabilities[i].tolist(), strict=True)
            self._found[position] = (_log(score), tuple((token, value) for token, value in others if value > -math.inf))
        for position, score in zip(step.edits.positions.tolist(), step.edits.scores.tolist(), strict=True):
            self._found[position] = (_log(score), ())

    def take(self, ids: Sequence[int], settled: int, length: int | None) -> list[TokenLogprob]:
        """The tokens before position ``settled`` that were not taken yet, and that begin within ``length`` characters.

        None: all of them. Tokens that write nothing are left out.
        """
        for position in range(self._next, min(settled, len(ids))):
            written = self._pieces.bytes_of(ids[position])
            if written and position in self._found:
                self._ready.append(
                    TokenLogprob(ids[position], self._found[position][0], self._offset, self._found[position][1])
                )
            self._offset += len(self._decoder.decode(written))
            self._next = position + 1
        taken = [each for each in self._ready if length is None or each.offset < length]
        self._ready = self._ready[len(taken) :]
        return taken


def _log(probability: float) -> float:
    return max(math.log(probability), LEAST) if probability > 0 else LEAST


def chat_logprobs(found: Sequence[TokenLogprob], pieces: TokenPieces) -> Json:
    """The object of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> Json:
        return {"token": pieces.of(token), "logprob": logprob, "bytes": list(pieces.bytes_of(token))}

    content = [{**entry(each.token, each.logprob), "top_logprobs": [entry(*one) for one in each.top]} for each in found]
    return {"content": content, "refusal": None}


def _by_text(top: Sequence[tuple[int, float]], pieces: TokenPieces) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, value in top:
        found.setdefault(pieces.of(token), value)
    return found


def completion_logprobs(found: Sequence[TokenLogprob], pieces: TokenPieces) -> Json:
    """The object of /v1/completions; of tokens that look the same, ``top_logprobs`` has the most probable one."""
    return {
        "tokens": [pieces.of(each.token) for each in found],
        "token_logprobs": [each.logprob for each in found],
        "top_logprobs": [_by_text(each.top, pieces) for each in found],
        "text_offset": [each.offset for each in found],
    }
