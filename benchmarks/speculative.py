"""Speculative decoding of the bundled model: what a check accepts, right answers, and seconds.

    python benchmarks/speculative.py --count 40 --passages books/test.jsonl.xz --out speculative.json

Word problems (greedy) and book passages (temperature 1), each by: drafts with the circuit, and with the null circuit;
joint threshold, and the causal model alone, one token a pass with its cache. Every text is saved as soon as it is
there; a second run with the same file goes on. Figures come with bootstrap intervals over texts (95%); seconds are CPU
seconds of one thread.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import codd
from codd.backbones.causal import CausalReader, load_causal
from codd.backbones.loading import BUNDLED
from codd.data.text_files import json_lines
from codd.decoding.samplers import choose_tokens
from codd.evaluation.statistics import bootstrap_interval, ratio_of_sums
from codd_lab.problems import extract_answer, problems

CONTEXT = 96
"""Tokens of a passage that are given."""
EVERY = 8000
"""Characters of a book from one passage to the next."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="problems, and passages (default: 200)")
    parser.add_argument("--seed", type=int, default=7, help="of the problems (default: 7)")
    parser.add_argument("--passages", type=Path, help="books: JSON lines, each with a text")
    parser.add_argument("--lengths", type=int, nargs=2, default=(128, 96), help="tokens of an answer, of a passage")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = codd.load(device="cpu")
    causal = load_causal(BUNDLED / "causal", torch.device("cpu"))
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for number, (kind, ids, answer) in enumerate(texts(model, args)):
        for way, write in ways(model, causal, kind, args.lengths).items():
            key = f"{kind}/{way}/{number}"
            if key in results:
                continue
            begun = time.process_time()
            found = write(ids, number)
            found["seconds"] = time.process_time() - begun
            found["right"] = None if answer is None else extract_answer(model.text(found["ids"], ids)) == answer
            found["ids"] = found["ids"].tolist()[len(ids) :]
            results[key] = found
            args.out.write_text(json.dumps(results))
    report(results)


def texts(model: codd.Model, args: argparse.Namespace) -> Iterator[tuple[str, list[int], Any]]:
    """Kind, prompt and answer; problems and passages in turn, so that an early stop leaves both."""
    assert model.tokenizer is not None
    books = [book["text"] for _, book in json_lines(args.passages)] if args.passages else []
    for number, problem in enumerate(problems(args.count, seed=args.seed)):
        yield "problems", model.encode(problem.question)[0], problem.answer
        if books:
            book = books[number % len(books)]
            begin = EVERY * (1 + number // len(books)) % max(1, len(book) - EVERY)
            yield "passages", model.tokenizer.encode(book[begin : begin + EVERY])[CONTEXT : 2 * CONTEXT], None


def ways(
    model: codd.Model, causal: Any, kind: str, lengths: list[int]
) -> dict[str, Callable[[list[int], int], dict[str, Any]]]:
    """How a text is written, by name; each gives its ids, network calls, and what was drafted and accepted."""
    prose = {"temperature": 1.0, "gen_length": lengths[1], "stop": False}
    common: dict[str, Any] = {"gen_length": lengths[0]} if kind == "problems" else prose
    null = model.with_circuit("null")

    def speculative(model: codd.Model, **options: Any) -> Callable[[list[int], int], dict[str, Any]]:
        def write(ids: list[int], seed: int) -> dict[str, Any]:
            steps = list(model.denoise([ids], mode="speculative", seed=seed, **common, **options))
            rounds = [(step.drafted, step.accepted) for step in steps if step.drafted]
            return {"ids": steps[-1].ids, "calls": len(steps), "rounds": rounds}

        return write

    def default(ids: list[int], seed: int) -> dict[str, Any]:
        threshold = 0.95 if kind == "passages" else 0.97
        out = model.generate([ids], seed=seed, sampler="any_order", threshold=threshold, **common)
        return {"ids": out.sequences[0], "calls": out.steps[0], "rounds": []}

    def alone(ids: list[int], seed: int) -> dict[str, Any]:
        return plain(model, causal, ids, seed, common)

    return {
        "circuit": speculative(model),
        "null": speculative(null),
        "threshold": default,
        "causal": alone,
    }


@torch.no_grad()
def plain(model: codd.Model, causal: Any, ids: list[int], seed: int, common: dict[str, Any]) -> dict[str, Any]:
    """The causal model alone, one token a pass."""
    length, temperature = common["gen_length"], common.get("temperature", 0.0)
    reader, out, new, generator = CausalReader(causal.network, 1, 512), list(ids), ids, torch.Generator()
    generator.manual_seed(seed)
    for _ in range(length):
        logits = reader.read(torch.tensor([new]))[0, -1:]
        logits[:, model.mask_id] = -torch.inf
        new = choose_tokens(logits, torch.rand(1, generator=generator), temperature, None, None).tolist()
        out += new
        if "stop" not in common and new[0] in model.stop_ids:
            break
    return {"ids": torch.tensor(out), "calls": len(out) - len(ids), "rounds": []}


def report(results: dict[str, Any]) -> None:
    """A table for each kind of text, and whether greedy texts are the causal model's."""
    for kind in sorted({key.split("/")[0] for key in results}, reverse=True):
        names = list(dict.fromkeys(key.split("/")[1] for key in results if key.startswith(kind)))
        rows = {name: [each for key, each in results.items() if key.startswith(f"{kind}/{name}/")] for name in names}
        print(f"\n{len(rows[names[0]])} {kind}: accepted a round, tokens a call, seconds a text, right")
        for name, found in rows.items():
            accepted = [(sum(a for _, a in each["rounds"]), len(each["rounds"])) for each in found]
            per_call = [(len(each["ids"]), each["calls"]) for each in found]
            seconds = [(each["seconds"], 1) for each in found]
            right = [each["right"] for each in found]
            shown = ratio(accepted) if any(count for _, count in accepted) else "-"
            print(f"{name:10} {shown:20} {ratio(per_call):20} {ratio(seconds):20} {sum(filter(None, right))}")
        if kind == "problems":
            for name in ("circuit", "null"):
                same = sum(a["ids"] == b["ids"] for a, b in zip(rows[name], rows["causal"], strict=True))
                print(f"{name}: {same} texts are the causal model's own")


def ratio(pairs: Sequence[tuple[float, float]]) -> str:
    """A sum over another, with its interval."""
    totals, counts = np.array(pairs, dtype=np.float64).T
    low, high = bootstrap_interval(ratio_of_sums(totals, counts), len(pairs))
    return f"{totals.sum() / max(counts.sum(), 1):.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    main()
