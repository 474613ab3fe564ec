"""What a cache is made of: files of questions or prose, generated problems, samples of a causal model."""

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from codd import files
from codd.backbones.tokenizer import Tokenizer
from codd.errors import FormatError, InvalidInput
from codd.training import corpus
from codd.training.causal_samples import SampledRows, load_causal
from codd.training.recipe import Source
from codd.training.rows import Mixture, RowSource

PAIRS = (("question", "answer"), ("problem", "solution"), ("instruction", "output"), ("prompt", "completion"))
"""Keys under which files are looked through for questions and answers."""
ENDINGS = (".jsonl", ".jsonl.xz", ".txt", ".txt.xz")


@dataclass(frozen=True)
class Samples:
    """What to draw from a causal model."""

    folder: Path
    count: int
    prompt: str = ""


class Supply(NamedTuple):
    """Some source of rows."""

    name: str
    """What it is, and a digest of all that its rows depend on."""
    rows: RowSource


def find_sources(paths: Sequence[Path], fields: Sequence[str] | None, problems: int | None, seed: int) -> list[Source]:
    """A source for each file; of a folder, its files whose names begin with train, or all if none does."""
    found: list[Source] = []
    for path in _files(paths):
        kind, keys = _kind(path, fields)
        name = f"{len(found)}-" + re.sub(r"[^\w.-]", "_", path.name)[-40:]  # two folders may hold files of one name
        found.append(Source(kind, name, path=str(path.resolve()), fields=keys))  # type: ignore[arg-type]  # one of three
    if problems is not None:
        found.append(Source("problems", f"{len(found)}-problems", count=problems, seed=seed))
    return found


def _files(paths: Sequence[Path]) -> Iterable[Path]:
    for path in paths:
        if not os.path.isdir(path):  # unlike Path.is_dir, not an error for a name that is too long
            yield path
            continue
        inside = sorted(each for each in path.iterdir() if each.is_file() and each.name.endswith(ENDINGS))
        if not inside:
            raise FormatError(f"{path}: holds no {', '.join(ENDINGS)} file. Give a folder with data, or files.")
        yield from [each for each in inside if each.name.startswith("train")] or inside


def _kind(path: Path, fields: Sequence[str] | None) -> tuple[str, Sequence[str]]:
    """What a file holds, by its ending and by the first object in it."""
    if ".jsonl" not in path.suffixes[-2:]:
        return "text", ("text",)
    if fields is not None:
        return ("qa" if len(fields) == 2 else "text"), tuple(fields)
    first = next(corpus.entries(path, 1), None)
    if first is None:
        raise FormatError(f"{path}: is empty. Give a file with one JSON object a line.")
    for keys in PAIRS:
        if all(key in first[1] for key in keys):
            return "qa", keys
    if "text" in first[1]:
        return "text", ("text",)
    found = ", ".join(key[:40] for key in itertools.islice(first[1], 8))
    raise FormatError(f"{path}: has the keys {found}; say with --fields which of them to use.")


def open_supplies(
    sources: Sequence[Source],
    samples: Samples | None,
    tokenizer: Tokenizer,
    layout: corpus.Layout,
    *,
    kept: Path,
    device: torch.device,
) -> list[Supply]:
    """Read and tokenize; what took work is kept in a folder and found there the next time."""
    found = []
    for source in sources:
        rows = corpus.open_source(source, Path(), tokenizer, layout, kept)
        found.append(Supply(f"{source.name} {corpus.identity(source, Path(), tokenizer, layout)}", rows))
    if samples is not None:
        found.append(_sampled(samples, tokenizer, layout, device))
    if not found:
        raise InvalidInput("there is no data: give files with --data, --problems or --samples-from.")
    return found


def _sampled(samples: Samples, tokenizer: Tokenizer, layout: corpus.Layout, device: torch.device) -> Supply:
    model = load_causal(samples.folder, device)
    rows = SampledRows(
        model, tokenizer, count=samples.count, length=layout.row_length, seed=layout.seed, prompt=samples.prompt
    )
    identity = [digest_of(samples.folder), str(samples.count), samples.prompt, *map(str, layout)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]
    return Supply(f"samples of {samples.folder.name} {digest}", rows)


def digest_of(checkpoint: Path, config_name: str = "config.json") -> str:
    """Names the weights of a checkpoint: of every file that a network (or an adapter) is read from."""
    parts = [f"{path.name} {files.sha256(path)}" for path in sorted(checkpoint.glob("*.safetensors"))]
    return hashlib.sha256("\n".join([*parts, files.sha256(checkpoint / config_name)]).encode()).hexdigest()[:16]


def mixture(supplies: Sequence[Supply], weights: Sequence[float] | None, rows: int) -> Mixture:
    """So many rows at a time; by default each source as often as it has rows, so that all are read once."""
    shares = [float(len(supply.rows)) for supply in supplies] if weights is None else list(weights)
    if len(shares) != len(supplies) or min(shares) <= 0:
        names = ", ".join(supply.name for supply in supplies)
        raise InvalidInput(f"weights must be {len(supplies)} numbers above zero, one for each of: {names}.")
    return Mixture([supply.rows for supply in supplies], shares, rows)
