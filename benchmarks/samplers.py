"""Word problems solved by each way of decoding, against the network alone on the same problems and seeds.

    python benchmarks/samplers.py --problems 300 --json FILE

Prints a line a way: how many were right, evaluations of the network a problem, and how many problems only one of the
two got right (McNemar's exact test). The null circuit is left out where it writes what the network alone writes (a test
says so); ways that sharpen the order have a control of their own. A circuit that was never trained perturbs like a
trained one, and must not help.
"""

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import codd
from codd.decoding import Model
from codd.training.problems import extract_answer, problems

WAYS: dict[str, dict[str, Any]] = {
    "network alone": {"sampler": "factorized"},
    "latent": {"sampler": "latent"},
    "latent below 0.6": {"sampler": "latent", "activation": 0.6},
    "any order": {"sampler": "any_order"},
    "any order, untrained": {"sampler": "any_order", "circuit": "untrained"},
    "alone, sharpened 0.2": {"sampler": "factorized", "remasking": "sharpened", "sharpening": 0.2},
    "null at 0.2": {"sampler": "latent", "circuit_temperature": 0.2, "circuit": "null"},
    "latent at 0.2": {"sampler": "latent", "circuit_temperature": 0.2},
    "any order at 0.2": {"sampler": "any_order", "circuit_temperature": 0.2},
}
UNCOUNTED: dict[str, dict[str, Any]] = {
    "alone, threshold 0.9": {"sampler": "factorized", "threshold": 0.9},
    "any order, joint threshold 0.9": {"sampler": "any_order", "threshold": 0.9},
    "alone, threshold 0.6": {"sampler": "factorized", "threshold": 0.6},
    "any order, joint threshold 0.6": {"sampler": "any_order", "threshold": 0.6},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=200, help="of the test problems")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 8], help="a step")
    parser.add_argument("--gen-length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--device")
    parser.add_argument("--ways", nargs="+", help="only these; the first of them is what the others are compared with")
    parser.add_argument("--json", type=Path, help="append a line a way")
    args = parser.parse_args()
    model = codd.load(device=args.device)
    untrained = codd.HMM.random(256, model.backbone.vocab_size, seed=0).to(model.backbone.device)
    models = {
        None: model,
        "null": replace(model, circuit=codd.load(device=args.device, circuit="null").circuit),
        "untrained": replace(model, circuit=untrained),
    }
    asked = list(problems(args.problems, split="test", seed=args.seed))
    for tokens in [*args.tokens, None]:
        base: list[bool] = []
        for name, way in (UNCOUNTED if tokens is None else WAYS).items():
            if args.ways and name not in args.ways:
                continue
            options = {key: value for key, value in way.items() if key != "circuit"}
            if tokens is not None:
                options["steps"] = args.gen_length // tokens
            begun = time.perf_counter()
            right, steps = solve(models[way.get("circuit")], asked, options, args)
            base = base or right
            row = {
                "tokens_a_step": tokens,
                "way": name,
                "right": sum(right),
                "of": len(right),
                "evaluations": sum(steps) / len(steps),
                "gained": sum(a and not b for a, b in zip(right, base, strict=True)),
                "lost": sum(b and not a for a, b in zip(right, base, strict=True)),
                "seconds": time.perf_counter() - begun,
            }
            row["p"] = mcnemar(int(row["gained"]), int(row["lost"]))
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps({**row, "device": str(model.backbone.device)}) + "\n")


@torch.no_grad()
def solve(
    model: Model, asked: list[Any], options: dict[str, Any], args: argparse.Namespace
) -> tuple[list[bool], list[int]]:
    right: list[bool] = []
    steps: list[int] = []
    for begin in range(0, len(asked), args.batch):
        some = asked[begin : begin + args.batch]
        found = model.generate([problem.question for problem in some], gen_length=args.gen_length, **options)
        assert found.texts is not None
        right += [extract_answer(text) == problem.answer for text, problem in zip(found.texts, some, strict=True)]
        steps += found.steps
    return right, steps


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact test: how likely is so uneven a split, if either way were as likely."""
    total = gained + lost
    tail = sum(math.comb(total, k) for k in range(min(gained, lost) + 1)) / 2**total
    return min(1.0, 2 * tail)


if __name__ == "__main__":
    main()
