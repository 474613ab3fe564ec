"""Text sampled at temperature 1, several tokens a step: with each circuit and without, scored by a causal model.

    python benchmarks/sampled_text.py --data DATA --samples 48 --tokens 2 4 8 16 --out FILE.json

Continues prose (the first 64 tokens of rows of DATA/books/valid.jsonl.xz) and answers generated problems, with the
same prompts and seeds for all ways. Prints Markdown: nats a token of what was written, given the prompt, under a causal
model of the same data; distinct n-grams (of all texts together, over all n-grams); the share of tokens that repeat the
one before; how many texts ended. A text that ends early is scored up to and including its end mark. Differences are
paired, with 95% intervals by bootstrap over prompts: to the control at the same and at half the tokens a step, and to
the network alone at half. Negative: better.

The control is the null circuit with the same sampler. For latent that is the network alone. For any_order it is a way
of its own: it takes the position whose best token is surest and then draws, while the others draw first and take the
position whose drawn token is surest. OUT is rewritten after every way, and what it holds already is not run again.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import codd
from codd.backbones import Backbone, Tokenizer, load_checkpoint
from codd.training import corpus
from codd.training.recipe import Source

BOOKS = Source("text", "books", path="books/valid.jsonl.xz", fields=("text",))
PROMPT, ROW = 64, 384
"""Tokens of a prose prompt, and of the rows that it begins."""
RESAMPLES = 2000
NULL, TRUE = "null", "true text"


class Case(NamedTuple):
    """A prompt, and how it really goes on."""

    prompt: list[int]
    truth: list[int]


def main() -> None:
    args = arguments()
    torch.set_grad_enabled(False)
    model = codd.load(circuit=None, device=args.device, dtype=torch.float32)
    circuits = {name: codd.load(circuit=name, device=args.device).circuit for name in args.circuits}
    judge, _, _ = load_checkpoint(args.judge, device=args.device, dtype=torch.float32)
    assert model.tokenizer is not None
    settings = {
        name: str(getattr(args, name))
        for name in ("samples", "gen_length", "block_length", "remasking", "judge", "seed")
    }
    report: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"texts": {}}
    if report.setdefault("settings", settings) != settings:
        raise SystemExit(f"{args.out}: was made with {report['settings']}, not {settings}; give another --out.")
    for kind in args.kinds:
        cases = KINDS[kind](args, model.tokenizer)
        found = report["texts"].setdefault(kind, {})
        if TRUE not in found:
            found[TRUE] = scored(judge, cases, [case.truth for case in cases])
        for tokens in sorted(args.tokens, reverse=True):
            for way, circuit, sampler in ways(args):
                if f"{way}, {tokens}" in found:
                    continue
                chosen = replace(model, circuit=circuits[circuit])
                begun = time.perf_counter()
                written = sample(chosen, cases, sampler, tokens, args)
                entry = scored(judge, cases, written) | {"seconds": time.perf_counter() - begun}
                found[f"{way}, {tokens}"] = entry | {"way": way, "tokens": tokens, "written": written}
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report) + "\n")
        print(f"\n### {kind}, {len(cases)} prompts\n\n{markdown(found)}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--circuits", nargs="+", default=[NULL, "static", "auto"], help="as codd.load takes them")
    parser.add_argument("--samplers", nargs="+", default=["latent", "any_order"], choices=["latent", "any_order"])
    parser.add_argument("--samples", type=int, default=48, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4, 8, 16], help="a step")
    parser.add_argument("--gen-length", type=int, default=96)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--remasking", default="low_confidence", help="random: no choice by what was drawn")
    parser.add_argument("--judge", default="models/causal", help="the causal model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    return parser.parse_args()


def ways(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Name, circuit, sampler. The null circuit draws as the network alone does, so there the circuit is left out."""
    pairs = [(circuit, sampler) for sampler in args.samplers for circuit in args.circuits]
    return [
        (name_of(circuit, sampler), circuit, "factorized" if (circuit, sampler) == (NULL, "latent") else sampler)
        for circuit, sampler in pairs
    ]


def name_of(circuit: str, sampler: str) -> str:
    return "network alone" if (circuit, sampler) == (NULL, "latent") else f"{circuit} {sampler}"


