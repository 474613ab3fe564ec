"""The chain over (latent, automaton state) by the kernels of `triton`: what `passes.Passes` answers, in few launches.

For one dense transition and one emission table in float32; `served` says whether a case is one of these.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind
from codd.circuits.ops.constrained import triton as kernels
from codd.circuits.ops.constrained.eager import Rows
from codd.circuits.ops.constrained.passes import Chain, Paths, WindowPasses, drawn, known, leading
from codd.circuits.ops.constrained.tables import Tables
from codd.circuits.ops.constrained.triton import DeviceRows, Messages, Place

_MOST = 2**31
"""Bytes of messages and leaf values of a window from which on only the states that can occur are kept."""


def served(chain: Chain, ev: Evidence) -> bool:
    """Whether the kernels serve this case."""
    batch, length = ev.shape
    structure, states = chain.structure, len(chain.initial)
    rows = 3 * structure.num_states + 2 * (structure.num_groups + structure.num_classes)
    simple = not (chain.transition.per_position or chain.transition.low_rank or chain.emission.per_position)
    return simple and ev.sparse is None and 4 * batch * (length + 1) * rows * states <= _MOST


class DevicePasses(WindowPasses):
    """`WindowPasses` by the GPU kernels, in a few launches. Nobody looks for what float32 loses."""

    faint: Bool[Tensor, " B"] | None = None

    def __init__(self, chain: Chain, ev: Evidence) -> None:
        """Compute the leaf values; messages are computed when a query needs them."""
        self.chain, self._given = chain, ev
        self.observed, self.tokens = ev.rows(Kind.OBSERVED).clone(), torch.zeros_like(ev.kind, dtype=torch.int64)
        if ev.tokens is not None:
            self.tokens = torch.where(self.observed, ev.tokens, 0)
        self._tables = chain.structure.on_device(ev.device, Tables)
        self._emission = chain.emission.token_rows
        self._positions = torch.arange(self.observed.numel(), dtype=torch.int32, device=ev.device)
        self._potentials = self._latent_potentials()
        self._leaf = self._leaves()
        batch, length = ev.shape
        self._messages = Messages(batch, length, self._tables.states, len(chain.initial), ev.device)
        self._messages.begin(chain.initial.detach(), chain.log_start, chain.log_end)
        self._stale = [(length - 1, 0)] * batch
        """From where on messages have to be made again, backward and forward."""
        self._log_weights: Tensor | None = None

    def _latent_potentials(self) -> DeviceRows | None:
        given = self._given.latent_log_potentials
        if given is None:
            return None
        given = given.detach().flatten(0, 1).float()
        top = given.amax(-1)
        top = torch.where(top > -torch.inf, top, 0)
        padding = (0, kernels.stride_of(given.shape[-1]) - given.shape[-1])
        return DeviceRows(torch.nn.functional.pad((given - top[:, None]).exp(), padding).contiguous(), top)

    def _leaves(self) -> DeviceRows:
        """Leaf values (B, L, groups, N)."""
        ev, tables, length = self._given, self._tables, self.length
        parts = kernels.leaf_parts(self._emission, ev, tables)
        pieces = len(tables.leaf_pieces.owner)
        place = Place(length * pieces, 0, pieces)
        by_class = kernels.sums(parts, place, tables.parts, self._positions, length, scale=self._potentials)
        place = Place(length * tables.classes, 0, tables.classes)
        out = kernels.sums(by_class, place, tables.members, self._positions, length)
        shape = (*self.observed.shape, tables.groups)
        out = DeviceRows(out.values.view(*shape, -1), out.log.view(shape))
        if ev.tokens is not None:
            for number, token in self._observed_tokens():
                self._commit(out, number, token)
        return out

    def _observed_tokens(self) -> list[tuple[int, int]]:
        """The numbers of observed positions and their tokens."""
        places = self.observed.flatten().nonzero()[:, 0]
        both = torch.stack([places, self.tokens.flatten()[places]], 1).tolist()
        return [(place, token) for place, token in both]

    def _commit(self, leaf: DeviceRows, place: int, token: int) -> None:
        given = (self._emission, self._potentials, self._tables, leaf, self.observed, self.tokens)
        kernels.commit(*given, place, token)

    def commit(self, b: int, t: int, token: int) -> None:
        """Observe ``token`` at position t of sequence b; messages that depend on it are made again later."""
        self._commit(self._leaf, b * self.length + t, token)
        backward, forward = self._stale[b]
        self._stale[b] = (max(backward, t), min(forward, t))

    def _made(self, forward: bool = True) -> Messages:
        """The messages, forward ones only if they are asked for."""
        last = self.length - 1
        if any(back >= 0 or (forward and on < last) for back, on in self._stale):
            step, stale = self.chain.transition, [(back, on if forward else last) for back, on in self._stale]
            self._messages.run(step.dense, step.dense_transposed, self._leaf, self._tables, stale)
            self._stale = [(-1, last if forward else on) for _, on in self._stale]
        return self._messages

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
        scores = kernels.token_marginals(self._emission, cavity, tables, self.log_weights, rows, *known_)
        out = scores.view(batch, count, -1).log_softmax(-1)
        return torch.where((made.log_partition() > -torch.inf)[:, None, None], out, -torch.inf), None

    def _scales(self, rows: Int[Tensor, " R"]) -> DeviceRows | None:
        if self._potentials is None:
            return None
        return DeviceRows(*(part[rows.long()].contiguous() for part in self._potentials))

    @property
    def log_weights(self) -> Float[Tensor, "B L V"]:
        """Log-weights of all tokens, computed once; 0 where there are no potentials."""
        if self._log_weights is None:
            ev, vocab = self._given, self._emission.shape[0]
            self._log_weights = torch.zeros(*ev.shape, vocab, device=ev.device)
            if ev.potentials is not None:
                dense = ev.rows(Kind.DENSE)[..., None]
                self._log_weights = torch.where(dense, ev.log_weights(torch.float32), self._log_weights)
        return self._log_weights

    def paths(self, uniforms: Float[Tensor, "M B L"]) -> Paths:
        """Draw latents and automaton states together, each from one uniform number a position."""
        made, shape, states = self._made(forward=False), uniforms.shape, len(self.chain.initial)
        paths = Paths(*(torch.zeros(shape, dtype=torch.int64, device=uniforms.device) for _ in range(2)))
        some = slice(0, self._tables.states)
        logs = (made.forward.values[:, 0, some, :states] * made.joint.values[:, 0, some, :states]).double().log()
        logs = logs + (made.forward.log[:, 0, some] + made.backward.log[:, 0, some])[..., None]
        logs = torch.where(logs > -torch.inf, logs, -torch.inf)  # rows of zeros hold anything
        first = drawn(logs.flatten(1), uniforms[..., 0].T).T
        paths.states[..., 0], paths.latents[..., 0] = first // states, first % states
        made.go_on(self.chain.transition.dense, self._leaf, self._tables, uniforms.float(), paths.states, paths.latents)
        return paths

    def scores(self, paths: Paths) -> Float[Tensor, "M B L V"]:
        """As `Passes.scores`."""
        batch, length = self.observed.shape
        place = self._positions.long()
        b, t = place // length, place % length
        emitted = self.chain.emission.rows(paths.latents[:, b, t].flatten(), place).log()
        rows = emitted.view(-1, batch * length, emitted.shape[-1]) + self.log_weights.flatten(0, 1)
        rows += leading(self.chain, paths, b, t).to(rows.dtype)
        return known(rows.view(-1, batch, length, rows.shape[-1]), self.tokens, self.observed)
