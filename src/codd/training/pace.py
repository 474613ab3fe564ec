"""How far a run is, by steps and by the clock, and when it has learnt enough."""

import math
import time

import torch

from codd.training.circuit_recipe import CircuitRecipe
from codd.training.workers import Workers


class Best:
    """The best validation so far."""

    def __init__(self, score: float = -math.inf, stale: int = 0):
        """``stale``: validations since."""
        self.score, self.stale = score, stale

    def take(self, score: float) -> bool:
        """Whether a validation is the best."""
        better = score > self.score
        self.score, self.stale = (score, 0) if better else (self.score, self.stale + 1)
        return better

    def enough(self, recipe: CircuitRecipe) -> bool:
        """Whether the recipe's patience is at its end."""
        return recipe.patience is not None and self.stale >= recipe.patience


class Clock:
    """How much of a run lies behind it: by steps, and by seconds of training if those are limited."""

    def __init__(
        self, recipe: CircuitRecipe, workers: Workers, spent: float = 0.0, read_at: tuple[int, float] = (0, 0.0)
    ):
        """Go on after so many seconds; ``read_at``: the step and the seconds of the last reading."""
        self.recipe, self.workers, self.spent, self.read_at = recipe, workers, spent, read_at
        self.since: float | None = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds of training."""
        return self.spent + (0.0 if self.since is None else time.perf_counter() - self.since)

    def pause(self) -> None:
        """What follows is no training."""
        self.spent, self.since = self.elapsed(), None

    def go_on(self) -> None:
        """Now it is again."""
        self.since = time.perf_counter()

    def part(self, step: int) -> float:
        """From 0 to 1, the same in all processes."""
        by_steps = step / self.recipe.steps
        if self.recipe.seconds is None:
            return by_steps
        return max(by_steps, of_leader(self.elapsed(), self.workers) / self.recipe.seconds)

    def read(self, step: int) -> dict[str, float]:
        """Seconds of training, and the rate since the last reading."""
        (before, then), now = self.read_at, self.elapsed()
        self.read_at = step, now
        rate = (step - before) * self.recipe.batch_windows / max(now - then, 1e-9)
        return {"windows_per_second": rate, "seconds": now}


def of_leader(value: float, workers: Workers) -> float:
    """The leading process's number, so that all decide alike."""
    if workers.count == 1:
        return value
    shared = torch.tensor([value if workers.leads else 0.0], dtype=torch.float64, device=workers.device)
    workers.add_up([shared])
    return float(shared)