def prose(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Case]:
    """Rows by chance; ones with the end of a book near their beginning are left out."""
    stream = corpus.token_stream(BOOKS, args.data, tokenizer)
    rows = stream[: len(stream) // ROW * ROW].reshape(-1, ROW).astype(np.int64)[:, : PROMPT + args.gen_length]
    order = np.random.default_rng((args.seed, 5)).permutation(len(rows))
    whole = [rows[i].tolist() for i in order if tokenizer.eos_id not in rows[i]]
    return [Case(row[:PROMPT], row[PROMPT:]) for row in whole[: args.samples]]


def problems(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Case]:
    """Fresh ones whose answer with its end mark fits."""
    source = Source("problems", "problems", split="test", seed=300 + args.seed, count=4 * args.samples)
    pairs = corpus.encode_pairs(list(corpus.pairs(source, args.data)), tokenizer)
    assert tokenizer.eos_id is not None
    cases = [Case(question.tolist(), [*answer.tolist(), tokenizer.eos_id]) for question, answer in pairs]
    return [case for case in cases if len(case.truth) <= args.gen_length][: args.samples]


KINDS = {"prose": prose, "problems": problems}


def sample(
    model: codd.Model, cases: Sequence[Case], sampler: Any, tokens: int, args: argparse.Namespace
) -> list[list[int]]:
    """One text a prompt, each with a seed of its own."""
    found = model.generate(
        [case.prompt for case in cases],
        gen_length=args.gen_length,
        block_length=args.block_length,
        steps=args.gen_length // tokens,
        remasking=args.remasking,
        sampler=sampler,
        temperature=1.0,
        circuit_temperature=1.0,
        seed=[1000 * args.seed + number for number in range(len(cases))],
    )
    return [text.tolist() for text in found.completions]


def scored(judge: Backbone, cases: Sequence[Case], written: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Nats and tokens of each text, and what the texts are like together."""
    ends = [judge.special.eos in text for text in written]
    pairs = [(a, b) for text in written for a, b in itertools.pairwise(text)]
    return {
        "nats": [nats(judge, case.prompt, text) for case, text in zip(cases, written, strict=True)],
        "lengths": [len(text) for text in written],
        **{f"distinct_{n}": distinct(written, n) for n in (1, 2, 3)},
        "repeated": sum(a == b for a, b in pairs) / max(1, len(pairs)),
        "ended": sum(ends) / len(ends),
    }


def nats(judge: Backbone, prompt: Sequence[int], text: Sequence[int]) -> float:
    ids = torch.tensor([[*prompt, *text]], device=judge.device)
    logits = judge.network.logits(judge.states(ids)).float()[0, len(prompt) - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


def markdown(found: dict[str, Any]) -> str:
    lines = [
        "| way | tokens a step | nats a token | to control, same tokens | to control, half | to network alone, half "
        "| distinct 1 / 2 / 3 | repeated | ended |",
        "|---|---|---|---|---|---|---|---|---|",
        row(TRUE, "", found[TRUE], ["", "", ""]),
    ]
    entries = [entry for name, entry in found.items() if name != TRUE]
    for entry in sorted(entries, key=lambda entry: (entry["way"], entry["tokens"])):
        way, tokens = entry["way"], entry["tokens"]
        control = name_of(NULL, "any_order" if way.endswith("any_order") else "latent")
        others = [(control, tokens), (control, tokens // 2), (name_of(NULL, "latent"), tokens // 2)]
        cells = [
            "" if other == (way, tokens) else difference(entry, found.get("{}, {}".format(*other))) for other in others
        ]
        lines.append(row(entry["way"], str(entry["tokens"]), entry, cells))
    return "\n".join(lines)


def row(way: str, tokens: str, entry: dict[str, Any], cells: Sequence[str]) -> str:
    mean = sum(entry["nats"]) / sum(entry["lengths"])
    grams = " / ".join(f"{entry[f'distinct_{n}']:.3f}" for n in (1, 2, 3))
    shares = f"{entry['repeated']:.1%} | {entry['ended']:.0%}"
    return f"| {way} | {tokens} | {mean:.3f} | {' | '.join(cells)} | {grams} | {shares} |"


def difference(entry: dict[str, Any], other: dict[str, Any] | None) -> str:
    """In nats a token, with its interval."""
    if other is None:
        return ""
    (a, n), (b, m) = ((np.asarray(x["nats"]), np.asarray(x["lengths"])) for x in (entry, other))
    drawn = np.random.default_rng(0).integers(len(a), size=(RESAMPLES, len(a)))
    low, high = np.percentile(mean_of(a[drawn], n[drawn]) - mean_of(b[drawn], m[drawn]), (2.5, 97.5))
    return f"{float(mean_of(a, n) - mean_of(b, m)):+.3f} ({low:+.3f} to {high:+.3f})"


def mean_of(total: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Over all tokens of some texts."""
    return np.asarray(total.sum(-1) / lengths.sum(-1))


if __name__ == "__main__":
    main()
