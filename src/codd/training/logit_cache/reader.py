"""A cache of what a network said: windows to train a circuit on without asking the network again.

>>> cache = LogitCache.open("folder")
>>> loaded = cache.load("cuda")                     # all of them in the device's memory
>>> loaded.windows(torch.randint(len(loaded), (512,), device="cuda"))
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from codd.errors import FormatError, InvalidInput
from codd.training.logit_cache import storage
from codd.training.logit_cache.cached_windows import CachedWindows, join
from codd.training.logit_cache.storage import CacheSettings, Index


class LogitCache:
    """The windows of a finished cache. A shard is checked when it is read."""

    def __init__(self, folder: Path, index: Index):
        """Use `LogitCache.open`."""
        self.folder, self.index = folder, index
        self._ends = list(itertools.accumulate(record.windows for record in index.shards))

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "LogitCache":
        """Read the index of a finished cache."""
        folder = Path(folder)
        index = storage.read_index(folder)
        if index is None or not index.shards:
            known = [] if index is None else storage.records(folder, index)
            raise FormatError(
                f"{folder}: is an unfinished cache, {sum(map(bool, known))} of {len(known) or 'its'} shards are there. "
                "Run `codd cache` with the same arguments to go on."
            )
        return cls(folder, index)

    @property
    def settings(self) -> CacheSettings:
        """All that the cache was made with."""
        return self.index.settings

    @property
    def vocab_size(self) -> int:
        """The number of tokens V that its distributions are over."""
        return self.settings.vocab_size

    @property
    def window(self) -> int:
        """The length of a window in tokens."""
        return self.settings.window.length

    @property
    def top_k(self) -> int:
        """How many tokens are listed at a masked position, the truth among them."""
        return self.index.top_k

    def __len__(self) -> int:
        """How many windows there are."""
        return self._ends[-1]

    def load(self, device: torch.device | str = "cpu", part: range | None = None) -> CachedWindows:
        """A part of the cache (by default all) as flat tensors in the memory of a device."""
        part = range(len(self)) if part is None else part
        if part.step != 1 or not 0 <= part.start < part.stop <= len(self):
            raise InvalidInput(f"part must be a range inside the {len(self)} windows, found {part}.")
        ends = zip(self.index.shards, self._ends, strict=True)
        spans = [(n, end - record.windows, end) for n, (record, end) in enumerate(ends)]
        spans = [span for span in spans if span[1] < part.stop and span[2] > part.start]

        def read() -> Iterator[CachedWindows]:
            for shard, begin, end in spans:
                entries = storage.read_shard(self.folder, shard, self.index)
                inside = begin >= part.start and end <= part.stop
                yield entries if inside else entries.part(max(part.start - begin, 0), min(part.stop, end) - begin)

        return join(read(), len(part), sum(self.index.shards[n].masked for n, _, _ in spans), device)
