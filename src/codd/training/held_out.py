"""Held-out text while a circuit is trained: what one step says of it, and how much of the gap to many is closed.

All that does not depend on the circuit is computed once: the network's states of each block at each mask ratio, its own
factorized score, and the score of writing one token at a time. `codd.evaluation.misspecification` asks the same of a
finished model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import ProbabilisticCircuit
from codd.coupling import Coupled
from codd.errors import InvalidInput
from codd.training.bank import Bank
from codd.training.cache_entries import narrow
from codd.training.rows import Rows
from codd.training.windows import Places, Shown, Windows, cut, held_out_blocks, mask_block, see

AT_ONCE = 128
"""Rows that the network is given at a time, and windows a circuit."""


@dataclass(frozen=True)
class Score:
    """Log-likelihoods per masked token at one mask ratio."""

    factorized: float
    coupled: float
    sequential: float

    @property
    def gap_closed(self) -> float:
        """The share of the distance from one step to many; 0 where there is none."""
        gap = self.sequential - self.factorized
        return (self.coupled - self.factorized) / gap if gap else 0.0


@dataclass(frozen=True)
class HeldOut:
    """The blocks of one set of rows: at each ratio a bank, and the score of writing one token at a time."""

    banks: Mapping[float, Bank]
    sequential: Mapping[float, float]

    @classmethod
    @torch.no_grad()
    def prepare(
        cls, backbone: Backbone, mask_id: int, rows: Rows, size: int, ratios: Sequence[float], seed: int
    ) -> "HeldOut":
        """One block of each row. The seed fixes blocks and masks; those of a higher ratio contain the lower's."""
        generator, absolute = torch.Generator().manual_seed(seed), backbone.block_size is not None
        (tokens, segments, scored), places, order = held_out_blocks(rows, size, generator, absolute=absolute)
        if not bool(places.useful.any()):
            raise InvalidInput(f"no block of {size} tokens fits the held-out text. Give longer texts.")
        keep = places.useful[:, 0]
        tokens, segments, scored, order = tokens[keep], segments[keep], scored[keep], order[keep]
        places = Places(places.starts[keep], places.useful[keep])
        rank = order.argsort(1)
        asked = _Asked(backbone, mask_id, size)

        def hide(count: int, some: slice) -> Shown:
            hidden = mask_block(segments[some], scored[some], places.starts[some], rank[some] < count)
            return Shown(*(x.to(backbone.device) for x in (tokens[some], segments[some], hidden)))

        parts = [slice(begin, begin + AT_ONCE) for begin in range(0, len(tokens), AT_ONCE)]
        counts = {ratio: max(1, round(ratio * size)) for ratio in ratios}
        banks = {
            ratio: asked.bank([(hide(count, p), _at(places, p)) for p in parts]) for ratio, count in counts.items()
        }
        steps = torch.zeros(size, dtype=torch.float64)
        for count in range(max(counts.values()), 0, -1):
            for p in parts:
                steps[count - 1] += asked.next_token(hide(count, p), _at(places, p), order[p, count - 1 : count])
        sequential = {ratio: float(steps[:count].sum()) / (count * len(tokens)) for ratio, count in counts.items()}
        return cls(banks, sequential)

    @torch.no_grad()
    def scores(self, circuit: ProbabilisticCircuit) -> dict[float, Score]:
        """Those of a circuit."""
        return {ratio: self._score(bank, circuit, self.sequential[ratio]) for ratio, bank in self.banks.items()}

    def _score(self, bank: Bank, circuit: ProbabilisticCircuit, sequential: float) -> Score:
        sums = torch.zeros(3, dtype=torch.float64)
        for begin in range(0, len(bank), AT_ONCE):
            index = torch.arange(begin, min(begin + AT_ONCE, len(bank)), device=bank.tokens.device)
            windows = bank.windows(index)
            found = (coupled_of(circuit, windows).sum(), factorized_of(windows).sum(), windows.masked.sum())
            sums += torch.stack([x.double() for x in found]).cpu()
        coupled, factorized, count = sums.tolist()
        return Score(factorized / count, coupled / count, sequential)


def coupled_of(circuit: ProbabilisticCircuit, windows: Windows) -> Tensor:
    """The log-probability of what is masked in each window."""
    assert windows.logits is not None
    joint = Coupled(
        circuit, logits=windows.logits, tokens=windows.tokens, masked=windows.masked, features=windows.features
    )
    return joint.log_prob(windows.tokens)


def factorized_of(windows: Windows) -> Tensor:
    """The same of the network by itself: what the null circuit would have."""
    if windows.sparse is not None:
        hit = windows.sparse.ids == windows.tokens[..., None]  # the truth is always listed
        truth = torch.where(hit, windows.sparse.log_weights, -torch.inf).amax(-1)
    else:
        assert windows.logits is not None
        truth = windows.logits.log_softmax(-1).gather(-1, windows.tokens[..., None])[..., 0]
    return torch.where(windows.masked, truth, 0).sum(-1)


def _at(places: Places, some: slice) -> Places:
    return Places(places.starts[some], places.useful[some])


@dataclass(frozen=True)
class _Asked:
    """The network, asked about blocks."""

    backbone: Backbone
    mask_id: int
    size: int

    def _places(self, places: Places) -> Places:
        return Places(*(x.to(self.backbone.device) for x in places))

    def bank(self, parts: Sequence[tuple[Shown, Places]]) -> Bank:
        """What it says of all blocks, kept."""
        columns: list[tuple[Tensor, ...]] = []
        for shown, places in parts:
            at = self._places(places)
            states = see(self.backbone, self.mask_id, shown, at, self.size)
            columns.append((cut(shown.tokens, at, self.size), cut(shown.hidden, at, self.size), states))
        tokens, masked, states = (torch.cat(column) for column in zip(*columns, strict=True))
        level = masked.float().mean(-1)
        vocab_size = self.backbone.vocab_size
        return Bank(self.backbone, self.mask_id, narrow(tokens, vocab_size), masked, level, states)

    def next_token(self, shown: Shown, places: Places, turn: Int[Tensor, "B 1"]) -> float:
        """The log-probability of the token whose turn it is, summed over blocks."""
        place = Places(places.starts + turn, places.useful)
        at = self._places(place)
        states = see(self.backbone, self.mask_id, shown, at, 1)
        truth = shown.tokens.gather(1, at.starts)
        logits = self.backbone.masked_logits_from_states(states, mask_id=self.mask_id)
        return float(logits.log_softmax(-1).gather(-1, truth[..., None]).double().sum())
