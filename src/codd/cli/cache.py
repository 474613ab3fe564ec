"""``codd cache``: evaluate a backbone once on many windows, and store its outputs for training circuits."""

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from codd.backbones.loading import Checkpoint, load_checkpoint
from codd.backbones.tokenizer import Tokenizer
from codd.circuits import HMM
from codd.cli import add_ray_argument, console
from codd.cli.lists import add_list
from codd.data.packing import MAX_TEXTS_PER_ROW, Mixture
from codd.data.sources import find_sources
from codd.data.tokenization import PackingConfig, dataset_digest, load_source
from codd.data.windows import WindowRecipe, check_lengths, supports_packing
from codd.distributed import DistributedContext, distributed
from codd.errors import FormatError, InvalidInput
from codd.training.logit_cache import storage
from codd.training.logit_cache.build import Progress, RowsAt, build, check, windows_per_row
from codd.training.logit_cache.reader import LogitCache
from codd.training.logit_cache.storage import ROWS, CacheSettings, network_name
from codd.validation import LARGEST

NAME = "cache"
RESUMES = True
HELP = """\
Masks texts as in training, asks the frozen backbone once, and keeps what it says of each masked token: the log-
probabilities of the truth and of the k - 1 likeliest others, and the mass of the rest. k is the smallest for which the
log-likelihood under a circuit changes by less than the tolerance. Data: questions and answers (.jsonl, .json, .parquet,
datasets of the hub), prose (.txt, or a text field), sequences (.tsv, .fasta, or --sequences), in which all but the
window is given if --begin or --begin-column says where it begins. Start it again with the same arguments to go on
after an interruption: finished shards are kept, damaged ones are made again. Under torchrun, the processes share the
shards.

Prints what the lists change for each k, a progress bar, and at the end the size of the cache."""
COUNT = console.number(int, 1, LARGEST - 1)
LONGEST_ROW = 384
MIN_CHARACTERS, CHARACTERS_PER_TOKEN = 2**18, 16
"""Minimum characters read per file, and per row token and requested window (a row has about four windows)."""


def configure(parser: argparse.ArgumentParser) -> None:
    """A backbone, data, where the cache goes."""
    parser.epilog = """\
examples:
  codd cache --data ../data/gsm8k/train.jsonl --strip gsm8k --out caches/mini
  codd cache --backbone GSAI-ML/LLaDA-8B-Instruct --data TIGER-Lab/MathInstruct --windows 100000 --out caches/llada
  torchrun --nproc-per-node 8 -m codd cache --data books.txt --out caches/books"""
    parser.add_argument("--backbone", default="bundled", help="a folder, a hub id, or bundled (the default)")
    parser.add_argument("--adapter", metavar="PATH", help="a LoRA adapter of PEFT for it: a folder or hub id")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder of the cache")
    _configure_data(parser)
    _configure_windows(parser)
    parser.add_argument("--top-k", type=COUNT, metavar="K", help="how many tokens to list (default: by the tolerance)")
    parser.add_argument(
        "--tolerance",
        type=console.number(float, 0, above=True),
        default=1e-3,
        help="nats per masked token (default: 1e-3)",
    )
    parser.add_argument("--circuit", type=Path, help="to measure with (default: the backbone's own, or a random one)")
    parser.add_argument("--features", action="store_true", help="keep the last hidden states too, in float16")
    parser.add_argument("--shard-windows", type=COUNT, default=8192, help="windows per file, about (default: 8192)")
    parser.add_argument("--batch-rows", type=COUNT, default=32, help="rows in one pass of the network (default: 32)")
    parser.add_argument("--mask-id", type=int, help="for checkpoints that do not say which token is the mask")
    parser.add_argument("--seed", type=console.seed, default=0, help="of order, noise and samples (default: 0)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--fresh", action="store_true", help="throw away what DIR holds of another cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")
    add_ray_argument(parser)


