"""A cache of what a network said: windows to train a circuit on without asking the network again.

>>> cache = LogitCache.open("folder")
>>> cache.windows(range(64))                        # some windows, straight from the files
>>> loaded = cache.load("cuda")                     # all of them in the device's memory
>>> loaded.windows(torch.randint(len(loaded), (512,), device="cuda"))
"""

import functools
import itertools
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import torch

from codd.data.windows import WindowBatch, concatenate_windows
from codd.errors import FormatError, InvalidInput
from codd.training.logit_cache import storage
from codd.training.logit_cache.entries import Buffer, CachedWindows
from codd.training.logit_cache.storage import CacheSettings, Index


class LogitCache:
    """The windows of a finished cache. A shard is checked when it is read."""

    def __init__(self, folder: Path, index: Index):
        """Use `LogitCache.open`."""
        self.folder, self.index = folder, index
        self._ends = list(itertools.accumulate(record.windows for record in index.shards))
        self._shard = functools.lru_cache(maxsize=2)(self._read)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, vocab_size: int | None = None) -> "LogitCache":
        """Read the index; InvalidInput if ``vocab_size``, that of the circuit to be trained, is not the cache's."""
        folder = Path(folder)
        index = storage.read_index(folder)
        if index is None or not index.shards:
            known = [] if index is None else storage.records(folder, index)
            raise FormatError(
                f"{folder}: is an unfinished cache, {sum(map(bool, known))} of {len(known) or 'its'} shards are there. "
                "Run `codd cache` with the same arguments to go on."
            )
        cache = cls(folder, index)
        if vocab_size not in (None, cache.vocab_size):
            raise InvalidInput(
                f"{folder}: is a cache over {cache.vocab_size} tokens, the circuit is over {vocab_size}: they do not "
                "belong together."
            )
        return cache

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

    def windows(self, indices: Sequence[int]) -> WindowBatch:
        """Some windows, in the order asked for. Each shard that holds one of them is read: ask for neighbours."""
        if not len(indices):
            raise InvalidInput("no windows were asked for.")
        wanted = sorted((*self._place(number), slot) for slot, number in enumerate(indices))
        parts = []
        for shard, group in itertools.groupby(wanted, key=lambda each: each[0]):
            parts.append(self._shard(shard).windows(torch.tensor([at for _, at, _ in group])))
        order = torch.tensor([slot for _, _, slot in wanted]).argsort()
        return concatenate_windows(parts, order)

    def load(self, device: torch.device | str = "cpu", part: range | None = None) -> CachedWindows:
        """A part of the cache (by default all) as flat tensors in the memory of a device."""
        part = range(len(self)) if part is None else part
        if part.step != 1 or not 0 <= part.start < part.stop <= len(self):
            raise InvalidInput(f"part must be a range inside the {len(self)} windows, found {part}.")
        spans = [
            (n, end - record.windows, end)
            for n, (record, end) in enumerate(zip(self.index.shards, self._ends, strict=True))
        ]
        spans = [span for span in spans if span[1] < part.stop and span[2] > part.start]
        buffer = None
        for shard, begin, end in spans:
            entries = self._read(shard)
            if begin < part.start or end > part.stop:
                entries = entries.part(max(part.start - begin, 0), min(part.stop, end) - begin)
            if buffer is None:
                lists = sum(self.index.shards[n].masked for n, _, _ in spans)
                buffer = Buffer(entries, len(part), lists, device)
            buffer.add(entries)
        assert buffer is not None, "the part is not empty"
        return buffer.entries()

    def _read(self, shard: int) -> CachedWindows:
        return storage.read_shard(self.folder, shard, self.index)

    def _place(self, number: int) -> tuple[int, int]:
        """The shard of a window, and which one of it."""
        if not 0 <= number < len(self):
            raise InvalidInput(f"there is no window {number}: the cache has {len(self)}, from 0 on.")
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard] - self.index.shards[shard].windows)
