"""Objectives and optimizers of a static circuit side by side: the same windows, the same number of updates, on a CPU.

    python benchmarks/objectives.py --data DATA --out FILE.json

For a relative comparison in minutes, not for circuits to keep: few states, few windows, a few hundred updates, and as
training text the books' VALIDATION rows (DATA/books/valid.jsonl.xz) and generated problems. Scored on books' test rows
and problems of the test stream. All ways learn in turn from each batch, so that the network's logits are made once and
what else the machine does slows all of them alike; no way's settings were tuned beyond the recipe's defaults.
"""

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from codd.circuits import HMM, Modulated
from codd.coupling.gap import gap_in_words
from codd.data.sources import Source
from codd.data.windows import WindowRecipe
from codd.distributed import DistributedContext
from codd.training.circuit.data import TrainingData, prepare
from codd.training.circuit.objectives import Objective
from codd.training.circuit.trainer import cosine_rate
from codd.training.circuit.updaters import make_updater
from codd.training.circuit_recipe import BankRecipe, CircuitRecipe, RuleRecipe, TablesRecipe

Rule = Literal["adam", "em", "ratio", "baum-welch"]
BOOKS = Source("text", "books", path="books/valid.jsonl.xz", fields=("text",))
"""What a full run keeps for validation is enough to tell ways of training apart."""


def main() -> None:
    args = arguments()
    recipe = base(args)
    context = DistributedContext(0, 1, torch.device("cpu"))
    ways = {name: way for name, way in recipes(recipe, args).items() if not args.way or name in args.way}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(recipe, args.data, Path(folder), context)
        updaters = {name: make_updater(way, data.spec) for name, way in ways.items()}
        seconds = dict.fromkeys(updaters, 0.0)
        report: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}, "torch": torch.__version__}
        for step in range(args.updates):
            windows, rate = data.draw(step), cosine_rate(step, step / args.updates, recipe.optimizer.warmup)
            for name, updater in updaters.items():
                begun = time.perf_counter()
                updater.update(windows, rate, context.all_reduce)
                seconds[name] += time.perf_counter() - begun
            if (step + 1) % args.every == 0 or step + 1 == args.updates:
                report |= {"updates": step + 1, "ways": {}}
                for name, updater in updaters.items():
                    found = scores(data, updater.circuit())
                    report["ways"][name] = {"milliseconds": 1e3 * seconds[name] / (step + 1), **found}
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=1) + "\n")
                print(f"\nafter {step + 1} updates of {args.batch} windows\n\n{markdown(report['ways'])}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--every", type=int, default=50, help="updates between two readings")
    parser.add_argument("--batch", type=int, default=64, help="windows of an update")
    parser.add_argument("--windows", type=int, default=2048, help="in all")
    parser.add_argument("--rows-at-once", type=int, default=8, help="that the network is given")
    parser.add_argument("--states", type=int, default=64)
    parser.add_argument("--row-length", type=int, default=384)
    parser.add_argument("--problems", type=int, default=800, help="to train on, beside the books")
    parser.add_argument("--held-out", type=int, default=24, help="rows of each kind of held-out text")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0], help="of masks, in held-out text")
    parser.add_argument("--way", nargs="+", help='only these, as in "conditional, adam"')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    return parser.parse_args()


def base(args: argparse.Namespace) -> CircuitRecipe:
    """What all ways share."""
    return CircuitRecipe(
        name="objectives",
        data=(BOOKS, Source("problems", "problems", count=args.problems)),
        validation=(
            Source("text", "books", path="books/test.jsonl.xz", fields=("text",), rows=args.held_out),
            Source("problems", "problems", split="test", seed=400, count=6 * args.held_out, rows=args.held_out),
        ),
        seed=args.seed,
        steps=args.updates,
        batch_windows=args.batch,
        row_length=args.row_length,
        ratios=tuple(args.ratios),
        circuit=TablesRecipe(num_states=args.states),
        optimizer=RuleRecipe(warmup=20),
        windows=WindowRecipe(per_row=4),
        bank=BankRecipe(windows=args.windows, rows_at_once=args.rows_at_once),
    )


def recipes(recipe: CircuitRecipe, args: argparse.Namespace) -> dict[str, CircuitRecipe]:
    """Every way."""
    pairs: list[tuple[Objective, Rule]] = [
        ("conditional", "adam"),
        ("conditional", "ratio"),
        ("conditional", "baum-welch"),
        ("local", "adam"),
        ("local", "ratio"),
        ("generative", "adam"),
        ("generative", "em"),
    ]
    found = {
        f"{objective}, {rule}": replace(recipe, objective=objective, optimizer=replace(recipe.optimizer, rule=rule))
        for objective, rule in pairs
    }
    found["conditional, adam, 1/t"] = replace(recipe, weighting="elbo")
    ranks = TablesRecipe(num_states=args.states, emission_rank=32, transition_rank=16)
    found["conditional, adam, ranks 32 and 16"] = replace(recipe, circuit=ranks)
    return found


def scores(data: TrainingData, circuit: HMM | Modulated) -> dict[str, dict[str, float | None]]:
    """Of each kind of held-out text at each ratio. JSON has no infinity."""
    found: dict[str, dict[str, float | None]] = {}
    for name, held_out in data.held_out.items():
        for ratio, score in held_out.scores(circuit).items():
            figures = {
                "factorized": score.factorized,
                "coupled": score.coupled,
                "sequential": score.sequential,
                "gap_closed": score.gap_closed,
            }
            found[f"{name} {ratio:g}"] = {k: v if math.isfinite(v) else None for k, v in figures.items()}
    return found


def markdown(ways: dict[str, dict[str, Any]]) -> str:
    """The share of the gap closed, and beside it what the log-likelihood of a masked token gained."""
    columns = [name for name in next(iter(ways.values())) if name != "milliseconds"]
    lines = [f"| way | {' | '.join(columns)} | ms an update |", "|---" * (len(columns) + 2) + "|"]
    for name, found in ways.items():
        cells = [cell(found[column]) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} | {found['milliseconds']:.0f} |")
    return "\n".join(lines)


def cell(score: dict[str, float | None]) -> str:
    if score["coupled"] is None or score["factorized"] is None:
        return "impossible"
    return f"{gap_in_words(score['gap_closed'])} ({score['coupled'] - score['factorized']:+.3f})"


if __name__ == "__main__":
    main()
