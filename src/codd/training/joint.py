"""Training the backbone along with its circuit: all of its weights, or low-rank additions to them (LoRA)."""

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from codd.backbones.backbone import Backbone


class LowRank(nn.Module):
    """A linear layer with a trainable addition of low rank, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator):
        """The layer itself stays as it is."""
        super().__init__()
        self.base = base.requires_grad_(False)
        device, dtype = base.weight.device, base.weight.dtype
        down = torch.randn(rank, base.in_features, generator=generator) * base.in_features**-0.5
        self.down = nn.Parameter(down.to(device, dtype))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        """Both."""
        out: Tensor = self.base(x) + linear(linear(x, self.down), self.up)
        return out

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One layer that does the same."""
        self.base.weight += self.up @ self.down
        return self.base


def trainable(
    backbone: Backbone, weights: Literal["none", "lora", "all"], rank: int, seed: int
) -> dict[str, nn.Parameter]:
    """Make some weights of a backbone trainable, and the rest not."""
    backbone.requires_grad_(False)
    if weights == "lora":
        generator = torch.Generator().manual_seed(seed)
        for parent, name, layer in list(_linears(backbone)):
            setattr(parent, name, LowRank(layer, rank, generator))
    elif weights == "all":
        backbone.requires_grad_(True)
    return {name: parameter for name, parameter in backbone.named_parameters() if parameter.requires_grad}


def merge(backbone: Backbone) -> None:
    """Put low-rank additions into the layers that they were added to."""
    for parent in list(backbone.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LowRank):
                setattr(parent, name, child.merged())


def _linears(backbone: Backbone) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of the blocks."""
    for parent in backbone.network.blocks.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child
