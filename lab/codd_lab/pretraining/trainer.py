"""The trainer of backbones: AdamW on the diffusion loss (or next-token prediction), and an average of the weights."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from codd.backbones import mini
from codd.backbones.backbone import Backbone
from codd.backbones.config import Config
from codd.backbones.loading import check_dtype
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import Transformer, initialise
from codd.data.packing import numbered_seed
from codd.distributed import DistributedContext
from codd.errors import Diverged, FormatError
from codd.training.checkpoints import adam_tensors, restore_adam
from codd.training.run import VALIDATION_SEED, Progress, run
from codd_lab.pretraining.data import ROWS, BackboneData
from codd_lab.pretraining.loss import Maker, causal_batch, diffusion_batch, loss_sum, mean_loss
from codd_lab.pretraining.recipe import OptimizerRecipe, Recipe


def train(recipe: Recipe, data: BackboneData, out: Path, context: DistributedContext) -> Iterator[Progress]:
    """Run the recipe to its end, from the last checkpoint in ``out`` if there is one; yields after every step.

    When it ends, ``out/model`` holds the averaged weights in float32 and ``out/model-int8`` the compact form.
    """
    return run(BackboneTrainer(recipe, data, out, context), recipe, out, context)


class BackboneTrainer:
    """A network of the family mini, its optimizer, and the average of its weights, which is validated and kept."""

    unit = "tokens"

    def __init__(self, recipe: Recipe, data: BackboneData, out: Path, context: DistributedContext):
        """Start at step 0, with weights drawn from the recipe's seed."""
        self.recipe, self.data, self.out, self.context = recipe, data, out, context
        self.per_step = recipe.batch_rows * recipe.row_length
        self.backbone = _new_backbone(recipe, data.tokenizer).to(context.device)
        self.parameters = dict(self.network.named_parameters())
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.optimizer = self._adam()
        self._half = uses_bfloat16(recipe, context.device)
        compiled = context.device.type == "cuda" if recipe.compile is None else recipe.compile
        self._loss_sum = torch.compile(loss_sum) if compiled else loss_sum
        self._make_batch = batch_maker(recipe, data.tokenizer)
        self._last: dict[str, Tensor] = {}

    @property
    def network(self) -> Transformer:
        """The network whose weights are trained."""
        return self.backbone.network

    def _adam(self) -> torch.optim.AdamW:
        chosen, parameters = self.recipe.optimizer, list(self.parameters.values())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": chosen.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = self.context.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=chosen.lr, betas=(chosen.betas[0], chosen.betas[1]), fused=fused)

    def step(self, step: int, progress: float) -> None:
        """One AdamW update; processes share the rows of the batch."""
        recipe, device, parameters = self.recipe, self.context.device, list(self.parameters.values())
        generator = torch.Generator(device).manual_seed(numbered_seed(recipe.seed, step))
        batch = self._make_batch(self.data.training.batch_at(step), generator)
        rate = learning_rate(step, recipe.steps, recipe.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        lost = torch.zeros((), device=device)
        own = self.context.shard(recipe.batch_rows, ROWS)
        micro = recipe.micro_rows or len(own)
        for first in own[::micro]:
            with torch.autocast(device.type, torch.bfloat16, enabled=self._half):
                loss = self._loss_sum(self.network, batch.part(first, min(first + micro, own.stop))) / batch.total
            torch.autograd.backward(loss)
            lost += loss.detach()
        self.context.all_reduce([*(p.grad for p in parameters if p.grad is not None), lost])
        norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        forget = 1 - min(recipe.optimizer.ema, (1 + step) / (10 + step))  # faster at first: the start is random
        with torch.no_grad():
            torch._foreach_lerp_([*self.average.values()], [*parameters], forget)
        self._last = {"loss": lost, "gradient_norm": norm, "lr": torch.tensor(rate)}

    def metrics(self, step: int) -> dict[str, float]:
        """Figures of the last step: loss in nats per token, norm of the gradient before clipping, learning rate."""
        figures = {name: float(value) for name, value in self._last.items()}
        _check_finite(figures["loss"], "the loss", step)
        return figures

    def validate(self, step: int) -> dict[str, float]:
        """The loss of the averaged weights on each validation source; every process computes the same."""
        if not step:
            return {}
        make = batch_maker(self.recipe, self.data.tokenizer, blocks=False)
        current = [parameter.detach().clone() for parameter in self.network.parameters()]
        _copy(self.average.values(), self.network)
        try:
            with torch.autocast(self.context.device.type, torch.bfloat16, enabled=self._half):
                return {
                    f"validation/{name}": mean_loss(
                        self.network,
                        rows,
                        make,
                        seed=VALIDATION_SEED,
                        device=self.context.device,
                        at_once=self.recipe.micro_rows or self.recipe.batch_rows,
                    )
                    for name, rows in self.data.validation.items()
                }
        finally:
            _copy(current, self.network)

    def state(self, step: int) -> dict[str, Tensor]:
        """Weights, their average, Adam's moments; Diverged if a weight is NaN."""
        _check_finite(float(sum(p.detach().sum() for p in self.network.parameters())), "the weights' sum", step)
        weights = {f"weights.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        average = {f"average.{name}": value for name, value in self.average.items()}
        return {**weights, **average, **adam_tensors(self.optimizer, self.parameters)}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave; KeyError or RuntimeError if it is of another network."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[f"weights.{name}"])
            self.average[name].copy_(tensors[f"average.{name}"])
        restore_adam(self.optimizer, self.parameters, tensors)

    def export(self) -> None:
        """Write the averaged weights as checkpoints that `codd.load` reads."""
        _copy(self.average.values(), self.network)
        notes = {"recipe": self.recipe.name, "recipe_digest": self.recipe.digest(), "steps": self.recipe.steps}
        for name, int8 in (("model", False), ("model-int8", True)):
            self.data.tokenizer.save(mini.save(self.backbone, self.out / name, int8=int8, notes=notes))


def _new_backbone(recipe: Recipe, tokenizer: Tokenizer) -> Backbone:
    config = Config(
        {
            **dataclasses.asdict(recipe.model),
            "vocab_size": tokenizer.vocab_size,
            "causal": recipe.objective == "causal",
            "mask_token_id": tokenizer.mask_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
            "bos_token_id": tokenizer.bos_id,
        },
        "the recipe's model",
    )
    backbone = mini.build(config)
    initialise(backbone.network, generator=torch.Generator().manual_seed(recipe.seed))
    return backbone


def learning_rate(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """Linear warm-up, then a linear or cosine decay that ends with the run."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, steps - recipe.warmup)
    left = 1 - done if recipe.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return recipe.lr * (recipe.final_lr + (1 - recipe.final_lr) * left)


def batch_maker(recipe: Recipe, tokenizer: Tokenizer, *, blocks: bool = True) -> Maker:
    """How rows become batches under the recipe's objective; without ``blocks``, under uniform noise only."""
    if recipe.objective == "causal":
        return causal_batch
    noise = recipe.noise if blocks else dataclasses.replace(recipe.noise, block_share=0.0)
    if tokenizer.mask_id is None:
        raise FormatError("the tokenizer has no mask token, which the diffusion objective needs.")
    return partial(
        diffusion_batch, recipe=noise, mask_id=tokenizer.mask_id, absolute=recipe.model.block_size is not None
    )


def uses_bfloat16(recipe: Recipe, device: torch.device) -> bool:
    """Whether matrix products are computed in bfloat16; InvalidInput if the device cannot."""
    half = recipe.precision == "bfloat16" or (recipe.precision == "auto" and device.type == "cuda")
    if half:
        check_dtype(torch.bfloat16, device)
    return half


def _check_finite(value: float, what: str, step: int) -> None:
    if not math.isfinite(value):
        raise Diverged(
            f"{what} is {value} after step {step}: the training has diverged. Lower optimizer.lr or optimizer.clip, or "
            "raise optimizer.warmup, and start again with --fresh."
        )


@torch.no_grad()
def _copy(source: Iterable[Tensor], network: Transformer) -> None:
    for parameter, value in zip(network.parameters(), source, strict=True):
        parameter.copy_(value)
