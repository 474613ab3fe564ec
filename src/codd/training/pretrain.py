"""Training a backbone: the loop, and what it writes.

A step is a function of the recipe, its number and the weights: rows, noise and learning rate are recomputed, not
remembered. So a run that was killed goes on from its last checkpoint to the same weights, bit for bit on a CPU.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codd.backbones import mini
from codd.backbones.backbone import Backbone
from codd.backbones.config import Config
from codd.backbones.loading import check_dtype
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import Transformer, initialise
from codd.errors import Diverged, FormatError, InvalidInput
from codd.files import brief
from codd.training import corpus
from codd.training.bpe import MINI_SPECIAL_TOKENS, train_bpe
from codd.training.checkpoints import checkpoints, read_checkpoint, write_checkpoint
from codd.training.metrics import Log, Progress
from codd.training.objective import Maker, causal_batch, diffusion_batch, loss_sum, mean_loss
from codd.training.recipe import Recipe
from codd.training.rows import Mixture, Rows
from codd.training.schedule import learning_rate, update_average
from codd.training.workers import Workers

VALIDATION_SEED = 20_000
"""Of the masks of validation, the same in every run."""


class Data(NamedTuple):
    """What a run reads."""

    tokenizer: Tokenizer
    training: Mixture
    validation: dict[str, Rows]


@dataclasses.dataclass
class State:
    """What a step changes."""

    backbone: Backbone
    average: dict[str, Tensor]
    optimizer: torch.optim.AdamW
    step: int = 0

    @property
    def network(self) -> Transformer:
        """The weights that are trained."""
        return self.backbone.network

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint keeps."""
        kept = {}
        for name, parameter in self.network.named_parameters():
            kept[f"weights.{name}"] = parameter.detach()
            kept[f"average.{name}"] = self.average[name]
            moments = self.optimizer.state.get(parameter, {})
            kept |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in moments.items()}
        return kept

    @torch.no_grad()
    def restore(self, kept: dict[str, Tensor], step: int) -> None:
        """The opposite of `tensors`."""
        for name, parameter in self.network.named_parameters():
            parameter.copy_(kept[f"weights.{name}"])
            self.average[name].copy_(kept[f"average.{name}"])
            start = f"optimizer.{name}."
            moments = {key.removeprefix(start): value for key, value in kept.items() if key.startswith(start)}
            # AdamW keeps its step count on the CPU unless it is fused.
            fused = self.optimizer.defaults.get("fused")
            self.optimizer.state[parameter] = {
                key: value.to("cpu") if key == "step" and not fused else value.to(parameter.device)
                for key, value in moments.items()
            }
        self.step = step


def prepare(recipe: Recipe, root: Path, out: Path, workers: Workers) -> Data:
    """Read, tokenize and pack; the leading process first, the others then find what it kept."""
    workers.share(recipe.batch_rows)  # an error now rather than after the work
    if not workers.leads:
        workers.wait()
    tokenizer = _tokenizer(recipe, root, out, kept=not workers.leads or bool(checkpoints(out / "checkpoints")))
    layout = corpus.Layout(recipe.row_length, recipe.noise.block_length, recipe.seed)
    cache = out / "data"
    sources = [corpus.open_source(source, root, tokenizer, layout, cache) for source in recipe.data]
    training = Mixture(sources, [source.weight for source in recipe.data], recipe.batch_rows)
    validation = {}
    for source in recipe.validation:
        found = corpus.open_source(source, root, tokenizer, layout, cache)
        validation[source.name] = found.take(0, min(len(found), source.rows or len(found)))
    if workers.leads:
        workers.wait()
    return Data(tokenizer, training, validation)


