"""The two parameter tables of an HMM, with the layouts that the operations read."""

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.ops import native
from codd.errors import InvalidCircuit, InvalidInput, shown

WIDEST = 256
"""Up to this many states the matrix fits the cache of a core in float32."""
_TOLERANCE, _COMPACT_TOLERANCE = 1e-4, 4e-3
"""How far a row's sum may be from one; float32 rows of 150,000 entries, or rows rounded to bfloat16, stay inside."""


def is_whole(value: object) -> bool:
    """Whether it is a whole number: Python's or NumPy's."""
    return isinstance(value, Integral)


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU. Any whole number is a seed; two that differ by a multiple of 2**64 are the same one."""
    if not is_whole(seed):
        raise InvalidInput(f"seed must be a whole number, found {shown(seed)}.")
    return torch.Generator().manual_seed(int(seed) % 2**64)


def check_rows(name: str, log_table: Float[Tensor, "*rows K"], compact: bool = False) -> None:
    """Raise unless every row of a table of log-probabilities is a distribution."""
    if not log_table.dtype.is_floating_point:
        raise InvalidCircuit(f"{name} must be floating point log-probabilities, found {log_table.dtype}")
    if log_table.shape[-1] == 0:
        raise InvalidCircuit(f"{name} has empty rows: shape {tuple(log_table.shape)}")
    sums = log_table.detach().double().logsumexp(-1)
    wrong = ~(sums.abs() <= (_COMPACT_TOLERANCE if compact else _TOLERANCE))
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        value = sums[where].exp().item()
        problem = "holds NaN" if value != value else f"sums to {value:.6g}"
        row = f"row {', '.join(map(str, where))} of {name}" if where else name
        raise InvalidCircuit(
            f"{row} {problem}, but the probabilities of a row must sum to 1 ({int(wrong.sum())} such row(s)). "
            "Parameters are log-probabilities: pass tensor.log_softmax(-1), or probabilities.log()"
        )


@dataclass(frozen=True, eq=False)
class Emission:
    """p(token | state): one table (N, V), or one per position (L, N, V).

    ``stored`` holds log-probabilities in float32 or float64, or probabilities in bfloat16. (Rounding logarithms to
    bfloat16 would cost up to 6% a factor; rounding the probabilities costs 0.4%.)
    """

    stored: Float[Tensor, "*L N V"]

    @property
    def compact(self) -> bool:
        """Whether the table is kept as bfloat16 probabilities."""
        return self.stored.dtype == torch.bfloat16

    @property
    def per_position(self) -> bool:
        """Whether each position has a table of its own."""
        return self.stored.ndim == 3

    @cached_property
    def log(self) -> Float[Tensor, "*L N V"]:
        """Log-probabilities, float32 or float64."""
        return self.stored.float().log() if self.compact else self.stored

    @cached_property
    def linear(self) -> Float[Tensor, "*L N V"]:
        """Probabilities as the GPU kernels read them, contiguous: bfloat16 if so stored."""
        return (self.stored if self.compact else self.stored.detach().exp()).contiguous()

    @cached_property
    def support(self) -> Bool[Tensor, "*L N V"]:
        """Which entries are not zero, also where the probability is too small for a number other than zero."""
        return self.stored > (0 if self.compact else -torch.inf)

    @cached_property
    def columns(self) -> Float[Tensor, "*L V N"]:
        """Probabilities with the states contiguous: an observed or listed token is then one row."""
        full = self.linear.float() if self.compact else self.linear
        return full.transpose(-1, -2).contiguous()

    @cached_property
    def token_rows(self) -> Float[Tensor, "*L V N"]:
        """The columns as kernels read them, token by token: bfloat16 if so stored."""
        return self.stored.transpose(-1, -2).contiguous() if self.compact else self.columns

    @cached_property
    def panels(self) -> Float[Tensor, "P V 32"] | None:
        """The columns as the loops in C read them; None if there is nothing to be gained by that."""
        return None if self.per_position else native.in_panels(self.columns)

    def log_rows(self, states: Int[Tensor, " R"], positions: Int[Tensor, " R"]) -> Float[Tensor, "R V"]:
        """The log-probabilities of some states' tokens, each at its position."""
        table = self.log.detach()
        return table[positions, states] if self.per_position else table[states]

    def log_columns(self, tokens: Int[Tensor, "*B"], positions: Int[Tensor, "*#B"]) -> Float[Tensor, "*B N"]:
        """The log-probabilities of some tokens, each at its position, under every state."""
        table = self.stored.detach()
        column = table[positions, :, tokens] if self.per_position else table[:, tokens].movedim(0, -1)
        return column.float().log() if self.compact else column

    def columns_of(self, ids: Int[Tensor, "B L K"]) -> Float[Tensor, "B L K N"]:
        """The probabilities of some tokens at all positions, under every state."""
        if not self.per_position:
            return torch.nn.functional.embedding(ids, self.columns)
        return self.columns[torch.arange(ids.shape[1], device=ids.device)[:, None], ids]

    def emitted(
        self, weights: Float[Tensor, "B R N"], positions: slice | Int[Tensor, "*B R"]
    ) -> Float[Tensor, "B R V"]:
        """sum_i c(i) E[i, v] at some positions: the weight of every token under weights of the states."""
        if self.per_position:
            return (weights[..., None, :] @ self.linear[positions].to(weights.dtype))[..., 0, :]
        return weights @ (self.columns.T if self.compact else self.linear)

    @property
    def dtype(self) -> torch.dtype:
        """The type of results: float32, or float64 if the table is."""
        return torch.float32 if self.compact else self.stored.dtype

    def at(self, position: int) -> "Emission":
        """The emission of one position; itself if all share one table."""
        return self._positions[position] if self.per_position else self

    @cached_property
    def _positions(self) -> list["Emission"]:
        return [Emission(table) for table in self.stored]