def _configure_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_list(
        parser,
        "--data",
        Path,
        metavar="PATH",
        default=[],
        help="files; of a folder its train files, or all; datasets of the hub: owner/name[:config][:split]",
    )
    add_list(parser, "--fields", metavar="KEY", help="keys of question and answer, or of a text (default: as found)")
    add("--strip", choices=["gsm8k"], help="leave out GSM8K's marks for a calculator, such as <<48/2=24>>, in answers")
    add_list(parser, "--weights", float, metavar="W", help="share of each of these sources (default: by their rows)")
    add("--sequences", action="store_true", help="text files hold one sequence per line, as .tsv and .fasta files do")
    add("--begin", metavar="N", type=console.number(int, 0), help="of sequences: the window's first token, from 0")
    add("--begin-column", metavar="N", type=COUNT, help="the column of a .tsv file, from 1, that says it of each")
    add("--row-length", type=int, help=f"tokens that the backbone sees at once (default: {LONGEST_ROW}, or its most)")


def _configure_windows(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--window", metavar="S", type=COUNT, default=32, help="tokens in a window (default: 32)")
    add(
        "--windows",
        metavar="N",
        type=COUNT,
        help="how many in all, about, from the beginning of large files (default: one pass over the data)",
    )
    add("--per-row", metavar="N", type=COUNT, default=4, help="at most this many per row (default: 4)")
    add("--block-share", type=float, default=0.5, help="rows with block noise instead of uniform noise (default: 0.5)")
    add("--minimum", type=float, default=1e-3, help="the smallest masking probability (default: 1e-3)")


def run(args: argparse.Namespace) -> int:
    """Make the cache, or go on with it."""
    window = WindowRecipe(args.window, args.per_row, args.block_share, args.minimum)
    with (
        distributed(args.device) as context,
        storage.claimed(args.out, fresh=args.fresh) if context.is_main else nullcontext(),
    ):
        source = None if args.backbone == "bundled" else args.backbone
        checkpoint = load_checkpoint(source, device=context.device, adapter=args.adapter)
        with console.working("reading the data", shown=context.is_main), console.one_line_warnings():
            circuit = _circuit(args.circuit, checkpoint)
            settings, rows_at = _prepare(args, window, checkpoint, context)
            check(checkpoint.backbone, circuit, settings)
        steps = build(
            checkpoint.backbone, rows_at, settings, args.out, context, circuit=circuit, batch_rows=args.batch_rows
        )
        _watch(steps, settings, args.out, context)
        if context.is_main:
            _report(args.out, as_json=args.json)
    return 0


def _prepare(
    args: argparse.Namespace, window: WindowRecipe, checkpoint: Checkpoint, context: DistributedContext
) -> tuple[CacheSettings, RowsAt]:
    """Read the data, the main process first; the others then find what it kept."""
    backbone, tokenizer = checkpoint.backbone, _tokenizer(checkpoint)
    length = args.row_length or min(LONGEST_ROW, backbone.max_length or LONGEST_ROW)
    packing = PackingConfig(length, args.window, args.seed, MAX_TEXTS_PER_ROW if supports_packing(backbone) else 1)
    if args.windows is not None:
        packing = packing._replace(characters=max(MIN_CHARACTERS, args.windows * length * CHARACTERS_PER_TOKEN))
    where = {"sequences": args.sequences, "begin": args.begin, "begin_column": args.begin_column}
    sources = find_sources(args.data, args.fields, args.strip, **where)
    if not sources:
        raise InvalidInput("there is no data: give files with --data.")
    root = Path()
    with context.main_first():
        datasets = [load_source(source, root, tokenizer, packing, args.out / ROWS) for source in sources]
    names = [f"{source.name} {dataset_digest(source, root, tokenizer, packing)}" for source in sources]
    for name, rows in zip(names, datasets, strict=True):
        check_lengths(name, rows, args.window, absolute=backbone.block_size is not None)
    shares = [float(len(rows)) for rows in datasets] if args.weights is None else args.weights
    if len(shares) != len(datasets) or min(shares) <= 0:
        raise InvalidInput(f"weights must be {len(names)} numbers above zero, one for each of: {', '.join(names)}.")
    first = CacheSettings(
        vocab_size=backbone.vocab_size,
        mask_id=_mask_id(args.mask_id, checkpoint),
        shards=1,
        shard_rows=1,
        window=window,
        top_k=args.top_k,
        tolerance=args.tolerance,
        features=args.features,
        seed=args.seed,
        backbone=network_name(backbone.family, checkpoint.folder, args.adapter),
        data=tuple(f"{name} x {share:g}" for name, share in zip(names, shares, strict=True)),
    )
    # A look at some rows says how many windows a row gives.
    whole = sum(map(len, datasets))
    each = windows_per_row(Mixture(datasets, shares, min(whole, 256)).batch_at(0), first)
    rows_in_all = whole if args.windows is None else math.ceil(args.windows / each)
    shards = math.ceil(rows_in_all * each / args.shard_windows)
    settings = dataclasses.replace(first, shards=shards, shard_rows=math.ceil(rows_in_all / shards))
    return settings, Mixture(datasets, shares, settings.shard_rows).batch_at


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    found = checkpoint.tokenizer
    if found is None:
        raise FormatError(f"{checkpoint.folder}: has no tokenizer files, so that no text can be read for it.")
    if found.vocab_size > (size := checkpoint.backbone.vocab_size):
        raise InvalidInput(
            f"{checkpoint.folder}: the tokenizer has {found.vocab_size} tokens, the network {size}: they do not belong "
            "together."
        )
    return found


def _mask_id(given: int | None, checkpoint: Checkpoint) -> int:
    named = None if checkpoint.tokenizer is None else checkpoint.tokenizer.mask_id
    known = (given, checkpoint.backbone.special.mask, named)
    found = next((id for id in known if id is not None), None)
    if found is None:
        raise InvalidInput(f"{checkpoint.folder}: does not say which token is the mask; give its id with --mask-id.")
    if not 0 <= found < checkpoint.backbone.vocab_size:
        raise InvalidInput(f"--mask-id {found} is not one of the {checkpoint.backbone.vocab_size} tokens.")
    return found


def _circuit(given: Path | None, checkpoint: Checkpoint) -> HMM | None:
    """What the lists are measured with; a circuit of a kind that is no plain HMM is passed over."""
    folder = given or checkpoint.folder / "circuit"
    if given is None and not folder.is_dir():
        return None
    try:
        return HMM.load(folder, device=checkpoint.backbone.device)
    except FormatError:
        if given is not None:
            raise
        return None


def _watch(steps: Iterator[Progress], settings: CacheSettings, out: Path, context: DistributedContext) -> None:
    with console.working("measuring how many tokens to list", shown=context.is_main):
        first = next(steps)
    if context.is_main and (index := storage.read_index(out)):
        console.say("k      change of the log-likelihood, nats per masked token")
        for k, change in index.measured:
            console.say(f"{k:<5}  {change:.2e}{'  <- kept' if k == index.top_k else ''}")
    begun, own = time.perf_counter(), len(range(context.rank, settings.shards, context.world_size))
    with console.bar("rows", own * settings.shard_rows, shown=context.is_main, transient=False) as bar:
        for step in itertools.chain([first], steps):
            if step.note is not None:
                console.say(step.note)
            rate = step.windows / (time.perf_counter() - begun)
            bar.update(step.rows, f"{step.windows:,} windows, {rate:,.0f}/s")


def _report(out: Path, *, as_json: bool) -> None:
    cache = LogitCache.open(out)
    counts = cache.counts()
    per_token, dense = counts["bytes"] / max(1, counts["masked"]), 2 * cache.settings.vocab_size
    found = {
        "windows": counts["windows"],
        "masked_tokens": counts["masked"],
        "shards": cache.settings.shards,
        "top_k": cache.index.top_k,
        "change": dict(cache.index.measured)[cache.index.top_k],
        "bytes": counts["bytes"],
        "bytes_per_token": per_token,
        "dense_bytes_per_token": dense,
        "digest": cache.settings.digest(),
        "out": str(out),
    }
    if per_token >= dense:
        console.say("note: this is no smaller than dense logits; a larger --tolerance or a --top-k makes it so.")
    if as_json:
        console.as_json({**found, "measured": [each._asdict() for each in cache.index.measured]})
    else:
        console.fields(f"cached: {out}", found)
