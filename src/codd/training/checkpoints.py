"""Checkpoints of a run: written beside the others and renamed when whole, so that a kill leaves only whole ones."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from codd import files
from codd.errors import FormatError

STATE, NOTES = "state.safetensors", "state.json"
_NAME = re.compile(r"step-(\d+)")


def write_checkpoint(
    root: Path, step: int, tensors: Mapping[str, Tensor], notes: Mapping[str, Any], *, keep: int
) -> Path:
    """Keep the state after ``step`` steps, and of older ones the last few."""
    root.mkdir(parents=True, exist_ok=True)
    folder, partial = root / f"step-{step:07d}", root / f".step-{step:07d}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        files.write_weights(partial / STATE, files.standalone(tensors))
        files.write_text(partial / NOTES, json.dumps({"step": step, **notes}, indent=2) + "\n")
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk has no room for half a checkpoint
        raise
    files.sync_folder(partial)
    if folder.exists():  # the run was started again from an older checkpoint; this one is the same to the bit
        shutil.rmtree(folder)
    os.replace(partial, folder)
    files.sync_folder(root)
    for old in checkpoints(root)[: -max(1, keep)]:
        shutil.rmtree(old)
    for remains in root.glob(".step-*"):  # of processes that were killed while writing
        shutil.rmtree(remains, ignore_errors=True)
    return folder


def checkpoints(root: Path) -> list[Path]:
    """All whole checkpoints of a run, oldest first."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_checkpoint(folder: Path, device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the notes."""
    try:
        return load_file(folder / STATE, device=device), json.loads((folder / NOTES).read_bytes())
    except (OSError, ValueError, SafetensorError) as error:
        raise FormatError(
            f"{folder}: cannot be read ({files.brief(error)}). Remove it to go on from the checkpoint before."
        ) from error
