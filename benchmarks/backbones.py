"""What a backbone is worth: bounds on the likelihood of text, and word problems solved; of several, side by side.

    python benchmarks/backbones.py --data DATA --model runs/mini/model --model src/codd/backbones/bundled

DATA holds books/test.jsonl.xz and gsm8k/test.jsonl. Prints one JSON object: machine, settings, and figures a model.
Bounds are per token and, since tokenizers differ, per byte. Of a causal model the same functions give exact values.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from codd.backbones import Backbone, Tokenizer, load_checkpoint
from codd.backbones.causal import CausalReader
from codd.data.noise import NoiseRecipe
from codd.data.packing import PackedSequences
from codd.data.sources import Source, read_pairs
from codd.data.tokenization import PackingConfig, encode_pairs, load_source, token_stream
from codd.decoding import Model
from codd.errors import FormatError, InvalidInput
from codd_lab.pretraining.loss import Maker, causal_batch, diffusion_batch, mean_loss
from codd_lab.problems import Problem, extract_answer, problems, write_problems
from timing import head

BOOKS = Source("text", "books", path="books/test.jsonl.xz", fields=("text",))
GSM8K = Source("qa", "gsm8k", path="gsm8k/test.jsonl", strip="gsm8k")
PROBLEMS = Source("qa", "problems", path="problems.jsonl")
"""Written for the run: other problems than those that are to be solved."""
AT_ONCE = 250
"""Problems in one batch."""
SEED = 777
"""Of the masks: the same for all models."""


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
        **head(args, args.device or ("cuda" if torch.cuda.is_available() else "cpu")),
        "models": {str(folder): measure(folder, args) for folder in args.model},
    }
    print(json.dumps(report, indent=2))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, object]:
    backbone, tokenizer, _ = load_checkpoint(folder, device=args.device, dtype=torch.float32, check=True)
    assert tokenizer is not None
    lengths = {"row_length": args.row_length, "draws": args.draws}
    with tempfile.TemporaryDirectory() as made:
        write_problems(Path(made, PROBLEMS.path), args.problems, split="test", seed=100)
        bounds = {
            source.name: asdict(score(backbone, tokenizer, source, root, **lengths))
            for source, root, score in (
                (BOOKS, args.data, text_likelihood),
                (GSM8K, args.data, answer_likelihood),
                (PROBLEMS, Path(made), answer_likelihood),
            )
        }
    begun = time.perf_counter()
    asked = list(problems(args.problems, split="test", seed=args.seed))
    texts = written(backbone, tokenizer, asked, gen_length=args.gen_length, steps=args.gen_length)
    by_steps: dict[int, list[bool]] = {}
    wrong = []
    for problem, text in zip(asked, texts, strict=True):
        right = extract_answer(text) == problem.answer
        by_steps.setdefault(problem.steps, []).append(right)
        if not right:
            wrong.append({"question": problem.question, "wanted": problem.solution, "found": text})
    return {
        "parameters": sum(parameter.numel() for parameter in backbone.parameters()),
        "causal": backbone.config.causal,
        "dtype": "float32",
        "bounds": bounds,
        "problems": {
            "count": args.problems,
            "accuracy": 1 - len(wrong) / len(asked),
            "by_steps": {steps: sum(c) / len(c) for steps, c in sorted(by_steps.items())},
            "seconds": time.perf_counter() - begun,
        },
        "failures": wrong[: args.failures],
    }


@dataclass(frozen=True)
class Likelihood:
    """Of a set of texts."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int
    rows: int
    draws: int


