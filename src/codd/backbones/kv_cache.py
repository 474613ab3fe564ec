"""Memory for keys and values: what attention needs of positions that a pass does not compute again.

Memory is taken once, for a number of sequences (slots) of bounded length. A pass computes some consecutive positions of
each sequence, writes their keys and values over what stood there, and attends to all positions up to the last one that
it is told to see. What is stale and what is exact is for the caller to know (`codd.decoding.runner`).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

ALIGNMENT = 64
"""Bytes: how a product rounds may depend on where its factors lie."""


CPU_MEMORY = 4 << 30
"""Bytes that the KV caches of a run may take on a CPU, which gives them when something is stored there."""


def default_memory(device: torch.device) -> int:
    """Bytes that KV caches may take where nobody says: on a GPU half of what is free."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CPU_MEMORY


class KVShape(NamedTuple):
    """What a network keeps of one position."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_of(self, length: int, dtype: torch.dtype) -> int:
        """What a sequence of ``length`` positions takes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * length * dtype.itemsize


class KVCache:
    """Keys and values of every layer for ``slots`` sequences of at most ``length`` positions."""

    def __init__(self, shape: KVShape, slots: int, length: int, *, device: torch.device, dtype: torch.dtype):
        """Take the memory, all zeros: what is masked has weight 0, but 0 times the NaN of old memory would be NaN.

        On a CPU the system gives it when something is stored there.
        """
        size = (shape.layers, 2, slots, shape.kv_heads, length, shape.head_dim)
        if device.type == "cpu":
            self.memory = _lazy_zeros(math.prod(size) * dtype.itemsize).view(dtype).view(size)
        else:
            self.memory = torch.zeros(size, device=device, dtype=dtype)

    @property
    def slots(self) -> int:
        """How many sequences it has room for."""
        return self.memory.shape[2]

    @property
    def length(self) -> int:
        """How many positions of each sequence it has room for."""
        return self.memory.shape[4]

    def clear(self, slot: int) -> None:
        """Forget a sequence: a NaN that it left would reach those that are padded beside the next one there."""
        self.memory[:, :, slot] = 0


def _lazy_zeros(count: int) -> UInt8[Tensor, " n"]:
    """Bytes, aligned as PyTorch's; PyTorch would write every one of them at once, though few may ever be used."""
    memory = np.zeros(count + ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory)[begin : begin + count]


class CachedPass(NamedTuple):
    """Where a pass over some positions of some sequences finds what it does not compute."""

    cache: KVCache
    slots: Int[Tensor, " B"]
    positions: Int[Tensor, "B R"]
    """Positions of the rows that are computed: consecutive, followed by -1 at padding where ``ends`` are given."""
    seen: int
    """Positions from 0 on that are attended to; those of each sequence end at ``ends``, if they differ."""
    ends: Int[Tensor, " B"] | None = None

    @property
    def places(self) -> tuple[Tensor, ...]:
        """Its tensors but the cache: slots, positions, and ends where they are given."""
        return tuple(each for each in (self.slots, self.positions, self.ends) if each is not None)

    def at(self, slots: Int[Tensor, " B"], positions: Int[Tensor, "B R"], *ends: Int[Tensor, " B"]) -> "CachedPass":
        """The same cache and number of seen positions with other slots, positions and ends."""
        return CachedPass(self.cache, slots, positions, self.seen, *ends)

    def to(self, device: torch.device) -> "CachedPass":
        """The same pass with copies of slots, positions and ends on a device."""
        return self.at(*(each.to(device, non_blocking=True, copy=True) for each in self.places))

    def update(
        self, layer: int, k: Float[Tensor, "B h R d"], v: Float[Tensor, "B h R d"]
    ) -> tuple[Float[Tensor, "B h S d"], Float[Tensor, "B h S d"]]:
        """Store the keys and values of a layer, and give those of all positions that are seen."""
        memory = self.cache.memory[layer]
        if len(self.slots) == 1 and self.ends is None and memory.device.type == "cpu":  # as views, nothing is copied
            slot, begin = int(self.slots[0]), int(self.positions[0, 0])
            for own, new in zip(memory, (k, v), strict=True):
                own[slot, :, begin : begin + k.shape[2]] = new[0]
            keys, values = memory[:, slot : slot + 1, :, : self.seen]
            return keys, values
        last = (self.positions >= 0).sum(1, keepdim=True) - 1
        rows = torch.arange(k.shape[2], device=k.device).minimum(last)  # padding writes its sequence's last row again
        where = (self.slots[:, None], slice(None), self.positions.gather(1, rows))
        for own, new in zip(memory, (k, v), strict=True):
            own[where] = new.transpose(1, 2).take_along_dim(rows[..., None, None], dim=1)
        keys, values = (own[self.slots, :, : self.seen] for own in memory)
        return keys, values
