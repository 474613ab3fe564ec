"""Compiled automata, kept by content: in this process, and in the user's cache folder."""

import contextlib
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from codd.constraints.automaton import Automaton
from codd.constraints.vocabulary import Vocabulary
from codd.errors import FormatError, InvalidConstraint
from codd.files import cache_folder, replacing, sha256_of, write_weights

_VERSION = 1  # of what compiling gives: another one finds nothing of this one
_IN_MEMORY = 64
_ON_DISK = 512

_memory: "OrderedDict[str, Automaton]" = OrderedDict()
_lock = threading.Lock()


def compiled(constraint: object, vocabulary: Vocabulary, build: Callable[[], Automaton]) -> Automaton:
    """What ``build`` gives for a constraint, which its ``repr`` describes in full, and a vocabulary; built once.

    A file that is damaged is built again; on a disk that takes no files, memory has to do.
    """
    content = json.dumps([_VERSION, repr(constraint), vocabulary.digest])
    key = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
    with _lock:
        if key in _memory:
            _memory.move_to_end(key)
            return _memory[key]
    try:
        automaton = _read(_folder() / f"{key}.safetensors")
    except (OSError, RuntimeError, SafetensorError, FormatError, InvalidConstraint):  # RuntimeError: no home folder
        automaton = build()
        with contextlib.suppress(OSError, RuntimeError):
            _write(_folder(), f"{key}.safetensors", automaton)
    with _lock:
        _memory[key] = automaton
        while len(_memory) > _IN_MEMORY:
            _memory.popitem(last=False)
    return automaton


def _write(folder: Path, name: str, automaton: Automaton) -> None:
    """A file; the oldest ones make room for it."""
    tensors = {
        "table": automaton.table.int(),
        "classes": automaton.classes.int(),
        "accepting": automaton.accepting,
        "start": torch.tensor([automaton.start]),
    }
    with replacing(folder, name) as (path,):
        write_weights(path, tensors, {"sha256": sha256_of("", tensors)})
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    for stale in files[:-_ON_DISK]:
        stale.unlink(missing_ok=True)


def forget() -> None:
    """Empty the memory of this process; files stay."""
    with _lock:
        _memory.clear()


def _folder() -> Path:
    return cache_folder() / "constraints"


def _read(path: Path) -> Automaton:
    with safe_open(os.fspath(path), framework="pt") as file:
        names = ("table", "classes", "accepting", "start")
        tensors = {name: file.get_tensor(name) for name in names}
        stated = (file.metadata() or {}).get("sha256")
    if sha256_of("", tensors) != stated:
        raise FormatError(f"{path}: is damaged.")
    accepting = torch.nonzero(tensors["accepting"]).flatten()
    return Automaton.from_classes(
        tensors["table"], tensors["classes"], start=int(tensors["start"]), accepting=accepting
    )
