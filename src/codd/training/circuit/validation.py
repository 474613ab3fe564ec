"""Validation of a circuit: what one step says of held-out text, and how much of the gap to many steps is closed.

All that does not depend on the circuit is computed once: the network's states of each block at each mask ratio, its own
factorized score, and the score of writing one token at a time. `codd.evaluation.misspecification` measures the same of
a finished model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import ProbabilisticCircuit
from codd.coupling import Coupled
from codd.coupling.gap import gap_closed
from codd.data.datasets import HiddenStateDataset, concatenate, evaluate_windows
from codd.data.packing import PackedSequences
from codd.data.windows import CPU, MaskedRows, WindowBatch, mask_block, sample_blocks, window_states
from codd.errors import InvalidInput

AT_ONCE = 128
"""Rows that the network is given at a time, and windows a circuit."""


@dataclass(frozen=True)
class Score:
    """Log-likelihoods per masked token at one mask ratio, in nats."""

    factorized: float
    coupled: float
    sequential: float

    @property
    def gap_closed(self) -> float:
        """The share of the gap from all at once to one at a time that the circuit closes; NaN: no gap to close."""
        return gap_closed(self.factorized, self.coupled, self.sequential)


@dataclass(frozen=True)
class HeldOut:
    """The blocks of one set of rows: at each mask ratio a dataset, and the score of writing one token at a time."""

    datasets: Mapping[float, HiddenStateDataset]
    sequential: Mapping[float, float]

    @classmethod
    @torch.no_grad()
    def prepare(
        cls, backbone: Backbone, mask_id: int, rows: PackedSequences, size: int, ratios: Sequence[float], seed: int
    ) -> "HeldOut":
        """One block of each row. The seed fixes blocks and masks; those of a higher ratio contain the lower's."""
        generator, absolute = torch.Generator().manual_seed(seed), backbone.block_size is not None
        first, valid, order = sample_blocks(rows, size, generator, absolute=absolute)
        if not bool(valid.any()):
            raise InvalidInput(f"no block of {size} tokens fits the held-out text. Give longer texts.")
        keep = valid[:, 0]
        blocks = _Blocks(backbone, mask_id, *(x[keep] for x in (*rows.tensors(CPU), first, order)))
        counts = {ratio: max(1, round(ratio * size)) for ratio in ratios}
        datasets = {ratio: blocks.dataset(count) for ratio, count in counts.items()}
        steps = torch.zeros(size, dtype=torch.float64)
        for count in range(max(counts.values()), 0, -1):
            steps[count - 1] = blocks.next_token(count)
        sequential = {
            ratio: float(steps[:count].sum()) / (count * len(blocks.order)) for ratio, count in counts.items()
        }
        return cls(datasets, sequential)

    @torch.no_grad()
    def scores(self, circuit: ProbabilisticCircuit) -> dict[float, Score]:
        """The scores of a circuit at each mask ratio."""
        return {ratio: _score(dataset, circuit, self.sequential[ratio]) for ratio, dataset in self.datasets.items()}


def _score(dataset: HiddenStateDataset, circuit: ProbabilisticCircuit, sequential: float) -> Score:
    sums = torch.zeros(3, dtype=torch.float64)
    for begin in range(0, len(dataset), AT_ONCE):
        index = torch.arange(begin, min(begin + AT_ONCE, len(dataset)), device=dataset.tokens.device)
        windows = dataset.windows(index)
        parts = (coupled_log_prob(circuit, windows), windows.factorized_log_prob(), windows.masked)
        sums += torch.stack([x.sum().double() for x in parts]).cpu()
    coupled, factorized, count = sums.tolist()
    return Score(factorized / count, coupled / count, sequential)


def coupled_log_prob(circuit: ProbabilisticCircuit, windows: WindowBatch) -> Float[Tensor, " W"]:
    """The log-probability of the masked tokens of each window under the product of network and circuit."""
    assert windows.logits is not None
    joint = Coupled(
        circuit, logits=windows.logits, tokens=windows.tokens, masked=windows.masked, features=windows.features
    )
    return joint.log_prob(windows.tokens)


@dataclass(frozen=True)
class _Blocks:
    """A block in each of B rows, on the host, and the network that is evaluated on them some rows at a time."""

    backbone: Backbone
    mask_id: int
    tokens: Int[Tensor, "B L"]
    segments: Int[Tensor, "B L"]
    scored: Tensor
    first: Int[Tensor, "B 1"]
    order: Int[Tensor, "B S"]
    """A ratio masks the positions that come first here."""

    def _batches(self, count: int, first: Int[Tensor, "B 1"]) -> Iterator[MaskedRows]:
        """Rows with ``count`` tokens of the block masked, and all to its right, on the network's device.

        Their windows begin at the positions given.
        """
        chosen = self.order.argsort(1) < count
        hidden = mask_block(self.segments, self.scored, self.first, chosen)
        level = chosen.float().mean(-1, keepdim=True)
        rows = MaskedRows(self.tokens, self.segments, hidden, first, torch.ones_like(first, dtype=torch.bool), level)
        for begin in range(0, len(self.tokens), AT_ONCE):
            yield rows.each(lambda x, begin=begin: x[begin : begin + AT_ONCE].to(self.backbone.device))  # type: ignore[misc]  # mypy and defaults

    def dataset(self, count: int) -> HiddenStateDataset:
        """The network's states in all blocks with ``count`` tokens masked."""
        size = self.order.shape[1]
        parts = [evaluate_windows(self.backbone, self.mask_id, x, size) for x in self._batches(count, self.first)]
        return concatenate(parts, len(self.tokens))

    def next_token(self, count: int) -> float:
        """With ``count`` tokens masked, the log-probability of the last of them in the order, summed over blocks."""
        total = 0.0
        for rows in self._batches(count, self.first + self.order[:, count - 1 : count]):
            states = window_states(self.backbone, self.mask_id, rows, 1)
            logits = self.backbone.masked_logits_from_states(states, mask_id=self.mask_id)
            truth = rows.tokens.gather(1, rows.first)
            total += float(logits.log_softmax(-1).gather(-1, truth[..., None]).double().sum())
        return total
