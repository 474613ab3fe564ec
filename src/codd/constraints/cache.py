"""Compiled automata, kept by content: in this process, and in the user's cache folder."""

import contextlib
import os
import threading
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from codd.constraints.automaton import Automaton
from codd.errors import FormatError, InvalidConstraint
from codd.files import cache_folder, replacing, sha256_of, write_weights

_IN_MEMORY = 64
_ON_DISK = 512

_memory: "OrderedDict[str, Automaton]" = OrderedDict()
_lock = threading.Lock()


def kept(key: str) -> Automaton | None:
    """The automaton that was stored under a digest; None if there is none, or its file is damaged."""
    with _lock:
        if key in _memory:
            _memory.move_to_end(key)
            return _memory[key]
    try:
        found = _read(_folder() / f"{key}.safetensors")
    except (OSError, RuntimeError, SafetensorError, FormatError, InvalidConstraint, KeyError):  # RuntimeError: no home
        return None
    _remember(key, found)
    return found


def keep(key: str, automaton: Automaton) -> None:
    """Store an automaton; on a disk that takes no files, in memory only. The oldest files make room."""
    _remember(key, automaton)
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder()
        with replacing(folder, f"{key}.safetensors") as (path,):
            tensors = {
                "table": automaton.table.int(),
                "classes": automaton.classes.int(),
                "accepting": automaton.accepting,
                "start": torch.tensor([automaton.start]),
            }
            write_weights(path, tensors, {"sha256": sha256_of("", tensors)})
        files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        for stale in files[:-_ON_DISK]:
            stale.unlink(missing_ok=True)


def forget() -> None:
    """Empty the memory of this process; files stay."""
    with _lock:
        _memory.clear()


def _remember(key: str, automaton: Automaton) -> None:
    with _lock:
        _memory[key] = automaton
        while len(_memory) > _IN_MEMORY:
            _memory.popitem(last=False)


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
