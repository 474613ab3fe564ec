"""What training a circuit of LLaDA's size costs: time and memory on a synthetic cache, by several optimizers.

    PYTHONPATH=src python benchmarks/circuit_training.py --out FILE.json

100,000 windows of 32 tokens over 126,464, half of them masked, with the 64 largest probabilities of each masked one in
the device's memory as `codd cache` keeps them; 1024 states, three epochs. Each way is timed over some steps first; the
one called --full then runs all of them. What is learned is of no use: the cache is drawn at random.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codd.data.packing import narrow
from codd.distributed import DistributedContext
from codd.training.circuit.initial import CircuitSpec
from codd.training.circuit.updaters import CapturedUpdater, GradientUpdater, make_updater
from codd.training.circuit_recipe import CircuitRecipe, RuleRecipe, TablesRecipe
from codd.training.logit_cache.cached_windows import CachedWindows, TopK
from timing import clock, head, save

WAYS: dict[str, dict[str, Any]] = {
    "adam, rank 128": {"circuit": {"emission_rank": 128, "transition_rank": 64}, "optimizer": {}},
    "adam, free logits": {"circuit": {}, "optimizer": {}},
    "anemone, ratio": {"circuit": {}, "optimizer": {"rule": "ratio"}},
}


def main() -> None:
    args = arguments()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    begun = clock(device)
    entries = synthetic(args.windows, args.window, args.vocab, args.top_k, device)
    report: dict[str, Any] = {
        **head(args, device),
        "cache_seconds": clock(device) - begun,
        "cache_gib": sum(x.numel() * x.element_size() for x in (*entries.lists, entries.tokens)) / 2**30,
        "ways": {},
    }
    print(json.dumps({name: value for name, value in report.items() if name != "ways"}), flush=True)
    steps = args.windows * args.epochs // args.batch
    for name in args.way or list(WAYS):
        found = measure(name, entries, args, device, steps if name == args.full else args.steps)
        found["seconds_for_all"] = found["milliseconds"] * steps / 1e3
        report["ways"][name] = found
        print(json.dumps({"way": name, "steps_for_all": steps, **found}), flush=True)
        save(report, args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=126_464)
    parser.add_argument("--states", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30, help="of the ways that are only timed")
    parser.add_argument("--way", nargs="+", choices=list(WAYS))
    parser.add_argument("--full", default="adam, rank 128", help="the way that runs to the end")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def synthetic(windows: int, length: int, vocab: int, k: int, device: torch.device) -> CachedWindows:
    """A cache as it lies in memory: tokens of a long-tailed distribution, the truth among the first of each list."""
    generator = torch.Generator(device).manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=generator, device=device) ** 4 * vocab).long()

    level = torch.rand(windows, generator=generator, device=device).clamp(min=0.05)
    masked = torch.rand(windows, length, generator=generator, device=device) < level[:, None]
    masked[:, 0] = True
    truth = tokens(windows, length)
    count = int(masked.sum())
    # Ids of a list differ: they step through the vocabulary from the truth on.
    steps = torch.arange(k, device=device) * 1009
    parts = torch.split(truth[masked], 2**18)
    ids = torch.cat([narrow((part[:, None] + steps) % vocab, vocab) for part in parts])
    log_probs = (torch.randn(count, k, generator=generator, device=device) * 2 - 3).log_softmax(-1) - 0.1
    tail = torch.full((count,), -2.35, device=device)
    lists = TopK(ids, log_probs.half(), log_probs[:, 0].clone(), tail)
    return CachedWindows(narrow(truth, vocab), masked, level, lists)


def measure(
    name: str, entries: CachedWindows, args: argparse.Namespace, device: torch.device, steps: int
) -> dict[str, Any]:
    """Milliseconds of a step and the most memory that was in use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    way = WAYS[name]
    recipe = CircuitRecipe(
        name="bench",
        cache="-",
        batch_windows=args.batch,
        circuit=TablesRecipe(num_states=args.states, **way["circuit"]),
        optimizer=RuleRecipe(**way["optimizer"]),
    )
    updater = make_updater(recipe, CircuitSpec(args.vocab, 0, DistributedContext(0, 1, device)))
    step: Callable[[Tensor], Tensor]
    if isinstance(updater, GradientUpdater) and device.type == "cuda":
        captured = CapturedUpdater(updater, entries, args.batch)
        step = lambda index: captured.update(index, 0.5)  # noqa: E731
    else:
        step = lambda index: updater.update(entries.windows(index), 0.5)  # noqa: E731
    generator = torch.Generator(device).manual_seed(1)
    first = last = torch.zeros(3, device=device)
    for number in range(steps + 3):
        if number == 3:
            begun = clock(device)
        last = step(torch.randint(len(entries), (args.batch,), generator=generator, device=device))
        first = last if number == 0 else first
    seconds = clock(device) - begun
    found = {"steps": steps, "seconds": seconds, "milliseconds": 1e3 * seconds / steps}
    found |= {"loss_first": float(-first[0] / first[2]), "loss_last": float(-last[0] / last[2])}
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


if __name__ == "__main__":
    main()
