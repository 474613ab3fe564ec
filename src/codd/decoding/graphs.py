"""CUDA graphs: a step's hundreds of kernels are launched one by one the first times, and at once from then on.

The network is captured for a batch of one shape; the coupled part of a step for one window length, one number of
tokens and one set of options. All of the window takes part, with a mask of the rows that are open, since a graph's
shapes are fixed. Graphs are kept with the backbone and the circuit that they belong to.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import HMM, Modulated
from codd.coupling import Coupled
from codd.coupling.coupled import Prior
from codd.decoding import samplers
from codd.decoding.options import Options
from codd.decoding.samplers import Noise, Ranking

NETWORKS, STEPS = 32, 16
"""Graphs that are kept. Those of a network share their memory. What was not used for the longest time goes."""
WARMUP = 2
"""Calls of a kind that are made without a graph first: they compile what is to be captured."""

Chain = HMM | Modulated
"""A circuit whose steps can be captured."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Kept(Generic[Arguments, Result]):
    """The graphs of one owner, and how often each kind of call was made without one."""

    def __init__(self, most: int) -> None:
        """Nothing yet, and at most so many."""
        self.most = most
        self.seen: dict[Hashable, int] = {}
        self.graphs: OrderedDict[Hashable, Callable[Arguments, Result]] = OrderedDict()
        self.pool: Any = None  # of memory that they share; PyTorch has no public name for its type

    def find(
        self, key: Hashable, capture: Callable[[], Callable[Arguments, Result]]
    ) -> Callable[Arguments, Result] | None:
        """The graph for a kind of call; None if such calls have been too few, or cannot be captured."""
        if key not in self.graphs:
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] != WARMUP + 1:
                return None
            try:
                self.graphs[key] = capture()
            except RuntimeError:  # something in it waits for the host; it works as well without a graph
                return None
            if len(self.graphs) > self.most:
                forgotten, _ = self.graphs.popitem(last=False)
                del self.seen[forgotten]
        self.graphs.move_to_end(key)
        return self.graphs[key]


_NETWORKS: WeakKeyDictionary[Backbone, Kept[[Tensor, Tensor | None], Tensor]] = WeakKeyDictionary()
_STEPS: WeakKeyDictionary[Chain, Kept[["Given"], Tensor]] = WeakKeyDictionary()


