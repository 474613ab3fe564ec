"""What the bundled model is worth: bounds on books and GSM8K, word problems solved; of several models, side by side.

    python benchmarks/backbones.py --data DATA --model runs/mini/model --model src/codd/backbones/bundled

DATA holds books/test.jsonl.xz and gsm8k/test.jsonl. Prints one JSON object: machine, settings, and figures a model.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch

from codd.backbones import load_checkpoint
from codd.evaluation.backbone import answer_likelihood, solve_problems, text_likelihood
from codd.training.recipe import Source

BOOKS = Source("text", "books", path="books/test.jsonl.xz", fields=("text",))
GSM8K = Source("qa", "gsm8k", path="gsm8k/test.jsonl")
PROBLEMS = Source("problems", "problems", split="test", seed=100, count=500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, action="append", required=True, help="a checkpoint; may be repeated")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=100, help="of the test problems")
    parser.add_argument("--gen-length", type=int, default=160)
    parser.add_argument("--tf32", action="store_true", help="on a GPU: faster products, rounded to 10 bits of mantissa")
    parser.add_argument("--draws", type=int, default=16, help="noise levels a row")
    parser.add_argument("--row-length", type=int, default=384)
    parser.add_argument("--device")
    parser.add_argument("--failures", type=int, default=0, help="show so many wrong answers")
    args = parser.parse_args()
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    report = {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "settings": {key: str(value) for key, value in vars(args).items()},
        "models": {str(folder): measure(folder, args) for folder in args.model},
    }
    print(json.dumps(report, indent=2))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, object]:
    backbone, tokenizer, _ = load_checkpoint(folder, device=args.device, dtype=torch.float32, check=True)
    assert tokenizer is not None
    bounds = {
        source.name: asdict(score(backbone, tokenizer, source, args.data, row_length=args.row_length, draws=args.draws))
        for source, score in (
            (BOOKS, text_likelihood),
            (GSM8K, answer_likelihood),
            (PROBLEMS, answer_likelihood),
        )
    }
    begun = time.perf_counter()
    solved = solve_problems(
        backbone, tokenizer, args.problems, seed=args.seed, gen_length=args.gen_length, steps=args.gen_length
    )
    by_steps: dict[int, list[bool]] = {}
    for problem, correct in zip(solved.problems, solved.correct, strict=True):
        by_steps.setdefault(problem.steps, []).append(correct)
    wrong = [
        {"question": problem.question, "wanted": problem.solution, "found": text}
        for problem, text, correct in zip(solved.problems, solved.texts, solved.correct, strict=True)
        if not correct
    ]
    return {
        "parameters": sum(parameter.numel() for parameter in backbone.parameters()),
        "causal": backbone.config.causal,
        "dtype": "float32",
        "bounds": bounds,
        "problems": {
            "count": args.problems,
            "accuracy": solved.accuracy,
            "by_steps": {steps: sum(c) / len(c) for steps, c in sorted(by_steps.items())},
            "seconds": time.perf_counter() - begun,
        },
        "failures": wrong[: args.failures],
    }


if __name__ == "__main__":
    main()
