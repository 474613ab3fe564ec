"""What a cache is made of: files of questions or prose."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from codd import files
from codd.backbones import adapters
from codd.backbones.tokenizer import Tokenizer
from codd.data.packing import SequenceDataset
from codd.data.sources import Source
from codd.data.tokenization import PackingConfig, dataset_digest, load_source
from codd.errors import InvalidInput
from codd.training.logit_cache.storage import WITH_ADAPTER


def open_datasets(
    sources: Sequence[Source], tokenizer: Tokenizer, packing: PackingConfig, *, kept: Path
) -> dict[str, SequenceDataset]:
    """Read and tokenize; what took work is kept in a folder and found there the next time.

    Rows by name: what they are, and a digest of all that they depend on.
    """
    if not sources:
        raise InvalidInput("there is no data: give files with --data.")
    return {
        f"{source.name} {dataset_digest(source, Path(), tokenizer, packing)}": load_source(
            source, Path(), tokenizer, packing, kept
        )
        for source in sources
    }


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


def shares_of(datasets: Mapping[str, SequenceDataset], weights: Sequence[float] | None) -> list[float]:
    """The weight of each dataset, by default the number of its rows; InvalidInput if the weights do not fit."""
    shares = [float(len(rows)) for rows in datasets.values()] if weights is None else list(weights)
    if len(shares) != len(datasets) or min(shares) <= 0:
        raise InvalidInput(
            f"weights must be {len(datasets)} numbers above zero, one for each of: {', '.join(datasets)}."
        )
    return shares
