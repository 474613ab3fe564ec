"""Checkpoints of a run: written beside the others and renamed when whole, so that a kill leaves only whole ones."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
        files.write_sealed(partial / NOTES, {"step": step, **notes, "state_sha256": files.sha256(partial / STATE)})
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
    whole = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(whole, key=lambda path: int(path.name.removeprefix("step-")))


def read_checkpoint(folder: Path, device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the notes, checked against their checksums."""
    with _readable(folder):
        notes = files.read_sealed(folder / NOTES)
        if files.sha256(folder / STATE) != notes.pop("state_sha256", None):
            raise FormatError(f"{STATE} does not have its checksum")
        with files.open_safetensors(folder / STATE, device) as file:
            return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118 - the handle is no mapping


def read_notes(folder: Path) -> dict[str, Any]:
    """The JSON of a checkpoint, checked against its checksum; FormatError if it cannot be read."""
    with _readable(folder):
        return files.read_sealed(folder / NOTES)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """A FormatError inside says what to do with the checkpoint."""
    try:
        yield
    except FormatError as error:
        raise FormatError(
            f"{folder}: cannot be read ({str(error).removesuffix('.')}). Remove it to go on from the checkpoint before."
        ) from error


def adam_tensors(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Adam's moments under the names of their parameters."""
    return {
        f"optimizer.{name}.{key}": torch.as_tensor(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_adam(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], kept: Mapping[str, Tensor]
) -> None:
    """Give an optimizer the moments that `adam_tensors` named. Adam keeps its step on the CPU unless it is fused."""
    fused = optimizer.defaults.get("fused")
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            key: value.to("cpu" if key == "step" and not fused else parameter.device, copy=True)
            for key, value in below(f"optimizer.{name}.", kept).items()
        }


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, under the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
