"""The folder of a cache: index.json, and shards that take their place only when they are whole.

Each finished shard has a record (its checksum and sizes) in a file of its own, so that several processes need not share
one. Shard and record are renamed in this order: a shard without a record, or with one that does not fit it, is not
finished and is made again.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load

from codd import files, folders, validation
from codd.backbones import adapters
from codd.data.packing import NARROW
from codd.data.windows import WindowRecipe
from codd.errors import FormatError
from codd.training.logit_cache.cached_windows import CachedWindows, TopK
from codd.validation import List, Section, Whole

FORMAT, VERSION = "codd logit cache", 3
INDEX, ROWS = "index.json", "rows"
WITH_ADAPTER = " + "
"""The separator between the digests of a network and of its adapter in `CacheSettings.backbone`."""
MAKE_ANEW = "Run `codd cache` with the same arguments again: it makes this shard anew and no other."


@dataclass(frozen=True)
class CacheSettings(Section):
    """Everything that makes a cache what it is: two with the same digest hold the same windows."""

    vocab_size: Whole
    mask_id: Whole
    shards: Whole
    shard_rows: Whole
    window: WindowRecipe
    top_k: Whole | None = None
    """How long the lists are; None: as long as the tolerance needs."""
    tolerance: float = 1e-3
    """The largest change of the conditional log-likelihood by the lists, in nats per masked token."""
    features: bool = False
    """Whether the network's last states are kept, at all positions."""
    seed: Whole = 0
    backbone: str = ""
    """Family and digest of the network, and that of the adapter merged into it, if any."""
    data: List[str] = ()
    """Name, digest and share of each source of rows."""

    @property
    def base(self) -> str | None:
        """Family and digest of the network without its adapter; None for a cache that does not say."""
        return self.backbone.partition(WITH_ADAPTER)[0] or None

    @property
    def adapter(self) -> str | None:
        """The digest of the adapter that the network was evaluated with; None if there was none."""
        return self.backbone.partition(WITH_ADAPTER)[2] or None

    def digest(self) -> str:
        """16 hex digits that name the settings, and so the cache."""
        return files.sha256_of_json(dataclasses.asdict(self))[:16]


class Change(NamedTuple):
    """What lists of k tokens do to the conditional log-likelihood, in nats a masked token."""

    k: Whole
    change: float


class Shard(NamedTuple):
    """Checksum and sizes of a finished shard."""

    sha256: str
    bytes: Whole
    windows: Whole
    masked: Whole


@dataclass(frozen=True)
class Index(Section):
    """The contents of index.json."""

    settings: CacheSettings
    top_k: Whole
    measured: List[Change]


def network_name(family: str, checkpoint: Path, adapter: str | None) -> str:
    """What `CacheSettings.backbone` says of a network."""
    name = f"{family} {_checkpoint_digest(checkpoint)}"
    return name if adapter is None else f"{name}{WITH_ADAPTER}{adapter_digest(adapter)}"


def adapter_digest(adapter: str) -> str:
    """Names the weights of an adapter, given by its folder or hub id."""
    return _checkpoint_digest(files.local_folder(adapter, adapters.FILES), adapters.CONFIG)


def _checkpoint_digest(checkpoint: Path, config_name: str = "config.json") -> str:
    """Of every file that a network (or an adapter) is read from."""
    parts = [f"{path.name} {files.sha256(path)}" for path in sorted(checkpoint.glob("*.safetensors"))]
    return hashlib.sha256("\n".join([*parts, files.sha256(checkpoint / config_name)]).encode()).hexdigest()[:16]


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"shard-{number:05d}.safetensors"


def record_name(number: int) -> str:
    """The file name of a shard's record while the cache is made."""
    return f"shard-{number:05d}.json"


@contextmanager
def claimed(folder: Path, *, fresh: bool) -> Iterator[None]:
    """Lock a folder and make it recognisable as a cache; an error empties it if the network was not evaluated yet.

    InvalidInput for one that holds something else, so that nothing of it is lost. ``fresh``: remove an older cache.
    """
    folders.check_own(folder, INDEX, "a cache")
    with folders.exclusive(folder):
        new = _fields(folder) is None
        for remains in folder.glob(".*.tmp"):  # of processes that were killed while writing
            remains.unlink()
        for remains in (folder / ROWS).glob(".*"):
            shutil.rmtree(remains, ignore_errors=True)
        if fresh and not new:
            shutil.rmtree(folder / ROWS, ignore_errors=True)
            for path in folder.glob("shard-*"):
                path.unlink()
        if fresh or new:
            _write(folder, {"format": FORMAT, "version": VERSION})
        try:
            yield
        except BaseException:
            if read_index(folder) is None:
                folders.discard_if_bare(folder, INDEX, ROWS)
            raise


