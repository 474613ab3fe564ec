"""Training a circuit: the loop, and what it writes.

A step is a function of the recipe, its number and the parameters: which windows it sees is recomputed, not remembered.
So a run that was killed goes on from its last checkpoint to the same circuit, bit for bit on a CPU.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from codd.backbones import adapters, mini
from codd.circuits import HMM, Modulated
from codd.errors import CoddError, Diverged, FormatError, InvalidCircuit, InvalidEvidence, InvalidInput
from codd.files import brief
from codd.training import joint
from codd.training.checkpoints import checkpoints, read_checkpoint, read_notes, write_checkpoint
from codd.training.circuit_recipe import STRATA, CircuitRecipe, as_dict
from codd.training.curve import write_curve
from codd.training.held_out import Score
from codd.training.learners import Captured, GradientLearner, Learner, learner_for, rate_at
from codd.training.metrics import METRICS, Log, Progress
from codd.training.pace import Best, Clock, of_leader
from codd.training.pretrain import difference, mix
from codd.training.supplies import Setup, index_of, strata_of
from codd.training.usage import usage
from codd.training.workers import Workers

CURVE, CIRCUIT, MODEL, ADAPTER, CHECKPOINTS = "curve.png", "circuit", "model", "adapter", "checkpoints"
SUMS = "run.sums"
WORST = 100.0
"""Nats per token beyond which a loss is a sign of divergence: to know nothing of a token costs about ten."""
LOWER = (
    "Lower optimizer.lr (of EM: optimizer.step_size) or raise optimizer.warmup, and start again with --fresh; the last "
    "checkpoint and the circuit of the last validation are whole."
)


@dataclass
class Run:
    """Where a run stands, beside its parameters."""

    clock: Clock
    best: Best
    sums: Float[Tensor, " 3"]
    """Of the steps since the last that was logged."""
    step: int = 0

    def notes(self, recipe: CircuitRecipe) -> dict[str, Any]:
        """What a checkpoint says of it."""
        named = {"recipe": as_dict(recipe), "digest": recipe.digest(), "since": self.clock.read_at}
        return {**named, "best": self.best.score, "stale": self.best.stale, "seconds": self.clock.elapsed()}


def train(recipe: CircuitRecipe, setup: Setup, out: Path, workers: Workers) -> Iterator[Progress]:
    """Run the recipe to its end, from the last checkpoint in ``out`` if there is one; yields after every step.

    ``out/circuit`` holds the best circuit so far by held-out text, or that of the last validation if there is none.
    """
    learner = learner_for(recipe, setup.ground, lambda circuit: usage(circuit, setup.draw, workers.add_up))
    run = resume(learner, recipe, out, workers)
    log = Log(out, run.step) if workers.leads else None
    once = _stepper(recipe, setup, learner, workers)
    part = run.clock.part(run.step)
    while part < 1 and not run.best.enough(recipe):
        rate = rate_at(run.step, part, recipe.optimizer.warmup)
        run.step += 1
        try:
            run.sums += once(run.step - 1, rate)
        except (InvalidEvidence, InvalidCircuit) as error:  # what a chain says of parameters that are no numbers
            raise Diverged(f"step {run.step}: {error}: the training has diverged. {LOWER}") from error
        part = run.clock.part(run.step)
        metrics = _logged(recipe, run, rate) if run.step % recipe.log_every == 0 or part >= 1 else {}
        run.clock.pause()
        if run.step % recipe.validate_every == 0 or part >= 1:
            metrics |= _validate(recipe, setup, learner, run, out, workers)
        if metrics and log:  # before the checkpoint: a run that goes on from it does not write this line again
            log.write(run.step, metrics)
        if run.step % recipe.checkpoint_every == 0 or part >= 1 or run.best.enough(recipe):
            _keep(recipe, learner, run, out, workers)
        run.clock.go_on()
        yield Progress(run.step, metrics)
    if workers.leads:
        _finish(recipe, setup, learner, out)


def _stepper(
    recipe: CircuitRecipe, setup: Setup, learner: Learner, workers: Workers
) -> Callable[[int, float], Float[Tensor, " 3"]]:
    """One update. On a GPU its first half is captured, where all of it lies there."""
    strata, supply = strata_of(workers), setup.supply
    if isinstance(learner, GradientLearner) and supply is not None and workers.device.type == "cuda":
        captured = Captured(learner, supply, recipe.batch_windows // workers.count)
        return lambda step, rate: captured.learn(index_of(recipe, step, strata, len(supply)), rate, workers.add_up)

    def once(step: int, rate: float) -> Float[Tensor, " 3"]:
        with torch.random.fork_rng(devices=[]):  # of dropout; no two processes drop alike
            torch.manual_seed(mix(recipe.seed, step) * STRATA + strata.start)
            return learner.learn(setup.draw(step), rate, workers.add_up)

    return once


def _logged(recipe: CircuitRecipe, run: Run, rate: float) -> dict[str, float]:
    coupled, factorized, tokens = run.sums.tolist()
    if math.isnan(factorized):
        raise Diverged("the network's own log-likelihood is no number: check the backbone's weights and precision.")
    _check_value(run)
    found = {"loss": -coupled / max(tokens, 1), "factorized": -factorized / max(tokens, 1), "rate": rate}
    found |= run.clock.read(run.step)
    run.sums = torch.zeros_like(run.sums)
    return found


def _check_value(run: Run) -> None:
    coupled, _, tokens = run.sums.tolist()
    loss = -coupled / max(tokens, 1)
    if not loss < WORST:
        raise Diverged(f"the loss is {loss:g} nats per token at step {run.step}: the training has diverged. {LOWER}")


def _check_parameters(learner: Learner, run: Run) -> None:
    """Before they take the place of older, better ones."""
    _check_value(run)
    if any(bool(x.isnan().any()) for x in learner.tensors().values()):
        raise Diverged(f"parameters are no numbers after step {run.step}: the training has diverged. {LOWER}")


def _validate(
    recipe: CircuitRecipe, setup: Setup, learner: Learner, run: Run, out: Path, workers: Workers
) -> dict[str, float]:
    """Scores of held-out text; a circuit that is better than all before is kept. Every process computes the same."""
    _check_parameters(learner, run)
    circuit = learner.circuit()
    found: dict[str, float] = {}
    scores = []
    for name, held_out in (setup.held_out if setup.ask_again is None else setup.ask_again()).items():
        for ratio, score in held_out.scores(circuit).items():
            found |= _shown(name, ratio, score)
            scores.append(score.coupled)
    if not all(map(math.isfinite, scores)):
        raise Diverged(f"held-out text has no probability after step {run.step}: the training has diverged. {LOWER}")
    better = run.best.take(of_leader(sum(scores) / len(scores), workers)) if scores else True
    if better and workers.leads and setup.ground.backbone is None:
        save(circuit, out / CIRCUIT, recipe)
    return found


def _shown(name: str, ratio: float, score: Score) -> dict[str, float]:
    start = f"held_out/{name}@{ratio:g}"
    return {f"{start}/gap_closed": score.gap_closed, f"{start}/log_likelihood": score.coupled}


def save(circuit: HMM | Modulated, folder: Path, recipe: CircuitRecipe) -> None:
    """In 16 bits if the recipe says so."""
    circuit.save(folder, half=recipe.half)


def _keep(recipe: CircuitRecipe, learner: Learner, run: Run, out: Path, workers: Workers) -> None:
    _check_parameters(learner, run)
    if workers.leads:
        kept = {**learner.tensors(), SUMS: run.sums}
        write_checkpoint(out / CHECKPOINTS, run.step, kept, run.notes(recipe), keep=recipe.keep)


def _finish(recipe: CircuitRecipe, setup: Setup, learner: Learner, out: Path) -> None:
    """The picture; and what was trained along: low-rank additions as an adapter, a network of ours as a whole."""
    backbone = setup.ground.backbone
    if backbone is not None and recipe.joint.weights == "lora":
        adapters.save(backbone, out / ADAPTER, recipe.backbone)
        save(learner.circuit(), out / ADAPTER / CIRCUIT, recipe)
    if backbone is not None and backbone.family == mini.NAME:
        joint.merge(backbone)
        mini.save(backbone, out / MODEL, notes={"recipe": recipe.name, "recipe_digest": recipe.digest()})
        if setup.tokenizer is not None:
            setup.tokenizer.save(out / MODEL)
        save(learner.circuit(), out / MODEL / CIRCUIT, recipe)
    if (out / METRICS).stat().st_size:
        write_curve(out / METRICS, out / CURVE)


def check_recipe(recipe: CircuitRecipe, out: Path) -> None:
    """Refuse a run of another recipe, before any work is done for it."""
    for folder in checkpoints(out / CHECKPOINTS)[-1:]:
        _check_notes(recipe, read_notes(folder), folder)


def _check_notes(recipe: CircuitRecipe, notes: dict[str, Any], folder: Path) -> None:
    if notes.get("digest") != recipe.digest():
        raise InvalidInput(
            f"{folder}: is of another recipe ({difference(notes.get('recipe', {}), recipe)}). Give another --out, "
            "or --fresh to begin again."
        )


def resume(learner: Learner, recipe: CircuitRecipe, out: Path, workers: Workers) -> Run:
    """Take up the last checkpoint, if there is one; that of another recipe is an error."""
    workers.wait()
    found = checkpoints(out / CHECKPOINTS)
    if not found:
        return Run(Clock(recipe, workers), Best(), torch.zeros(3, device=workers.device))
    kept, notes = read_checkpoint(found[-1], str(workers.device))
    _check_notes(recipe, notes, found[-1])
    try:
        learner.restore(kept)
        best = Best(float(notes["best"]), int(notes["stale"]))
        step, seconds = notes["since"]
        clock = Clock(recipe, workers, float(notes["seconds"]), (int(step), float(seconds)))
        return Run(clock, best, kept[SUMS], int(notes["step"]))
    except (KeyError, TypeError, ValueError, RuntimeError, CoddError) as error:
        raise FormatError(
            f"{found[-1]}: does not fit this recipe's circuit ({brief(error)}); files of the run were changed. Give "
            "another --out, or --fresh to begin again."
        ) from error