def text_likelihood(
    backbone: Backbone, tokenizer: Tokenizer, source: Source, root: Path, *, row_length: int, draws: int
) -> Likelihood:
    """The bound of prose, row by row: a row does not see the one before it.

    The first token of a row, which a causal model is given, counts for it neither as a token nor in bytes.
    """
    stream = token_stream(source, root, tokenizer)
    whole = len(stream) // row_length * row_length
    if not whole:
        raise FormatError(f"source {source.name}: {len(stream)} tokens do not fill a row of {row_length}.")
    tokens = stream[:whole].reshape(-1, row_length)
    rows = PackedSequences(tokens, np.ones(tokens.shape, np.uint8), np.ones(tokens.shape, np.bool_))
    predicted = [row[1:] for row in tokens.tolist()] if backbone.config.causal else [tokens.ravel().tolist()]
    size = sum(len(tokenizer.decode(ids).encode()) for ids in predicted)
    return _likelihood(backbone, tokenizer, rows, tokens=sum(map(len, predicted)), size=size, draws=draws)


def answer_likelihood(
    backbone: Backbone, tokenizer: Tokenizer, source: Source, root: Path, *, row_length: int, draws: int
) -> Likelihood:
    """The bound of answers given their questions.

    End marks that fill an answer's last block are predicted, and what they cost is counted; but they are not counted
    among the tokens, of which an answer has its own and one end mark.
    """
    packing = PackingConfig(row_length, block_length=32, seed=0)
    found = encode_pairs(list(read_pairs(source, root)), tokenizer)
    packed = load_source(source, root, tokenizer, packing, None)
    rows = packed.take(0, len(packed))
    kept = [answer for question, answer in found if len(question) + len(answer) < row_length]
    size = sum(len(tokenizer.decode(answer.tolist()).encode()) for answer in kept)
    return _likelihood(
        backbone, tokenizer, rows, tokens=sum(len(answer) + 1 for answer in kept), size=size, draws=draws
    )


def _likelihood(
    backbone: Backbone, tokenizer: Tokenizer, rows: PackedSequences, *, tokens: int, size: int, draws: int
) -> Likelihood:
    draws = 1 if backbone.config.causal else draws
    mean = mean_loss(
        backbone.network,
        rows,
        batch_maker(backbone, tokenizer),
        seed=SEED,
        device=backbone.device,
        at_once=256 if backbone.device.type == "cuda" else 16,
        draws=draws,
    )
    total = mean * _at_stake(backbone, rows)
    return Likelihood(total / tokens, total / size / math.log(2), tokens, len(rows.tokens), draws)


def _at_stake(backbone: Backbone, rows: PackedSequences) -> int:
    """What `mean_loss` is the mean over: a causal model does not predict the first token of a text."""
    if not backbone.config.causal:
        return int(rows.scored.sum())
    batch = causal_batch(rows, torch.Generator())
    return int(batch.total)


def batch_maker(backbone: Backbone, tokenizer: Tokenizer) -> Maker:
    """Uniform noise, or for a causal model none."""
    if backbone.config.causal:
        return causal_batch
    if tokenizer.mask_id is None:
        raise InvalidInput("the tokenizer has no mask token.")
    return partial(diffusion_batch, recipe=NoiseRecipe(block_share=0.0), mask_id=tokenizer.mask_id)


def written(
    backbone: Backbone, tokenizer: Tokenizer, asked: Sequence[Problem], *, gen_length: int, steps: int
) -> list[str]:
    """An answer to each problem; a causal model writes from left to right, always greedily."""
    if backbone.config.causal:
        return [_continued(backbone, tokenizer, tokenizer.encode_chat(each.question), gen_length) for each in asked]
    model, texts = Model(backbone, None, tokenizer, backbone.special.mask), list[str]()
    for begin in range(0, len(asked), AT_ONCE):
        some = [each.question for each in asked[begin : begin + AT_ONCE]]
        texts += model.generate(some, gen_length=gen_length, steps=steps).texts or []
    return texts


def _continued(backbone: Backbone, tokenizer: Tokenizer, prompt: Sequence[int], length: int) -> str:
    reader, new, found = CausalReader(backbone, 1, len(prompt) + length), list(prompt), list[int]()
    for _ in range(length):
        new = [int(reader.read(torch.tensor([new])).argmax())]
        if new[0] == backbone.special.eos:
            break
        found += new
    return tokenizer.decode(found)


if __name__ == "__main__":
    main()
