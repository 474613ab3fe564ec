"""Mixtures of experts: a router chooses a few MLPs for every position, and only those are computed.

Weights of all experts are stacked, so that rows sorted by expert meet them in one grouped product.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from codd.backbones.kernels import kernels_for


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a network, and how its router chooses among them."""

    count: int
    chosen: int
    """How many experts each position is routed to."""
    width: int
    """The width of an expert's hidden layer."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others have an MLP."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: probabilities over all experts, the bias added, choose and weigh. sigmoid: with the bias they choose;
    without it, made to sum to one and scaled, they weigh."""
    bias: bool = False
    """Whether each expert has a number that is added to its score."""
    groups: int = 1
    """The number of groups of consecutive experts; a group's score is the sum of its two best."""
    kept_groups: int = 1
    """The number of best groups that experts are chosen from."""
    normalised: bool = False
    """Whether the weights of a softmax router are made to sum to one, too."""
    scale: float = 1.0
    """What the weights of a sigmoid router are multiplied with."""
    shared_width: int = 0
    """The width of a shared MLP that every position passes; 0: there is none."""


class Router(nn.Module):
    """Scores the experts of each position."""

    def __init__(self, width: int, config: ExpertsConfig):
        """``width``: that of the network's hidden states."""
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.count, width))
        self.bias = nn.Parameter(torch.zeros(config.count)) if config.bias else None
        """In float32 whatever the network's dtype (`keep_precise`): a choice must not hang on its rounding."""

    def keep_precise(self) -> None:
        """Give the bias back the precision that a cast of the network took from it."""
        if self.bias is not None:
            self.bias.data = self.bias.data.float()

    def forward(self, x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """The weights and numbers of the experts that each row goes to."""
        config, wide = self.config, torch.promote_types(x.dtype, torch.float32)
        dtype = x.dtype if config.score == "softmax" else wide
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        if wide == torch.float32 and (kernels := kernels_for(logits)) is not None:
            weights, chosen = kernels.route(logits, self.bias, config, wide if config.normalised else dtype)
            return self._normalised(weights).to(dtype), chosen
        bias = 0.0 if self.bias is None else self.bias.to(wide)
        if config.score == "softmax":
            weights, chosen = (logits.softmax(-1, dtype=wide) + bias).topk(config.chosen, dim=-1)
            return self._normalised(weights).to(dtype), chosen
        scores = logits.sigmoid()
        chosen = self._of_best_groups(scores + bias).topk(config.chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.chosen > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.scale, chosen

    def _normalised(self, weights: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        return weights / weights.sum(-1, keepdim=True) if self.config.normalised else weights

    def _of_best_groups(self, ranks: Float[Tensor, "n E"]) -> Float[Tensor, "n E"]:
        config = self.config
        if config.groups == config.kept_groups:
            return ranks
        grouped = ranks.view(len(ranks), config.groups, config.count // config.groups)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(config.kept_groups, dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


class Experts(nn.Module):
    """The chosen experts of every position, weighted and summed."""

    def __init__(self, width: int, config: ExpertsConfig):
        """Each expert is a gated MLP without biases: ``up`` holds its gate, then its multiplier."""
        super().__init__()
        self.config = config
        self.router = Router(width, config)
        self.up = nn.Parameter(torch.empty(config.count, 2 * config.width, width))
        self.down = nn.Parameter(torch.empty(config.count, width, config.width))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The sum over each position's experts, in the precision of the router's weights; in the dtype of x."""
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows)
        if rows.dtype != torch.float64 and (kernels := kernels_for(rows, self.up)) is not None:
            mixed: Tensor = kernels.mix(rows, weights, chosen, self.up, self.down)
            return mixed.view(x.shape)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.searchsorted(chosen.flatten()[order], torch.arange(len(self.up), device=x.device), right=True)
        gate, inner = grouped_linear(rows[order // self.config.chosen], self.up, ends).chunk(2, dim=-1)
        outputs = grouped_linear(F.silu(gate) * inner, self.down, ends)
        by_choice = torch.empty_like(outputs).index_copy(0, order, outputs).view(*chosen.shape, x.shape[-1])
        summed: Tensor = (by_choice * weights[..., None]).sum(-2)
        return summed.to(x.dtype).view(x.shape)


def grouped_linear(
    x: Float[Tensor, "n i"], weights: Float[Tensor, "E o i"], ends: Int[Tensor, " E"]
) -> Float[Tensor, "n o"]:
    """Rows of x times the matrix of their expert: those of expert e end before ``ends[e]``.

    Experts without rows cost nothing; which they are the host must know, so that this waits for a device.
    """
    bounds = [0, *ends.tolist()]
    parts = [
        F.linear(x[bounds[e] : bounds[e + 1]], weights[e]) for e in range(len(weights)) if bounds[e] < bounds[e + 1]
    ]
    return torch.cat(parts) if parts else x.new_zeros(0, weights.shape[1])
