"""One process, or several that torchrun started."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from codd.backbones.loading import choose_device
from codd.errors import InvalidInput


@dataclass(frozen=True)
class Workers:
    """Which of how many processes this one is, and its device."""

    rank: int
    count: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    def share(self, rows: int) -> tuple[int, int]:
        """The rows of a batch that are this process's."""
        if rows % self.count:
            raise InvalidInput(f"batch_rows {rows} is not a multiple of the {self.count} processes.")
        each = rows // self.count
        return self.rank * each, (self.rank + 1) * each

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes."""
        if self.count == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        at = 0
        for tensor in tensors:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()

    def told(self, value: bool) -> bool:
        """What the first process says, so that all do the same even where they do not share a disk."""
        if self.count == 1:
            return value
        said = torch.tensor([int(value)], device=self.device)
        dist.broadcast(said, 0)
        return bool(said.item())

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def workers(device: str | None = None) -> Iterator[Workers]:
    """The processes of this run, as torchrun's environment variables say."""
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    place = choose_device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", place.index or 0)))
        torch.cuda.set_device(place)
    if count == 1:
        yield Workers(0, 1, place)
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Workers(rank, count, place)
    finally:
        dist.destroy_process_group()
