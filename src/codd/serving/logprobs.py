"""Log-probabilities of written tokens, in OpenAI's two forms.

Of each token the probability under the distribution that it was taken from: the joint of network and circuit, given
the tokens before it in the order of commitment, which is not that of the text.
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass

from codd.decoding import Step
from codd.serving.encoding import Json
from codd.serving.prompts import GenerationRequest
from codd.serving.responses import TokenPieces

LEAST = -9999.0
"""What OpenAI's servers say for a probability of zero, which JSON cannot say."""


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
