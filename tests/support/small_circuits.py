"""A small network on the disk, recipes of circuits for it, and runs of them; as a program, in several processes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from codd.backbones.loading import read_spec
from codd.backbones.transformer import Transformer, initialise
from codd.backbones.weights import SINGLE, expand_keys
from codd.distributed import DistributedContext, distributed
from codd.training.circuit.data import TrainingData
from codd.training.circuit.trainer import train
from codd.training.circuit_recipe import CircuitRecipe, read_circuit_recipe
from codd.training.run import Progress
from tests.support import FIXTURES, PROBLEMS
from tests.support.checkpoints import save_network
from tests.support.small_runs import CPU, small_tokenizer

ALONE = DistributedContext(0, 1, CPU)
WINDOW, WIDTH, STEPS = 8, 16, 8
CLOCK = ("windows_per_second", "seconds")
RECIPE = """\
name: small
backbone: ROOT/mini
data: [{kind: qa, name: problems, path: PROBLEMS/train.jsonl, count: 30}]
validation: [{kind: qa, name: held, path: PROBLEMS/test.jsonl, count: 10, rows: 4}]
steps: 8
batch_windows: 16
windows: {length: 8, per_row: 4}
bank: {windows: 64, rows_at_once: 4}
circuit: {num_states: 8}
optimizer: {lr: 0.05, head_lr: 0.01, warmup: 3}
ratios: [0.5, 1.0]
log_every: 3
validate_every: 4
checkpoint_every: 2
half: false
"""
HEAD = ["head.latents=true", "head.dropout=0.2", "head.hidden=6"]
ANEMONE = ["optimizer.rule=baum-welch"]


PUBLISHED = {"llada": "llada_mha", "dream": "dream_untied_sharded", "sdar": "sdar", "llada2": "llada2_moe"}


def save_published(folder: Path, family: str) -> Path:
    """A network in the layout in which another family is published, with our vocabulary and random weights."""
    tokenizer = small_tokenizer(400)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("mask", "eos", "pad")}
    config = json.loads((FIXTURES / PUBLISHED[family] / "config.json").read_text())
    config |= {"vocab_size": tokenizer.vocab_size, "embedding_size": tokenizer.vocab_size, **special}
    if family in ("sdar", "llada2"):
        config["block_size"] = WINDOW
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder)
    network = Transformer(spec.transformer)
    initialise(network, generator=torch.Generator().manual_seed(3), std=0.3)
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    slots = expand_keys(spec.keys, spec.transformer)
    save_file({name: slot.part(parameters[slot.target]).clone() for name, slot in slots.items()}, folder / SINGLE)
    tokenizer.save(folder)
    return folder


def make_root(root: Path) -> Path:
    save_network(root / "mini", small_tokenizer())
    (root / "small.yaml").write_text(RECIPE.replace("ROOT", str(root)).replace("PROBLEMS", str(PROBLEMS)))
    return root


def small(root: Path, *changes: str) -> CircuitRecipe:
    return read_circuit_recipe(root / "small.yaml", changes)


def run(
    recipe: CircuitRecipe, out: Path, *, steps: int | None = None, data: TrainingData | None = None
) -> list[Progress]:
    """Some steps of a run, as if it had been killed after them, or all."""
    data = data or TrainingData(recipe, Path(), out, ALONE)
    return list(up_to(steps, train(recipe, data, out, ALONE)))


def up_to(steps: int | None, made: Iterator[Progress]) -> Iterator[Progress]:
    """A run as far as a step; what follows is never asked for, as if the process had died."""
    for progress in made:
        yield progress
        if progress.step == steps:
            return


def metrics_of(out: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]


def circuit_of(out: Path) -> bytes:
    return (out / "circuit" / "circuit.safetensors").read_bytes()


def main(root: Path, out: Path, jobs: dict[str, Any]) -> None:
    """Each job has changes of the recipe and how many steps to make."""
    with distributed("cpu") as context:
        for name, (changes, steps) in jobs.items():
            recipe = small(root, *changes)
            data = TrainingData(recipe, Path(), out / name, context)
            made = len(list(up_to(steps, train(recipe, data, out / name, context))))
            (out / f"{name}.{context.rank}").write_text(str(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
