"""The same operations in float64 logarithms, entry by entry."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.ops.constrained.eager import Linear, Rows
from codd.circuits.ops.constrained.reachable_states import Atoms, Ids, SortedColumns
from codd.circuits.parameters import Emission, Transition


class LogRows(Rows):
    """Rows whose ``values`` are logarithms."""

    def _log(self, values: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return values

    def log_total(self) -> Float[Tensor, " B"]:
        """The logarithm of the sum of all entries of each sequence."""
        return self.logs().logsumexp((0, 2))


class LogSpace(Linear):
    """The operations on logarithms."""

    def __init__(self) -> None:
        """Everything is in float64."""
        super().__init__(torch.float64)

    def from_logs(self, ids: Ids, logs: Float[Tensor, "n B N"]) -> LogRows:
        """Rows, one for each of ``ids``, from the logarithms of their entries."""
        return LogRows(ids, logs.double(), logs.new_zeros(logs.shape[:2], dtype=torch.float64), None)

    def times(self, rows: Rows, logs: Float[Tensor, "B N"]) -> LogRows:
        """Every row times one factor for each latent; ``logs``: the logarithms of the factors."""
        return self.from_logs(rows.ids, rows.logs() + logs.double())

    def sums(self, out_ids: Ids, x: Rows, x_ids: Ids, y: Rows | None = None, y_ids: Ids | None = None) -> LogRows:
        """For each of the distinct ``out_ids``: the sum of x[x_ids] * y[y_ids] over the entries that name it."""
        terms = x.logs()[np.searchsorted(x.ids, x_ids)]
        if y is not None and y_ids is not None:
            terms = terms + y.logs()[np.searchsorted(y.ids, y_ids)]
        ids = np.unique(out_ids)
        values = terms.new_empty(len(ids), *terms.shape[1:])
        for place, one in enumerate(ids):
            values[place] = terms[np.flatnonzero(out_ids == one)].logsumexp(0)
        return self.from_logs(ids, values)

    def step(self, transition: Transition, t: int, rows: Rows, reverse: bool) -> LogRows:
        """Through the transition from position t to t + 1, or backward from t + 1 to t."""
        matrix, logs = transition.log_step(t), rows.logs()
        values = torch.empty_like(logs)
        for place, row in enumerate(logs):
            for b, one in enumerate(row):
                table = matrix if matrix.ndim == 2 else matrix[b]
                values[place, b] = (table + one).logsumexp(1) if reverse else (table + one[:, None]).logsumexp(0)
        return self.from_logs(rows.ids, values)

    def leaf(self, table: Emission, sorted_: SortedColumns, log_weights: Float[Tensor, "R V"], atoms: Atoms) -> LogRows:
        """Leaf values by atom for rows of log-weights sorted by class."""
        log = table.log.detach().double()[:, sorted_.order]
        out = log.new_full((atoms.count, len(log_weights), len(log)), -torch.inf)
        for r, weights in enumerate(log_weights.double()):
            terms = log + weights
            for number, begin, end in atoms.runs:
                part = terms[:, begin:end].logsumexp(1)
                out[number, r] = torch.logaddexp(out[number, r], part)
        return self.from_logs(np.arange(atoms.count), out)

    def tokens(self, table: Emission, sorted_: SortedColumns, rows: Rows, atoms: Atoms) -> Float[Tensor, "R V"]:
        """log sum over latents of rows[a] E[:, v] for the tokens v of each atom a, sorted by class."""
        log, cavity = table.log.detach().double()[:, sorted_.order], rows.logs()
        out = log.new_full((cavity.shape[1], log.shape[1]), -torch.inf)
        for r in range(len(out)):
            for number, begin, end in atoms.runs:
                out[r, begin:end] = (log[:, begin:end] + cavity[number, r][:, None]).logsumexp(0)
        return out

    def leaving(self, transition: Transition, t: int, latents: Int[Tensor, "S B"]) -> Float[Tensor, "S B N"]:
        """Log-weights of the latents that follow at t + 1."""
        table = transition.log_step(t)
        return table[latents] if table.ndim == 2 else table[torch.arange(len(table)), latents]
