"""One process, or several that torchrun started: the few words of torch.distributed that we use."""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from codd.errors import InvalidInput

Scalar = TypeVar("Scalar", bool, float)
Value = TypeVar("Value")


@dataclass(frozen=True)
class DistributedContext:
    """The rank of this process, how many processes there are, and the device of this one."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process (rank 0) writes files and prints."""
        return self.rank == 0

    def shard(self, count: int, what: str) -> range:
        """The numbers, of ``count``, that are this process's; InvalidInput, with ``what`` they are, if uneven."""
        if count % self.world_size:
            raise InvalidInput(f"{self.world_size} processes cannot share {count} {what}.")
        each = count // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, in one exchange."""
        if self.world_size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        at = 0
        for tensor in tensors:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()

    def broadcast(self, value: Scalar) -> Scalar:
        """The main process's value, so that all decide alike even where clocks and disks differ."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return type(value)(shared.item())

    def gather(self, value: Value) -> list[Value] | None:
        """The values of all processes by rank, on the main one; None on the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values)
        return values

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world_size > 1:
            dist.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run a block in the main process before the others run it, which then find what it kept on disk."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device named, or by default a CUDA device if there is one; InvalidInput if this machine does not have it."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InvalidInput(f"there is no device {device!r}; use 'cpu' or 'cuda'.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device {str(chosen)!r} was asked for, but this machine has no CUDA device; use 'cpu'.")
    return chosen


@contextmanager
def distributed(device: str | None = None) -> Iterator[DistributedContext]:
    """Join the processes of this run, as torchrun's environment variables say; leave them at the end.

    Nothing may keep the group beyond it: threads of a group that outlives the interpreter abort the process.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    place = choose_device(device)
    if place.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", place.index or 0))
        place = torch.device("cuda", local % torch.cuda.device_count())  # Ray shows every process its own GPU only
        torch.cuda.set_device(place)
    if world_size == 1:
        yield DistributedContext(0, 1, place)
        return
    importlib.import_module("torch.distributed.nn.functional")  # made after the group is, its defaults would keep it
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield DistributedContext(rank, world_size, place)
    finally:
        dist.destroy_process_group()
