"""The chain over (latent, automaton state) of B windows: leaf values by group, messages, and what comes of them.

    a_t(z, s)   forward: evidence before t, with z_t = z and s_t = s
    c_t(z, s')  backward: evidence after t, given z_t = z and s_{t+1} = s'
    b_t(z, s)   leaf values of t times c_t, given z_t = z and s_t = s

Written once, for numbers (`eager.Linear`) and for logarithms (`reference.LogSpace`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, log_softmax, tempered
from codd.circuits.ops.constrained.eager import Linear
from codd.circuits.ops.constrained.layout import Ids, Layout, Structure
from codd.circuits.ops.constrained.reference import LogSpace
from codd.circuits.parameters import Emission, Transition
from codd.circuits.underflow import either
from codd.errors import InvalidEvidence

_BLOCK = 2**22
"""Numbers that are held at a time, where positions or samples can be taken together."""


Algebra: TypeAlias = Linear | LogSpace
"""The operations on messages: on scaled numbers, or on float64 logarithms."""


class Chain(NamedTuple):
    """What the windows share: the circuit, and the automaton with log-weights of its states at both ends."""

    initial: Float[Tensor, " N"]
    transition: Transition
    emission: Emission
    structure: Structure
    log_start: Float[Tensor, " S"]
    log_end: Float[Tensor, " S"]


class Paths(NamedTuple):
    """Latents and automaton states (before each position) of some samples."""

    latents: Int[Tensor, "M B L"]
    states: Int[Tensor, "M B L"]


class WindowPasses(ABC):
    """The messages of B windows, computed as they are asked for; tokens may be added."""

    tokens: Int[Tensor, "B L"]
    observed: Bool[Tensor, "B L"]

    @property
    def length(self) -> int:
        """L, the number of positions."""
        return self.observed.shape[1]

    @property
    @abstractmethod
    def faint(self) -> Bool[Tensor, " B"] | None:
        """The sequences in which log Z may be wrong; None: nobody looked."""

    @abstractmethod
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of each window; -inf if its evidence or the automaton excludes every text."""

    @abstractmethod
    def posterior(self, t: int) -> Any:
        """p(z_t, evidence): one row, whose entries sum to Z."""

    @abstractmethod
    def marginals(self, positions: Int[Tensor, " T"] | None = None) -> tuple[Float[Tensor, "B T V"], Tensor | None]:
        """log p(x_t) at some positions (None: all) in the order given, and sequences in doubt; -inf if impossible."""

    @abstractmethod
    def paths(self, uniforms: Float[Tensor, "M B L"]) -> Paths:
        """Draw latents and automaton states together, each from one uniform number a position."""

    @abstractmethod
    def scores(self, paths: Paths) -> Float[Tensor, "M B L V"]:
        """log E[z_t, v] + log w_t(v) of the tokens that lead from s_t to s_{t+1} (at the end: weighted by where to).

        An observed position has 0 at its token and -inf elsewhere.
        """

    @abstractmethod
    def commit(self, b: int, t: int, token: int) -> None:
        """Observe ``token`` at position t of sequence b, which was not observed before."""