def write_index(folder: Path, index: Index) -> None:
    """Write index.json."""
    settings = index.settings
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "digest": settings.digest(),
        "settings": dataclasses.asdict(settings),
        "top_k": index.top_k,
        "measured": [change._asdict() for change in index.measured],
    }
    _write(folder, {**fields, "sha256": files.sha256_of_json(fields)})


def read_index(folder: Path) -> Index | None:
    """What index.json says; None if its cache was begun and no more."""
    where, fields = folder / INDEX, _fields(folder)
    if fields is None:
        raise FormatError(f"{where}: there is no cache. Make one with `codd cache --out {folder}`.")
    if "settings" not in fields:
        return None
    if fields.pop("sha256", None) != files.sha256_of_json(fields):
        raise FormatError(f"{where}: does not have its checksum: it was changed. Make the cache again.")
    said = {field.name: fields.get(field.name) for field in dataclasses.fields(Index)}
    return validation.build(Index, said, str(where))  # type: ignore[no-any-return]  # it builds what is asked for


def _fields(folder: Path) -> dict[str, Any] | None:
    """The content of index.json; None if the file does not exist."""
    where = folder / INDEX
    if not where.is_file():
        return None
    fields = files.read_json(where)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise FormatError(f"{where}: is not the index of a cache.")
    if fields.get("version") != VERSION:
        raise FormatError(f"{where}: is of version {fields.get('version')}, this codd reads {VERSION}. Make it again.")
    return fields


def _write(folder: Path, fields: dict[str, Any]) -> None:
    with files.replacing(folder, INDEX) as (path,):
        files.write_text(path, json.dumps(fields, indent=1) + "\n")


def records(folder: Path, settings: CacheSettings) -> list[Shard | None]:
    """The record of each shard; None if it is not finished, or has a record that cannot be read or be true."""
    known: list[Shard | None] = [None] * settings.shards
    for number in range(settings.shards):
        path = folder / record_name(number)
        with contextlib.suppress(FormatError):
            record = validation.build(Shard, files.read_json(path), str(path))
            positions = record.windows * settings.window.length  # of at least three bytes each
            known[number] = record if 0 <= record.masked <= positions <= record.bytes // 3 else None
    return known


def write_shard(folder: Path, number: int, windows: CachedWindows, settings: CacheSettings) -> Shard:
    """Shard and record, both on the disk when this returns."""
    tensors = {
        "tokens": _unsigned(windows.tokens, settings),
        "masked": windows.masked,
        "level": windows.level,
        **windows.lists._asdict(),
        "ids": _unsigned(windows.lists.ids, settings),
        **({} if windows.features is None else {"features": windows.features}),
    }
    with files.replacing(folder, shard_name(number), record_name(number)) as (shard, note):
        # One word of metadata only: safetensors writes several in any order, and shards are the same to the byte.
        files.write_weights(shard, files.standalone(tensors), {FORMAT: settings.digest()})
        record = Shard(files.sha256(shard), shard.stat().st_size, len(windows), len(windows.lists.truth))
        files.write_text(note, json.dumps(record._asdict()) + "\n")
    return record


def checked_content(folder: Path, number: int, record: Shard) -> bytes:
    """The bytes of a shard; FormatError unless they are those of its record."""
    path = folder / shard_name(number)
    content = files.read_bytes(path, record.bytes)
    if len(content) != record.bytes or hashlib.sha256(content).hexdigest() != record.sha256:
        raise FormatError(f"{path}: is damaged, it has not the size and checksum of its record")
    return content


def read_shard(folder: Path, number: int, record: Shard) -> CachedWindows:
    """Read a shard, and check it against its record."""
    try:
        tensors = load(checked_content(folder, number, record))
    except FormatError as error:
        raise FormatError(f"{str(error).removesuffix('.')}. {MAKE_ANEW}") from error
    lists = TopK(*(_signed(tensors[name]) for name in TopK._fields))
    tokens, masked, level = _signed(tensors["tokens"]), tensors["masked"], tensors["level"]
    if (len(tokens), len(lists.truth)) != (record.windows, record.masked):
        raise FormatError(f"{folder / record_name(number)}: its record states other numbers than it has. {MAKE_ANEW}")
    return CachedWindows(tokens, masked, level, lists, tensors.get("features"))


def _unsigned(ids: torch.Tensor, settings: CacheSettings) -> torch.Tensor:
    """Files say what they hold: ids of two bytes are whole numbers from 0 to 65,535."""
    return ids.view(torch.uint16) if settings.vocab_size <= NARROW else ids


def _signed(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16) if x.dtype == torch.uint16 else x
