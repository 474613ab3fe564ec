"""What a KV cache saves on a GPU: calls of LLaDA-8B's and SDAR-8B's shapes with random weights, bfloat16.

    python benchmarks/kv_cache.py --out FILE.json                        # all parts
    python benchmarks/kv_cache.py --parts llada --batches       1 --out FILE.json
    python benchmarks/kv_cache.py --tiny                                 # the same at toy sizes, on a CPU if need be

attention: microseconds of one layer's attention over the cache, beside those of reading its keys and values. llada: no
cache, prefix and dual, with factorized, latent and any-order steps (a random circuit of 1024 states). sdar: no cache
and the exact one, at blocks of 4 and of 32. Prompts of 512 tokens, 256 written; every run is made once before it is
timed, on the same memory, so that what can be captured is. A call is a step of the whole loop, all sequences at once:
network, head, sampler, commit. ``ms_full`` are the calls that compute every position, ``ms_part`` the others (medians),
``ms_a_call`` all (mean). Runs without a cache are cut after ``--uncached`` calls.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import codd
from codd.backbones.backbone import Backbone
from codd.backbones.kernels import kernels_for
from codd.backbones.kv_cache import CachedPass, KVCache, KVShape
from codd.decoding import Options
from codd.decoding.loop import denoise
from codd.decoding.runner import FullRecompute, NetworkRunner, runner_for
from codd.decoding.sequence import SequenceState
from decoding import SAMPLERS, llada_8b
from families import BANDWIDTH, SHAPES, SMALL, random_backbone, run_parts, spec_of
from timing import milliseconds

MEMORY = 40 << 30
"""Bytes that a cache may take: enough for all sequences at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--written", type=int, default=256, help="tokens (default: 256)")
    parser.add_argument("--tokens", type=int, default=8, help="a call of llada's shape (default: 8)")
    parser.add_argument("--uncached", type=int, default=8, help="calls of a run without a cache (default: 8)")
    parser.add_argument("--states", type=int, default=1024, help="of the circuit (default: 1024)")
    parser.add_argument("--rounds", type=int, default=20, help="of the part attention (default: 20)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on a CPU if there is no GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="all figures as JSON, after every part")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        parser.exit(2, f"{parser.prog}: needs a CUDA device, and PyTorch finds none; for a tiny run: --tiny\n")
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    args.layers, args.width, args.spread = (1, 128, 8.0) if args.tiny else (32, 4096, 8.0)
    if args.tiny:
        args.prompt, args.written, args.tokens, args.batches, args.states = 6, 64, 16, [1], 4
    parser.exit(0 if run_parts(args, args.parts, PARTS) else 1)


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of storing and attending, for a block of 32, by batch and number of key heads."""
    found: dict[str, Any] = {}
    length, rows, heads, width = args.prompt + args.written, 32, 2 if args.tiny else 32, 16 if args.tiny else 128
    for batch, kv_heads in product(args.batches, (heads, heads // 4 or 1)):
        cache = KVCache(KVShape(1, kv_heads, width), batch, length, device=args.device, dtype=args.dtype)
        cache.memory.normal_()
        joined = torch.randn(batch, rows, (heads + 2 * kv_heads) * width, device=args.device, dtype=args.dtype)
        positions = (torch.arange(rows) + length // 2).expand(batch, rows).contiguous()
        past = CachedPass(cache, torch.arange(batch), positions, length, torch.full((batch,), length)).to(args.device)
        row = {"reading_us": 1e6 * cache.memory.nbytes / BANDWIDTH}
        if (kernels := kernels_for(joined)) is not None:
            assert past.ends is not None
            given = joined, cache.memory[0], past.slots, past.positions
            row["store_us"] = captured_microseconds(partial(kernels.store_kv, *given, heads), args.rounds)
            for name, size in (("attend_us", None), ("attend_in_blocks_us", 32)):
                attend = partial(kernels.attend_cached, *given, past.ends, heads, size)
                row[name] = captured_microseconds(attend, args.rounds)
        found[f"{batch} x {rows} rows, {heads} heads, {kv_heads} key heads, {length} positions"] = row
    return found


def captured_microseconds(function: Callable[[], object], rounds: int) -> float:
    """Of one call among 100 in a graph: as in a network, no launch by the host is in it."""
    for _ in range(3):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            function()
    return 10 * milliseconds(graph.replay, rounds, "cuda")


def llada(args: argparse.Namespace) -> dict[str, Any]:
    backbone, circuit = llada_8b(args)
    model = codd.Model(backbone, circuit, None, backbone.special.mask)
    found: dict[str, Any] = {"floor_ms": floor(backbone)}
    for batch, cache, sampler in product(args.batches, (None, "prefix", "dual"), args.samplers):
        row = run(model, batch, args, cache=cache, sampler=sampler, steps=args.written // args.tokens)
        found[f"batch {batch}, {cache}, {sampler}"] = row
        print(f"llada, batch {batch}, {cache}, {sampler}: {json.dumps(row)}", flush=True)
    return found


def sdar(args: argparse.Namespace) -> dict[str, Any]:
    """Any ``cache`` of a block-causal network is its exact one."""
    found: dict[str, Any] = {}
    for size in (4, 32):
        spec = spec_of("sdar", (SMALL if args.tiny else SHAPES)["sdar"] | {"block_size": size})
        backbone = random_backbone(spec, args.device, args.dtype)
        model = codd.Model(backbone, None, None, backbone.vocab_size - 1)
        found["floor_ms"] = floor(backbone)
        for batch, cache in product(args.batches, (None, "prefix")):
            steps = args.written // min(args.tokens, size // 2)
            row = run(model, batch, args, cache=cache, steps=steps, block_length=size)
            found[f"block {size}, batch {batch}, {cache and 'exact'}"] = row
            print(f"sdar, block {size}, batch {batch}, {cache and 'exact'}: {json.dumps(row)}", flush=True)
        del model, backbone
        gc.collect()
    return found


def own_runner(backbone: Backbone, sequences: Sequence[SequenceState]) -> NetworkRunner:
    """A runner with a cache if one is asked for: a block-causal network's would be there unasked."""
    if all(state.options.cache is None for state in sequences):
        return FullRecompute(backbone)
    return runner_for(backbone, sequences, memory=MEMORY)


def floor(backbone: Backbone) -> float:
    """Milliseconds in which an H200 reads the weights once, head included."""
    own = (p for name, p in backbone.network.named_parameters() if not name.startswith("embedding."))
    return 1e3 * sum(p.nbytes for p in own) / BANDWIDTH


def run(model: codd.Model, batch: int, args: argparse.Namespace, **told: Any) -> dict[str, float]:
    """Milliseconds of the calls of a run, by what they compute; see the module."""
    draw, ids = torch.Generator().manual_seed(args.seed), model.backbone.vocab_size * 9 // 10
    prompts = torch.randint(1, ids, (batch, args.prompt), generator=draw).tolist()
    options = Options.of(gen_length=args.written, stop=False, seed=args.seed, **told)
    runner = own_runner(model.backbone, model.start(prompts, options))
    for _ in range(2):
        sequences, times = model.start(prompts, options), list[tuple[float, bool]]()
        steps, before = denoise(runner, sequences), time.perf_counter()
        while not sequences[0].finished and (told["cache"] or len(times) < args.uncached):
            made = [next(steps) for _ in sequences]  # all take as many steps
            now = time.perf_counter()
            times.append((1e3 * (now - before), made[0].cached == 0))
            before = now
        for state in sequences:
            runner.release(state)
    whole, part = ([ms for ms, full in times if full == wanted] for wanted in (True, False))
    total = sum(ms for ms, _ in times)
    written = sum(int((~state.given & ~state.masked).sum()) for state in sequences)
    found = {"calls": len(times), "ms_a_call": total / len(times), "tokens_a_second": 1e3 * written / total}
    found |= {"ms_full": statistics.median(whole)} if whole else {}
    found |= {"ms_part": statistics.median(part)} if part else {}
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "attention": attention,
    "llada": llada,
    "sdar": sdar,
}

if __name__ == "__main__":
    main()
