"""Training the backbone along with its circuit: all of its weights, or low-rank additions to them (LoRA)."""

from typing import Literal

import torch
from torch import nn

from codd.backbones.adapters import LowRank
from codd.backbones.backbone import Backbone


def trainable(
    backbone: Backbone, weights: Literal["none", "lora", "all"], rank: int, seed: int
) -> dict[str, nn.Parameter]:
    """Make some weights of a backbone trainable, and the rest not.

    Additions of low rank start at zero. They are in float32 even if the backbone is in bfloat16, which would round the
    small steps of an optimizer away.
    """
    backbone.requires_grad_(weights == "all")
    if weights == "lora":
        generator = torch.Generator().manual_seed(seed)
        blocks = backbone.network.blocks
        for name, layer in [(name, x) for name, x in blocks.named_modules() if isinstance(x, nn.Linear)]:
            down = torch.randn(rank, layer.in_features, generator=generator) * layer.in_features**-0.5
            precise = torch.promote_types(layer.weight.dtype, torch.float32)
            added = LowRank(layer, down, torch.zeros(layer.out_features, rank), precise)
            added.down.requires_grad_(True)
            added.up.requires_grad_(True)
            blocks.set_submodule(name, added)
    return {name: parameter for name, parameter in backbone.named_parameters() if parameter.requires_grad}


def merge(backbone: Backbone) -> None:
    """Put low-rank additions into the layers that they were added to."""
    for name, layer in [(name, x) for name, x in backbone.named_modules() if isinstance(x, LowRank)]:
        backbone.set_submodule(name, layer.merged())