def _tokenizer(recipe: Recipe, root: Path, out: Path, *, kept: bool) -> Tokenizer:
    """The recipe's, or a new one; ``kept``: the one in ``out``, which is this recipe's since checkpoints are."""
    folder = out / "tokenizer"
    found = Tokenizer.from_folder(recipe.tokenizer.path) if recipe.tokenizer.path else None
    if recipe.tokenizer.path and found is None:
        raise FormatError(f"{recipe.tokenizer.path}: there is no tokenizer in this folder (tokenizer.path).")
    found = found or (Tokenizer.from_folder(folder) if kept and folder.is_dir() else None)
    if found is None:
        sample = corpus.sample_texts(recipe.data, root, recipe.tokenizer.megabytes)
        found = train_bpe(sample, vocab_size=recipe.tokenizer.vocab_size, special_tokens=MINI_SPECIAL_TOKENS)
        found.save(folder)
    if found.vocab_size > 2**16:
        raise InvalidInput(f"a vocabulary of {found.vocab_size} tokens; rows hold at most 65,536.")
    return found


def start(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> State:
    """The network at step 0."""
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
    backbone.to(device)
    parameters = list(backbone.network.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = recipe.optimizer.betas
    optimizer = torch.optim.AdamW(groups, lr=recipe.optimizer.lr, betas=(beta1, beta2), fused=device.type == "cuda")
    average = {name: parameter.detach().clone() for name, parameter in backbone.network.named_parameters()}
    return State(backbone, average, optimizer)


def train(recipe: Recipe, data: Data, out: Path, workers: Workers) -> Iterator[Progress]:
    """Run the recipe to its end, from the last checkpoint in ``out`` if there is one; yields after every step.

    When it ends, ``out/model`` holds the averaged weights in float32 and ``out/model-int8`` the compact form.
    """
    state = start(recipe, data.tokenizer, workers.device)
    resume(state, recipe, out, workers)
    log = Log(out, state.step) if workers.leads else None
    step_once = _stepper(recipe, data, state, workers)
    clock = Clock(recipe.batch_rows * recipe.row_length)
    while state.step < recipe.steps:
        measured = step_once()
        state.step += 1
        last = state.step == recipe.steps
        metrics: dict[str, float] = {}
        if state.step % recipe.log_every == 0 or last:
            metrics = {name: float(value) for name, value in measured.items()} | clock.read(state.step)
            _check_finite(metrics["loss"], "the loss", state.step)
        if data.validation and (state.step % recipe.validate_every == 0 or last):
            metrics |= validate(recipe, data, state, workers)
            clock.skip(state.step)
        if metrics and log:  # before the checkpoint: a run that goes on from it does not write this line again
            log.write(state.step, metrics)
        if workers.leads and (state.step % recipe.checkpoint_every == 0 or last):
            # Before it takes the place of an older, better one.
            _check_finite(
                float(sum(p.detach().sum() for p in state.network.parameters())), "the weights' sum", state.step
            )
            notes = {"recipe": dataclasses.asdict(recipe), "digest": recipe.digest()}
            write_checkpoint(out / "checkpoints", state.step, state.tensors(), notes, keep=recipe.keep)
            clock.skip(state.step)
        yield Progress(state.step, metrics)
    if workers.leads:
        export(recipe, data.tokenizer, state, out)


def _check_finite(value: float, what: str, step: int) -> None:
    if not math.isfinite(value):
        raise Diverged(
            f"{what} is {value} after step {step}: the training has diverged. Lower optimizer.lr or optimizer.clip, or "
            "raise optimizer.warmup, and start again with --fresh."
        )


def resume(state: State, recipe: Recipe, out: Path, workers: Workers) -> None:
    """Take up the last checkpoint; one of another recipe is an error."""
    workers.wait()
    found = checkpoints(out / "checkpoints")
    if not found:
        return
    kept, notes = read_checkpoint(found[-1], str(workers.device))
    if notes.get("digest") != recipe.digest():
        raise InvalidInput(
            f"{found[-1]}: is of another recipe ({difference(notes.get('recipe', {}), recipe)}). Give another --out, "
            "or --fresh to begin again."
        )
    try:
        state.restore(kept, int(notes["step"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"{found[-1]}: does not fit this recipe's network ({brief(error)}); files of the run were changed. "
            "Give another --out, or --fresh to begin again."
        ) from error


def difference(old: Any, recipe: Any) -> str:
    """Which fields of a recipe differ from those that a checkpoint notes."""
    new = json.loads(json.dumps(dataclasses.asdict(recipe)))
    differing = [name for name in new if not isinstance(old, dict) or old.get(name) != new[name]]
    return f"{', '.join(differing)} differ" if differing else "of another version of codd"


def _stepper(recipe: Recipe, data: Data, state: State, workers: Workers) -> Callable[[], dict[str, Tensor]]:
    """One optimizer step."""
    device = workers.device
    make = batch_maker(recipe, data.tokenizer)
    begin, end = workers.share(recipe.batch_rows)
    micro = recipe.micro_rows or (end - begin)
    half = precision_of(recipe, device)
    on_gpu = device.type == "cuda"
    function = torch.compile(loss_sum) if (on_gpu if recipe.compile is None else recipe.compile) else loss_sum
    parameters = list(state.network.parameters())
    averages = [state.average[name] for name, _ in state.network.named_parameters()]

    def step() -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(mix(recipe.seed, state.step))
        batch = make(data.training.batch_at(state.step), generator)
        rate = learning_rate(state.step, recipe.steps, recipe.optimizer)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        lost = torch.zeros((), device=device)
        for first in range(begin, end, micro):
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = function(state.network, batch.part(first, min(first + micro, end))) / batch.total
            torch.autograd.backward(loss)
            lost += loss.detach()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        workers.add_up([*gradients, lost])
        norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.optimizer.clip)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        update_average(averages, parameters, state.step, recipe.optimizer.ema)
        return {"loss": lost, "gradient_norm": norm, "lr": torch.tensor(rate)}

    return step


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


def precision_of(recipe: Recipe, device: torch.device) -> bool:
    """Whether matrix products are done in bfloat16."""
    half = recipe.precision == "bfloat16" or (recipe.precision == "auto" and device.type == "cuda")
    if half:
        check_dtype(torch.bfloat16, device)
    return half


def validate(recipe: Recipe, data: Data, state: State, workers: Workers) -> dict[str, float]:
    """The loss of the averaged weights on each validation source; every process computes the same."""
    make = batch_maker(recipe, data.tokenizer, blocks=False)
    current = [parameter.detach().clone() for parameter in state.network.parameters()]
    _copy(state.average.values(), state.network)
    try:
        with torch.autocast(workers.device.type, torch.bfloat16, enabled=precision_of(recipe, workers.device)):
            return {
                f"validation/{name}": mean_loss(
                    state.network,
                    rows,
                    make,
                    seed=VALIDATION_SEED,
                    device=workers.device,
                    at_once=recipe.micro_rows or recipe.batch_rows,
                )
                for name, rows in data.validation.items()
            }
    finally:
        _copy(current, state.network)


@torch.no_grad()
def _copy(source: Any, network: Transformer) -> None:
    for parameter, value in zip(network.parameters(), source, strict=True):
        parameter.copy_(value)


def export(recipe: Recipe, tokenizer: Tokenizer, state: State, out: Path) -> None:
    """The averaged weights as checkpoints that `codd.load` reads."""
    _copy(state.average.values(), state.network)
    notes = {"recipe": recipe.name, "recipe_digest": recipe.digest(), "steps": state.step}
    for name, int8 in (("model", False), ("model-int8", True)):
        tokenizer.save(mini.save(state.backbone, out / name, int8=int8, notes=notes))


class Clock:
    """Tokens a second, without the time spent on validation and checkpoints."""

    def __init__(self, tokens: int):
        """``tokens`` in a step."""
        self.tokens, self.begun, self.since = tokens, time.perf_counter(), 0

    def read(self, step: int) -> dict[str, float]:
        """The rate since the last reading."""
        now = time.perf_counter()
        rate = (step - self.since) * self.tokens / (now - self.begun) if self.since else 0.0
        self.begun, self.since = now, step
        return {"tokens_per_second": rate} if rate else {}

    def skip(self, step: int) -> None:
        """Begin anew."""
        self.begun, self.since = time.perf_counter(), step


def mix(seed: int, step: int) -> int:
    """A seed of its own for every step."""
    return (seed * 1_000_003 + step) % 2**63
