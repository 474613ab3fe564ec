"""Causal language models: ours, and those that the package transformers loads, with keys and values of what they read.

They check drafts (`codd.decoding.speculative`), and text is drawn from them, judged by them and scored beside DCD.
"""

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd import files
from codd.backbones import mini
from codd.backbones.backbone import Backbone
from codd.backbones.config import Config
from codd.backbones.kv_cache import CachedPass
from codd.backbones.loading import MODEL_FILES, load_checkpoint
from codd.backbones.tokenizer import Tokenizer
from codd.errors import FormatError, InvalidInput, MissingDependency


class CausalReader:
    """A causal model in the middle of some texts of equal length: what it has read it does not compute again."""

    def __init__(self, network: Any, rows: int, length: int):
        """Read ``rows`` texts of at most ``length`` tokens with a `Backbone`, or a model of transformers."""
        self.network, self.length = network, 0
        """``length``: how many tokens of each text it has read."""
        self._cache = network.network.kv_cache(rows, length) if isinstance(network, Backbone) else None
        self._past: Any = None

    @torch.no_grad()
    def read(self, ids: Int[Tensor, "B n"], count: int = 1) -> Float[Tensor, "B count V"]:
        """Read on; logits of the tokens that follow each of the last ``count``, in float32."""
        ids, begin = ids.to(self.network.device), self.length
        self.length += ids.shape[1]
        if self._cache is None:
            out = self.network(input_ids=ids, past_key_values=self._past, use_cache=True)
            self._past = out.past_key_values
            logits: Tensor = out.logits[:, -count:]
            return logits.float()
        places = torch.arange(begin, self.length, device=ids.device).expand(ids.shape)
        past = CachedPass(self._cache, torch.arange(len(ids), device=ids.device), places, self.length)
        states = self.network.cached_states(ids, past)[:, -count:]
        return self.network.logits(states, ids[:, -count:]).float()  # type: ignore[no-any-return]

    def rewind(self, length: int) -> None:
        """Forget what was read beyond the first ``length`` tokens; nothing if there is no more than that."""
        if length >= self.length:
            return
        if self._past is not None:
            self._past.crop(length - self.length)
        self.length = length


@dataclass(frozen=True)
class CausalModel:
    """A causal language model and what its tokens are."""

    network: Any
    """A `Backbone`, or a model of the package transformers."""
    tokenizer: Tokenizer | None = None
    """None: not known."""
    max_length: int | None = None

    @property
    def vocab_size(self) -> int:
        """How many tokens its logits are of."""
        own = isinstance(self.network, Backbone)
        return int(self.network.vocab_size if own else self.network.config.vocab_size)


def load_causal(
    source: str | os.PathLike[str], device: torch.device, dtype: torch.dtype | str | None = None
) -> CausalModel:
    """A causal model from a folder or hub id: one of ours with ``causal: true``, or one that transformers can load.

    Args:
        source: A folder or a hub id; no code of it runs.
        device: Where the weights are to be.
        dtype: Their type; "auto": that of the files. None: float32 on a CPU, elsewhere that of the files.

    Raises:
        FormatError: The files cannot be read.
        InvalidInput: The model is a denoiser.
        MissingDependency: It needs transformers, which is not installed.
    """
    folder = files.local_folder(source, MODEL_FILES)
    if Config.read(folder).kind(mini.KINDS):
        ours = load_checkpoint(folder, device=device, dtype=None if dtype == "auto" else dtype)
        return CausalModel(check_causal(ours.backbone, folder), ours.tokenizer, ours.backbone.max_length)
    kind = dtype or (torch.float32 if device.type == "cpu" else "auto")
    network = load_causal_lm(folder, dtype=kind).to(device)
    tokenizer = Tokenizer.from_folder(folder, vocab_size=int(network.config.vocab_size))
    return CausalModel(network, tokenizer, getattr(network.config, "max_position_embeddings", None))


def check_causal(backbone: Backbone, name: object) -> Backbone:
    """The same network; InvalidInput for one that is not causal."""
    if not backbone.config.causal:
        raise InvalidInput(f"{name}: is a denoiser ({backbone.family}), expected a causal model (causal: true).")
    return backbone


@lru_cache(maxsize=4)  # for every request to a server, and vocabularies are long
def check_same_tokens(
    size: int, theirs: Tokenizer | None, vocab_size: int, mask_id: int, tokenizer: Tokenizer | None
) -> None:
    """Raise InvalidInput unless every token of a network but its mask is a causal model's, by the same id.

    Tables need not have one size: some are padded, and denoisers of GPT-2's tokens have the mask behind them. Where a
    tokenizer is not known, ids are taken to mean the same.

    Args:
        size: How many tokens the causal model has.
        theirs: Its tokenizer.
        vocab_size: How many tokens the network has.
        mask_id: The network's mask.
        tokenizer: The network's tokenizer.
    """
    missing = set(range(size, vocab_size)) - {mask_id}
    if missing:
        raise InvalidInput(
            f"the causal model has {size} tokens, the network {vocab_size}, {min(missing)} for one beyond them that is "
            "not the mask: both must have the same tokens."
        )
    if tokenizer is None or theirs is None or theirs is tokenizer:
        return
    known = theirs.backend.get_vocab(with_added_tokens=True)
    for token, id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if id < size and id != mask_id and known.get(token) != id:
            raise InvalidInput(
                f"the causal model reads other tokens: {token!r} is {id} for the network and "
                f"{known.get(token, 'nothing')} for it. Both must have the same tokens."
            )


def on_shared_tokens(logits: Float[Tensor, "*b C"], vocab_size: int) -> Float[Tensor, "*b V"]:
    """Logits over a network's tokens: those that it lacks are cut off, those that only it has are impossible."""
    missing = max(0, vocab_size - logits.shape[-1])
    return torch.nn.functional.pad(logits[..., :vocab_size], (0, missing), value=-torch.inf)


@contextmanager
def transformers_for(folder: Path) -> Iterator[Any]:
    """The package transformers, to load files of a folder with; what it raises becomes an error of ours."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependency(
            f"{folder}: is no model of ours; any other needs the package transformers: pip install transformers"
        ) from error
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars know no other switch
            yield library
    except ImportError as error:
        raise MissingDependency(f"{folder}: {files.brief(error)} pip install transformers") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise FormatError(f"{folder}: transformers cannot load it ({files.brief(error)}).") from error


def load_causal_lm(folder: Path, *, dtype: torch.dtype | str = torch.float32, gguf_file: str | None = None) -> Any:
    """A causal language model with its head, for inference, on the CPU; no code of the folder runs.

    ``dtype`` "auto" is that of the files, which are safetensors unless a ``gguf_file`` of the folder is named. Weights
    that the files lack are a FormatError, not noise.
    """
    kind = {"use_safetensors": True} if gguf_file is None else {"gguf_file": gguf_file}
    with transformers_for(folder) as library:
        model, report = library.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, local_files_only=True, trust_remote_code=False, **kind
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise FormatError(f"{folder}: {len(missing)} weights are missing, {missing[0]} for one. Download it again.")
    return model.eval().requires_grad_(False)
