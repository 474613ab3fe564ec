"""The same operations in float64 logarithms, entry by entry."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.ops.constrained.layout import Atoms, Ids, SortedColumns
from codd.circuits.parameters import Emission, Transition


@dataclass(frozen=True, eq=False)
class LogRows:
    """Logarithms for n states (or groups, or atoms), whose sorted numbers are ``ids``."""

    ids: Ids
    values: Float[Tensor, "n B N"]
    faint: None = None

    def logs(self) -> Float[Tensor, "n B N"]:
        """The logarithms of all entries, in float64."""
        return self.values

    def logs_at(self, rows: Int[Tensor, "..."], sequences: Int[Tensor, "..."]) -> Float[Tensor, "... N"]:
        """The logarithms of row ``rows[i]`` of sequence ``sequences[i]``, for every index i."""
        return self.values[rows, sequences]

    def log_entries(
        self, rows: Int[Tensor, "..."], sequences: Int[Tensor, "..."], latents: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """The logarithms of single entries: latent ``latents[i]`` of row ``rows[i]`` of sequence ``sequences[i]``."""
        return self.values[rows, sequences, latents]

    def at(self, sequences: slice | Int[Tensor, " k"]) -> "LogRows":
        """The same rows of a subset of the sequences."""
        return LogRows(self.ids, self.values[:, sequences])

    def log_total(self) -> Float[Tensor, " B"]:
        """The logarithm of the sum of all entries of each sequence."""
        return self.values.logsumexp((0, 2))


class LogSpace:
    """The operations on logarithms."""

    dtype = torch.float64

    def from_logs(self, ids: Ids, logs: Float[Tensor, "n B N"]) -> LogRows:
        """Rows, one for each of ``ids``, from the logarithms of their entries."""
        return LogRows(ids, logs.double())

    def times(self, rows: LogRows, logs: Float[Tensor, "B N"]) -> LogRows:
        """Every row times one factor for each latent; ``logs``: the logarithms of the factors."""
        return LogRows(rows.ids, rows.values + logs.double())

    def advance(self, x: LogRows, y: LogRows, x_ids: Ids, y_ids: Ids, out_ids: Ids) -> LogRows:
        """For each of the distinct ``out_ids``: the sum of x[x_ids] * y[y_ids] over the entries that name it."""
        terms = x.values[np.searchsorted(x.ids, x_ids)] + y.values[np.searchsorted(y.ids, y_ids)]
        return self._collected(terms, out_ids)

    def sums(self, x: LogRows, x_ids: Ids, out_ids: Ids) -> LogRows:
        """For each of the distinct ``out_ids``: the sum of x[x_ids] over the entries that name it."""
        return self._collected(x.values[np.searchsorted(x.ids, x_ids)], out_ids)

    def _collected(self, terms: Float[Tensor, "P B N"], out_ids: Ids) -> LogRows:
        ids = np.unique(out_ids)
        values = terms.new_empty(len(ids), *terms.shape[1:])
        for place, one in enumerate(ids):
            values[place] = terms[np.flatnonzero(out_ids == one)].logsumexp(0)
        return LogRows(ids, values)

    def step(self, transition: Transition, t: int, rows: LogRows, reverse: bool) -> LogRows:
        """Through the transition from position t to t + 1, or backward from t + 1 to t."""
        matrix = transition.log_step(t)
        values = torch.empty_like(rows.values)
        for place, row in enumerate(rows.values):
            for b, one in enumerate(row):
                table = matrix if matrix.ndim == 2 else matrix[b]
                values[place, b] = (table + one).logsumexp(1) if reverse else (table + one[:, None]).logsumexp(0)
        return LogRows(rows.ids, values)

    def leaf(self, table: Emission, columns: SortedColumns, log_weights: Float[Tensor, "R V"], atoms: Atoms) -> LogRows:
        """Leaf values by atom for rows of log-weights sorted by class."""
        log = table.log.detach().double()[:, columns.order]
        out = log.new_full((atoms.count, len(log_weights), len(log)), -torch.inf)
        for r, weights in enumerate(log_weights.double()):
            terms = log + weights
            for number, begin, end in atoms.runs:
                part = terms[:, begin:end].logsumexp(1)
                out[number, r] = torch.logaddexp(out[number, r], part)
        return LogRows(np.arange(atoms.count), out)

    def tokens(self, table: Emission, columns: SortedColumns, rows: LogRows, atoms: Atoms) -> Float[Tensor, "R V"]:
        """log sum over latents of rows[a] E[:, v] for the tokens v of each atom a, sorted by class."""
        log, cavity = table.log.detach().double()[:, columns.order], rows.values
        out = log.new_full((cavity.shape[1], log.shape[1]), -torch.inf)
        for r in range(len(out)):
            for number, begin, end in atoms.runs:
                out[r, begin:end] = (log[:, begin:end] + cavity[number, r][:, None]).logsumexp(0)
        return out

    def leaving(self, transition: Transition, t: int, latents: Int[Tensor, "S B"]) -> Float[Tensor, "S B N"]:
        """Log-weights of the latents that follow at t + 1."""
        table = transition.log_step(t)
        return table[latents] if table.ndim == 2 else table[torch.arange(len(table)), latents]

    def beside(self, ids: Ids, parts: list[LogRows]) -> LogRows:
        """The sequences of several rows beside each other; ids that a part does not have are zero there."""
        padded = []
        for part in parts:
            values = part.values.new_full((len(ids), *part.values.shape[1:]), -torch.inf)
            values[np.searchsorted(ids, part.ids)] = part.values
            padded.append(values)
        return LogRows(ids, torch.cat(padded, 1))

    def stacked(self, parts: list[LogRows], period: int) -> LogRows:
        """The rows of several positions under each other; the ids of each begin a period later."""
        ids = np.concatenate([part.ids + i * period for i, part in enumerate(parts)])
        return LogRows(ids, torch.cat([part.values for part in parts]))

    def unstacked(self, rows: LogRows, count: int, period: int) -> list[LogRows]:
        """The inverse of `stacked`: the rows of each of ``count`` positions, with their own ids again."""
        bounds = np.searchsorted(rows.ids, np.arange(count + 1) * period)
        return [
            LogRows(rows.ids[a:b] - i * period, rows.values[a:b]) for i, (a, b) in enumerate(pairwise(bounds.tolist()))
        ]
