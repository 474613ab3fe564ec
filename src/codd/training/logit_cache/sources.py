"""What a cache is made of: files of questions or prose."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from codd import files
from codd.backbones import adapters
from codd.backbones.tokenizer import Tokenizer
from codd.data.packing import Mixture, SequenceDataset
from codd.data.sources import Source
from codd.data.tokenization import PackingConfig, dataset_digest, load_source
from codd.errors import InvalidInput
from codd.training.logit_cache.storage import WITH_ADAPTER


class NamedDataset(NamedTuple):
    """A dataset of rows under a name."""

    name: str
    """What it is, and a digest of all that its rows depend on."""
    rows: SequenceDataset


def open_datasets(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    packing: PackingConfig,
    *,
    kept: Path,
) -> list[NamedDataset]:
    """Read and tokenize; what took work is kept in a folder and found there the next time."""
    datasets = []
    for source in sources:
        rows = load_source(source, Path(), tokenizer, packing, kept)
        datasets.append(NamedDataset(f"{source.name} {dataset_digest(source, Path(), tokenizer, packing)}", rows))
    if not datasets:
        raise InvalidInput("there is no data: give files with --data.")
    return datasets


def network_name(family: str, checkpoint: Path, adapter: str | None) -> str:
    """What a cache notes of the network that made it: family, digest of the checkpoint, and that of its adapter."""
    name = f"{family} {checkpoint_digest(checkpoint)}"
    return name if adapter is None else f"{name}{WITH_ADAPTER}{adapter_digest(adapter)}"


def adapter_digest(adapter: str) -> str:
    """Names the weights of an adapter, given by its folder or hub id."""
    return checkpoint_digest(files.local_folder(adapter, adapters.FILES), adapters.CONFIG)


def checkpoint_digest(checkpoint: Path, config_name: str = "config.json") -> str:
    """Names the weights of a checkpoint: of every file that a network (or an adapter) is read from."""
    parts = [f"{path.name} {files.sha256(path)}" for path in sorted(checkpoint.glob("*.safetensors"))]
    return hashlib.sha256("\n".join([*parts, files.sha256(checkpoint / config_name)]).encode()).hexdigest()[:16]


def mix_datasets(datasets: Sequence[NamedDataset], weights: Sequence[float] | None, rows: int) -> Mixture:
    """A mixture with batches of ``rows`` rows."""
    return Mixture([dataset.rows for dataset in datasets], shares_of(datasets, weights), rows)


def shares_of(datasets: Sequence[NamedDataset], weights: Sequence[float] | None) -> list[float]:
    """The weight of each dataset, by default the number of its rows; InvalidInput if the weights do not fit."""
    shares = [float(len(dataset.rows)) for dataset in datasets] if weights is None else list(weights)
    if len(shares) != len(datasets) or min(shares) <= 0:
        names = ", ".join(dataset.name for dataset in datasets)
        raise InvalidInput(f"weights must be {len(datasets)} numbers above zero, one for each of: {names}.")
    return shares
