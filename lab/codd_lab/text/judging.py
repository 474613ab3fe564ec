"""Outside reference models: how probable a text is to a model that did not write it, and where it puts the text.

A judge reads text, not ids: prompt and continuation are joined and split anew by its own tokenizer. What it says
depends on which judge it is, so that its description belongs beside every figure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tokenizers
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones import Backbone
from codd.coupling.gap import Progress
from codd.errors import InvalidInput

NUMBERS = 2**27
"""The most logits that are held at a time: half a gigabyte in float32."""


class Score(NamedTuple):
    """How probable a continuation is to a judge, given its prompt."""

    nats: float
    """Negative log-likelihood of the tokens that were scored, in all."""
    tokens: int
    """How many were scored: the judge's own tokens."""
    bytes: int
    """How much text they are, in UTF-8: figures per byte can be compared between judges."""


class Read(NamedTuple):
    """The outputs of a network for a batch of texts."""

    logits: Float[Tensor, "B L V"]
    """Logits of the token that follows each position."""
    states: Float[Tensor, "B L d"]
    """The last hidden states."""


class Assessed(NamedTuple):
    """A text's score and its feature."""

    score: Score
    feature: Float[Tensor, " d"]
    """The last hidden state at the last token of prompt and continuation, as MAUVE takes it; on the host."""


@runtime_checkable
class Network(Protocol):
    """A causal language model: position i sees positions 0 to i. Batches are padded on the right."""

    vocab_size: int

    def read(self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"]) -> Read:
        """The outputs for a batch of texts, in one forward pass."""


class TransformersNetwork:
    """A model of the package transformers."""

    def __init__(self, model: Any):
        """A causal language model with a head."""
        self.model = model
        self.vocab_size = int(model.config.vocab_size)

    def read(self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"]) -> Read:
        """The outputs for a batch of texts; no KV cache is kept."""
        output = self.model(
            input_ids=ids, attention_mask=valid.long(), use_cache=False, output_hidden_states=True, return_dict=True
        )
        return Read(output.logits, output.hidden_states[-1])


class OwnNetwork:
    """A causal checkpoint of codd as a judge's network."""

    def __init__(self, backbone: Backbone):
        """``backbone`` is one with ``causal: true`` in its configuration."""
        self.backbone = backbone
        self.vocab_size = backbone.vocab_size

    def read(self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"]) -> Read:
        """The outputs for a batch of texts; states are zero at padding."""
        states = self.backbone.states(ids, valid)
        return Read(self.backbone.logits(states, ids), states)


class _Reading(NamedTuple):
    """A prompt with its continuation in the judge's tokens."""

    ids: list[int]
    first: int
    """The first token that is scored; all after it are, too."""
    size: int
    """Bytes of the text that is scored."""

    @property
    def scored(self) -> int:
        return len(self.ids) - self.first


@dataclass(frozen=True)
class Judge:
    """A causal language model with its tokenizer; `load_judge` makes one."""

    name: str
    description: str
    """Which model, its size, how it is stored, whether it is instruction-tuned: belongs beside its figures."""
    tokenizer: tokenizers.Tokenizer
    """Blind to special tokens that are spelt out in a text."""
    network: Network
    max_length: int | None
    """The most tokens that it reads; a longer text is refused, never cut."""
    device: torch.device

    def assess(
        self,
        prompts: Sequence[str],
        continuations: Sequence[str],
        progress: Progress | None = None,
        *,
        most: int | None = None,
    ) -> list[Assessed]:
        """Of each continuation given its prompt what it costs, and where the whole text is; others do not matter.

        Scored are the tokens that begin at or after the end of the prompt. A token that spans the boundary belongs to
        the prompt: its bytes are not counted either. An empty continuation has no tokens and no nats. What the
        tokenizer itself puts before a text (a beginning mark) is given, what it puts behind one is left out. Of each
        continuation at most the first ``most`` tokens are read.
        """
        if len(prompts) != len(continuations):
            raise InvalidInput(f"{len(prompts)} prompts do not go with {len(continuations)} continuations.")
        pairs = zip(prompts, continuations, strict=True)
        readings = [self._read(prompt, text, f"text {number}", most) for number, (prompt, text) in enumerate(pairs)]
        for number, reading in enumerate(readings):
            if not reading.ids:
                raise InvalidInput(f"text {number} is empty, and so is its prompt: leave it out.")
            if reading.scored and not reading.first:
                raise InvalidInput(
                    f"text {number} has no prompt, and {self.name} puts no token before a text, so that nothing "
                    "predicts its first token: give a prompt."
                )
        return self._each(readings, progress)

    def score(
        self, prompts: Sequence[str], continuations: Sequence[str], progress: Progress | None = None
    ) -> list[Score]:
        """Negative log-likelihood of each continuation given its prompt, as `assess` finds it."""
        return [assessed.score for assessed in self.assess(prompts, continuations, progress)]

    def _read(self, prompt: str, text: str, where: str, most: int | None) -> _Reading:
        encoding = self.tokenizer.encode(prompt + text, add_special_tokens=True)
        tokens = list(zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True))
        begin = next((i for i, (_, _, special) in enumerate(tokens) if not special), len(tokens))
        end = next((i for i in range(len(tokens), begin, -1) if not tokens[i - 1][2]), begin)
        starts = [start for _, (start, _), _ in tokens[:end]] + [len(prompt + text)]
        first = next((i for i in range(begin, end) if starts[i] >= len(prompt)), end)
        end = end if most is None else min(end, first + most)
        if self.max_length is not None and end > self.max_length:
            raise InvalidInput(f"{where} has {end} tokens, but {self.name} reads at most {self.max_length}: cut it.")
        size = len((prompt + text)[starts[first] : starts[end]].encode())
        return _Reading(encoding.ids[:end], first, size)

    @torch.no_grad()
    def _each(self, readings: Sequence[_Reading], progress: Progress | None) -> list[Assessed]:
        """Score texts in batches of similar length."""
        assessed: dict[int, Assessed] = {}
        for batch in self._batches([len(reading.ids) for reading in readings]):
            ids, valid = _padded([readings[i].ids for i in batch], self.device)
            read = self.network.read(ids, valid)
            for i, logits, states, given in zip(batch, read.logits, read.states, ids, strict=True):
                assessed[i] = _assessed(readings[i], logits, states, given)
            if progress is not None:
                progress(len(assessed), len(readings))
        return [assessed[i] for i in range(len(readings))]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Longest first, so that what does not fit into memory fails at once."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while order:
            size = max(1, NUMBERS // (lengths[order[0]] * self.network.vocab_size))
            yield order[:size]
            order = order[size:]


def _assessed(
    reading: _Reading, logits: Float[Tensor, "L V"], states: Float[Tensor, "L d"], ids: Int[Tensor, " L"]
) -> Assessed:
    end = len(reading.ids)
    nats = 0.0
    if reading.scored:
        rows = logits[reading.first - 1 : end - 1].float()
        nats = float(F.cross_entropy(rows, ids[reading.first : end], reduction="none").double().sum())
    return Assessed(Score(nats, reading.scored, reading.size), states[end - 1].float().cpu())


def _padded(rows: Sequence[list[int]], device: torch.device) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Ids padded on the right, which a causal model does not see, and which of them are valid."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
    valid = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows], device=device)
    return ids, valid
