"""The learning rate over a run, and the average of the weights."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from codd.training.recipe import OptimizerRecipe


def learning_rate(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """Linear warm-up, then a linear or cosine decay that ends with the run."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, steps - recipe.warmup)
    left = 1 - done if recipe.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return recipe.lr * (recipe.final_lr + (1 - recipe.final_lr) * left)


@torch.no_grad()
def update_average(average: Iterable[Tensor], current: Iterable[Tensor], step: int, decay: float) -> None:
    """Move the average towards the current weights; faster at first, so that it forgets the random start."""
    share = 1 - min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average), list(current), share)
