"""Messages over (latent, automaton state) as products of ordinary numbers, each state's row with a scale of its own.

A row holds the values of all latents of one state (or group, or atom) of each sequence; its largest value is one, and
the logarithm of what was taken out is kept beside it. So states whose probabilities are far apart lose nothing; only
values that are far apart within a row can, which shows when a product leaves little of both its factors. On a GPU that
is not checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.ops import native
from codd.circuits.ops.constrained.reachable_states import Atoms, Ids, Pairs, SortedColumns
from codd.circuits.ops.path.eager import leaving
from codd.circuits.parameters import Emission, Transition
from codd.circuits.underflow import either, lost_some

_SMALL = {torch.float32: 1e-18, torch.float64: 1e-150}
"""Where the largest value of a product of rows is below this, values that matter may have been lost."""
_BLOCK = {"cpu": 2**18, "cuda": 2**27}
"""Entries of the products that are held at a time: on a CPU what its cache holds."""


@dataclass(frozen=True, eq=False)
class Rows:
    """``values * exp(log)`` for n states (or groups, or atoms), whose sorted numbers are ``ids``."""

    ids: Ids
    values: Float[Tensor, "n B N"]
    log: Float[Tensor, "n B"]
    """In float64; -inf for rows of zeros."""
    underflow: Bool[Tensor, " B"] | None
    """Sequences in which something may have been lost on the way here; None: not checked."""

    def _log(self, values: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return values.double().log()

    def logs(self) -> Float[Tensor, "n B N"]:
        """The logarithms of all entries, in float64."""
        return self._log(self.values) + self.log[..., None]

    def logs_at(self, rows: Int[Tensor, "..."], sequences: Int[Tensor, "..."]) -> Float[Tensor, "... N"]:
        """The logarithms of row ``rows[i]`` of sequence ``sequences[i]``, for every index i; in float64."""
        return self._log(self.values[rows, sequences]) + self.log[rows, sequences][..., None]

    def log_entries(
        self, rows: Int[Tensor, "..."], sequences: Int[Tensor, "..."], latents: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """The logarithms of single entries: latent ``latents[i]`` of row ``rows[i]`` of sequence ``sequences[i]``."""
        return self._log(self.values[rows, sequences, latents]) + self.log[rows, sequences]

    def log_total(self) -> Float[Tensor, " B"]:
        """The logarithm of the sum of all entries of each sequence."""
        return (self._log(self.values.sum(-1)) + self.log).logsumexp(0)

    def at(self, sequences: slice | Int[Tensor, " k"]) -> "Rows":
        """The same rows of a subset of the sequences."""
        underflow = None if self.underflow is None else self.underflow[sequences]
        return replace(self, values=self.values[:, sequences], log=self.log[:, sequences], underflow=underflow)


def local(ids: Ids, wanted: Ids, device: torch.device) -> Int[Tensor, " P"]:
    """Positions of the wanted numbers in sorted ones that contain them all."""
    return torch.from_numpy(np.searchsorted(ids, wanted)).to(device, non_blocking=True)


def _grouped(out: Ids) -> tuple[Ids, Ids, Ids]:
    """Numbers in order, each once; where each begins among all when sorted, and where the last ends; the sorting."""
    order = np.argsort(out, kind="stable")
    ids, first = np.unique(out[order], return_index=True)
    return ids, np.append(first, len(out)), order


def beside(ids: Ids, parts: list[Rows]) -> Rows:
    """The sequences of several rows next to each other; ids that a part does not have are zero there."""
    if len(parts) == 1 and len(parts[0].ids) == len(ids):
        return parts[0]
    first, batch = parts[0].values, sum(part.values.shape[1] for part in parts)
    values = first.new_zeros(len(ids), batch, first.shape[-1])
    log = parts[0].log.new_full((len(ids), batch), -torch.inf)
    begin = 0
    for part in parts:
        end = begin + part.values.shape[1]
        at = local(ids, part.ids, first.device)
        values[at, begin:end], log[at, begin:end] = part.values, part.log
        begin = end
    checked = [part.underflow for part in parts if part.underflow is not None]
    return replace(parts[0], ids=ids, values=values, log=log, underflow=torch.cat(checked) if checked else None)


def numbered(parts: list[Rows], which: Ids) -> Rows:
    """Some rows of several tensors, numbered as if these were concatenated."""
    every = stacked(parts, 0)
    at = torch.from_numpy(which).to(every.values.device)
    return replace(every, ids=every.ids[which], values=every.values[at], log=every.log[at])


def stacked(parts: list[Rows], period: int) -> Rows:
    """Concatenate positions; ids of position i are offset by i * period."""
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([part.ids + i * period for i, part in enumerate(parts)])
    values, log = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "log"))
    return replace(parts[0], ids=ids, values=values, log=log, underflow=either(*(part.underflow for part in parts)))


def unstacked(rows: Rows, count: int, period: int) -> list[Rows]:
    """The inverse of `stacked`: the rows of each of ``count`` positions, with their own ids again."""
    bounds = np.searchsorted(rows.ids, np.arange(count + 1) * period)
    return [
        replace(rows, ids=rows.ids[a:b] - i * period, values=rows.values[a:b], log=rows.log[a:b])
        for i, (a, b) in enumerate(pairwise(bounds.tolist()))
    ]


class Linear:
    """The operations on ordinary numbers, in the type of the circuit."""

    def __init__(self, dtype: torch.dtype, *, compiled: bool = False) -> None:
        """``dtype``: of the values, float32 or float64; scales are always in float64. ``compiled``: in C if it can."""
        self.dtype = dtype
        self._library = native.library() if compiled and dtype == torch.float32 else None

    def _rows(
        self, ids: Ids, values: Float[Tensor, "n B N"], log: Float[Tensor, "n B"], underflow: Bool[Tensor, " B"] | None
    ) -> Rows:
        """Rows with their largest values at one; ``underflow``: of what they were made from."""
        top = values.amax(-1)
        if values.device.type == "cpu":
            underflow = torch.zeros(values.shape[1], dtype=torch.bool) if underflow is None else underflow
            if top.numel() and float(top.min()) < _SMALL[self.dtype]:
                underflow = underflow | ((top < _SMALL[self.dtype]) & (log > -torch.inf)).any(0)
        log = torch.where(top > 0, log + top.double().log(), -torch.inf)
        return Rows(ids, values / top.clamp_min(torch.finfo(self.dtype).tiny)[..., None], log, underflow)

    def from_logs(self, ids: Ids, logs: Float[Tensor, "n B N"]) -> Rows:
        """Rows, one for each of ``ids``, from the logarithms of their entries."""
        top = logs.amax(-1).double()
        shift = torch.where(top > -torch.inf, top, 0)
        checked = torch.zeros(logs.shape[1], dtype=torch.bool) if logs.device.type == "cpu" else None
        return Rows(ids, (logs - shift[..., None]).exp().to(self.dtype), top, checked)

    def times(self, rows: Rows, logs: Float[Tensor, "B N"]) -> Rows:
        """Every row times one factor for each latent; ``logs``: the logarithms of the factors."""
        top = logs.amax(-1, keepdim=True).double()
        top = torch.where(top > -torch.inf, top, 0)
        return self._rows(
            rows.ids, rows.values * (logs - top).exp().to(self.dtype), rows.log + top[:, 0], rows.underflow
        )

    def sums(self, out_ids: Ids, x: Rows, x_ids: Ids, y: Rows | None = None, y_ids: Ids | None = None) -> Rows:
        """For each of the distinct ``out_ids``: the sum of x[x_ids] * y[y_ids] over the entries that name it.

        The one operation of all passes: forward messages times leaf values by group give what reaches the next states,
        leaf values times backward messages what leads from a state, forward times backward messages a group's cavity.
        Without y it is the sum of x[x_ids]: leaf values by group from those by atom.
        """
        device, (rows, batch, width) = x.values.device, x.values.shape
        if self._library is not None and batch == 1:
            return self._compiled_sums(out_ids, x, x_ids, y, y_ids)
        ids, place = np.unique(out_ids, return_inverse=True)
        order = np.argsort(place, kind="stable")
        xi, underflow = local(x.ids, x_ids[order], device), x.underflow
        log, values = x.log.index_select(0, xi), x.values
        if y is not None and y_ids is not None:
            yi, underflow = local(y.ids, y_ids[order], device), either(underflow, y.underflow)
            log.add_(y.log.index_select(0, yi))

        def products(some: slice) -> Tensor:
            product = values.index_select(0, xi[some])
            return product if y is None else product.mul_(y.values.index_select(0, yi[some]))

        if len(ids) == len(place):
            alone = products(slice(None))
            return Rows(ids, alone, log, underflow) if y is None else self._rows(ids, alone, log, underflow)
        out = torch.from_numpy(place[order]).to(device, non_blocking=True)
        top = log.new_full((len(ids), batch), -torch.inf)
        top.scatter_reduce_(0, out[:, None].expand_as(log), log, "amax")
        weight = (log - torch.where(top > -torch.inf, top, 0)[out]).exp().to(self.dtype)
        if y is None and len(ids) * rows <= 16 * len(place):  # dense: one matrix product for each sequence
            matrix = torch.zeros(len(ids), rows, batch, dtype=self.dtype, device=device)
            matrix.index_put_((out, xi), weight)
            return self._rows(ids, (matrix.permute(2, 0, 1) @ values.transpose(0, 1)).transpose(0, 1), top, underflow)
        total = torch.zeros(len(ids), batch, width, dtype=self.dtype, device=device)
        size = max(1, _BLOCK.get(device.type, _BLOCK["cuda"]) // (batch * width))
        for begin in range(0, len(place), size):
            some = slice(begin, begin + size)
            total.index_add_(0, out[some], products(some).mul_(weight[some, :, None]))
        return self._rows(ids, total, top, underflow)

    def _compiled_sums(self, out_ids: Ids, x: Rows, x_ids: Ids, y: Rows | None, y_ids: Ids | None) -> Rows:
        assert self._library is not None
        ids, first, order = _grouped(out_ids)
        xi, width = np.searchsorted(x.ids, x_ids[order]), x.values.shape[-1]
        values, log = torch.empty(len(ids), 1, width), torch.empty(len(ids), 1, dtype=torch.float64)
        kept = [x.values.contiguous(), x.log.contiguous()]  # while C reads them
        others: list[int | None] = [None, None, None]
        if y is not None and y_ids is not None:
            kept += [y.values.contiguous(), y.log.contiguous()]
            yi = np.searchsorted(y.ids, y_ids[order])
            others = [kept[2].data_ptr(), kept[3].data_ptr(), yi.ctypes.data]
        given = (kept[0].data_ptr(), kept[1].data_ptr(), xi.ctypes.data, *others, first.ctypes.data)
        out = (values.data_ptr(), log.data_ptr(), _SMALL[torch.float32])
        lost = torch.tensor([bool(self._library.codd_pair_sums(*given, len(ids), width, *out))])
        return Rows(ids, values, log, either(lost, x.underflow, None if y is None else y.underflow))

    def sweep(
        self,
        transition: Transition,
        rows: Rows,
        positions: Sequence[int],
        pairs: Sequence[Pairs],
        leaf: Sequence[Rows],
        reverse: bool,
    ) -> list[tuple[Rows, Rows]]:
        """From the messages ``rows`` through some positions: the sums over the pairs of each, and the next messages."""
        if self._serves(transition, rows):
            return self._compiled_sweep(transition, rows, positions, pairs, leaf, reverse)
        out = []
        for t in positions:
            to, ids = (pairs[t].source, pairs[t].target) if reverse else (pairs[t].target, pairs[t].source)
            sums = self.sums(to, rows, ids, leaf[t], pairs[t].group)
            rows = self.step(transition, t - reverse, sums, reverse)
            out.append((sums, rows))
        return out

    def _serves(self, transition: Transition, rows: Rows) -> bool:
        one_matrix = not (transition.per_position or transition.low_rank or transition.stepwise)
        return self._library is not None and rows.values.shape[1] == 1 and one_matrix

    def _compiled_sweep(
        self,
        transition: Transition,
        rows: Rows,
        positions: Sequence[int],
        pairs: Sequence[Pairs],
        leaf: Sequence[Rows],
        reverse: bool,
    ) -> list[tuple[Rows, Rows]]:
        ids, firsts, ways, groups, offset = [rows.ids], [np.zeros(1, dtype=np.int64)], [], [], 0
        for t in positions:
            to, by = (pairs[t].source, pairs[t].target) if reverse else (pairs[t].target, pairs[t].source)
            out, first, order = _grouped(to)
            ways.append(np.searchsorted(ids[-1], by[order]))
            groups.append(np.searchsorted(leaf[t].ids, pairs[t].group[order]))
            firsts.append(first[1:] + offset)
            ids.append(out)
            offset += len(to)
        xi, yi, first = (np.concatenate(parts) for parts in (ways, groups, firsts))
        bounds = np.cumsum([0, *map(len, ids)])
        width, given = rows.values.shape[-1], bounds[1]
        values, log = torch.empty(bounds[-1], 1, width), torch.empty(bounds[-1], 1, dtype=torch.float64)
        values[:given], log[:given] = rows.values, rows.log
        sums, sums_log = torch.empty_like(values[given:]), torch.empty_like(log[given:])
        parts = [(leaf[t].values.contiguous(), leaf[t].log.contiguous()) for t in positions]  # while C reads them
        tables = [np.array([part[i].data_ptr() for part in parts]) for i in (0, 1)]
        lost = np.array([lost_some(leaf[t].underflow) for t in positions])
        lost[:1] |= lost_some(rows.underflow)
        matrix = (transition.transposed if reverse else transition.linear)[0]
        assert self._library is not None
        self._library.codd_product_pass(
            matrix.data_ptr(),
            *(table.ctypes.data for table in tables),
            *(table.data_ptr() for table in (sums, sums_log, values, log)),
            *(array.ctypes.data for array in (bounds, first, xi, yi)),
            *(len(parts), width, _SMALL[torch.float32]),
            lost.ctypes.data,
        )
        made = []
        for k, (begin, end) in enumerate(pairwise(bounds[1:].tolist())):
            known = torch.from_numpy(lost[k : k + 1])
            inner = slice(begin - given, end - given)
            reached = Rows(ids[k + 1], sums[inner], sums_log[inner], known)
            made.append((reached, Rows(ids[k + 1], values[begin:end], log[begin:end], known)))
        return made

    def step(self, transition: Transition, t: int, rows: Rows, reverse: bool) -> Rows:
        """Through the transition from position t to t + 1, or backward from t + 1 to t."""
        log = rows.log if transition.gates is None else rows.log + transition.gates[1][:, t].double()
        return self._rows(rows.ids, transition.through(rows.values, t, reverse), log, rows.underflow)

    def leaf(self, table: Emission, sorted_: SortedColumns, log_weights: Float[Tensor, "R V"], atoms: Atoms) -> Rows:
        """Leaf values by atom, sum over its tokens v of E[:, v] w(v), for rows of log-weights sorted by class."""
        columns, device = sorted_.columns, log_weights.device
        count, width, states = len(log_weights), atoms.count, columns.shape[1]
        atom = atoms.sorted_atoms(device).expand_as(log_weights)
        top = log_weights.new_full((count, width + 1), -torch.inf).scatter_reduce_(1, atom, log_weights, "amax")
        possible = top > -torch.inf
        weights = (log_weights - torch.where(possible, top, 0).gather(1, atom)).exp_()
        if states == 1:
            sums = weights.new_zeros(count, width + 1).scatter_add_(1, atom, weights * columns[:, 0])
            values = sums[:, :-1].T[..., None]
        else:
            values = log_weights.new_zeros(width, count, states)
            for number, begin, end in atoms.longer:
                values[number].addmm_(weights[:, begin:end], columns[begin:end])
            ones, at = (torch.from_numpy(x).to(device, non_blocking=True) for x in atoms.single)
            values[ones] = columns[at][:, None] * weights[:, at].T[..., None]
        return self._rows(np.arange(width), values, top[:, :-1].T.double(), None)

    def tokens(self, table: Emission, sorted_: SortedColumns, rows: Rows, atoms: Atoms) -> Float[Tensor, "R V"]:
        """log sum over latents of rows[a] E[:, v] for the tokens v of each atom a, sorted by class."""
        columns, cavity = sorted_.columns, rows.values
        _, count, states = cavity.shape
        atom = atoms.sorted_atoms(cavity.device)
        if states == 1:
            padded = torch.cat([cavity[..., 0], cavity.new_zeros(1, count)])
            out = (padded[atom] * columns).T.contiguous()
        else:
            out = cavity.new_zeros(count, len(columns))
            for number, begin, end in atoms.longer:
                out[:, begin:end] = cavity[number] @ columns[begin:end].T
            ones, at = (torch.from_numpy(x).to(cavity.device, non_blocking=True) for x in atoms.single)
            out[:, at] = (cavity[ones] @ columns[at][..., None])[..., 0].T
        scale = torch.cat([rows.log, rows.log.new_full((1, count), -torch.inf)]).to(self.dtype)
        return out.log_() + scale[atom].T

    def listed(self, columns: Float[Tensor, "R K N"], rows: Rows, atoms: Int[Tensor, "R K"]) -> Float[Tensor, "R K"]:
        """log sum over latents of rows[a] E[:, v] for some tokens v of each row, of atom a; -inf for those of none."""
        at, here = atoms.clamp_min(0), torch.arange(len(atoms), device=atoms.device)[:, None]
        log = (rows.values[at, here] * columns).sum(-1).log() + rows.log[at, here].to(self.dtype)
        return torch.where(atoms >= 0, log, -torch.inf)

    def leaving(self, transition: Transition, t: int, latents: Int[Tensor, "S B"]) -> Float[Tensor, "S B N"]:
        """Log-weights of the latents that follow at t + 1."""
        return leaving(transition, t, latents).double().log()
