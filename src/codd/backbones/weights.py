"""Reading safetensors checkpoints: the key table of a family says which tensor fills which parameter."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from codd.backbones.progress import lasting_bar
from codd.backbones.transformer import Transformer, TransformerConfig
from codd.errors import FormatError
from codd.files import brief, open_safetensors, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 1 << 26
"""Bytes of an index: 91,000 tensors have one of 9 MB."""
SCALE = "_scale"
"""Suffix of the tensor that holds the row scales of an 8-bit tensor."""

CHUNK = 1 << 20
"""Values checked at once by `check_finite`: few enough to stay in the processor's cache."""
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""The dtypes that weights may be stored in: safetensors' names and torch's."""


class Key(NamedTuple):
    """One line of a key table. On both sides ``{i}`` stands for the number of a layer, ``{e}`` for an expert's."""

    source: str
    """The tensor's name in the file."""
    target: str
    """The parameter's name in `codd.backbones.transformer.Transformer`; a network that has none has no such tensor."""
    rows: str | None = None
    """Which rows of a joined projection it fills (a key of `TransformerConfig.row_ranges`); None: all."""


def affine(source: str, target: str, rows: str | None = None) -> tuple[Key, Key]:
    """A weight and its bias, where the network has one."""
    return Key(f"{source}.weight", f"{target}.weight", rows), Key(f"{source}.bias", f"{target}.bias", rows)


@dataclass(frozen=True)
class Slot:
    """The parameter, or the rows (from, to) of one, that a tensor of a file fills."""

    target: str
    rows: tuple[int, int] | None
    expert: int | None = None
    """The index of an expert in a parameter that stacks all experts; None: the parameter is no such stack."""

    def part(self, parameter: Tensor) -> Tensor:
        """What the tensor fills of the parameter that is its target."""
        own = parameter if self.expert is None else parameter[self.expert]
        return own if self.rows is None else own[slice(*self.rows)]


def expand_keys(keys: Sequence[Key], config: TransformerConfig) -> dict[str, Slot]:
    """The lines of a key table that a network has parameters for, with its layers and experts written out.

    Gives the name in the file -> slot.
    """
    with torch.device("meta"):
        parameters = {name for name, _ in Transformer(config).named_parameters()}
    ranges, table = config.row_ranges(), {}
    for key in keys:
        for i in range(config.layers) if "{i}" in key.source else (0,):
            source, target = (name.replace("{i}", str(i)) for name in (key.source, key.target))
            if target not in parameters:
                continue
            rows = None if key.rows is None else ranges[key.rows]
            if "{e}" not in source:
                table[source] = Slot(target, rows)
            elif config.experts is not None:
                for e in range(config.experts.count):
                    table[source.replace("{e}", str(e))] = Slot(target, rows, e)
    return table


