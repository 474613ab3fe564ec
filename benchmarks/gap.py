"""How much of the gap between one step and many each circuit closes, on several texts that no model here has seen.

    python benchmarks/gap.py --data DATA --circuit runs/static runs/modulated --blocks 200 --out docs/gap.json

DATA holds books/test.jsonl.xz, gsm8k/test.jsonl and wikitext103/test.txt.xz; word problems are generated. An answer
ends where training ends it, at a block's end; what is called padded has masks up to the end of a row of 384 instead,
which do not tell where the answer ends. Circuits are compared side by side on the same blocks and masks, with the null
circuit as a control. Prints Markdown tables (95% intervals by bootstrap over blocks); writes all figures to OUT and the
perplexity curves to an .svg beside it.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import codd
from codd.backbones import Tokenizer
from codd.circuits import HMM
from codd.evaluation.gap import RATIOS, BlockScores, block_scores, circuit_length, summary
from codd.training import corpus
from codd.training.recipe import Source

GSM8K = Source("qa", "gsm8k", path="gsm8k/test.jsonl")
SOURCES = {
    "books": Source("text", "books", path="books/test.jsonl.xz", fields=("text",)),
    "gsm8k": GSM8K,
    "gsm8k-padded": GSM8K,
    "wikitext103": Source("text", "wikitext103", path="wikitext103/test.txt.xz"),
    "problems": Source("problems", "problems", split="test", seed=100, count=2000),
}
FIRST = 96
"""Tokens of a prose that are given at least."""
RESAMPLES = 2000
NULL = "null"


class Texts(NamedTuple):
    """Rows of one length, and a block in each."""

    ids: Tensor
    starts: Tensor


def main() -> None:
    args = arguments()
    model = codd.load(args.model, circuit=None, device=args.device, dtype=torch.float32)
    assert model.mask_id is not None
    assert model.tokenizer is not None
    circuits = load_circuits(args, model.backbone.vocab_size)
    length = circuit_length(next(iter(circuits.values())))
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if model.backbone.device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "settings": {key: str(value) for key, value in vars(args).items()},
        "circuits": {name: repr(circuit) for name, circuit in circuits.items()},
        "texts": {},
    }
    for name in args.text:
        begun = time.perf_counter()
        groups = draw(name, args, model.tokenizer, length)
        scores = joined([measure(model, circuits, group, args, name) for group in groups])
        found = {circuit: figures(scores, circuit, args.seed) for circuit in circuits}
        blocks = sum(len(group.ids) for group in groups)
        seconds = round(time.perf_counter() - begun, 1)
        report["texts"][name] = {"blocks": blocks, "seconds": seconds, "circuits": found}
        print(f"\n### {name}, {blocks} blocks of {length} tokens\n\n{markdown(found)}", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    draw_curves(report["texts"], args.out.with_suffix(".svg"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--circuit", nargs="+", default=["auto"], help="folders (default: the model's own)")
    parser.add_argument("--model", type=Path, help="a checkpoint (default: the bundled one)")
    parser.add_argument("--text", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--blocks", type=int, default=200, help="of each kind of text")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS))
    parser.add_argument("--row-length", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0, help="of blocks, masks and orders")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    return parser.parse_args()


def load_circuits(args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """By the names that were given, and the null circuit for the length of the first."""
    found: dict[str, Any] = {}
    for name in args.circuit:
        circuit = codd.load(args.model, circuit=name, device=args.device, dtype=torch.float32).circuit
        if circuit is None:
            sys.exit(f"{name}: there is no circuit; give a folder with --circuit.")
        found[name] = circuit
    lengths = {name: circuit_length(circuit) for name, circuit in found.items()}
    if len(set(lengths.values())) > 1:
        sys.exit(f"the circuits are for blocks of different lengths: {lengths}.")
    first = next(iter(found.values()))
    neutral = HMM.neutral(num_states=1, vocab_size=vocab_size).to(device=first.device)
    return {**found, NULL: neutral}


def draw(name: str, args: argparse.Namespace, tokenizer: Tokenizer, length: int) -> list[Texts]:
    """Blocks of a source; those of one group have texts of the same length."""
    source, generator = SOURCES[name], np.random.default_rng((args.seed, 17))
    if source.kind == "text":
        return [prose(corpus.token_stream(source, args.data, tokenizer), args, length, generator)]
    pairs = corpus.encode_pairs(list(corpus.pairs(source, args.data)), tokenizer)
    assert tokenizer.eos_id is not None
    return answers(pairs, tokenizer.eos_id, args, length, generator, padded=name.endswith("padded"))


def prose(stream: NDArray[np.uint16], args: argparse.Namespace, length: int, generator: np.random.Generator) -> Texts:
    """Rows side by side, some of them by chance, and a block anywhere but near the beginning."""
    rows = stream[: len(stream) // args.row_length * args.row_length].reshape(-1, args.row_length)
    chosen = generator.permutation(len(rows))[: args.blocks]
    starts = generator.integers(FIRST, args.row_length - length + 1, len(chosen))
    return Texts(torch.from_numpy(rows[chosen].astype(np.int64)), torch.from_numpy(starts))


def answers(
    pairs: Sequence[corpus.Encoded],
    eos: int,
    args: argparse.Namespace,
    length: int,
    generator: np.random.Generator,
    *,
    padded: bool,
) -> list[Texts]:
    """A block on the grid of an answer, the one with its end at the latest."""
    layout = corpus.Layout(args.row_length, length, args.seed)
    groups: dict[int, list[tuple[NDArray[np.int64], int]]] = {}
    fitting = [(q, a) for q, a in pairs if len(q) + (len(a) // length + 1) * length <= args.row_length]
    for number in generator.permutation(len(fitting))[: args.blocks]:
        question, answer = fitting[number]
        extra = int(generator.choice(len(corpus.TAILS), p=corpus.TAILS))
        start = len(question) + length * int(generator.integers(len(answer) // length + 1))
        row = corpus._fill(question, answer, extra, eos, layout).tokens.astype(np.int64)
        if padded:
            row = np.pad(row, (0, args.row_length - len(row)), constant_values=eos)
        groups.setdefault(len(row), []).append((row, start))
    return [
        Texts(torch.from_numpy(np.stack([row for row, _ in group])), torch.tensor([start for _, start in group]))
        for _, group in sorted(groups.items())
    ]


def measure(
    model: codd.Model, circuits: Mapping[str, Any], texts: Texts, args: argparse.Namespace, name: str
) -> dict[float, BlockScores]:
    assert model.mask_id is not None

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{name}: {len(texts.ids)} texts of {texts.ids.shape[1]}: {done / total:6.1%} ",
                end="",
                file=sys.stderr,
            )

    return block_scores(
        model.backbone,
        circuits,
        texts.ids,
        texts.starts,
        mask_id=model.mask_id,
        block_length=circuit_length(next(iter(circuits.values()))),
        ratios=args.ratios,
        seed=args.seed + 7919 * texts.ids.shape[1],  # groups of one text each must not all get the same masks
        progress=tell,
    )


def joined(groups: Sequence[Mapping[float, BlockScores]]) -> dict[float, BlockScores]:
    """The blocks of all groups."""
    first = groups[0]
    return {
        ratio: BlockScores(
            first[ratio].masked,
            torch.cat([group[ratio].factorized for group in groups]),
            {name: torch.cat([group[ratio].coupled[name] for group in groups]) for name in first[ratio].coupled},
            torch.cat([group[ratio].sequential for group in groups]),
        )
        for ratio in first
    }


def figures(scores: Mapping[float, BlockScores], circuit: str, seed: int) -> dict[str, dict[str, float | None]]:
    """Of each ratio; JSON has no NaN."""
    table: dict[str, dict[str, float | None]] = {}
    for ratio, found in scores.items():
        numbers = summary(found, found.coupled[circuit])
        low, high = interval(found, found.coupled[circuit], seed)
        numbers |= {"gap_closed_low": low, "gap_closed_high": high}
        numbers |= {f"perplexity_{way}": math.exp(-numbers[way]) for way in ("factorized", "coupled", "sequential")}
        table[f"{ratio:g}"] = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return table


def interval(found: BlockScores, coupled: Tensor, seed: int) -> tuple[float, float]:
    """The middle 95% of the gap closed when blocks are drawn again."""
    gains, gaps = (coupled - found.factorized).numpy(), (found.sequential - found.factorized).numpy()
    picks = np.random.default_rng(seed).integers(len(gains), size=(RESAMPLES, len(gains)))
    with np.errstate(divide="ignore", invalid="ignore"):
        closed = gains[picks].sum(1) / gaps[picks].sum(1)
    if np.isnan(closed).all():
        return math.nan, math.nan
    low, high = np.nanquantile(closed, (0.025, 0.975))
    return float(low), float(high)


def markdown(found: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> str:
    """Log-likelihoods per masked token, with the perplexity of one step in brackets."""
    lines = [
        "| mask ratio | factorized | "
        + " | ".join(found)
        + " | sequential | "
        + " | ".join(f"{c}: gap closed" for c in found)
        + " |"
    ]
    lines.append("|---" * (3 + 2 * len(found)) + "|")
    some = next(iter(found.values()))
    for ratio, shared in some.items():
        rows = [figures[ratio] for figures in found.values()]
        likelihoods = [cell(shared, "factorized"), *(cell(row, "coupled") for row in rows), cell(shared, "sequential")]
        lines.append("| " + " | ".join([ratio, *likelihoods, *map(share, rows)]) + " |")
    return "\n".join(lines)


def cell(row: Mapping[str, float | None], way: str) -> str:
    value, perplexity = row[way], row[f"perplexity_{way}"]
    return "excluded" if value is None or perplexity is None else f"{value:.3f} ({perplexity:.2f})"


def share(row: Mapping[str, float | None]) -> str:
    closed, low, high = (row[name] for name in ("gap_closed", "gap_closed_low", "gap_closed_high"))
    if closed is None:
        return "-"
    return f"{closed:.1%}" if low is None or high is None else f"{closed:.1%} ({low:.1%} to {high:.1%})"


def draw_curves(texts: Mapping[str, Any], out: Path) -> None:
    """Perplexity of one step against mask ratio, a panel a text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(texts), 3.4), layout="constrained")
    for (name, text), panel in zip(texts.items(), figure.subplots(1, len(texts), squeeze=False)[0], strict=True):
        for label, ratios, values, style in curves(text["circuits"]):
            panel.plot(ratios, values, style, marker=".", label=label)
        panel.set(title=name, xlabel="mask ratio", yscale="log")
        panel.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("perplexity of a masked token")
    figure.axes[0].legend(frameon=False)
    with rc_context({"svg.hashsalt": "codd"}):  # the same figures give the same file
        figure.savefig(out, metadata={"Date": None})


def curves(found: Mapping[str, Any]) -> Iterator[tuple[str, list[float], list[float], str]]:
    """The network in one step, with each circuit, and in many steps; the null circuit would hide the first."""
    some = next(iter(found.values()))
    ways = [("factorized", some, "factorized", "k-"), ("sequential", some, "sequential", "k--")]
    ways[1:1] = [(name, table, "coupled", "-") for name, table in found.items() if name != NULL]
    for label, table, way, style in ways:
        points = [(float(ratio), row[f"perplexity_{way}"]) for ratio, row in table.items()]
        kept = sorted((ratio, value) for ratio, value in points if value is not None)
        yield label, [ratio for ratio, _ in kept], [value for _, value in kept], style


if __name__ == "__main__":
    main()
