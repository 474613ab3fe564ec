"""The settled prefix: masks are filled in any order, but clients read from left to right.

What is written without a gap will not change any more, so it can be sent. A `Prefix` follows the steps of one sequence
and gives the text that each of them settles; all of it together is what `codd.Model.text` gives of the whole sequence,
or less if a stop text comes first.
"""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from codd.decoding import Model
from codd.serving.answers import Reason
from codd.serving.prompts import Plan

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""


class Prefix:
    """The text of one sequence, as far as it is settled."""

    def __init__(self, plan: Plan, model: Model):
        """Nothing is sent yet, not even what the plan echoes."""
        self.text = ""
        """All that was sent."""
        self.tokens = 0
        """How many of the tokens before the first gap were written by the model."""
        self.finished = False
        """Whether nothing follows: cancel the rest of the run, if there is any."""
        self.reason: Reason = "length"
        """Why the text ends where it ends."""
        self._plan, self._model = plan, model
        self._echo = plan.echo
        self._sent = ""
        self._settled = -1
        first = next((p for p, token in enumerate(plan.ids) if p >= plan.begin and token == model.mask_id), plan.begin)
        self._given = len(self._decode(plan.ids[plan.begin : first]).rstrip(UNFINISHED))

    def feed(self, ids: Int[Tensor, " L"], finished: bool) -> str:
        """What a step adds to the text, given the sequence after it; an empty text if that is nothing."""
        if self.finished:
            return ""
        own = ids[: self._plan.end].tolist()
        end = len(own) if finished else self._first_gap(own)
        if end == self._settled and not finished:
            return ""
        self._settled = end
        self._count(own[:end])
        ready = self._ready(self._decode(own[self._plan.begin : end]), finished)
        if finished and not self.finished:
            self.finished, self.reason = True, self._end_reason(ids)
        return self._send(ready)

    def _first_gap(self, ids: Sequence[int]) -> int:
        begin = self._plan.begin
        return next((p for p in range(begin, len(ids)) if ids[p] == self._model.mask_id), len(ids))

    def _count(self, ids: Sequence[int]) -> None:
        given, mask = self._plan.ids, self._model.mask_id
        self.tokens = sum(p >= len(given) or given[p] == mask for p in range(self._plan.begin, len(ids)))

    def _decode(self, ids: Sequence[int]) -> str:
        """As `Model.text` does; of outputs of a network that are no tokens, nothing."""
        tokenizer = self._model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(list(ids), skip_unknown=True)

    def _ready(self, text: str, finished: bool) -> str:
        """The part of the text that nothing can change any more."""
        if not finished:
            text = text.rstrip(UNFINISHED)
        cut = first_stop(text, self._plan.stops, self._given)
        if cut is not None:
            self.finished, self.reason = True, "stop"
            return text[:cut]
        return text if finished else text[: len(text) - _held_back(text, self._plan.stops, self._given)]

    def _send(self, ready: str) -> str:
        """What of the text is new. A decoder that takes back what it said is waited for until the end."""
        if not (self.finished or ready.startswith(self._sent)):
            return ""
        new = ready[len(self._sent) :]
        self._sent += new
        if new or self.finished:
            new, self._echo = self._echo + new, ""
        self.text += new
        return new

    def _end_reason(self, ids: Int[Tensor, " L"]) -> Reason:
        """An end-of-text counts where the loop itself looks for one: behind the prompt."""
        options = self._plan.options
        looked_for = options.stop and not options.reference and len(ids) > len(self._plan.ids)
        return "stop" if looked_for and int(ids[-1]) in self._model.stop_ids else "length"


def first_stop(text: str, stops: Sequence[str], begin: int = 0) -> int | None:
    """Where the text ends because of the stop text that is complete first; None if there is none.

    The first to be complete, not the first to begin, so that it does not matter in which portions the text came.
    """
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop, begin)) >= 0]
    return min(found)[1] if found else None


def _held_back(text: str, stops: Sequence[str], begin: int) -> int:
    """How many characters at the end may be the beginning of a stop text."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text) - begin), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops if len(stop) > size):
            return size
    return 0
