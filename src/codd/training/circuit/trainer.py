"""The trainer of circuits: updates on windows, scores of held-out text, and the best circuit so far on disk."""

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from codd.backbones import adapters, mini
from codd.data.datasets import STRATA
from codd.data.packing import numbered_seed
from codd.distributed import DistributedContext
from codd.errors import Diverged, InvalidCircuit, InvalidEvidence
from codd.training.circuit import joint
from codd.training.circuit.data import TrainingData, batch_index
from codd.training.circuit.updaters import CapturedUpdater, GradientUpdater, make_updater
from codd.training.circuit_recipe import CircuitRecipe
from codd.training.curve import write_curve
from codd.training.run import METRICS, Progress, run

CURVE, CIRCUIT, MODEL, ADAPTER = "curve.png", "circuit", "model", "adapter"
SUMS, BEST = "run.sums", "run.best"
WORST = 100.0
"""Nats per token beyond which a loss is a sign of divergence: to know nothing of a token costs about ten."""
LOWER = (
    "Lower optimizer.lr (of anemone: optimizer.step_size) or raise optimizer.warmup, and start again with --fresh; the "
    "last checkpoint and the circuit of the last validation are whole."
)


def train(recipe: CircuitRecipe, data: TrainingData, out: Path, context: DistributedContext) -> Iterator[Progress]:
    """Run the recipe to its end, from the last checkpoint in ``out`` if there is one; yields after every step.

    ``out/circuit`` holds the best circuit so far by held-out text, or that of the last validation if there is none.
    """
    return run(CircuitTrainer(recipe, data, out, context), recipe, out, context)


class CircuitTrainer:
    """A circuit in training, with the backbone if the recipe says so."""

    unit = "windows"

    def __init__(self, recipe: CircuitRecipe, data: TrainingData, out: Path, context: DistributedContext):
        """Start at step 0, from the recipe's initial circuit."""
        self.recipe, self.data, self.out, self.context = recipe, data, out, context
        self.per_step, self.rate = recipe.batch_windows, 0.0
        self.updater = make_updater(data.recipe, data.spec, data.draw)
        self.best = torch.tensor(-math.inf, dtype=torch.float64)
        """The best validation so far."""
        self.sums = torch.zeros(3, device=context.device)
        """Log-likelihood, the network's own, and tokens, of the steps since the last that was logged."""

    def step(self, step: int, progress: float) -> None:
        """One update; Diverged if the chain refuses the parameters."""
        self.rate = cosine_rate(step, progress, self.recipe.optimizer.warmup)
        try:
            self.sums += self._update(step)
        except (InvalidEvidence, InvalidCircuit) as error:  # what a chain says of parameters that are no numbers
            raise Diverged(f"step {step + 1}: {error}: the training has diverged. {LOWER}") from error

    def _update(self, step: int) -> Float[Tensor, " 3"]:
        recipe, data = self.recipe, self.data
        if self._captured is not None and data.dataset is not None:
            return self._captured.update(batch_index(recipe, step, data.strata, len(data.dataset)), self.rate)
        with torch.random.fork_rng(devices=[]):  # of dropout; no two processes drop alike
            torch.manual_seed(numbered_seed(recipe.seed, step) * STRATA + data.strata.start)
            return self.updater.update(data.draw(step), self.rate)

    @functools.cached_property
    def _captured(self) -> CapturedUpdater | None:
        """The first half of an update as a CUDA graph, if it has gradients and the windows lie on a GPU."""
        dataset, on_gpu = self.data.dataset, self.context.device.type == "cuda"
        if not isinstance(self.updater, GradientUpdater) or dataset is None or not on_gpu:
            return None
        return CapturedUpdater(self.updater, dataset, self.recipe.batch_windows // self.context.world_size)

    def metrics(self, step: int) -> dict[str, float]:
        """Since the last call: the loss and that of the network alone, in nats per masked token; the learning rate."""
        loss, factorized = self._losses(step)
        self.sums = torch.zeros_like(self.sums)
        return {"loss": loss, "factorized": factorized, "rate": self.rate}

    def _losses(self, step: int) -> tuple[float, float]:
        coupled, factorized, tokens = self.sums.tolist()
        loss = -coupled / max(tokens, 1)
        if not loss < WORST:
            raise Diverged(f"the loss is {loss:g} nats per token at step {step}: the training has diverged. {LOWER}")
        return loss, -factorized / max(tokens, 1)

    def _check(self, step: int) -> None:
        self._losses(step)
        if any(bool(x.isnan().any()) for x in self.updater.tensors().values()):
            raise Diverged(f"parameters are no numbers after step {step}: the training has diverged. {LOWER}")

    def validate(self, step: int) -> dict[str, float]:
        """Scores of held-out text, the same in every process; a circuit that is better than all before is saved."""
        self._check(step)
        circuit = self.updater.circuit()
        figures: dict[str, float] = {}
        scores = []
        for name, held_out in self.data.held_out().items():
            for ratio, score in held_out.scores(circuit).items():
                start = f"held_out/{name}@{ratio:g}"
                if not math.isnan(score["gap_closed"]):  # there is a gap to close
                    figures[f"{start}/gap_closed"] = score["gap_closed"]
                figures[f"{start}/log_likelihood"] = score["coupled"]
                scores.append(score["coupled"])
        if not all(map(math.isfinite, scores)):
            raise Diverged(f"held-out text has no probability after step {step}: the training has diverged. {LOWER}")
        mean = sum(scores) / len(scores) if scores else -math.inf
        if step and (not scores or mean > self.best):  # without held-out text the last circuit is kept
            self.best.fill_(mean)
            if self.context.is_main and self.data.spec.backbone is None:
                circuit.save(self.out / CIRCUIT, half=self.recipe.half)
        return figures

    def state(self, step: int) -> dict[str, Tensor]:
        """Parameters, the optimizer's state, the best validation, and the sums that were not logged yet."""
        self._check(step)
        return {**self.updater.tensors(), BEST: self.best, SUMS: self.sums}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; an error if it is of another circuit."""
        self.updater.restore(state)
        self.best, self.sums = state[BEST].cpu(), state[SUMS]

    def export(self) -> None:
        """The curve; and of a backbone that was trained along, LoRA as an adapter, and a network of ours as a whole."""
        backbone, recipe = self.data.spec.backbone, self.recipe
        if backbone is not None and recipe.joint.weights == "lora":
            adapters.save(backbone, self.out / ADAPTER, recipe.backbone)
            self.updater.circuit().save(self.out / ADAPTER / CIRCUIT, half=recipe.half)
        if backbone is not None and backbone.family == mini.NAME:
            joint.merge(backbone)
            mini.save(backbone, self.out / MODEL, notes={"recipe": recipe.name, "recipe_digest": recipe.digest()})
            if self.data.tokenizer is not None:
                self.data.tokenizer.save(self.out / MODEL)
            self.updater.circuit().save(self.out / MODEL / CIRCUIT, half=recipe.half)
        if (self.out / METRICS).stat().st_size:
            write_curve(self.out / METRICS, self.out / CURVE)


def cosine_rate(step: int, progress: float, warmup: int) -> float:
    """A factor from 0 to 1: linear warm-up over the first steps, under a cosine that ends with the run."""
    return min(1.0, (step + 1) / max(1, warmup)) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