@dataclass(frozen=True, eq=False)
class Transition:
    """p(next state | state) as a product of stochastic matrices: one dense factor, or two of low rank.

    Each factor is (rows, columns), or (L - 1, rows, columns) with entry t leading from position t to t + 1. Gates are
    log-weights, of each sequence and step, on the inner states between two factors.
    """

    log_factors: tuple[Float[Tensor, "*steps _ _"], ...]
    log_gates: Float[Tensor, "B T R"] | None = None

    def gated(self, log_gates: Float[Tensor, "B T R"] | None) -> "Transition":
        """This transition with gates between its two factors; what was computed of the factors is kept."""
        if log_gates is None:
            return self
        made = Transition(self.log_factors, log_gates.detach())
        for name in ("linear", "transposed"):
            made.__dict__[name] = getattr(self, name)
        return made

    @property
    def stepwise(self) -> bool:
        """Whether it matters which step of the chain this is."""
        return self.per_position or self.log_gates is not None

    @cached_property
    def gates(self) -> tuple[Float[Tensor, "B T R"], Float[Tensor, "B T"]] | None:
        """Gates with the largest of a step at one, and the logarithms of what was taken out."""
        if self.log_gates is None:
            return None
        log = self.log_gates.to(self.log_factors[0].dtype)
        top = log.amax(-1, keepdim=True)
        return (log - top).exp(), top[..., 0]

    def at(self, t: int, tables: tuple[Float[Tensor, "*steps _ _"], ...]) -> tuple[Float[Tensor, "_ _"], ...]:
        """Tables made of the factors, as they are from position t to t + 1."""
        return tuple(table[t] for table in tables) if self.per_position else tables

    def through(self, values: Float[Tensor, "*n B N"], t: int, reverse: bool = False) -> Float[Tensor, "*n B N"]:
        """Values times the factors and gates of a step; the scale of the gates is left out."""
        for place, factor in enumerate(self.at(t, self.transposed if reverse else self.linear)):
            values = values @ factor
            if self.gates is not None and place == 0:
                values = values * self.gates[0][:, t]
        return values

    def log_step(self, t: int) -> Float[Tensor, "*B N N"]:
        """log-weights from position t to t + 1 in float64; one matrix a sequence if there are gates."""
        if self.log_gates is None:
            return self.at(t, (self.dense_log,))[0]
        left, right = (f.double() for f in self.at(t, self.log_factors))
        through = left + self.log_gates[:, t, None].double()  # (B, N, R)
        return torch.stack([(one[:, :, None] + right).logsumexp(1) for one in through])

    @property
    def per_position(self) -> bool:
        """Whether each step has matrices of its own."""
        return self.log_factors[0].ndim == 3

    @property
    def low_rank(self) -> bool:
        """Whether the matrix is kept as a product of two thin ones."""
        return len(self.log_factors) > 1

    @cached_property
    def linear(self) -> tuple[Float[Tensor, "*steps _ _"], ...]:
        """The factors as probabilities, contiguous."""
        return tuple(f.detach().exp().contiguous() for f in self.log_factors)

    @cached_property
    def transposed(self) -> tuple[Float[Tensor, "*steps _ _"], ...]:
        """The transposed factors, contiguous, in the order in which a backward message meets them."""
        return tuple(f.transpose(-1, -2).contiguous() for f in reversed(self.linear))

    @cached_property
    def dense_log(self) -> Float[Tensor, "*steps N N"]:
        """The whole matrix as log-probabilities in float64: for the reference path and for conversion."""
        out = self.log_factors[0].double()
        for factor in self.log_factors[1:]:
            out = (out[..., :, :, None] + factor.double()[..., None, :, :]).logsumexp(-2)
        return out

    @cached_property
    def dense(self) -> Float[Tensor, "*steps N N"]:
        """The whole matrix as probabilities."""
        out = self.linear[0]
        for factor in self.linear[1:]:
            out = out @ factor
        return out.contiguous()

    @cached_property
    def narrowed(self) -> Int[Tensor, "N N"] | None:
        """The one dense matrix in 16 bits, which the cache of a core holds for more states; None if it cannot be."""
        return native.narrowed(self.linear[0]) if self.linear[0].shape[-1] > WIDEST else None

    @cached_property
    def dense_transposed(self) -> Float[Tensor, "*steps N N"]:
        """The transposed whole matrix, contiguous."""
        return self.dense.transpose(-1, -2).contiguous()
