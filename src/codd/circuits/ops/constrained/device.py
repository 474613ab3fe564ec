"""The messages of `product_chain.ProductMessages` by the kernels of `triton`, in few launches.

For one dense transition and one emission table in float32; `served` says whether a case is one of these.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind
from codd.circuits.ops.constrained import triton as kernels
from codd.circuits.ops.constrained.eager import Rows
from codd.circuits.ops.constrained.product_chain import ProductChain, ProductMessages, drawn, known, leading
from codd.circuits.ops.constrained.tables import Tables
from codd.circuits.ops.constrained.triton import DeviceRows, Messages, Place

_MOST = 2**31
"""Bytes of messages and leaf values of a window from which on only the states that can occur are kept."""


def served(chain: ProductChain, ev: Evidence) -> bool:
    """Whether the kernels serve this case."""
    batch, length = ev.shape
    classes, states = chain.classes, len(chain.initial)
    rows = 3 * classes.num_states + 2 * (classes.num_groups + classes.num_classes)
    simple = not (chain.transition.per_position or chain.transition.low_rank or chain.emission.per_position)
    return simple and ev.sparse is None and 4 * batch * (length + 1) * rows * states <= _MOST


class DeviceMessages(ProductMessages):
    """`ProductMessages` by the GPU kernels, in a few launches. What float32 loses is not checked."""

    def __init__(self, chain: ProductChain, ev: Evidence) -> None:
        """Compute the leaf values; messages are computed when a query needs them."""
        self.chain, self._given = chain, ev
        self.observed, self.tokens = ev.rows(Kind.OBSERVED).clone(), torch.zeros_like(ev.kind, dtype=torch.int64)
        if ev.tokens is not None:
            self.tokens = torch.where(self.observed, ev.tokens, 0)
        self._tables = chain.classes.on_device(ev.device, Tables)
        self._emission = chain.emission.token_rows
        self._positions = torch.arange(self.observed.numel(), dtype=torch.int32, device=ev.device)
        self._potentials = self._latent_potentials()
        self._rows = self._leaf_rows()
        batch, length = ev.shape
        self._messages = Messages(batch, length, self._tables.states, len(chain.initial), ev.device)
        self._messages.begin(chain.initial.detach(), chain.log_start, chain.log_end)
        self._stale = [(length - 1, 0)] * batch
        """From where on messages have to be made again, backward and forward."""
        self._weights_of_all: Tensor | None = None

    def _latent_potentials(self) -> DeviceRows | None:
        given = self._given.latent_log_potentials
        if given is None:
            return None
        given = given.detach().flatten(0, 1).float()
        top = given.amax(-1)
        top = torch.where(top > -torch.inf, top, 0)
        padding = (0, kernels.stride_of(given.shape[-1]) - given.shape[-1])
        return DeviceRows(torch.nn.functional.pad((given - top[:, None]).exp(), padding).contiguous(), top)

    def _leaf_rows(self) -> DeviceRows:
        """Leaf values (B, L, groups, N)."""
        ev, tables, length = self._given, self._tables, self.length
        parts = kernels.leaf_parts(self._emission, ev, tables)
        count = len(tables.leaf_pieces.owner)
        pieces = Place(length * count, 0, count)
        by_class = kernels.sums(parts, pieces, tables.parts, self._positions, length, scale=self._potentials)
        classes = Place(length * tables.classes, 0, tables.classes)
        out = kernels.sums(by_class, classes, tables.members, self._positions, length)
        shape = (*self.observed.shape, tables.groups)
        out = DeviceRows(out.values.view(*shape, -1), out.log.view(shape))
        if ev.tokens is not None:
            places = self.observed.flatten().nonzero()[:, 0]
            for place, token in torch.stack([places, self.tokens.flatten()[places]], 1).tolist():
                self._commit(out, place, token)
        return out

    def _commit(self, leaf: DeviceRows, place: int, token: int) -> None:
        given = (self._emission, self._potentials, self._tables, leaf, self.observed, self.tokens)
        kernels.commit(*given, place, token)

    def commit(self, b: int, t: int, token: int) -> None:
        """Observe ``token`` at position t of sequence b; messages that depend on it are made again later."""
        self._commit(self._rows, b * self.length + t, token)
        backward, forward = self._stale[b]
        self._stale[b] = (max(backward, t), min(forward, t))

    def _made(self, forward: bool = True) -> Messages:
        """The messages, forward ones only if they are asked for."""
        last = self.length - 1
        if any(back >= 0 or (forward and on < last) for back, on in self._stale):
            step, stale = self.chain.transition, [(back, on if forward else last) for back, on in self._stale]
            self._messages.run(step.dense, step.dense_transposed, self._rows, self._tables, stale)
            self._stale = [(-1, last if forward else on) for _, on in self._stale]
        return self._messages

    @property
    def underflow(self) -> Bool[Tensor, " B"] | None:
        """None: not checked."""
        return None

    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of each window, in float64."""
        return self._made(forward=False).log_partition().double()

    def posterior(self, t: int) -> Rows:
        """p(z_t, evidence): one row, whose entries sum to Z."""
        made, states = self._made(), len(self.chain.initial)
        log = (made.forward.log[:, t] + made.backward.log[:, t]).double()
        live = torch.where((log > -torch.inf)[..., None], made.forward.values[:, t] * made.joint.values[:, t], 0)
        top = log.amax(-1)
        weight = (log - torch.where(top > -torch.inf, top, 0)[:, None]).exp()
        values = (live[..., :states] * weight[..., None]).sum(1).float()
        return Rows(np.zeros(1, dtype=np.int64), values[None], top[None], None)

    def marginals(self, positions: Int[Tensor, " T"] | None = None) -> tuple[Float[Tensor, "B T V"], None]:
        """log p(x_t) at some positions (None: all) in the order given; -inf if impossible."""
        made, tables, (batch, length) = self._made(), self._tables, self.observed.shape
        count = length if positions is None else len(positions)
        rows = self._positions
        if positions is not None:
            rows = (torch.arange(batch, device=positions.device)[:, None] * length + positions).flatten().int()
        after = made.place._replace(first=1)
        by_group = kernels.sums(made.forward, made.place, tables.between, rows, length, made.backward, after)
        place, each = Place(count * tables.groups, 0, tables.groups), self._positions[: len(rows)]
        cavity = kernels.sums(by_group, place, tables.holders, each, count, scale=self._scales(rows))
        known_ = (self.observed, self.tokens)
        scores = kernels.token_marginals(self._emission, cavity, tables, self._all_log_weights(), rows, *known_)
        out = scores.view(batch, count, -1).log_softmax(-1)
        return torch.where((made.log_partition() > -torch.inf)[:, None, None], out, -torch.inf), None

    def _scales(self, rows: Int[Tensor, " R"]) -> DeviceRows | None:
        if self._potentials is None:
            return None
        return DeviceRows(*(part[rows.long()].contiguous() for part in self._potentials))

    def _all_log_weights(self) -> Float[Tensor, "R V"]:
        """Log-weights of all tokens at all positions, computed once; 0 where there are no potentials."""
        if self._weights_of_all is None:
            weights = self._given.dense_log_weights(self._emission.shape[0], torch.float32)
            self._weights_of_all = weights.flatten(0, 1)
        return self._weights_of_all

    def paths(self, uniforms: Float[Tensor, "M B L"]) -> Int[Tensor, "M B L"]:
        """Draw latents of the product, each from one uniform number a position."""
        made, shape, width = self._made(forward=False), uniforms.shape, len(self.chain.initial)
        states, latents = (torch.zeros(shape, dtype=torch.int64, device=uniforms.device) for _ in range(2))
        some = slice(0, self._tables.states)
        logs = (made.forward.values[:, 0, some, :width] * made.joint.values[:, 0, some, :width]).double().log()
        logs = logs + (made.forward.log[:, 0, some] + made.backward.log[:, 0, some])[..., None]
        logs = torch.where(logs > -torch.inf, logs, -torch.inf)  # rows of zeros hold anything
        first = drawn(logs.flatten(1), uniforms[..., 0].T).T
        states[..., 0], latents[..., 0] = first // width, first % width
        made.go_on(self.chain.transition.dense, self._rows, self._tables, uniforms.float(), states, latents)
        return states * width + latents

    def scores(self, paths: Int[Tensor, "M B L"]) -> Float[Tensor, "M B L V"]:
        """As `ProductMessages.scores`."""
        batch, length = self.observed.shape
        place = self._positions.long()
        b, t = place // length, place % length
        latents = (paths[:, b, t] % len(self.chain.initial)).flatten()
        emitted = self.chain.emission.log_rows(latents, t.expand(len(paths), -1).flatten())
        rows = emitted.view(-1, batch * length, emitted.shape[-1]) + self._all_log_weights()
        rows += leading(self.chain, paths, b, t).to(rows.dtype)
        return known(rows.view(-1, batch, length, rows.shape[-1]), self.tokens, self.observed)
