"""The engine on a GPU: what sharing steps gains there, for sequences that have nothing in common.

    python benchmarks/serving_gpu.py mini                 # the bundled model
    python benchmarks/serving_gpu.py llada --json FILE    # LLaDA-8B's shape with random weights, bfloat16

No HTTP: requests with prompts of all lengths (word problems; for LLaDA's shape 64 to 256 tokens) and seeds of their own
go through `codd.serving.engine`, all at once. Engines with different numbers of slots take turns over the same
requests; the ratio of each round is against one slot in that round.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import codd
from codd.decoding import Options
from codd.serving.engine import Engine
from codd.serving.requests import SequenceRequest
from codd_lab.problems import problems
from decoding import add_model_arguments, model_from
from timing import head, save

SAMPLERS = ("latent", "any_order", "factorized")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mini", "llada"))
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--exact", action="store_true", help="the network sees one sequence at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    add_model_arguments(parser)
    parser.set_defaults(device="cuda")
    args = parser.parse_args()
    model = model_from(args, parser)
    on_gpu = model.backbone.device.type == "cuda"
    found: dict[str, Any] = {
        **head(args, model.backbone.device),
        "dtype": str(model.backbone.dtype),
        "samplers": {},
    }
    for sampler in SAMPLERS:
        found["samplers"][sampler] = measure(model, sampler, args)
        print(sampler, json.dumps(found["samplers"][sampler]), flush=True)
    if on_gpu:
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print(json.dumps(found, indent=1))
    save(found, args.json)


def measure(model: codd.Model, sampler: str, args: argparse.Namespace) -> dict[str, Any]:
    prompts = asked(model, args)
    rates: dict[int, list[float]] = {slots: [] for slots in args.slots}
    written: dict[int, list[list[int]]] = {}
    for number in range(args.rounds + 1):
        for slots in args.slots:
            texts, rate = asyncio.run(served(model, prompts, sampler, slots, args))
            written[slots] = texts
            if number:  # the first round compiles and captures
                rates[slots].append(rate)
    base = rates[args.slots[0]]
    same = {s: sum(a == b for a, b in zip(written[s], written[args.slots[0]], strict=True)) for s in args.slots}
    return {
        str(slots): {
            "requests_per_second": median(rates[slots]),
            "ratio": median(a / b for a, b in zip(rates[slots], base, strict=True)),
            "same_text_as_with_one_slot": same[slots],
        }
        for slots in args.slots
    }


def asked(model: codd.Model, args: argparse.Namespace) -> list[list[int]]:
    """Word problems for the bundled model; weights that were never trained get any tokens."""
    if args.what == "mini":
        return model.encode([problem.question for problem in problems(args.requests, split="test", seed=args.seed)])
    rng = random.Random(args.seed)
    return [[rng.randrange(10, 8000) for _ in range(rng.randrange(64, 257))] for _ in range(args.requests)]


async def served(
    model: codd.Model, prompts: list[list[int]], sampler: str, slots: int, args: argparse.Namespace
) -> tuple[list[list[int]], float]:
    """All requests at once; the texts, and how many a second."""
    engine = Engine(model, slots=slots, queue=len(prompts), exact=args.exact)
    engine.start()
    options = {"gen_length": args.gen_length, "steps": args.steps, "sampler": sampler, "stop": False}

    async def one(number: int, prompt: list[int]) -> list[int]:
        [state] = model.start([prompt], Options.of(**options, seed=args.seed + number))
        request = SequenceRequest(state, number % 7)
        ids: list[int] = []
        with engine.submit([request]):
            async for step in request.steps():
                ids = step.ids.tolist()
        return ids

    begun = time.perf_counter()
    texts = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    took = time.perf_counter() - begun
    await engine.close()
    return texts, len(prompts) / took


if __name__ == "__main__":
    main()
