"""Reading safetensors checkpoints: the key table of a family says which tensor goes where."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from codd.errors import FormatError
from codd.files import brief

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SCALE = "_scale"
"""What the name of a tensor's row scales adds to the tensor's, where a checkpoint keeps 8-bit integers."""


@dataclass(frozen=True)
class Key:
    """One line of a key table. ``{i}`` stands for the number of a layer, on both sides."""

    source: str
    """The name in the file."""
    target: str
    """The parameter of `codd.backbones.transformer.Transformer`."""
    rows: str | None = None
    """Which of the joined projections' rows (`TransformerConfig.row_ranges`); None: all."""


@dataclass(frozen=True)
class Slot:
    """Where one tensor of a file goes."""

    target: str
    rows: tuple[int, int] | None


def expand(keys: Sequence[Key], layers: int, ranges: Mapping[str, tuple[int, int]]) -> dict[str, Slot]:
    """The table with its layers written out: name in the file -> slot."""
    table = {}
    for key in keys:
        for i in range(layers) if "{i}" in key.source else (0,):
            rows = None if key.rows is None else ranges[key.rows]
            table[key.source.replace("{i}", str(i))] = Slot(key.target.replace("{i}", str(i)), rows)
    return table


def files_of(folder: Path) -> dict[str, Path]:
    """Name of every tensor in the folder's checkpoint -> the file it is in."""
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    single = folder / SINGLE
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    fix = "Download the checkpoint again, or give the folder that holds them."
    if pickled := sorted(path.name for ending in ("bin", "pt", "pth") for path in folder.glob(f"*.{ending}")):
        fix = f"{pickled[0]} is a pickle, which codd does not load because it may run code: convert it to safetensors."
    raise FormatError(f"{folder}: has neither {SINGLE} nor {INDEX}. {fix}")


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    try:
        where = json.loads(index.read_bytes())["weight_map"]
        files = {str(name): folder / str(shard) for name, shard in where.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{index}: is not an index of shards ({brief(error)}). Download it again.") from error
    for shard in sorted(set(files.values())):
        if shard.parent != folder:
            found = str(shard)
            raise FormatError(f"{index}: names a shard outside its folder, {found!r}. Use no checkpoint that does so.")
        if not shard.is_file():
            raise FormatError(f"{index}: lists {shard.name!r}, which is missing. Download the checkpoint again.")
    for shard in sorted(set(files.values())):
        listed = {name for name, path in files.items() if path == shard}
        with _open(shard) as file:
            if absent := sorted(listed - set(file.keys())):
                raise FormatError(f"{shard}: lacks {_some(absent)}, which {INDEX} says it holds. Download it again.")
    return files


def assign(
    folder: Path,
    found: Iterable[str],
    table: Mapping[str, Slot],
    *,
    rename: Callable[[str], str],
    ignored: Callable[[str], bool],
) -> dict[str, Slot]:
    """Which of the tensors found goes where. Every one of the table must be there, once, and no other."""
    spelled = {name: rename(name) for name in found}
    if missing := sorted(table.keys() - set(spelled.values())):
        raise FormatError(
            f"{folder}: the checkpoint lacks {_some(missing)}. Its config.json describes another network, or a shard "
            "was left out: download it again."
        )
    if unknown := sorted(name for name, new in spelled.items() if new not in table and not ignored(new)):
        raise FormatError(
            f"{folder}: the checkpoint has {_some(unknown)}, which this family does not use. Loading the rest would "
            "give another network than the one that was trained: check model_type and the number of layers in "
            "config.json."
        )
    times = Counter(spelled.values())
    if twice := sorted(name for name, new in spelled.items() if new in table and times[new] > 1):
        raise FormatError(f"{folder}: {_some(twice)} are the same tensor. Save the checkpoint with one name for each.")
    return {name: table[new] for name, new in spelled.items() if new in table}


def check_shapes(network: nn.Module, files: Mapping[str, Path], slots: Mapping[str, Slot]) -> None:
    """Compare the headers of the files with the network, before memory is taken for it."""
    targets = _targets(network, slots)
    for shard, names in _by_shard(files, slots):
        with _open(shard) as file:
            for name in names:
                found, wanted = tuple(file.get_slice(name).get_shape()), tuple(targets[name].shape)
                if found != wanted:
                    raise FormatError(
                        f"{shard}: {name} has shape {found}, but config.json says {wanted}. The two files are not of "
                        "the same checkpoint: download both again."
                    )


def stored_dtype(files: Mapping[str, Path], slots: Mapping[str, Slot]) -> torch.dtype:
    """In which precision a checkpoint keeps its token embedding; float32 where that is not one to compute in."""
    name = next(name for name, slot in slots.items() if slot.target == "embedding.tokens.weight")
    with _open(files[name]) as file:
        kept = {"BF16": torch.bfloat16, "F16": torch.float16}
        return kept.get(file.get_slice(name).get_dtype(), torch.float32)


@torch.no_grad()
def load(network: nn.Module, files: Mapping[str, Path], slots: Mapping[str, Slot], *, check: bool = False) -> None:
    """Copy every tensor into its parameter, one at a time: each goes straight to its device and dtype.

    ``check`` also refuses tensors with NaN or infinite values.
    """
    targets = _targets(network, slots)
    filled = sum(target.numel() for target in targets.values())
    assert filled == sum(p.numel() for p in network.parameters()), "the key table leaves parameters empty"
    for shard, names in _by_shard(files, slots):
        with _open(shard) as file:
            for name in names:
                _copy(shard, name, file, targets[name], check)


def _copy(shard: Path, name: str, file: Any, target: Tensor, check: bool) -> None:
    tensor = _read(shard, name, file)
    if check and not bool(torch.isfinite(tensor).all()):
        raise FormatError(
            f"{shard}: {name} has NaN or infinite values. The file is damaged or the training had diverged: download "
            "it again or use an earlier checkpoint."
        )
    target.copy_(tensor)


def _targets(network: nn.Module, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
    """The parameter, or the rows of one, that each tensor of the files fills."""
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    return {
        name: parameters[slot.target] if slot.rows is None else parameters[slot.target][slice(*slot.rows)]
        for name, slot in slots.items()
    }


def _by_shard(files: Mapping[str, Path], slots: Mapping[str, Slot]) -> Iterator[tuple[Path, list[str]]]:
    for shard in sorted({files[name] for name in slots}):
        yield shard, sorted(name for name in slots if files[name] == shard)


def _read(shard: Path, name: str, file: Any) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    if tensor.dtype == torch.int8:
        scale = file.get_tensor(name + SCALE) if name + SCALE in file.keys() else None  # noqa: SIM118 - not a mapping
        if scale is None or scale.shape != tensor.shape[:1] or tensor.ndim != 2:
            raise FormatError(
                f"{shard}: {name} is of 8-bit integers, but {name + SCALE} with one number for each of its rows is "
                "missing. Save it again."
            )
        return tensor.float().mul_(scale.float()[:, None])
    if not tensor.is_floating_point():
        raise FormatError(
            f"{shard}: {name} is of type {tensor.dtype}; expected floating-point weights. Use a checkpoint that is not "
            "quantised."
        )
    return tensor


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{path}: is truncated, damaged or not a safetensors file ({brief(error)}). Download it again."
        ) from error


def _some(names: Sequence[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + more