def _capture(function: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Once on a stream of its own, as PyTorch wants it, then for the record."""
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
    """The network's last states. On a GPU they are overwritten by the next call."""
    if ids.device.type != "cuda":
        return backbone.states(ids, valid, fill_padding=False)
    kept = _NETWORKS.setdefault(backbone, Kept(NETWORKS))
    where = tuple(parameter.data_ptr() for parameter in backbone.parameters())  # weights may be moved
    if kept.pool is None:
        kept.pool = torch.cuda.graph_pool_handle()
    graph = kept.find((where, ids.shape, valid is None), lambda: _Network(backbone, ids, valid, kept.pool))
    return backbone.states(ids, valid, fill_padding=False) if graph is None else graph(ids, valid)


class _Network:
    """The network for batches of one shape. Its activations lie where those of other shapes do."""

    def __init__(
        self,
        backbone: Backbone,
        ids: Int[Tensor, "B L"],
        valid: Bool[Tensor, "B L"] | None,
        pool: Any,
    ):
        self.ids, self.valid = ids.clone(), None if valid is None else valid.clone()
        self.graph, self.states = _capture(lambda: backbone.states(self.ids, self.valid, fill_padding=False), pool)

    def __call__(self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L d"]:
        self.ids.copy_(ids)
        if self.valid is not None and valid is not None:
            self.valid.copy_(valid)
        self.graph.replay()
        return self.states


def coupled_step(
    joint: Coupled,
    open_rows: Bool[Tensor, " L"],
    noise: Noise,
    count: int,
    options: Options,
    *,
    dense: bool = False,
) -> Ranking:
    """A latent or any-order step over a whole window, of which some rows are open."""
    if options.sampler == "latent":
        return samplers.latent(joint, None, count, options, noise, open_rows)
    everything = torch.arange(len(open_rows), device=open_rows.device)
    return samplers.any_order(joint, everything, count, options, noise, open_rows, dense=dense)


class Given(NamedTuple):
    """What a coupled step is about: a window on the host, and the logits of its masked places on the device."""

    tokens: Int[Tensor, " L"]
    masked: Bool[Tensor, " L"]
    places: Int[Tensor, " R"]
    logits: Float[Tensor, "R V"]
    noise: Noise
    features: Float[Tensor, "L d"] | None = None
    """The network's last states in the window, on the device, if the circuit listens to them."""
    hidden: Bool[Tensor, " L"] | None = None
    """What was masked when the network saw the window; more than what is masked now, once tokens are known."""

    def packed(self) -> Float[Tensor, "rows L"]:
        """What crosses to the device, in one go."""
        rows = [self.tokens, self.masked, *self.noise, *(() if self.hidden is None else (self.hidden,))]
        return torch.stack([row.double() for row in rows])

    def after(self, places: Int[Tensor, " k"], tokens: Int[Tensor, " k"]) -> "Given":
        """What is left once some of the masked places are known."""
        left = ~torch.isin(self.places, places)
        return self._replace(
            tokens=self.tokens.scatter(0, places, tokens),
            masked=self.masked.scatter(0, places, False),
            places=self.places[left],
            logits=self.logits[left.nonzero()[:, 0].to(self.logits.device)],
        )

    def joint(self, circuit: Prior | Modulated, temperature: float) -> Coupled:
        """The product, on the logits' device."""
        device, dense = self.logits.device, self.logits
        if len(self.places) != len(self.tokens):
            dense = self.logits.new_zeros(len(self.tokens), self.logits.shape[-1])
            dense[self.places.to(device)] = self.logits
        tokens, masked = self.tokens[None].to(device), self.masked[None].to(device)
        return Coupled(
            circuit,
            logits=dense[None],
            tokens=tokens,
            masked=masked,
            temperature=temperature,
            features=None if self.features is None else self.features[None],
            hidden=None if self.hidden is None else self.hidden[None].to(device),
        )


def temperature_of(options: Options) -> float:
    """What the logits are divided by before the product: the paper tempers after it."""
    return 1.0 if options.tempering == "paper" else options.circuit_temperature


def step_on_device(circuit: Chain, given: Given, count: int, options: Options) -> Float[Tensor, "4 more"]:
    """A coupled step on a GPU, packed, its rows being places of the window; captured if such steps come again."""
    # What has no part in the sampler's work must not make another graph.
    same = options.changed(
        gen_length=0, block_length=1, steps=None, ban=(), hooks=(), stop=True, seed=0, cfg_scale=0.0, activation=None
    )
    heard = None if given.features is None else given.features.dtype
    key = (len(given.tokens), given.logits.shape[-1], given.logits.dtype, heard, count, same)
    kept = _STEPS.setdefault(circuit, Kept(STEPS))
    graph = kept.find(key, lambda: _Step(circuit, given, count, options))
    return eager_step(circuit, given, count, options).packed() if graph is None else graph(given)


def eager_step(circuit: Chain, given: Given, count: int, options: Options, *, dense: bool = False) -> Ranking:
    """The same without a graph; ``dense``: with all tokens as candidates."""
    joint = given.joint(circuit, temperature_of(options))
    noise = given.noise.to(given.logits.device)
    return coupled_step(joint, joint.masked[0], noise, count, options, dense=dense)


class _Step:
    """The coupled part of a step for windows of one length."""

    def __init__(self, circuit: Chain, given: Given, count: int, options: Options):
        device, vocab = given.logits.device, given.logits.shape[-1]
        # What an earlier step left at observed places does no harm: it is not looked at.
        self.logits = given.logits.new_zeros(1, len(given.tokens), vocab)
        self.features = None if given.features is None else given.features[None].clone()
        self.packed = given.packed().to(device)

        def step() -> Float[Tensor, "4 more"]:
            tokens, masked, hidden = self.packed[:1].long(), self.packed[1:2].bool(), self.packed[5:].bool()
            joint = Coupled(
                circuit,
                logits=self.logits,
                tokens=tokens,
                masked=masked,
                temperature=temperature_of(options),
                features=self.features,
                hidden=None if self.features is None else hidden,
            )
            return coupled_step(joint, masked[0], Noise(*self.packed[2:5].float()), count, options).packed()

        self.graph, self.found = _capture(step)

    def __call__(self, given: Given) -> Float[Tensor, "4 more"]:
        self.logits[0].index_copy_(0, given.places.to(self.logits.device, non_blocking=True), given.logits)
        self.packed.copy_(given.packed(), non_blocking=True)
        if self.features is not None and given.features is not None:
            self.features[0].copy_(given.features)
        self.graph.replay()
        return self.found.clone()  # the next sequence uses the same graph
