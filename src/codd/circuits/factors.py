"""The trainable parameters of an HMM: logits whose softmaxes are its tables, or pairs of thin matrices.

A pair of thin matrices in place of a table of free logits has two uses. States and tokens share what they learn, so
that a circuit of many states trains in a fraction of the steps; and files are small: (N + V) r numbers, not N V.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from codd.errors import FormatError, InvalidCircuit

_PER_COLUMN = ("transition_logits", "transition_right", "detour_right")
_NOT_PER_ROW = ("transition_right", "detour_right", "emission_right", "emission_bias")
"""Which axes of the tensors are states, by their names in a file."""
Table = tuple[Float[Tensor, "_ _"]] | tuple[Float[Tensor, "_ _"], Float[Tensor, "_ _"]]
"""Logits, or two matrices whose product they are. (Axes without names: two tables of one call have other sizes.)"""


def logits_of(table: Table) -> Float[Tensor, "n m"]:
    """The logits of a table; a pair is multiplied out."""
    return table[0] if len(table) == 1 else table[0] @ table[1]


class Detour(NamedTuple):
    """A second way from state to state, through R inner states, which gates can widen and narrow."""

    share: Float[Tensor, " N"]
    """The logit of the share of each state's transitions that take it."""
    left: Float[Tensor, "N R"]
    right: Float[Tensor, "R N"]


