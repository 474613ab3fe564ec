"""A network that is too large for one device, divided among processes: tensor parallel.

Every process holds a part of each layer: some attention heads with their keys and values, and some columns between the
two products of an MLP or of every expert. What the parts add to the residual stream is summed over the processes, twice
a layer. Norms, routers, the embedding and what reads a noise level are whole in every process; the head is divided by
tokens, and its logits are gathered.

The main process (rank 0) decodes, evaluates or serves as if it were alone. The others wait for its calls of the
network (`ShardedTransformer.follow`): tokens are chosen in one place, so that no two processes can disagree on them.

Weights are plain tensors with the layout of one process. PyTorch's plans (`ColwiseParallel`) divide a matrix into
consecutive rows, which would give one process the queries of a joined ``qkv`` and another its values, and our kernels
take no DTensor.
"""

import atexit
import functools
import os
import signal
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from codd.backbones.kv_cache import CachedPass, KVCache
from codd.backbones.transformer import Head, Transformer, TransformerConfig
from codd.backbones.weights import Cut
from codd.distributed import join_processes
from codd.errors import CoddError, InvalidInput

MAIN = 0
IDLE = timedelta(days=365)
"""How long the other processes wait for a call: a server may have nothing to do."""
WHOLE_BIASES = ("attention.out.bias", "mlp.down.bias", "mlp.shared.down.bias")
"""The ends of the names of biases that follow a sum over processes: one process adds them."""


