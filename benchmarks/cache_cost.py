"""What making a logit cache costs with a network of LLaDA-8B's or Dream-7B's shape: time and memory, random weights.

    python benchmarks/cache_cost.py --out FILE.json                      # a GPU, bfloat16: the whole network
    python benchmarks/cache_cost.py --layers 2 --rows 16 --batch-rows 8 --out FILE.json   # a CPU: of its layers two

`codd cache`'s own code on rows of random tokens as long as the paper's recipe has them, all of a row to be predicted.
What the network alone takes for the same rows stands beside it, so that the difference is masking, head and lists.
Memory is what the run takes beyond the weights: on a GPU the allocator's peak, on a CPU resident memory, sampled. Time
is the wall's on a GPU, and on a CPU, which others may share, that of the process (with one thread).
"""

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from codd.backbones.backbone import Backbone
from codd.data.packing import PackedSequences
from codd.data.windows import WindowRecipe
from codd.distributed import DistributedContext
from codd.training.logit_cache.build import build
from codd.training.logit_cache.storage import CacheSettings, claimed
from families import SHAPES, SMALL, memory, random_backbone, run_parts, spec_of
from timing import clock

LAYERS = {"llada": "n_layers", "dream": "num_hidden_layers"}
"""The names that config.json gives the number of layers."""
PAPER_WINDOWS = 500_000
MASK = 1
"""Any token: the network knows nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=LAYERS, default=["llada"])
    parser.add_argument("--layers", type=int, help="of the network (default: all)")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--row-length", type=int, default=768)
    parser.add_argument("--batch-rows", type=int, default=32, help="rows in one pass, as of codd cache (default: 32)")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--features", action="store_true", help="keep the last hidden states, too")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    args = parser.parse_args()
    if args.tiny:
        args.rows, args.row_length, args.batch_rows, args.top_k = 4, 40, 2, 4
    parts = {shape: functools.partial(measure, shape) for shape in args.shapes}
    parser.exit(0 if run_parts(args, args.shapes, parts) else 1)


def measure(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    fields = (SMALL if args.tiny else SHAPES)[shape]
    if args.layers:
        fields = fields | {LAYERS[shape]: args.layers}
    dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    backbone = random_backbone(spec_of(shape, fields), args.device, dtype)
    rows = random_rows(args, backbone.vocab_size)
    weights = sum(x.numel() * x.element_size() for x in backbone.parameters())
    make(backbone, rows, args, count=args.batch_rows)  # compiles and captures
    passes = [forward(backbone, rows.tokens[i : i + args.batch_rows]) for i in range(0, args.rows, args.batch_rows)]
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with memory() as taken:
        found = make(backbone, rows, args, count=args.rows)
    found |= {"layers": backbone.config.layers, "weights_gib": weights / 2**30, "network_alone_seconds": sum(passes)}
    if args.device.type == "cuda":
        found["peak_gib_beyond_weights"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    else:
        found["peak_gib_beyond_weights"] = taken["resident_gigabytes"] * 1e9 / 2**30
    found["hours_for_the_papers_windows"] = PAPER_WINDOWS / found["windows_per_second"] / 3600
    return found


def make(backbone: Backbone, rows: PackedSequences, args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Make a cache of the first rows, and throw it away."""
    some = PackedSequences(rows.tokens[:count], rows.segments[:count], rows.scored[:count])
    settings = CacheSettings(
        vocab_size=backbone.vocab_size,
        mask_id=MASK,
        shards=1,
        shard_rows=count,
        window=WindowRecipe(per_row=4, block_share=0),
        top_k=args.top_k,
        features=args.features,
        seed=args.seed,
    )
    context = DistributedContext(0, 1, args.device)
    with tempfile.TemporaryDirectory() as folder, claimed(Path(folder), fresh=False):
        work = build(backbone, lambda _: some, settings, Path(folder), context, batch_rows=args.batch_rows)
        next(work)  # tries out what the lists change
        begun = clock(args.device)
        *_, progress = work
        seconds = clock(args.device) - begun
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    found = {"rows": count, "windows": progress.windows, "seconds": seconds}
    found |= {"windows_per_second": progress.windows / seconds, "cache_bytes_a_window": size / progress.windows}
    return found


def forward(backbone: Backbone, tokens: NDArray[Any]) -> float:
    """Seconds of the layers alone."""
    ids = torch.from_numpy(tokens.astype("int64")).to(backbone.device)
    begun = clock(backbone.device)
    backbone.network.states(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
    return clock(backbone.device) - begun


def random_rows(args: argparse.Namespace, vocab: int) -> PackedSequences:
    generator, shape = np.random.default_rng(args.seed), (args.rows, args.row_length)
    tokens = generator.integers(MASK + 1, vocab, shape, dtype=np.uint32)
    return PackedSequences(tokens, np.ones(shape, dtype=np.uint8), np.ones(shape, dtype=np.bool_))


if __name__ == "__main__":
    main()
