"""Train the circuit of the bundled model against the clock.

    PYTHONPATH=src python recipes/first_circuit.py --data DATA --out DIR --seconds 200 --states 256 --problems 100000

Prints JSON lines; writes OUT/circuit (bfloat16 emissions) and OUT/metrics.json.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import torch

import codd
from codd.circuits import HMM
from codd.training import corpus
from codd.training.circuit import CircuitSettings, held_out, train_circuit
from codd.training.recipe import Recipe, Source, read_recipe
from codd.training.rows import Mixture, Rows

BEGUN = time.perf_counter()
GSM8K_TEST = Source(kind="qa", name="gsm8k-test", path="gsm8k/test.jsonl")


def main() -> None:
    """Prepare, train, save, measure."""
    args = arguments()
    recipe = read_recipe(Path(args.recipe))
    settings = CircuitSettings(
        num_states=args.states, windows=args.windows, lr=args.lr, seed=args.seed, report_every=args.report_every
    )
    model = codd.load(circuit=None, device=args.device, dtype=torch.float32)
    model.backbone.eval().requires_grad_(False)
    model.backbone.one_by_one = False
    args.out.mkdir(parents=True, exist_ok=True)
    say(event="model", device=str(model.backbone.device))
    training, validation = prepare(args, recipe, model)
    log: list[dict] = []

    def measure(step: int, circuit: HMM) -> None:
        table = {name: table_of(model, circuit, rows) for name, rows in validation.items()}
        log.append(say(event="held_out", step=step, table=table))

    first = time.perf_counter()
    told = {"time": first, "step": 0, "halfway": False, "aside": 0.0}

    def done(step: int) -> float:
        return (time.perf_counter() - first - told["aside"]) / args.seconds

    def report(step: int, metrics: dict, circuit: HMM) -> None:
        now = time.perf_counter()
        if step == settings.report_every or now - told["time"] >= args.every:
            speed = (step - told["step"]) / (now - told["time"])
            log.append(
                say(event="train", step=step, steps_per_second=round(speed, 2), part=round(done(step), 4), **metrics)
            )
            told.update(time=now, step=step)
        if done(step) >= 0.5 and not told["halfway"]:
            measure(step, circuit)
            after = time.perf_counter()
            told.update(time=after, step=step, halfway=True, aside=after - now)

    circuit = train_circuit(model.backbone, model.mask_id, training.batch_at, settings, report=report, done=done)
    small = circuit.to(emission=torch.bfloat16)
    folder = small.save(Path(args.out) / "circuit")
    write(args, settings, log)
    say(event="saved", folder=str(folder), bytes=sum(f.stat().st_size for f in folder.iterdir()))
    measure(-1, HMM.load(folder, device=str(model.backbone.device)))  # what was written, not what was meant
    write(args, settings, log)
    if model.backbone.device.type == "cuda":
        say(event="memory", gib=round(torch.cuda.max_memory_allocated() / 2**30, 2))


def arguments() -> argparse.Namespace:
    """What can be chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="recipes/mini.yaml")
    parser.add_argument("--seconds", type=float, default=220.0, help="of training, after the data is ready")
    parser.add_argument("--states", type=int, default=256)
    parser.add_argument("--rows", type=int, default=128, help="of a step")
    parser.add_argument("--windows", type=int, default=2, help="of a row, at most")
    parser.add_argument("--lr", type=float, default=1.5e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=100_000, help="how many to generate")
    parser.add_argument("--held-out-rows", type=int, default=256)
    parser.add_argument("--report-every", type=int, default=50, help="steps between looks at the device")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between lines")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "codd-circuit-data")
    parser.add_argument("--device")
    return parser.parse_args()


def prepare(args: argparse.Namespace, recipe: Recipe, model: codd.Model) -> tuple[Mixture, dict[str, Rows]]:
    """The recipe's mixture, with fewer problems, and what is held out."""
    assert model.tokenizer is not None
    layout = corpus.Layout(recipe.row_length, recipe.noise.block_length, recipe.seed)

    def opened(source: Source):
        if source.kind == "problems":
            source = dataclasses.replace(source, count=min(source.count or 0, args.problems))
        found = corpus.open_source(source, args.data, model.tokenizer, layout, args.cache)
        say(event="data", name=source.name, rows=len(found))
        return found

    mixture = Mixture([opened(s) for s in recipe.data], [s.weight for s in recipe.data], args.rows)
    tests = [*recipe.validation, *([GSM8K_TEST] if (args.data / str(GSM8K_TEST.path)).is_file() else [])]
    validation = {}
    for source in tests:
        found = opened(source)
        validation[source.name] = found.take(0, min(len(found), args.held_out_rows))
    return mixture, validation


def table_of(model: codd.Model, circuit: HMM, rows: Rows) -> dict[str, dict[str, float]]:
    """Log-likelihoods per masked token by mask ratio."""
    scores = held_out(model.backbone, model.mask_id, circuit, rows, seed=20_000)
    return {
        f"{ratio:.2f}": {"factorized": round(s.factorized, 4), "coupled": round(s.coupled, 4), "tokens": s.tokens}
        for ratio, s in scores.items()
    }


def write(args: argparse.Namespace, settings: CircuitSettings, log: list[dict]) -> None:
    """Everything said so far."""
    told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    text = {"arguments": told, "settings": dataclasses.asdict(settings), "torch": torch.__version__, "log": log}
    (args.out / "metrics.json").write_text(json.dumps(text, indent=1) + "\n")


def say(**fields) -> dict:
    """One line."""
    line = {"at": round(time.perf_counter() - BEGUN, 2), **fields}
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":  # the data is prepared in processes, which read this file again
    main()
