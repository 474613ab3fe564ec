"""CUDA graphs: hundreds of kernels are launched one by one the first times, and by one call from then on.

The network is captured for a batch of one shape and the memory of a KV cache, if it has one; the coupled part of a step
(`codd.decoding.samplers`) for one window length, number of tokens and set of options. Graphs are kept with the
backbone or circuit that they belong to.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.backbones.kv_cache import CachedPass
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import Options
from codd.decoding.samplers import Noise, Ranking, WindowInputs

NETWORK_GRAPHS, STEP_GRAPHS = 32, 16
"""Graphs kept for one network (they share their memory) and for one circuit; the least recently used one goes."""
WARMUP = 2
"""Calls of a kind that are made without a graph first: they compile what is to be captured."""

SAMPLER_OPTIONS = (
    "sampler",
    "remasking",
    "temperature",
    "top_p",
    "top_k",
    "circuit_temperature",
    "tempering",
    "threshold",
    "entropy_budget",
)
"""The options that a captured step depends on."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class GraphCache(Generic[Arguments, Result]):
    """The graphs of one owner by kind of call, and how often each kind was called without one."""

    def __init__(self, capacity: int) -> None:
        """Keep at most ``capacity`` graphs."""
        self.capacity = capacity
        self.calls: dict[Hashable, int] = {}
        self.graphs: OrderedDict[Hashable, Callable[Arguments, Result]] = OrderedDict()

    @cached_property
    def pool(self) -> Any:  # PyTorch has no public name for its type
        """The memory pool that all captured graphs share."""
        return torch.cuda.graph_pool_handle()

    def find(
        self, key: Hashable, capture: Callable[[], Callable[Arguments, Result]]
    ) -> Callable[Arguments, Result] | None:
        """The graph for a kind of call; None if such calls were too few yet, or cannot be captured."""
        if key not in self.graphs:
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] != WARMUP + 1:
                return None
            try:
                self.graphs[key] = capture()
            except RuntimeError:  # something in it waits for the host; it works as well without a graph
                return None
            if len(self.graphs) > self.capacity:
                evicted, _ = self.graphs.popitem(last=False)
                del self.calls[evicted]
        self.graphs.move_to_end(key)
        return self.graphs[key]


_NETWORKS: WeakKeyDictionary[Backbone, GraphCache[[Tensor, Tensor | None], Tensor]] = WeakKeyDictionary()
_PASSES: WeakKeyDictionary[Backbone, GraphCache[[Tensor, CachedPass], Tensor]] = WeakKeyDictionary()
_WEIGHTS: "WeakKeyDictionary[Backbone, _Weights]" = WeakKeyDictionary()
_STEPS: WeakKeyDictionary[Any, GraphCache[..., Tensor]] = WeakKeyDictionary()


def graphs_of(circuit: object) -> GraphCache[..., Tensor]:
    """The captured steps of a circuit."""
    return _STEPS.setdefault(circuit, GraphCache(STEP_GRAPHS))