class TensorHeader(NamedTuple):
    """A tensor's entry in the header of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name: F32, BF16, I8, ..."""


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """The header of every tensor in a file."""
    with open_safetensors(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the handle is no mapping
        return {name: TensorHeader(path, tuple(x.get_shape()), str(x.get_dtype())) for name, x in slices.items()}


def checkpoint_headers(folder: Path) -> dict[str, TensorHeader]:
    """The header of every tensor of the folder's checkpoint; FormatError if files are missing."""
    if (folder / INDEX).is_file():
        return _indexed_headers(folder, folder / INDEX)
    if (folder / SINGLE).is_file():
        return read_headers(folder / SINGLE)
    fix = "Download the checkpoint again, or give the folder that holds them."
    if pickled := sorted(path.name for ending in ("bin", "pt", "pth") for path in folder.glob(f"*.{ending}")):
        fix = f"{pickled[0]} is a pickle, which codd does not load because it may run code: convert it to safetensors."
    raise FormatError(f"{folder}: has neither {SINGLE} nor {INDEX}. {fix}")


def _indexed_headers(folder: Path, index: Path) -> dict[str, TensorHeader]:
    listed: dict[Path, list[str]] = {}
    try:
        for name, shard in read_json_object(index, MAX_INDEX)["weight_map"].items():
            listed.setdefault(folder / str(shard), []).append(name)
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{index}: is not an index of shards ({brief(error)}). Download it again.") from error
    headers: dict[str, Any] = {}
    for shard, names in sorted(listed.items()):
        if shard.parent != folder:
            raise FormatError(
                f"{index}: names a shard outside its folder, {str(shard)!r:.300}. Use no checkpoint that does so."
            )
        if not os.path.isfile(shard):  # which takes any name
            raise FormatError(f"{index}: lists {shard.name!r:.200}, which is missing. Download the checkpoint again.")
        found = read_headers(shard)
        if absent := sorted(set(names) - found.keys()):
            raise FormatError(f"{shard}: lacks {_quoted(absent)}, which {INDEX} says it holds. Download it again.")
        headers |= {name: found[name] for name in names}
    return headers


def assign_slots(
    folder: Path,
    names: Iterable[str],
    table: Mapping[str, Slot],
    *,
    rename: Callable[[str], str],
    ignored: Callable[[str], bool],
) -> dict[str, Slot]:
    """The slot of each tensor named.

    FormatError unless every tensor of the table is there once, and no other but those ``ignored``.
    """
    spelled = {name: rename(name) for name in names}
    if missing := sorted(table.keys() - set(spelled.values())):
        raise FormatError(
            f"{folder}: the checkpoint lacks {_quoted(missing)}. Its config.json describes another network, or a shard "
            "was left out: download it again."
        )
    if unknown := sorted(name for name, new in spelled.items() if new not in table and not ignored(new)):
        raise FormatError(
            f"{folder}: the checkpoint has {_quoted(unknown)}, which this family does not use. Loading the rest would "
            "give another network than the one that was trained: check model_type and the number of layers in "
            "config.json."
        )
    times = Counter(spelled.values())
    if twice := sorted(name for name, new in spelled.items() if new in table and times[new] > 1):
        raise FormatError(
            f"{folder}: {_quoted(twice)} are the same tensor. Save the checkpoint with one name for each."
        )
    return {name: table[new] for name, new in spelled.items() if new in table}


def check_headers(network: nn.Module, headers: Mapping[str, TensorHeader], slots: Mapping[str, Slot]) -> None:
    """Raise a FormatError where shapes or dtypes of the files do not fit the network, before memory is taken for it."""
    targets = _targets(network, slots)
    for name in sorted(slots):
        file, shape, dtype = headers[name]
        if shape != (wanted := tuple(targets[name].shape)):
            raise FormatError(
                f"{file}: {name} has shape {shape}, but config.json says {wanted}. The two files are not of the same "
                "checkpoint: download both again."
            )
        scale = headers.get(name + SCALE)
        if dtype == "I8" and (scale is None or scale.file != file or scale.shape != shape[:1] or len(shape) != 2):
            raise FormatError(
                f"{file}: {name} is of 8-bit integers, but {name + SCALE} with one number for each of its rows is "
                "missing. Save it again."
            )
        if dtype not in DTYPES:
            raise FormatError(
                f"{file}: {name} is of type {dtype}; expected floating-point weights. Use a checkpoint that is not "
                "quantised."
            )


def stored_dtype(headers: Mapping[str, TensorHeader], slots: Mapping[str, Slot]) -> torch.dtype:
    """The dtype of a checkpoint's token embedding; float32 where that is none to compute in."""
    name = next(name for name, slot in slots.items() if slot.target == "embedding.tokens.weight")
    half = {"BF16": torch.bfloat16, "F16": torch.float16}
    return half.get(headers[name].dtype, torch.float32)


@torch.no_grad()
def load(
    network: nn.Module, headers: Mapping[str, TensorHeader], slots: Mapping[str, Slot], *, check: bool = True
) -> None:
    """Copy every tensor into its parameter, one at a time: each goes straight to its device and dtype.

    One file is mapped at a time, so that its pages are all that stays in the host's memory beside the network itself.
    On a terminal, a progress bar if it takes long. ``check``: also raise a FormatError for NaN or infinite values.
    """
    targets = _targets(network, slots)
    filled = sum(target.numel() for target in targets.values())
    assert filled == sum(p.numel() for p in network.parameters()), "the key table leaves parameters empty"
    shards: dict[Path, list[str]] = {}
    for name in sorted(slots):
        shards.setdefault(headers[name].file, []).append(name)
    with lasting_bar("loading the weights", filled) as advance:
        for shard, names in sorted(shards.items()):
            with open_safetensors(shard) as file:
                for name in names:
                    _copy(f"{shard}: {name}", _read(name, file), targets[name], check)
                    advance(targets[name].numel())


def _copy(where: str, tensor: Tensor, target: Tensor, check: bool) -> None:
    # In a function of its own: a tensor that a loop still holds would stand beside the next one.
    if check:
        check_finite(where, tensor)
    target.copy_(tensor)


def _read(name: str, file: Any) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    if tensor.dtype == torch.int8:
        scale: Tensor = file.get_tensor(name + SCALE)
        return tensor.float().mul_(scale.float()[:, None])
    return tensor


def check_finite(where: str, tensor: Tensor, advance: Callable[[int], None] = lambda count: None) -> None:
    """Raise a FormatError for NaN or infinite values; ``advance`` is called with the number of values checked."""
    for part in torch.split(tensor.flatten(), CHUNK):
        # torch has no extremes of 8-bit floats; of others they tell at a twentieth of the time that isfinite takes
        extremes = torch.aminmax(part.float() if part.dtype.itemsize == 1 else part) if part.numel() else ()
        if not all(math.isfinite(value) for value in extremes):
            raise FormatError(
                f"{where} has NaN or infinite values. The file is damaged or the training had diverged: download it "
                "again or use an earlier checkpoint."
            )
        advance(part.numel())


def _targets(network: nn.Module, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
    """The parameter, or the rows of one, that each tensor of the files fills."""
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    return {name: slot.part(parameters[slot.target]) for name, slot in slots.items()}


def _quoted(names: Sequence[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"{name!r:.200}" for name in names[:shown]) + more


def check_values(headers: Mapping[str, TensorHeader]) -> None:
    """Read every tensor, one at a time; FormatError if one has NaN or infinite values."""
    total = sum(math.prod(header.shape) for header in headers.values())
    with lasting_bar("reading the weights", total) as advance:
        for shard in sorted({header.file for header in headers.values()}):
            with open_safetensors(shard) as file:
                for name in sorted(name for name, header in headers.items() if header.file == shard):
                    check_finite(f"{shard}: {name}", file.get_tensor(name), advance)
