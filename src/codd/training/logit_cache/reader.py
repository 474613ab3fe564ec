"""A cache of what a network said: windows to train a circuit on without asking the network again.

>>> cache = LogitCache.open("folder")
>>> loaded = cache.load("cuda")                     # all of them in the device's memory
>>> loaded.windows(torch.randint(len(loaded), (512,), device="cuda"))
"""

import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from codd.errors import FormatError, InvalidInput
from codd.training.logit_cache import storage
from codd.training.logit_cache.cached_windows import CachedWindows, join
from codd.training.logit_cache.storage import Index, Shard


class LogitCache:
    """The windows of a finished cache. A shard is checked when it is read."""

    def __init__(self, folder: Path, index: Index, shards: Sequence[Shard]):
        """Use `LogitCache.open`."""
        self.folder, self.index, self.settings, self.shards = folder, index, index.settings, shards
        self._ends = list(itertools.accumulate(shard.windows for shard in shards))

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "LogitCache":
        """Read the index of a finished cache, and what is noted of its shards."""
        folder = Path(folder)
        index = storage.read_index(folder)
        known = [] if index is None else storage.records(folder, index.settings)
        shards = [shard for shard in known if shard is not None]
        if index is None or len(shards) < len(known):
            raise FormatError(
                f"{folder}: is an unfinished cache, {len(shards)} of {len(known) or 'its'} shards are there. "
                "Run `codd cache` with the same arguments to go on."
            )
        return cls(folder, index, shards)

    def counts(self) -> dict[str, int]:
        """Windows, masked tokens and bytes of all shards."""
        return {name: sum(getattr(shard, name) for shard in self.shards) for name in ("windows", "masked", "bytes")}

    def __len__(self) -> int:
        """How many windows there are."""
        return self._ends[-1]

    def load(self, device: torch.device | str = "cpu", part: range | None = None) -> CachedWindows:
        """A part of the cache (by default all) as flat tensors in the memory of a device."""
        part = range(len(self)) if part is None else part
        if part.step != 1 or not 0 <= part.start < part.stop <= len(self):
            raise InvalidInput(f"part must be a range inside the {len(self)} windows, found {part}.")
        spans = [(n, end - self.shards[n].windows, end) for n, end in enumerate(self._ends)]
        begins = {n: begin for n, begin, end in spans if begin < part.stop and end > part.start}
        parts = (
            storage.read_shard(self.folder, n, self.shards[n]).part(max(part.start - begin, 0), part.stop - begin)
            for n, begin in begins.items()
        )
        loaded = join(parts, len(part), sum(self.shards[n].masked for n in begins), device)
        return dataclasses.replace(loaded, complete=self.index.top_k == self.settings.vocab_size)