@dataclass(frozen=True)
class Partition:
    """Which part of every layer this process holds."""

    rank: int
    size: int
    """How many processes there are."""

    def part(self, count: int, offset: int = 0) -> tuple[int, int]:
        """The part (from, to) of ``count`` things, the first of which is ``offset``; the last part may be smaller."""
        each = -(-count // self.size)
        return offset + min(self.rank * each, count), offset + min((self.rank + 1) * each, count)

    def local(self, config: TransformerConfig) -> TransformerConfig:
        """The sizes of the layers in one process."""
        experts = config.experts
        if experts is not None:
            width, shared = experts.width // self.size, experts.shared_width // self.size
            experts = replace(experts, width=width, shared_width=shared)
        return replace(
            config,
            heads=config.heads // self.size,
            kv_heads=max(1, config.kv_heads // self.size),
            head_width=config.head_dim,
            mlp_width=config.mlp_width // self.size,
            experts=experts,
        )

    def cuts(self, config: TransformerConfig) -> dict[str, Cut]:
        """What this process reads of a network's parameters; those that are not named it reads whole.

        Where there are fewer key heads than processes, those whose queries share one have a copy of it each.
        """
        width, rows = config.head_dim, config.row_ranges()
        first = self.rank * config.kv_heads // self.size
        kv_rows = first * width, (first + max(1, config.kv_heads // self.size)) * width
        keys, values = ((rows[part][0] + kv_rows[0], rows[part][0] + kv_rows[1]) for part in ("k", "v"))
        heads = self.part(config.heads)
        q = heads[0] * width, heads[1] * width
        cuts = {"head.weight": Cut(0, (self.part(config.vocab_size),))}
        cuts["head.bias"] = cuts["head.weight"]
        for i in range(config.layers):
            block = f"blocks.{i}."
            for kind in ("weight", "bias"):
                cuts[f"{block}attention.qkv.{kind}"] = Cut(0, (q, keys, values))
            cuts[f"{block}attention.out.weight"] = Cut(1, (q,))
            if config.experts is None or not config.has_experts(i):
                cuts |= self._mlp(f"{block}mlp.", config.mlp_width, config.gated)
                continue
            cuts |= self._mlp(f"{block}mlp.shared.", config.experts.shared_width, config.gated)
            up, down = self._inner(config.experts.width, gated=True)
            cuts |= {f"{block}mlp.experts.up": up, f"{block}mlp.experts.down": down}
        return cuts

    def _mlp(self, name: str, width: int, gated: bool) -> dict[str, Cut]:
        up, down = self._inner(width, gated)
        return {f"{name}up.weight": up, f"{name}up.bias": up, f"{name}down.weight": down}

    def _inner(self, width: int, gated: bool) -> tuple[Cut, Cut]:
        """What is read of the two matrices around a width: rows of the first one's halves, columns of the second."""
        halves = (self.part(width), self.part(width, width))
        return Cut(0, halves if gated else halves[:1]), Cut(1, halves[:1])


def misfits(config: TransformerConfig, size: int) -> list[str]:
    """What of a network cannot be divided among so many processes, in words."""
    experts = config.experts
    counts = {"attention heads": config.heads}
    if any(not config.has_experts(i) for i in range(config.layers)):
        counts["columns in an MLP"] = config.mlp_width
    if experts is not None:
        counts |= {"columns in an expert": experts.width, "columns in a shared expert": experts.shared_width}
    wrong = [f"{count} {what}" for what, count in counts.items() if count % size]
    if config.kv_heads % size and size % config.kv_heads:
        wrong.append(f"{config.kv_heads} key heads")
    return wrong


def join(config: TransformerConfig, device: torch.device) -> tuple[Partition, torch.device]:
    """Meet the other processes, as torchrun's environment variables say; this one's part, and its device.

    Raises InvalidInput, in every process alike, where this is the only one, where a network cannot be divided among
    so many, and where a machine has fewer GPUs than processes.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        raise InvalidInput(
            "tensor_parallel divides a network among processes, but this is the only one: start several, one for each "
            "GPU, with torchrun --nproc-per-node."
        )
    if ShardedTransformer.leading:
        raise InvalidInput("tensor_parallel is for one network: the other processes already hold the parts of another.")
    if wrong := misfits(config, size):
        fitting = [str(count) for count in range(2, config.heads + 1) if not misfits(config, count)]
        fix = f"start {' or '.join(fitting)} processes" if fitting else "load it without tensor_parallel"
        raise InvalidInput(f"tensor_parallel: {size} processes cannot share {' and '.join(wrong)} evenly: {fix}.")
    if device.type == "cuda":
        place = int(os.environ.get("LOCAL_RANK", "0"))
        if place >= torch.cuda.device_count():
            raise InvalidInput(
                f"tensor_parallel needs a GPU for each process, but this machine has {torch.cuda.device_count()}: "
                "start fewer processes on it."
            )
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        join_processes(device)
        atexit.register(_leave)
    return Partition(rank, size), device


@functools.cache
def _calls() -> Any:  # a ProcessGroup, which not every build of PyTorch has
    """The group through which the main process tells the others what to do; all make it together."""
    return dist.new_group(backend="gloo", timeout=IDLE)


def _leave() -> None:
    """Part from the other processes, with no group left."""
    _calls.cache_clear()
    dist.destroy_process_group()


class Summed(nn.Module):
    """A part of a layer in every process: their outputs are added up."""

    def __init__(self, part: nn.Module):
        """``part``: attention, an MLP or a mixture of experts."""
        super().__init__()
        self.part = part

    def forward(self, x: Float[Tensor, "B L d"], *context: Any, onto: Tensor | None = None) -> Float[Tensor, "B L d"]:
        """The whole output; ``onto``: what it is added to."""
        out: Tensor = self.part(x, *context)
        dist.all_reduce(out)
        return out if onto is None else onto + out


class GatheredHead(Head):
    """A head with the rows of some tokens; the main process gets the logits of all."""

    def __init__(self, config: TransformerConfig, partition: Partition):
        """``config``: the network's. A tied head uses its rows of the embedding, which is whole."""
        begin, end = partition.part(config.vocab_size)
        super().__init__(replace(config, vocab_size=end - begin))
        self.rows, self.partition, self.vocab_size = slice(begin, end), partition, config.vocab_size

    def forward(self, x: Float[Tensor, "*b d"], embedding: Float[Tensor, "V d"]) -> Float[Tensor, "*b v"]:
        """All logits in the main process, in others those of their tokens."""
        own = super().forward(x, embedding[self.rows])
        each = -(-self.vocab_size // self.partition.size)
        own = nn.functional.pad(own, (0, each - own.shape[-1])).contiguous()
        if self.partition.rank != MAIN:
            dist.gather(own, dst=MAIN)
            return own
        parts = [torch.empty_like(own) for _ in range(self.partition.size)]
        dist.gather(own, parts, dst=MAIN)
        return torch.cat(parts, dim=-1)[..., : self.vocab_size]


class SharedCache(KVCache):
    """A KV cache that every process has for its key heads; the main process's tells the others what becomes of it."""

    def __init__(self, network: "ShardedTransformer", number: int, slots: int, length: int):
        """``number``: its name in all processes."""
        weight = network.embedding.tokens.weight
        super().__init__(network.config.kv_shape, slots, length, device=weight.device, dtype=weight.dtype)
        self.network, self.number = network, number

    def clear(self, slot: int) -> None:
        """Forget a sequence, in all processes."""
        self.network.everywhere("clear", {}, self.number, slot)


class ShardedTransformer(Transformer):
    """The network of which this process holds a part. All its methods are for the main process but `follow`.

    On a GPU its passes are not captured in CUDA graphs.
    """

    capturable = False
    leading: ClassVar[bool] = False
    """Whether the other processes wait for calls of a network of this one."""

    def __init__(self, config: TransformerConfig, partition: Partition):
        """``config``: of the whole network. Parameters are to be loaded with `Partition.cuts`, then `connect`."""
        super().__init__(partition.local(config))
        self.head = GatheredHead(config, partition)
        self.partition = partition
        self.caches: weakref.WeakValueDictionary[int, SharedCache] = weakref.WeakValueDictionary()
        self._made = 0
        self._dropped: list[int] = []
        """Numbers of caches that nobody uses any more here; the others are told with the next call."""
        self._lock = threading.RLock()
        self._usable = True

    def connect(self) -> None:
        """Sum over processes what layers add to the residual stream, and let the main process lead."""
        for block in self.blocks:
            for name in ("attention", "mlp"):
                block.set_submodule(name, Summed(block.get_submodule(name)))
        for name, parameter in self.named_parameters():
            if self.partition.rank != MAIN and name.replace(".part.", ".").endswith(WHOLE_BIASES):
                parameter.data.zero_()
        _calls()
        if self.partition.rank == MAIN:
            ShardedTransformer.leading = True
            atexit.register(self.close)

    def states(
        self,
        ids: Int[Tensor, "B L"],
        positions: Int[Tensor, "B L"],
        *,
        valid: Bool[Tensor, "B L"] | None = None,
        segments: Int[Tensor, "B L"] | None = None,
        types: Int[Tensor, "B L"] | None = None,
        sigma: Float[Tensor, " B"] | None = None,
        past: CachedPass | None = None,
    ) -> Float[Tensor, "B L d"]:
        """The last hidden states, as of `Transformer`."""
        given = {"ids": ids, "positions": positions, "valid": valid, "segments": segments, "types": types}
        given["sigma"] = sigma
        if past is None:
            return cast(Tensor, self.everywhere("states", given))
        assert isinstance(past.cache, SharedCache), "make KV caches with network.kv_cache"
        places = {"ids": ids, "slots": past.slots, "positions": past.positions, "ends": past.ends}
        return cast(Tensor, self.everywhere("cached_states", places, past.cache.number, past.seen))

    def logits(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b V"]:
        """Logits of some hidden states."""
        return cast(Tensor, self.everywhere("logits", {"states": states}))

    def kv_cache(self, slots: int, length: int) -> KVCache:
        """Memory for the keys and values of so many sequences, in all processes."""
        with self._lock:
            self._made += 1
            cache: SharedCache = self.everywhere("kv_cache", {}, self._made, slots, length)
            weakref.finalize(cache, self._dropped.append, cache.number).atexit = False
        return cache

    def everywhere(self, name: str, given: Mapping[str, Tensor | None], *numbers: int) -> Any:
        """Run what `_run` has under a name in every process; its result in this one, the main process.

        After an error in the midst of it the processes are out of step, and every later call raises a CoddError.
        """
        with self._lock:
            if not self._usable:
                raise CoddError("the processes of this network are out of step after an error or its end: start again.")
            device = self.embedding.tokens.weight.device
            tensors = {key: x.to(device).contiguous() for key, x in given.items() if x is not None}
            layout = {key: (tuple(x.shape), x.dtype) for key, x in tensors.items()}
            dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
            self._usable = False
            dist.broadcast_object_list([(name, layout, numbers, dropped)], src=MAIN, group=_calls())
            for tensor in tensors.values():
                dist.broadcast(tensor, MAIN)
            result = self._run(name, tensors, numbers)
            self._usable = True
            return result

    def close(self) -> None:
        """Let the other processes go; the network cannot be used any more."""
        with self._lock:
            if self._usable:
                self._usable = ShardedTransformer.leading = False
                dist.broadcast_object_list([None], src=MAIN, group=_calls())

    @torch.no_grad()
    def follow(self) -> None:
        """Compute this process's part of everything that the main process calls, until that closes the network.

        A signal to stop is for the main process to heed: it may have requests to finish. Raises CoddError where that
        has gone without a word.
        """
        with suppress(ValueError):  # of a thread, which gets no signals
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        device = self.embedding.tokens.weight.device
        kept: dict[int, SharedCache] = {}
        while (call := self._next_call()) is not None:
            name, layout, numbers, dropped = call
            for number in dropped:
                kept.pop(number, None)
            tensors = {key: torch.empty(shape, dtype=dtype, device=device) for key, (shape, dtype) in layout.items()}
            for tensor in tensors.values():
                dist.broadcast(tensor, MAIN)
            result = self._run(name, tensors, numbers)
            if isinstance(result, SharedCache):
                kept[result.number] = result

    def _next_call(self) -> tuple[str, dict[str, Any], tuple[Any, ...], list[int]] | None:
        call: list[Any] = [None]
        try:
            dist.broadcast_object_list(call, src=MAIN, group=_calls())
        except RuntimeError as error:  # its socket has closed
            raise CoddError("the main process of this network has ended before the others.") from error
        sent: tuple[str, dict[str, Any], tuple[Any, ...], list[int]] | None = call[0]
        return sent

    def _run(self, name: str, tensors: dict[str, Tensor], numbers: tuple[Any, ...]) -> Any:
        """This process's part of a call."""
        if name == "states":
            return super().states(**tensors)  # type: ignore[arg-type]  # `past` comes by "cached_states"
        if name == "logits":
            return super().logits(tensors["states"])
        number, *sizes = numbers
        if name == "kv_cache":
            self.caches[number] = cache = SharedCache(self, number, *sizes)
            return cache
        if name == "clear":
            return KVCache.clear(self.caches[number], *sizes)
        (seen,) = sizes
        past = CachedPass(self.caches[number], tensors["slots"], tensors["positions"], seen, tensors.get("ends"))
        return super().states(tensors["ids"], past.positions, past=past)