class Passes(WindowPasses):
    """`WindowPasses` over only the states that can occur, which the host works out; any circuit, any evidence."""

    def __init__(self, chain: Chain, ev: Evidence, algebra: Algebra) -> None:
        """Compute the leaf values; InvalidEvidence if the potentials hold NaN or +inf (looked for on a CPU only)."""
        self.chain, self._given = chain, ev
        self.algebra: Any = algebra  # its rows are opaque here
        self.steps = chain.transition.gated(ev.step_log_gates)
        self.observed = ev.rows(Kind.OBSERVED).cpu()
        tokens = torch.zeros(ev.shape, dtype=torch.int64) if ev.tokens is None else ev.tokens.cpu()
        self.tokens = torch.where(self.observed, tokens, 0)
        self.layout = self._laid_out()
        self._row, self._batch = self.layout.hidden
        self.log_weights = self._log_weights()
        """Log-weights of all tokens at the positions not observed at first, in the order of ``layout.hidden``."""
        self._atoms = self.layout.atoms
        self._leaf = self._leaves()
        self._meeting = 0
        self._root: Any = None
        self._forward: list[Any] = [None] * ev.shape[1]
        self._backward: list[Any] = [None] * ev.shape[1]
        self._joint: list[Any] = [None] * ev.shape[1]

    def _laid_out(self) -> Layout:
        start, end = (w.cpu().numpy() > -np.inf for w in (self.chain.log_start, self.chain.log_end))
        return Layout(self.chain.structure, start, end, self.tokens, self.observed)

    # Leaf values.

    def _log_weights(self) -> Float[Tensor, "R V"]:
        ev, dtype = self._given, self.algebra.dtype
        t, b = (torch.from_numpy(x).to(ev.device) for x in (self._row, self._batch))
        vocab = self.chain.emission.stored.shape[-1]
        out = torch.zeros(len(t), vocab, dtype=dtype, device=ev.device)
        kind = ev.kind[b, t][:, None]
        if ev.potentials is not None:
            given = ev.potentials[b, t]
            if ev.normalised:
                heat = ev.heat(dtype)
                given = log_softmax(tempered(given, heat[b, 0] if isinstance(heat, Tensor) else heat, dtype))
            out = torch.where(kind == Kind.DENSE, given.to(dtype), out)
        if ev.sparse is not None:
            tail = ev.sparse.log_tail_weight(vocab)[b, t].to(dtype)[:, None].expand_as(out)
            listed = tail.scatter(-1, ev.sparse.ids[b, t], ev.sparse.log_weights[b, t].to(dtype))
            out = torch.where(kind == Kind.SPARSE, listed, out)
        if out.device.type == "cpu" and not bool((out < torch.inf).all()):
            wrong = int((~(out < torch.inf)).any(-1).nonzero()[0])
            raise InvalidEvidence(
                f"the potentials of sequence {self._batch[wrong]}, position {self._row[wrong]} hold NaN or +inf; "
                "log-potentials must be finite or -inf"
            )
        return out

    def _tables(self, rows: dict[int, slice]) -> list[tuple[Emission, slice]]:
        """Each emission table with the rows that it serves."""
        emission = self.chain.emission
        if emission.per_position:
            return [(emission.at(t), here) for t, here in rows.items()]
        return [(emission, slice(0, len(self._row)))] if rows else []

    def _by_position(self) -> dict[int, slice]:
        """The rows of the log-weights that belong to each position."""
        bounds = np.searchsorted(self._row, np.arange(self.length + 1))
        return {t: slice(bounds[t], bounds[t + 1]) for t in range(self.length) if bounds[t] < bounds[t + 1]}

    def _leaves(self) -> list[Any]:
        """Leaf values by group at every position."""
        atoms, rows = self._atoms, self._by_position()
        parts = []
        for table, here in self._tables(rows):
            columns = self.chain.structure.sorted_columns(table)
            weights = self.log_weights[here][:, columns.order]
            if columns.silent is not None:
                weights.masked_fill_(columns.silent, -torch.inf)
            parts.append(self.algebra.leaf(table, columns, weights, atoms))
        by_atom: Any = self.algebra.beside(np.arange(atoms.count), parts) if parts else None
        if parts and self._given.latent_log_potentials is not None:
            at = (torch.from_numpy(x).to(self._given.device) for x in (self._batch, self._row))
            by_atom = self.algebra.times(by_atom, self._given.latent_log_potentials[tuple(at)])
        # All positions at once, unless that were too much to hold.
        small = len(np.unique(atoms.group)) * len(self._row) * len(self.chain.initial) <= _BLOCK
        by_group: Any = self.algebra.sums(by_atom, atoms.atom, atoms.group) if parts and small else None

        def hidden(here: slice, groups: Ids) -> Any:
            if small:
                return by_group.at(here)
            row, atom = atoms.inside(groups)
            return self.algebra.sums(by_atom.at(here), atom, groups[row])

        out = []
        for t in range(self.length):
            groups, here = self.layout.groups(t), rows.get(t, slice(0, 0))
            if here.stop - here.start == len(self.observed):
                out.append(hidden(here, groups))
                continue
            each = iter(range(here.start, here.stop))
            pieces = [
                self._observed_leaf(b, t, groups) if known else hidden(slice(r := next(each), r + 1), groups)
                for b, known in enumerate(self.observed[:, t].tolist())
            ]
            ids = np.unique(np.concatenate([piece.ids for piece in pieces]))
            out.append(self.algebra.beside(ids, pieces))
        return out

    def _observed_leaf(self, b: int, t: int, groups: Ids) -> Any:
        """The emission of the observed token, in all live groups that lead it."""
        token = int(self.tokens[b, t])
        structure, table = self.chain.structure, self.chain.emission.at(t)
        column = table.stored.detach()[:, token]
        column = column.float().log() if table.compact else column
        if self._given.latent_log_potentials is not None:
            column = column + self._given.latent_log_potentials[b, t].to(column.dtype)
        ids = np.intersect1d(structure.groups_of(int(structure.classes[token])), groups)
        return self.algebra.from_logs(ids, column.expand(len(ids), 1, -1))

    # Messages.

    def forward(self, t: int) -> Any:
        """a_t: a row for each live state before position t."""
        known = t
        while known >= 0 and self._forward[known] is None:
            known -= 1
        if known < 0:
            start, first = self.chain.log_start, self.layout.first
            logs = start[torch.from_numpy(first).to(start.device)][:, None, None] + self.chain.initial.detach().double()
            self._forward[0] = self.algebra.from_logs(first, logs.expand(-1, len(self.observed), -1))
            known = 0
        for at in range(known, t):
            pairs = self.layout.pairs[at]
            reached = self.algebra.advance(self.forward(at), self._leaf[at], pairs.source, pairs.group, pairs.target)
            self._forward[at + 1] = self.algebra.step(self.steps, at, reached, reverse=False)
        return self._forward[t]

    def backward(self, t: int) -> Any:
        """c_t: a row for each live state after position t."""
        known = t
        while known < self.length and self._backward[known] is None:
            known += 1
        if known == self.length:
            end, last = self.chain.log_end, self.layout.last
            logs = end[torch.from_numpy(last).to(end.device)][:, None, None]
            self._backward[-1] = self.algebra.from_logs(
                last, logs.expand(-1, len(self.observed), len(self.chain.initial))
            )
            known -= 1
        for at in range(known, t, -1):
            self._backward[at - 1] = self.algebra.step(self.steps, at - 1, self.joint(at), reverse=True)
        return self._backward[t]

    def joint(self, t: int) -> Any:
        """b_t: a row for each live state before position t."""
        if self._joint[t] is None:
            pairs = self.layout.pairs[t]
            arguments = (self.backward(t), self._leaf[t], pairs.target, pairs.group, pairs.source)
            self._joint[t] = self.algebra.advance(*arguments)
        return self._joint[t]

    def posterior(self, t: int) -> Any:
        """a_t times b_t summed over states: one row, whose entries sum to Z."""
        a, b = self.forward(t), self.joint(t)
        return self.algebra.advance(a, b, b.ids, b.ids, np.zeros_like(b.ids))

    def commit(self, b: int, t: int, token: int) -> None:
        """Observe one more token. Messages that do not depend on it, and their states, stay."""
        self.tokens[b, t], self.observed[b, t] = token, True
        self.layout = self._laid_out()
        piece = self._observed_leaf(b, t, self.layout.groups(t))
        old, batch = self._leaf[t], len(self.observed)
        sides = [old.at(slice(0, b)), piece, old.at(slice(b + 1, batch))] if batch > 1 else [piece]
        self._leaf[t] = self.algebra.beside(old.ids if batch > 1 else piece.ids, sides)
        self._meeting, self._root = t, None
        self._forward[t + 1 :] = [None] * (self.length - t - 1)
        self._backward[:t] = [None] * t
        self._joint[: t + 1] = [None] * (t + 1)

    # What comes of them.

    def marginals(self, positions: Int[Tensor, " T"] | None = None) -> tuple[Float[Tensor, "B T V"], Tensor | None]:
        """log p(x_t) at some positions (None: all) in the order given, and sequences in doubt; -inf if impossible."""
        wanted = range(self.length) if positions is None else positions.tolist()
        vocab, emission, device = self.chain.emission.stored.shape[-1], self.chain.emission, self._given.device
        out = torch.full((len(self.observed), len(wanted), vocab), -torch.inf, dtype=self.algebra.dtype, device=device)
        place, faint = {t: i for i, t in enumerate(wanted)}, None
        for index, b, t, whole, doubt in self._by_atom(list(place)):
            faint = either(faint, doubt)
            columns = self.chain.structure.sorted_columns(table := emission.at(int(t[0])))
            log_p = torch.empty(len(index), vocab, dtype=self.algebra.dtype, device=device)
            log_p[:, columns.order] = self.algebra.tokens(table, columns, whole, self._atoms)
            places = torch.tensor([place[at] for at in t.tolist()], device=device)
            out[b, places] = log_softmax(log_p + self.log_weights[index])
        return self._with_observed(out, wanted), faint

    def list_candidates(self, ids: Int[Tensor, "B L K"]) -> None:
        """Prepare `candidate_marginals` of these tokens."""
        b, t = (torch.from_numpy(x) for x in (self._batch, self._row))
        self._ids = ids
        rows = self.chain.emission.columns
        listed = ids[b, t]
        self._listed = rows[t[:, None], listed] if self.chain.emission.per_position else rows[listed]
        self._listed_weights = self.log_weights.gather(-1, listed)
        self._listed_atoms = torch.from_numpy(self._atoms.of_class[self.chain.structure.classes])[listed]

    def candidate_marginals(self) -> tuple[Float[Tensor, "B L K"], Tensor | None]:
        """log p(x_t) of the listed tokens at all positions, and sequences in doubt; -inf if impossible."""
        out, faint = torch.full(self._ids.shape, -torch.inf, dtype=self.algebra.dtype), None
        total = self.log_partition()
        for index, b, t, whole, doubt in self._by_atom(list(range(self.length))):
            faint = either(faint, doubt)
            log = self.algebra.listed(self._listed[index], whole, self._listed_atoms[index])
            out[b, t] = (log + self._listed_weights[index] - total[b][:, None]).to(out.dtype)
        certain = torch.where(self._ids == self.tokens[..., None], 0.0, -torch.inf).to(out.dtype)
        out = torch.where(self.observed[..., None], certain, out)
        return out.masked_fill_((total == -torch.inf)[:, None, None], -torch.inf), faint

    def _by_atom(self, positions: list[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, Any, Tensor | None]]:
        """Of some positions that are not observed: rows of the log-weights, sequences, positions, a_t times c_t, doubt.

        All together, or position by position if each has an emission of its own.
        """
        device, batch, width = self._given.device, len(self.observed), len(self.chain.initial)
        rows = self._by_position()
        hidden = [t for t in positions if self._atoms.count and not bool(self.observed[:, t].all())]
        for some in _together(hidden, 1 if self.chain.emission.per_position else self.length):
            parts = []
            sizes = [len(self.layout.pairs[t].source) for t in some]
            for few in _together(some, max(1, _BLOCK // (batch * width * max(sizes, default=1) + 1))):
                parts += self._cavities(few)
            index = np.concatenate([np.arange(rows[t].start, rows[t].stop) for t in some])
            t, b = (torch.from_numpy(x[index]).to(device) for x in (self._row, self._batch))
            members = [part.at(torch.from_numpy(self._batch[rows[at]])) for part, at in zip(parts, some, strict=True)]
            whole = self.algebra.beside(np.arange(self._atoms.count), members)
            if self._given.latent_log_potentials is not None:
                whole = self.algebra.times(whole, self._given.latent_log_potentials[b, t])
            yield torch.from_numpy(index).to(device), b, t, whole, either(*(part.faint for part in parts))

    def _cavities(self, positions: list[int]) -> list[Any]:
        """a_t times c_t by atom, some positions at once: with latent potentials, E and w_t it is Z p(z_t, x_t)."""
        structure, atoms = self.chain.structure, self._atoms
        before = self.algebra.stacked([self.forward(t) for t in positions], structure.num_states)
        behind = self.algebra.stacked([self.backward(t) for t in positions], structure.num_states)
        pairs = [self.layout.pairs[t] for t in positions]
        shift = np.repeat(np.arange(len(pairs)), [len(one.source) for one in pairs])
        source, target, group = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        states = (source + shift * structure.num_states, target + shift * structure.num_states)
        by_group = self.algebra.advance(before, behind, *states, group + shift * structure.num_groups)
        row, atom = atoms.inside(by_group.ids % structure.num_groups)
        where = by_group.ids[row]
        by_atom = self.algebra.sums(by_group, where, atom + where // structure.num_groups * atoms.count)
        out: list[Any] = self.algebra.unstacked(by_atom, len(positions), atoms.count)
        return out

    def _with_observed(self, out: Float[Tensor, "B T V"], wanted: Any) -> Float[Tensor, "B T V"]:
        """Certainty at the observed positions of sequences that are possible."""
        out = known(out, self.tokens[:, list(wanted)], self.observed[:, list(wanted)])
        return out.masked_fill_((self.log_partition() == -torch.inf)[:, None, None], -torch.inf)

    @property
    def root(self) -> Any:
        """Z as one row, from messages that meet where the last token was committed: these have to be made anyway."""
        if self._root is None:
            self._root = self.posterior(self._meeting)
        return self._root

    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z."""
        out: Tensor = self.root.log_total()
        return out

    @property
    def faint(self) -> Bool[Tensor, " B"] | None:
        """The sequences in which log Z may be wrong."""
        out: Tensor | None = self.root.faint
        return out

    def paths(self, uniforms: Float[Tensor, "M B L"]) -> Paths:
        """Draw latents and automaton states together, each from one uniform number a position."""
        shape, device = uniforms.shape, uniforms.device
        paths = Paths(*(torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2)))
        if not len(self.layout.first):
            return paths
        width, sequences = len(self.chain.initial), torch.arange(shape[1], device=device)[None, :, None]
        first = self.joint(0)
        logs = self.algebra.advance(self.forward(0), first, first.ids, first.ids, first.ids).logs()
        choice = drawn(logs.transpose(0, 1).flatten(1), uniforms[..., 0].T).T
        for t in range(shape[2]):
            here, latent = choice // width, choice % width
            rows = self.joint(t)
            paths.latents[..., t] = latent
            paths.states[..., t] = torch.from_numpy(rows.ids).to(device)[here]
            if t + 1 == shape[2]:
                break
            ways = self._ways(t, rows.ids, device)
            size = max(1, _BLOCK // (shape[1] * ways.next.shape[1] * width))
            parts = []
            for m in range(0, shape[0], size):
                some = slice(m, m + size)
                way = here[some]
                leaf = self._leaf[t].log_entries(ways.group[way], sequences, latent[some, :, None])
                leaf = leaf.masked_fill(~ways.there[way], -torch.inf)
                after = self.joint(t + 1).logs_at(ways.next[way], sequences)
                leaving = self.algebra.leaving(self.steps, t, latent[some])
                log = leaf[..., None] + after + leaving[:, :, None]
                flat = log.flatten(2)
                picked = drawn(flat.flatten(0, 1), uniforms[some, :, t + 1].reshape(-1, 1)).reshape(flat.shape[:2])
                parts.append(ways.next[way].gather(-1, (picked // width)[..., None])[..., 0] * width + picked % width)
            choice = torch.cat(parts)
        return paths

    def _ways(self, t: int, ids: Ids, device: torch.device) -> "_Ways":
        """From each state before t the ways on, padded to the same number."""
        pairs = self.layout.pairs[t]
        source = np.searchsorted(ids, pairs.source)
        column = np.arange(len(source)) - np.searchsorted(source, source)
        shape = (len(ids), int(column.max()) + 1)
        group, after, there = (
            np.zeros(shape, dtype=np.int64),
            np.zeros(shape, dtype=np.int64),
            np.zeros(shape, dtype=bool),
        )
        group[source, column] = np.searchsorted(self._leaf[t].ids, pairs.group)
        after[source, column] = np.searchsorted(self.joint(t + 1).ids, pairs.target)
        there[source, column] = True
        return _Ways(*(torch.from_numpy(x).to(device) for x in (group, after, there)))

    def scores(self, paths: Paths) -> Float[Tensor, "M B L V"]:
        """log E[z_t, v] + log w_t(v) of the tokens that lead from s_t to s_{t+1} (at the end: weighted by where to).

        An observed position has 0 at its token and -inf elsewhere.
        """
        device = self._given.device
        t, b = (torch.from_numpy(x).to(device) for x in (self._row, self._batch))
        latents = paths.latents[:, b, t]
        emitted = self.chain.emission.log_rows(latents.flatten(), t.expand_as(latents).flatten())
        rows = emitted.view(*latents.shape, emitted.shape[-1]).to(self.algebra.dtype) + self.log_weights
        rows += leading(self.chain, paths, b, t).to(rows.dtype)
        out = rows.new_full((*paths.latents.shape, rows.shape[-1]), -torch.inf)
        out[:, b, t] = rows
        return known(out, self.tokens, self.observed)


def leading(chain: Chain, paths: Paths, b: Int[Tensor, " R"], t: Int[Tensor, " R"]) -> Float[Tensor, "M R V"]:
    """0 for the tokens that lead from s_t to s_{t+1} (after the last: the log-weight of where they lead), else -inf."""
    table, classes = chain.structure.tables(t.device)
    end = torch.cat([chain.log_end, chain.log_end.new_full((1,), -torch.inf)])  # -1: no way on
    after = torch.cat([paths.states[..., 1:], torch.full_like(paths.states[..., :1], -1)], -1)[:, b, t]
    next_ = table[paths.states[:, b, t]]  # (M, R, C)
    leads = torch.where((next_ == after[..., None]) & (next_ >= 0), 0.0, -torch.inf)
    return torch.where((t == paths.states.shape[-1] - 1)[:, None], end[next_], leads)[..., classes]


def known(
    out: Float[Tensor, "*M B L V"], tokens: Int[Tensor, "B L"], observed: Bool[Tensor, "B L"]
) -> Float[Tensor, "*M B L V"]:
    """``out`` with 0 at the token of each observed position, and -inf at all other tokens there."""
    tokens, observed = tokens.to(out.device)[..., None], observed.to(out.device)[..., None]
    certain = torch.full(out.shape[-3:], -torch.inf, dtype=out.dtype, device=out.device).scatter_(-1, tokens, 0.0)
    return torch.where(observed, certain, out)


def _together(positions: list[int], count: int) -> list[list[int]]:
    """The positions in lists of so many."""
    return [positions[i : i + count] for i in range(0, len(positions), count)]


class _Ways(NamedTuple):
    """The ways on from each state: the group's row of the leaf values, the next state's row, and whether it is one."""

    group: Int[Tensor, "n K"]
    next: Int[Tensor, "n K"]
    there: Bool[Tensor, "n K"]


def drawn(logs: Float[Tensor, "rows K"], uniforms: Float[Tensor, "rows S"]) -> Int[Tensor, "rows S"]:
    """Inverse-CDF samples from weights in logarithms, as `ops.path` draws them."""
    cumulative = logs.softmax(-1).nan_to_num_(0.0).cumsum(-1)
    threshold = uniforms.double() * cumulative[:, -1:] * (1 - 2**-23)
    return torch.searchsorted(cumulative, threshold.contiguous(), right=True).clamp_max_(logs.shape[1] - 1)
