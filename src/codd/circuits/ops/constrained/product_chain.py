"""The chain over (latent, automaton state) of B windows: leaf values by group, messages, and what comes of them.

    a_t(z, s)   forward: evidence before t, with z_t = z and s_t = s
    c_t(z, s')  backward: evidence after t, given z_t = z and s_{t+1} = s'
    b_t(z, s)   leaf values of t times c_t, given z_t = z and s_t = s

Written once, for ordinary numbers (`eager.Linear`) and for logarithms (`reference.LogSpace`).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, log_softmax
from codd.circuits.ops.constrained.eager import Linear, Rows, beside, numbered, stacked, unstacked
from codd.circuits.ops.constrained.reachable_states import Ids, ReachableStates, TokenClasses
from codd.circuits.parameters import Emission, Transition
from codd.circuits.underflow import either
from codd.errors import InvalidEvidence

_BLOCK = 2**22
"""Numbers that are held at a time, where positions or samples can be taken together."""


class ProductChain(NamedTuple):
    """What the windows share: the circuit, and the automaton with log-weights of its states at both ends."""

    initial: Float[Tensor, " N"]
    transition: Transition
    emission: Emission
    classes: TokenClasses
    log_start: Float[Tensor, " S"]
    log_end: Float[Tensor, " S"]


class ProductMessages:
    """The messages of B windows, computed when a query needs them; tokens may be added.

    Any circuit, any evidence: the host works out which states can occur, and only these have messages. A latent of the
    product is a number: ``s * N + z`` for the automaton's state s before the position and the circuit's state z.
    """

    tokens: Int[Tensor, "B L"]
    observed: Bool[Tensor, "B L"]

    def __init__(self, chain: ProductChain, ev: Evidence, algebra: Linear) -> None:
        """Compute the leaf values; InvalidEvidence if the potentials hold NaN or +inf (checked on a CPU only)."""
        self.chain, self._given, self.algebra = chain, ev, algebra
        self.steps = chain.transition.gated(ev.step_log_gates)
        self.observed = ev.rows(Kind.OBSERVED).cpu()
        tokens = torch.zeros(ev.shape, dtype=torch.int64) if ev.tokens is None else ev.tokens.cpu()
        self.tokens = torch.where(self.observed, tokens, 0)
        self.reachable = self._reachable()
        self._row, self._batch = self.reachable.hidden
        self.log_weights = self._log_weights()
        """Log-weights of all tokens at the positions not observed at first, in the order of ``reachable.hidden``."""
        self._atoms = self.reachable.atoms
        self._leaf = self._leaves()
        self._meeting = 0
        self._root: Rows | None = None
        self._forward: list[Rows | None] = [None] * ev.shape[1]
        self._backward: list[Rows | None] = [None] * ev.shape[1]
        self._joint: list[Rows | None] = [None] * ev.shape[1]

    @property
    def length(self) -> int:
        """L, the number of positions."""
        return self.observed.shape[1]

    def _reachable(self) -> ReachableStates:
        start, end = (w.cpu().numpy() > -np.inf for w in (self.chain.log_start, self.chain.log_end))
        return ReachableStates(self.chain.classes, start, end, self.tokens, self.observed)

    # Leaf values.

    def _log_weights(self) -> Float[Tensor, "R V"]:
        at = tuple(torch.from_numpy(x).to(self._given.device) for x in (self._batch, self._row))
        out = self._given.dense_log_weights(self.chain.emission.stored.shape[-1], self.algebra.dtype, (at[0], at[1]))
        if out.device.type == "cpu" and not bool((out < torch.inf).all()):
            wrong = int((~(out < torch.inf)).any(-1).nonzero()[0])
            raise InvalidEvidence(
                f"the potentials of sequence {self._batch[wrong]}, position {self._row[wrong]} hold NaN or +inf; "
                "log-potentials must be finite or -inf"
            )
        return out

    def _by_position(self) -> dict[int, slice]:
        """The rows of the log-weights that belong to each position."""
        bounds = np.searchsorted(self._row, np.arange(self.length + 1))
        return {t: slice(bounds[t], bounds[t + 1]) for t in range(self.length) if bounds[t] < bounds[t + 1]}

    def _leaves(self) -> list[Rows]:
        """Leaf values by group at every position."""
        atoms, rows, emission = self._atoms, self._by_position(), self.chain.emission
        if emission.per_position:
            tables = [(emission.at(t), here) for t, here in rows.items()]
        else:
            tables = [(emission, slice(0, len(self._row)))] if rows else []
        parts = []
        for table, here in tables:
            columns = self.chain.classes.sorted_columns(table)
            weights = self.log_weights[here][:, columns.order]
            if columns.silent is not None:
                weights.masked_fill_(columns.silent, -torch.inf)
            parts.append(self.algebra.leaf(table, columns, weights, atoms))
        small = len(np.unique(atoms.group)) * len(self._row) * len(self.chain.initial) <= _BLOCK
        if parts:
            by_atom = beside(np.arange(atoms.count), parts)
            if self._given.latent_log_potentials is not None:
                at = (torch.from_numpy(x).to(self._given.device) for x in (self._batch, self._row))
                by_atom = self.algebra.times(by_atom, self._given.latent_log_potentials[tuple(at)])
            if small:  # all positions at once
                by_group = self.algebra.sums(atoms.group, by_atom, atoms.atom)

        def hidden(here: slice, groups: Ids) -> Rows:
            if small:
                return by_group.at(here)
            row, atom = atoms.inside(groups)
            return self.algebra.sums(groups[row], by_atom.at(here), atom)

        out = []
        for t in range(self.length):
            groups, here = self.reachable.groups(t), rows.get(t, slice(0, 0))
            if here.stop - here.start == len(self.observed):
                out.append(hidden(here, groups))
                continue
            each = iter(range(here.start, here.stop))
            pieces = [
                self._observed_leaf(b, t, groups) if known else hidden(slice(r := next(each), r + 1), groups)
                for b, known in enumerate(self.observed[:, t].tolist())
            ]
            ids = np.unique(np.concatenate([piece.ids for piece in pieces]))
            out.append(beside(ids, pieces))
        return out

    def _observed_leaf(self, b: int, t: int, groups: Ids) -> Rows:
        """The emission of the observed token, in all live groups that lead it."""
        token = int(self.tokens[b, t])
        classes, table = self.chain.classes, self.chain.emission.at(t)
        column = table.stored.detach()[:, token]
        column = column.float().log() if table.compact else column
        if self._given.latent_log_potentials is not None:
            column = column + self._given.latent_log_potentials[b, t].to(column.dtype)
        ids = np.intersect1d(classes.groups_of(int(classes.classes[token])), groups)
        return self.algebra.from_logs(ids, column.expand(len(ids), 1, -1))

    # Messages.

    def forward(self, t: int) -> Rows:
        """a_t: a row for each live state before position t."""
        made = self._forward
        if made[0] is None:
            made[0] = self._end(self.reachable.first, self.chain.log_start, self.chain.initial.detach().double())
        known = next(at for at in range(t, -1, -1) if made[at] is not None)
        made[known + 1 : t + 1] = [after for _, after in self._swept(made[known], range(known, t), reverse=False)]
        return cast(Rows, made[t])

    def _end(self, states: Ids, log_weights: Float[Tensor, " S"], latents: Float[Tensor, " N"]) -> Rows:
        """The message at one end of the window, from log-weights of the automaton's states and of latents."""
        logs = log_weights[torch.from_numpy(states).to(log_weights.device)][:, None, None] + latents
        return self.algebra.from_logs(states, logs.expand(-1, len(self.observed), -1))

    def _swept(self, rows: Rows | None, positions: range, reverse: bool) -> list[tuple[Rows, Rows]]:
        assert rows is not None
        pairs = self.reachable.pairs
        return self.algebra.sweep(self.steps, rows, positions, pairs, self._leaf, reverse) if positions else []

    def backward(self, t: int) -> Rows:
        """c_t: a row for each live state after position t."""
        made, last = self._backward, self.length - 1
        if made[last] is None:
            nothing = torch.zeros_like(self.chain.initial, dtype=torch.float64)
            made[last] = self._end(self.reachable.last, self.chain.log_end, nothing)
        known = next(at for at in range(t, self.length) if made[at] is not None)
        places = range(known, t, -1)
        for at, swept in zip(places, self._swept(made[known], places, reverse=True), strict=True):
            self._joint[at], made[at - 1] = swept
        return cast(Rows, made[t])

    def joint(self, t: int) -> Rows:
        """b_t: a row for each live state before position t."""
        rows = self._joint[t]
        if rows is None:
            pairs = self.reachable.pairs[t]
            rows = self.algebra.sums(pairs.source, self.backward(t), pairs.target, self._leaf[t], pairs.group)
            self._joint[t] = rows
        return rows

    def commit(self, b: int, t: int, token: int) -> None:
        """Observe ``token`` at position t of sequence b, which was not observed before.

        Messages that do not depend on it, and their states, stay.
        """
        self.tokens[b, t], self.observed[b, t] = token, True
        self.reachable = self._reachable()
        piece = self._observed_leaf(b, t, self.reachable.groups(t))
        old, batch = self._leaf[t], len(self.observed)
        sides = [old.at(slice(0, b)), piece, old.at(slice(b + 1, batch))] if batch > 1 else [piece]
        self._leaf[t] = beside(old.ids if batch > 1 else piece.ids, sides)
        self._meeting, self._root = t, None
        self._forward[t + 1 :] = [None] * (self.length - t - 1)
        self._backward[:t] = [None] * t
        self._joint[: t + 1] = [None] * (t + 1)

    # What comes of them.

    def posterior(self, t: int) -> Rows:
        """p(z_t, evidence), a_t times b_t summed over states: one row, whose entries sum to Z."""
        b = self.joint(t)
        return self.algebra.sums(np.zeros_like(b.ids), self.forward(t), b.ids, b, b.ids)

    def onward(self, entered: Mapping[int, Rows], exits: Ids) -> dict[int, Rows]:
        """Forward messages at some states, by position (L: after the last), of what enters the chain as stated.

        A message goes no further than these states; at the end all states count.
        """
        found: dict[int, Rows] = {}
        inside: list[Rows] = []
        for t in range(min(entered), self.length):
            parts = [*inside, entered[t]] if t in entered else inside
            if not parts:
                continue
            rows = numbered(parts, np.argsort(np.concatenate([part.ids for part in parts])))
            pairs = self.reachable.pairs[t]
            pairs = pairs.select(np.isin(pairs.source, rows.ids))
            rows = self.algebra.sums(pairs.target, rows, pairs.source, self._leaf[t], pairs.group)
            last = t == self.length - 1
            rows = rows if last else self.algebra.step(self.steps, t, rows, reverse=False)
            out = np.ones(len(rows.ids), dtype=bool) if last else np.isin(rows.ids, exits)
            found[t + 1] = numbered([rows], np.flatnonzero(out))
            inside = [] if out.all() else [numbered([rows], np.flatnonzero(~out))]
        return {t: rows for t, rows in found.items() if len(rows.ids)}

    def log_masses(self, t: int, forward: Rows) -> Float[Tensor, "n B"]:
        """log p(what the forward messages are of, evidence), for each of their states."""
        back = self.joint(t) if t < self.length else self.backward(t - 1)
        return self.algebra.sums(forward.ids, forward, forward.ids, back, forward.ids).logs().logsumexp(-1)

    def _partition(self) -> Rows:
        """Z as one row, from messages that meet where the last token was committed: these have to be made anyway."""
        if self._root is None:
            self._root = self.posterior(self._meeting)
        return self._root

    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of each window; -inf if its evidence or the automaton excludes every text."""
        return self._partition().log_total()

    @property
    def underflow(self) -> Bool[Tensor, " B"] | None:
        """The sequences in which log Z may be wrong; None: not checked."""
        return self._partition().underflow

    def marginals(self, positions: Int[Tensor, " T"] | None = None) -> tuple[Float[Tensor, "B T V"], Tensor | None]:
        """log p(x_t) at some positions (None: all), in the order given, and where it underflows; -inf if impossible."""
        wanted = list(range(self.length)) if positions is None else positions.tolist()
        vocab, emission, device = self.chain.emission.stored.shape[-1], self.chain.emission, self._given.device
        out = torch.full((len(self.observed), len(wanted), vocab), -torch.inf, dtype=self.algebra.dtype, device=device)
        place, underflow = {t: i for i, t in enumerate(wanted)}, None
        for index, b, t, whole, lost in self._by_atom(list(place)):
            underflow = either(underflow, lost)
            columns = self.chain.classes.sorted_columns(table := emission.at(int(t[0])))
            log_p = torch.empty(len(index), vocab, dtype=self.algebra.dtype, device=device)
            log_p[:, columns.order] = self.algebra.tokens(table, columns, whole, self._atoms)
            places = torch.tensor([place[at] for at in t.tolist()], device=device)
            out[b, places] = log_softmax(log_p + self.log_weights[index])
        out = known(out, self.tokens[:, wanted], self.observed[:, wanted])
        return out.masked_fill_((self.log_partition() == -torch.inf)[:, None, None], -torch.inf), underflow

    def list_candidates(self, ids: Int[Tensor, "B L K"]) -> None:
        """Prepare `candidate_marginals` of these tokens."""
        b, t = (torch.from_numpy(x) for x in (self._batch, self._row))
        rows, listed = self.chain.emission.columns, ids[b, t]
        self._candidates = ids
        self._columns = rows[t[:, None], listed] if self.chain.emission.per_position else rows[listed]
        self._weights = self.log_weights.gather(-1, listed)
        self._atom_of = torch.from_numpy(self._atoms.of_class[self.chain.classes.classes])[listed]

    def candidate_marginals(self) -> tuple[Float[Tensor, "B L K"], Tensor | None]:
        """log p(x_t) of the listed tokens at all positions, and where it underflows; -inf if impossible."""
        ids, underflow, total = self._candidates, None, self.log_partition()
        out = torch.full(ids.shape, -torch.inf, dtype=self.algebra.dtype)
        for index, b, t, whole, lost in self._by_atom(list(range(self.length))):
            underflow = either(underflow, lost)
            log = self.algebra.listed(self._columns[index], whole, self._atom_of[index])
            out[b, t] = (log + self._weights[index] - total[b][:, None]).to(out.dtype)
        certain = torch.where(ids == self.tokens[..., None], 0.0, -torch.inf).to(out.dtype)
        out = torch.where(self.observed[..., None], certain, out)
        return out.masked_fill_((total == -torch.inf)[:, None, None], -torch.inf), underflow

    def _by_atom(self, positions: list[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, Rows, Tensor | None]]:
        """Rows of the log-weights, sequences, positions, a_t times c_t and underflow, of those that are not observed.

        All together, or position by position if each has an emission of its own.
        """
        device, batch, width = self._given.device, len(self.observed), len(self.chain.initial)
        rows = self._by_position()
        hidden = [t for t in positions if self._atoms.count and not bool(self.observed[:, t].all())]
        for some in _together(hidden, 1 if self.chain.emission.per_position else self.length):
            parts = []
            most = max(len(self.reachable.pairs[t].source) for t in some)
            for few in _together(some, max(1, _BLOCK // (batch * width * most + 1))):
                parts += self._cavities(few)
            index = np.concatenate([np.arange(rows[t].start, rows[t].stop) for t in some])
            t, b = (torch.from_numpy(x[index]).to(device) for x in (self._row, self._batch))
            members = [part.at(torch.from_numpy(self._batch[rows[at]])) for part, at in zip(parts, some, strict=True)]
            whole = beside(np.arange(self._atoms.count), members)
            if self._given.latent_log_potentials is not None:
                whole = self.algebra.times(whole, self._given.latent_log_potentials[b, t])
            yield torch.from_numpy(index).to(device), b, t, whole, either(*(part.underflow for part in parts))

    def _cavities(self, positions: list[int]) -> list[Rows]:
        """a_t times c_t by atom, some positions at once: with latent potentials, E and w_t it is Z p(z_t, x_t)."""
        states, groups, atoms = self.chain.classes.num_states, self.chain.classes.num_groups, self._atoms
        self.forward(positions[-1]), self.backward(positions[0])  # each in one go
        before = stacked([self.forward(t) for t in positions], states)
        behind = stacked([self.backward(t) for t in positions], states)
        pairs = [self.reachable.pairs[t] for t in positions]
        shift = np.repeat(np.arange(len(pairs)), [len(one.source) for one in pairs])
        source, target, group = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        ids = group + shift * groups
        by_group = self.algebra.sums(ids, before, source + shift * states, behind, target + shift * states)
        row, atom = atoms.inside(by_group.ids % groups)
        where = by_group.ids[row]
        by_atom = self.algebra.sums(atom + where // groups * atoms.count, by_group, where)
        return unstacked(by_atom, len(positions), atoms.count)

    def paths(self, uniforms: Float[Tensor, "M B L"]) -> Int[Tensor, "M B L"]:
        """Draw latents of the product, each from one uniform number a position."""
        shape, device, width = uniforms.shape, uniforms.device, len(self.chain.initial)
        out = torch.zeros(shape, dtype=torch.int64, device=device)
        if not len(self.reachable.first):
            return out
        sequences = torch.arange(shape[1], device=device)[None, :, None]
        first = self.joint(0)
        logs = self.algebra.sums(first.ids, self.forward(0), first.ids, first, first.ids).logs()
        choice = drawn(logs.transpose(0, 1).flatten(1), uniforms[..., 0].T).T
        for t in range(shape[2]):
            here, latent, ids = choice // width, choice % width, self.joint(t).ids
            out[..., t] = torch.from_numpy(ids).to(device)[here] * width + latent
            if t + 1 == shape[2]:
                break
            group, next_, there = (torch.from_numpy(x).to(device) for x in self._ways(t, ids))
            size = max(1, _BLOCK // (shape[1] * next_.shape[1] * width))
            parts = []
            for m in range(0, shape[0], size):
                some = slice(m, m + size)
                way = here[some]
                leaf = self._leaf[t].log_entries(group[way], sequences, latent[some, :, None])
                leaf = leaf.masked_fill(~there[way], -torch.inf)
                after = self.joint(t + 1).logs_at(next_[way], sequences)
                leaving = self.algebra.leaving(self.steps, t, latent[some])
                flat = (leaf[..., None] + after + leaving[:, :, None]).flatten(2)
                picked = drawn(flat.flatten(0, 1), uniforms[some, :, t + 1].reshape(-1, 1)).reshape(flat.shape[:2])
                parts.append(next_[way].gather(-1, (picked // width)[..., None])[..., 0] * width + picked % width)
            choice = torch.cat(parts)
        return out

    def _ways(self, t: int, ids: Ids) -> tuple[Ids, Ids, NDArray[np.bool_]]:
        """From each state before t the pairs that leave it, padded to the same number: (states, pairs) each.

        The group's row of the leaf values, the next state's row, and whether there is such a pair.
        """
        pairs = self.reachable.pairs[t]
        source = np.searchsorted(ids, pairs.source)
        column = np.arange(len(source)) - np.searchsorted(source, source)
        shape = (len(ids), int(column.max()) + 1)
        group, after = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        there = np.zeros(shape, dtype=bool)
        group[source, column] = np.searchsorted(self._leaf[t].ids, pairs.group)
        after[source, column] = np.searchsorted(self.joint(t + 1).ids, pairs.target)
        there[source, column] = True
        return group, after, there

    def scores(self, paths: Int[Tensor, "M B L"]) -> Float[Tensor, "M B L V"]:
        """log E[z_t, v] + log w_t(v) of the tokens that lead from s_t to s_{t+1} (at the end: weighted by where to).

        An observed position has 0 at its token and -inf elsewhere.
        """
        t, b = (torch.from_numpy(x).to(self._given.device) for x in (self._row, self._batch))
        latents = paths[:, b, t] % len(self.chain.initial)
        emitted = self.chain.emission.log_rows(latents.flatten(), t.expand_as(latents).flatten())
        rows = emitted.view(*latents.shape, emitted.shape[-1]).to(self.algebra.dtype) + self.log_weights
        rows += leading(self.chain, paths, b, t).to(rows.dtype)
        out = rows.new_full((*paths.shape, rows.shape[-1]), -torch.inf)
        out[:, b, t] = rows
        return known(out, self.tokens, self.observed)


def leading(
    chain: ProductChain, paths: Int[Tensor, "M B L"], b: Int[Tensor, " R"], t: Int[Tensor, " R"]
) -> Float[Tensor, "M R V"]:
    """0 for the tokens that lead from s_t to s_{t+1} (after the last: the log-weight of where they lead), else -inf."""
    states = paths // len(chain.initial)
    table, classes = chain.classes.tables(t.device)
    end = torch.cat([chain.log_end, chain.log_end.new_full((1,), -torch.inf)])  # -1: no token leads there
    after = torch.cat([states[..., 1:], torch.full_like(states[..., :1], -1)], -1)[:, b, t]
    next_ = table[states[:, b, t]]  # (M, R, C)
    leads = torch.where((next_ == after[..., None]) & (next_ >= 0), 0.0, -torch.inf)
    return torch.where((t == states.shape[-1] - 1)[:, None], end[next_], leads)[..., classes]


def known(
    out: Float[Tensor, "*M B L V"], tokens: Int[Tensor, "B L"], observed: Bool[Tensor, "B L"]
) -> Float[Tensor, "*M B L V"]:
    """``out`` with 0 at the token of each observed position, and -inf at all other tokens there."""
    tokens, observed = tokens.to(out.device)[..., None], observed.to(out.device)[..., None]
    certain = torch.full(out.shape[-3:], -torch.inf, dtype=out.dtype, device=out.device).scatter_(-1, tokens, 0.0)
    return torch.where(observed, certain, out)


def _together(positions: list[int], count: int) -> list[list[int]]:
    """The positions in lists of at most ``count``."""
    return [positions[i : i + count] for i in range(0, len(positions), count)]


def drawn(logs: Float[Tensor, "rows K"], uniforms: Float[Tensor, "rows S"]) -> Int[Tensor, "rows S"]:
    """Inverse-CDF samples from weights in logarithms, as `ops.path` draws them."""
    cumulative = logs.softmax(-1).nan_to_num_(0.0).cumsum(-1)
    threshold = uniforms.double() * cumulative[:, -1:] * (1 - 2**-23)
    return torch.searchsorted(cumulative, threshold.contiguous(), right=True).clamp_max_(logs.shape[1] - 1)
