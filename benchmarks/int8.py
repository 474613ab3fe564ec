"""Int8 weights: what a product with them takes, and what they cost and save in answers.

    python benchmarks/int8.py --parts linears --out FILE.json                # a GPU: LLaDA-8B's shapes, bfloat16
    python benchmarks/int8.py --parts linears --sweep --rows 32              # the best tiles of each shape
    python benchmarks/int8.py --parts quality answers --device cpu --threads 1 --seconds 360
    python benchmarks/int8.py --tiny                                         # the same at toy sizes

linears: microseconds of each shape by rows, of 100 in a graph, with other weights each time where they would stay in
the L2 cache: in the network's own precision (plain), with int8 weights widened first, by the kernel for few rows, and
as the layer chooses; and the bytes of int8 weights per second of that choice. On a CPU the first and the last.

quality: the bundled model on solutions of word problems that it has not seen, of which a share (uniform) is masked:
nats per token of the divergence KL(float || int8), and of the log-likelihood of what was masked. answers: the same
problems answered by both, in turns, at the defaults and with cache="dual", until ``--seconds`` are over; CPU seconds
are those of the process.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import codd
from codd.backbones.kernels import kernels_for
from codd.backbones.quantized import Int8Linear
from codd.evaluation.statistics import paired
from codd_lab.problems import Problem, extract_answer, generate
from families import run_parts
from kv_cache import captured_microseconds
from timing import milliseconds

SHAPES = {
    "qkv": (12288, 4096),
    "out": (4096, 4096),
    "up": (24576, 4096),
    "down": (4096, 12288),
    "head": (126464, 4096),
}
"""Of LLaDA-8B: outputs and inputs."""
L2 = 64 << 20
"""Bytes: more than a GPU keeps of what it read last."""
WAYS: dict[str, dict[str, Any]] = {"default": {}, "dual": {"cache": "dual"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--sweep", action="store_true", help="try tiles of the kernel, and name the best ones")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--problems", type=int, default=500, help="at most (default: 500)")
    parser.add_argument("--seconds", type=float, default=360.0, help="of the part answers (default: 360)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on a CPU (default: 1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--seed", type=int, default=500)
    parser.add_argument("--out", type=Path, help="all figures as JSON, after every part")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.device = torch.device(args.device)
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    args.sizes = {name: SHAPES[name] for name in args.shapes}
    if args.tiny:
        args.sizes, args.rows, args.rounds, args.problems, args.seconds = {"tiny": (48, 80)}, [1, 3], 1, 1, 0.0
    parser.exit(0 if run_parts(args, args.parts, PARTS) else 1)


def layers(args: argparse.Namespace, shape: tuple[int, int], count: int = 1) -> tuple[list[Tensor], list[Int8Linear]]:
    weights = [torch.randn(shape, device=args.device, dtype=args.dtype) / shape[1] ** 0.5 for _ in range(count)]
    return weights, [Int8Linear(weight) for weight in weights]


def linears(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, shape in args.sizes.items():
        count = max(1, -(-L2 // (shape[0] * shape[1]))) if args.device.type == "cuda" else 1
        weights, quantized = layers(args, shape, count)
        for rows in args.rows:
            x = torch.randn(rows, shape[1], device=args.device, dtype=args.dtype)
            timed = ways(x, weights, quantized).items()
            row: dict[str, Any] = {f"{way}_us": microseconds(call, count, args) for way, call in timed}
            row["TB/s"] = shape[0] * shape[1] / row["layer_us"] / 1e6
            if args.sweep and (kernels := kernels_for(x)) is not None:
                row["best"] = best_tiles(kernels, x, quantized, args)
            found[f"{name} {shape}, {rows} rows"] = row
            print(f"{name} {shape}, {rows} rows: {row}", flush=True)
    return found


def ways(x: Tensor, weights: list[Tensor], quantized: list[Int8Linear]) -> dict[str, Callable[[int], Tensor]]:
    """A product with the i-th weights, in each way."""
    found: dict[str, Callable[[int], Tensor]] = {
        "plain": lambda i: F.linear(x, weights[i]),
        "layer": lambda i: quantized[i](x),
    }
    if (kernels := kernels_for(x)) is not None:
        found["kernel"] = partial(product, kernels, x, quantized, None)
        found["widened"] = lambda i: widened(x, quantized[i])
    return found


def product(kernels: ModuleType, x: Tensor, quantized: list[Int8Linear], tile: Any, i: int) -> Tensor:
    made: Tensor = kernels.int8_product(x, quantized[i].weight, quantized[i].scale, tile=tile)
    return made


def widened(x: Tensor, layer: Int8Linear) -> Tensor:
    with torch.enable_grad():  # no kernel of ours serves then
        made: Tensor = layer(x)
        return made


def best_tiles(
    kernels: ModuleType, x: Tensor, quantized: list[Int8Linear], args: argparse.Namespace
) -> list[tuple[float, tuple[int, ...]]]:
    """The five fastest tiles, with their microseconds; those that do not fit into the GPU are left out."""
    height = min(64, max(16, 1 << (len(x) - 1).bit_length()))
    heights = sorted({height, 64, 128} if len(x) > 64 else {height})
    tried: list[tuple[float, tuple[int, ...]]] = []
    for sizes in itertools.product(heights, (32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 5), (1, 2, 4, 8)):
        tile = kernels.Tile(*sizes)
        programs = -(-quantized[0].weight.shape[0] // tile.columns) * tile.splits
        if not 100 <= programs <= 4000 or tile.splits * tile.depth * 2 > x.shape[1]:
            continue
        call = partial(product, kernels, x, quantized, tile)
        try:
            tried.append((microseconds(call, len(quantized), args), tuple(tile)))
        except Exception as error:  # more shared memory than there is
            if "out of resource" not in str(error).lower():
                raise
    return sorted(tried)[:5]


def microseconds(call: Callable[[int], Tensor], count: int, args: argparse.Namespace) -> float:
    """Of one call; with ``count`` layers in turn."""
    turns = itertools.cycle(range(count))
    if args.device.type == "cuda":
        return captured_microseconds(lambda: call(next(turns)), args.rounds)
    return 1e3 * milliseconds(lambda: call(next(turns)), 10 * args.rounds, args.device)


@cache
def models(device: torch.device, dtype: torch.dtype) -> dict[str, codd.Model]:
    plain, rounded = codd.load(device=device, dtype=dtype), codd.load(device=device, dtype=dtype, quantize="int8")
    return {"float": plain, "int8": rounded}


def quality(args: argparse.Namespace) -> dict[str, Any]:
    found = models(args.device, args.dtype)
    model, generator = found["float"], torch.Generator().manual_seed(args.seed)
    assert model.tokenizer is not None
    assert model.mask_id is not None
    sums = dict.fromkeys(("tokens", "divergence", "float", "int8", "agree"), 0.0)
    for number in range(args.problems):
        problem = generate(number, split="test", seed=args.seed)
        (prompt,) = model.encode(problem.question)
        ids = torch.tensor(prompt + model.tokenizer.encode(problem.solution))
        noise = torch.rand(len(ids), generator=generator) < torch.rand((), generator=generator)
        where = (noise & (torch.arange(len(ids)) >= len(prompt))).nonzero()[:, 0]
        truth = ids[where]
        ids[where] = model.mask_id
        given = ids[None].to(args.device), where[None].to(args.device)
        logs = {
            name: each.backbone.masked_logits(*given, mask_id=model.mask_id).logits[0].log_softmax(-1).cpu()
            for name, each in found.items()
        }
        sums["tokens"] += len(where)
        sums["agree"] += float((logs["float"].argmax(-1) == logs["int8"].argmax(-1)).sum())
        terms = logs["float"].exp() * (logs["float"] - logs["int8"])
        sums["divergence"] += float(terms.nan_to_num().sum())  # the mask: 0 times minus infinity less itself
        for name, each in logs.items():
            sums[name] += float(each[torch.arange(len(where)), truth].sum())
    tokens = sums.pop("tokens") or 1.0
    names = {"divergence": "KL, nats per token", "agree": "same best token, share"}
    names |= {name: f"{name}: log-likelihood, nats per token" for name in found}
    return {"tokens": tokens} | {names[name]: value / tokens for name, value in sums.items()}


def answers(args: argparse.Namespace) -> dict[str, Any]:
    """Means over problems; differences to float with 95% intervals, paired."""
    settings = [(name, model, way) for way in WAYS for name, model in models(args.device, args.dtype).items()]
    rows: dict[str, list[tuple[bool, int, float]]] = {f"{name}, {way}": [] for name, _, way in settings}
    deadline = time.monotonic() + args.seconds
    for number in range(0 if args.tiny else -1, args.problems):  # the first one warms up
        problem = generate(max(number, 0), split="test", seed=args.seed)
        first = number % len(settings)
        for name, model, way in settings[first:] + settings[:first]:
            row = answer(model, problem, args.tiny, WAYS[way])
            rows[f"{name}, {way}"] += [row] if number >= 0 else []
        if time.monotonic() > deadline and number >= 0:
            break
    found: dict[str, Any] = {"problems": len(next(iter(rows.values())))}
    for name, each in rows.items():
        right, calls, cpu = ([float(row[i]) for row in each] for i in range(3))
        found[name] = {key: statistics.mean(values) for key, values in (("right", right), ("calls", calls))}
        found[name] |= {"CPU s": statistics.mean(cpu), "CPU ms per call": 1e3 * sum(cpu) / sum(calls)}
        base = rows[name.replace("int8", "float")]
        if base is not each and len(each) > 1:
            found[name]["points against float"] = str(paired(right, [float(row[0]) for row in base]))
    return found


def answer(model: codd.Model, problem: Problem, tiny: bool, told: dict[str, Any]) -> tuple[bool, int, float]:
    begun = time.process_time()
    made = model.generate(problem.question, **(told | {"gen_length": 2, "steps": 1} if tiny else told))
    assert made.texts is not None
    return extract_answer(made.texts[0]) == problem.answer, made.steps[0], time.process_time() - begun


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "linears": linears,
    "quality": quality,
    "answers": answers,
}

if __name__ == "__main__":
    main()
