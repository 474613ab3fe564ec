"""Compiled automata, kept by content: in this process, and in the user's cache folder."""

import contextlib
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from codd.constraints.automaton import Automaton
from codd.constraints.vocabulary import Vocabulary
from codd.errors import FormatError, InvalidConstraint
from codd.files import cache_folder, read_bytes, replacing, sha256_of, write_weights

_VERSION = 3  # of what compiling gives: another one finds nothing of this one
_IN_MEMORY = 64
_ON_DISK = 512
_MOST_BYTES = 1 << 28  # of a file: more than any automaton within the limits takes

_memory: "OrderedDict[str, Automaton]" = OrderedDict()
_lock = threading.Lock()


def compiled(constraint: object, vocabulary: Vocabulary, build: Callable[[], Automaton]) -> Automaton:
    """What ``build`` gives for a constraint, which its ``repr`` describes in full, and a vocabulary; built once.

    A file that is damaged, belongs to another constraint or is not a regular file is built again; on a disk that takes
    no files, memory has to do.
    """
    content = json.dumps([_VERSION, repr(constraint), vocabulary.digest])
    key = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
    with _lock:
        if key in _memory:
            _memory.move_to_end(key)
            return _memory[key]
    try:
        automaton = _read(_folder(), key, len(vocabulary))
    except (OSError, RuntimeError, SafetensorError, FormatError, InvalidConstraint):  # RuntimeError: no home folder
        automaton = build()
        with contextlib.suppress(OSError, RuntimeError):
            _write(_folder(), key, automaton)
    with _lock:
        _memory[key] = automaton
        while len(_memory) > _IN_MEMORY:
            _memory.popitem(last=False)
    return automaton


def _write(folder: Path, key: str, automaton: Automaton) -> None:
    """A file; the oldest ones make room for it."""
    tensors = {
        "table": automaton.table.int(),
        "classes": automaton.classes.int(),
        "accepting": automaton.accepting,
        "start": torch.tensor([automaton.start]),
    }
    digest = torch.frombuffer(bytearray.fromhex(_digest(key, tensors)), dtype=torch.uint8)
    with replacing(folder, f"{key}.safetensors") as (path,):
        write_weights(path, {**tensors, "sha256": digest})
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    for stale in files[:-_ON_DISK]:
        stale.unlink(missing_ok=True)


def forget() -> None:
    """Empty the memory of this process; files stay."""
    with _lock:
        _memory.clear()


def _folder() -> Path:
    return cache_folder() / "constraints"


def _digest(key: str, tensors: dict[str, torch.Tensor]) -> str:
    """That of a key, and of the names, types, shapes and bytes of tensors."""
    layout = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(tensors.items())]
    return sha256_of(f"{key} {layout}", tensors)


def _read(folder: Path, key: str, vocab_size: int) -> Automaton:
    """The automaton of a key; FormatError unless the file was written for this key and number of tokens."""
    path = folder / f"{key}.safetensors"
    tensors = load(read_bytes(path, _MOST_BYTES))
    digest = tensors.pop("sha256", torch.zeros(0, dtype=torch.uint8))
    stated = bytes(digest.flatten().view(torch.uint8).numpy()).hex()
    if _digest(key, tensors) != stated or len(tensors["classes"]) != vocab_size:
        raise FormatError(f"{path}: is damaged, or was written for another constraint.")
    accepting = torch.nonzero(tensors["accepting"]).flatten()
    return Automaton.from_classes(
        tensors["table"], tensors["classes"], start=int(tensors["start"]), accepting=accepting
    )