@dataclass(frozen=True, eq=False)
class Factors:
    """Logits of the initial, transition and emission tables."""

    initial: Float[Tensor, " N"]
    transition: Table
    emission: Table
    bias: Float[Tensor, " V"] | None = None
    """Added to the emission logits of every state."""
    detour: Detour | None = None

    @classmethod
    def near_neutral(
        cls,
        num_states: int,
        vocab_size: int,
        *,
        transition_rank: int | None = None,
        emission_rank: int | None = None,
        inner_states: int = 0,
        noise: float = 0.5,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> "Factors":
        """Logits of deviation ``noise``: nearly the null circuit. Drawn on the CPU, alike everywhere.

        With ``inner_states`` half of the transitions take a detour through that many.
        """
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = noise) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(device)

        def table(columns: int, rank: int | None) -> Table:
            if rank is None:
                return (draw(num_states, columns),)
            return draw(num_states, rank, scale=1.0), draw(rank, columns, scale=noise / rank**0.5)

        initial = draw(num_states)
        transition, emission = table(num_states, transition_rank), table(vocab_size, emission_rank)
        bias = None if emission_rank is None else torch.zeros(vocab_size, device=device)
        detour = None
        if inner_states:
            sides = draw(num_states, inner_states), draw(inner_states, num_states)
            detour = Detour(torch.zeros(num_states, device=device), *sides)
        return cls(initial, transition, emission, bias, detour)

    @property
    def num_states(self) -> int:
        """N, the number of states."""
        return self.initial.shape[0]

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.emission[-1].shape[-1]

    def tables(self) -> tuple[Float[Tensor, " N"], Tensor | tuple[Tensor, Tensor], Float[Tensor, "N V"]]:
        """The logarithms of the three tables; differentiable. With a detour the transition is a pair of low rank."""
        emission = logits_of(self.emission)
        if self.bias is not None:
            emission = emission + self.bias
        return self.initial.log_softmax(-1), self._transition(), emission.log_softmax(-1)

    def _transition(self) -> Float[Tensor, "N N"] | tuple[Float[Tensor, "N R"], Float[Tensor, "R N"]]:
        """The direct way, or both: each state stays itself on the direct one, as one of N further inner states."""
        direct = logits_of(self.transition).log_softmax(-1)
        if self.detour is None:
            return direct
        share, left, right = self.detour
        itself = torch.eye(self.num_states, dtype=torch.bool, device=share.device)
        straight = torch.where(itself, logsigmoid(-share)[:, None], -torch.inf)
        away = logsigmoid(share)[:, None] + left.log_softmax(-1)
        return torch.cat((straight, away), 1), torch.cat((direct, right.log_softmax(-1)))

    def named(self) -> dict[str, Tensor]:
        """Every tensor under the name that it has in a file."""
        tensors = {"initial_logits": self.initial}
        for name, table in (("transition", self.transition), ("emission", self.emission)):
            names = (f"{name}_logits",) if len(table) == 1 else (f"{name}_left", f"{name}_right")
            tensors |= dict(zip(names, table, strict=True))
        if self.bias is not None:
            tensors["emission_bias"] = self.bias
        if self.detour is not None:
            tensors |= {f"detour_{name}": x for name, x in self.detour._asdict().items()}
        return tensors

    @classmethod
    def from_named(cls, tensors: Mapping[str, Tensor], where: str = "the factors") -> "Factors":
        """Read what `named` gave; `FormatError` if a tensor is missing, `InvalidCircuit` if shapes do not fit."""

        def table(name: str) -> Table:
            if f"{name}_logits" in tensors:
                return (tensors[f"{name}_logits"],)
            return tensors[f"{name}_left"], tensors[f"{name}_right"]

        try:
            detour = None
            if "detour_share" in tensors:
                detour = Detour(*(tensors[f"detour_{name}"] for name in Detour._fields))
            bias = tensors.get("emission_bias")
            factors = cls(tensors["initial_logits"], table("transition"), table("emission"), bias, detour)
        except KeyError as missing:
            raise FormatError(f"{where}: has no tensor {missing}") from None
        factors.check()
        return factors

    def check(self) -> None:
        """Raise unless the shapes fit together."""
        if self.initial.ndim != 1:
            raise InvalidCircuit(f"initial_logits must be (N,), found {tuple(self.initial.shape)}")
        n = self.num_states
        for name, table, columns in (("transition", self.transition, n), ("emission", self.emission, None)):
            flat = all(x.ndim == 2 for x in table)
            joined = flat and (len(table) == 1 or table[0].shape[1] == table[1].shape[0])
            if not joined or table[0].shape[0] != n or columns not in (None, table[-1].shape[1]):
                shapes = " and ".join(str(tuple(x.shape)) for x in table)
                wanted = f"({n}, {columns or 'V'})"
                raise InvalidCircuit(f"the {name} of {n} states must be {wanted} or such a product, found {shapes}")
        if self.bias is not None and self.bias.shape != (self.vocab_size,):
            raise InvalidCircuit(f"emission_bias must be ({self.vocab_size},), found {tuple(self.bias.shape)}")
        if self.detour is not None:
            share, left, right = self.detour
            if share.shape != (n,) or left.ndim != 2 or left.shape[0] != n or right.shape != left.shape[::-1]:
                shapes = ", ".join(str(tuple(x.shape)) for x in self.detour)
                raise InvalidCircuit(f"the detour of {n} states must be ({n},), ({n}, R) and (R, {n}), found {shapes}")

    def map(self, function: Callable[[Tensor], Tensor]) -> "Factors":
        """Apply a function to every tensor."""
        return Factors.from_named({name: function(x) for name, x in self.named().items()})

    def __iter__(self) -> Iterator[Tensor]:
        """All tensors: what an optimizer changes."""
        return iter(self.named().values())

    def restricted(self, states: Int[Tensor, " K"]) -> "Factors":
        """The chain of some of the states: as the softmax does, the rest of each row's mass is shared out among them.

        `InvalidCircuit` if a state, or the beginning, is left without any way on.
        """
        kept = {}
        for name, x in self.named().items():
            rows = x if name in _NOT_PER_ROW else x[states]
            kept[name] = rows[:, states] if name in _PER_COLUMN else rows
        made = Factors.from_named(kept)
        if bool((torch.cat((made.initial[None], logits_of(made.transition))).amax(-1) == -torch.inf).any()):
            raise InvalidCircuit("a state that is kept, or the beginning, leads to none that is kept: keep more states")
        return made