def capture(function: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run a function on a side stream, as PyTorch requires, then capture it; replays overwrite the output."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # What other threads of the program do meanwhile is no part of it, and must not spoil it.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return graph, result


def network_states(
    backbone: Backbone, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None
) -> Float[Tensor, "B L d"]:
    """The network's last hidden states on a GPU, from ids anywhere; the next call overwrites them."""
    cache = _NETWORKS.setdefault(backbone, GraphCache(NETWORK_GRAPHS))
    key = (_addresses(backbone), ids.shape, valid is None)
    graph = cache.find(key, lambda: _CapturedNetwork(backbone, ids, valid, cache.pool))
    return backbone.states(ids, valid) if graph is None else graph(ids, valid)


def cached_states(backbone: Backbone, ids: Int[Tensor, "B R"], past: CachedPass) -> Float[Tensor, "B R d"]:
    """`Backbone.cached_states` on a GPU, ids and places being anywhere; the next call overwrites the states."""
    cache = _PASSES.setdefault(backbone, GraphCache(NETWORK_GRAPHS))
    memory = past.cache.memory
    key = (_addresses(backbone), memory.data_ptr(), memory.shape, ids.shape, past.seen, past.ends is None)
    graph = cache.find(key, lambda: _CapturedPass(backbone, ids, past, cache.pool))
    if graph is not None:
        return graph(ids, past)
    return backbone.cached_states(ids.to(backbone.device, non_blocking=True), past.to(backbone.device))


def _addresses(backbone: Backbone) -> tuple[int, ...]:
    """Where the weights of a network are."""
    weights = _WEIGHTS.get(backbone)
    if weights is None or weights.replaced():
        weights = _WEIGHTS[backbone] = _Weights(backbone)
    return weights.addresses()


class _Weights:
    """Where a network's modules keep its weights, which may be moved: looked at before every pass, by loops in C."""

    def __init__(self, backbone: Backbone):
        tables = [table for module in backbone.modules() for table in (module._modules, module._parameters)]
        places = [(table, name) for table in tables for name, held in table.items() if held is not None]
        self.tables, self.names = zip(*places, strict=True)
        self.held = [table[name] for table, name in places]
        self.weights = [held for held in self.held if isinstance(held, Tensor)]

    def replaced(self) -> bool:
        """Whether there are other modules or parameters now."""
        return not all(map(operator.is_, map(dict.get, self.tables, self.names), self.held))

    def addresses(self) -> tuple[int, ...]:
        """The addresses of all weights: a captured graph is valid while they stay the same."""
        return tuple(map(Tensor.data_ptr, self.weights))


class _CapturedNetwork:
    """The network captured for batches of one shape; activations of all shapes share their memory."""

    def __init__(self, backbone: Backbone, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None, pool: Any):
        self.ids = ids.to(backbone.device, copy=True)
        self.valid = None if valid is None else valid.to(backbone.device, copy=True)
        self.graph, self.states = capture(lambda: backbone.states(self.ids, self.valid), pool)

    def __call__(self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L d"]:
        self.ids.copy_(ids, non_blocking=True)
        if self.valid is not None and valid is not None:
            self.valid.copy_(valid, non_blocking=True)
        self.graph.replay()
        return self.states


class _CapturedPass:
    """A pass with a KV cache, captured for one shape and one memory, which it does not keep from being given back."""

    def __init__(self, backbone: Backbone, ids: Int[Tensor, "B R"], past: CachedPass, pool: Any):
        given = (ids, *past.places)
        self.inputs = _flat(given).to(backbone.device, copy=True)
        parts = torch.split(self.inputs, [each.numel() for each in given])
        ids, *places = (part.view(each.shape) for part, each in zip(parts, given, strict=True))
        own = past.at(*places)
        self.graph, self.states = capture(lambda: backbone.cached_states(ids, own), pool)

    def __call__(self, ids: Int[Tensor, "B R"], past: CachedPass) -> Float[Tensor, "B R d"]:
        self.inputs.copy_(_flat((ids, *past.places)), non_blocking=True)
        self.graph.replay()
        return self.states


def _flat(tensors: Sequence[Tensor]) -> Int[Tensor, " n"]:
    """One after the other, so that they cross to a device in one transfer."""
    return torch.cat([each.flatten() for each in tensors])


def sample_captured(
    sample: Callable[[ProbabilisticCircuit, WindowInputs, int, Options], Ranking],
    circuit: ProbabilisticCircuit,
    window: WindowInputs,
    count: int,
    options: Options,
) -> Float[Tensor, "4 more"]:
    """What ``sample`` gives, packed; from a CUDA graph, once steps of this kind have come often enough."""
    features = window.features
    kind = (*window.logits.shape, window.logits.dtype, None if features is None else features.dtype)
    key = (*kind, window.due is None, count, *(getattr(options, name) for name in SAMPLER_OPTIONS))
    graph = graphs_of(circuit).find(
        key, lambda: _CapturedStep(window, lambda own: sample(circuit, own, count, options).packed())
    )
    return sample(circuit, window, count, options).packed() if graph is None else graph(window)


class _CapturedStep:
    """The coupled part of a step, captured for windows of one length and one number of tokens."""

    def __init__(self, window: WindowInputs, sample: Callable[[WindowInputs], Float[Tensor, "4 more"]]):
        self.logits, self.features = window.logits.clone(), None if window.features is None else window.features.clone()
        self.packed = _host_part(window).to(window.logits.device)

        def step() -> Float[Tensor, "4 more"]:
            tokens, masked, noise = self.packed[0].long(), self.packed[1].bool(), Noise(*self.packed[2:5].float())
            due = None if window.due is None else self.packed[5].bool()
            return sample(WindowInputs(tokens, masked, self.logits, noise, self.features, due=due))

        self.graph, self.output = capture(step)

    def __call__(self, window: WindowInputs) -> Float[Tensor, "4 more"]:
        self.logits.copy_(window.logits)
        self.packed.copy_(_host_part(window), non_blocking=True)
        if self.features is not None and window.features is not None:
            self.features.copy_(window.features)
        self.graph.replay()
        return self.output.clone()  # the next sequence replays the same graph


def _host_part(window: WindowInputs) -> Float[Tensor, "R L"]:
    """Tokens, masks, noise and what is due in one tensor, so that they cross to the device in one transfer."""
    due = () if window.due is None else (window.due,)
    return torch.stack([row.double() for row in (window.tokens, window.masked, *window.noise, *due)])
