"""``codd demo``: what the circuit gains at equal network calls, counted on this machine."""

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from codd.cli import console, sampling, tables
from codd.cli.tables import Cell, Section
from codd.decoding import Generation, Model, Options, load
from codd.errors import InvalidInput
from codd.evaluation.statistics import mcnemar

NAME = "demo"
HELP = """\
The bundled model at work, in under a minute on two CPU cores, with no network connection.

The network alone and the network with its circuit write the same things in the same number of network calls, with
the same seed: a sentence whose masks are filled in 2 calls, a passage of 128 tokens in 8 calls, and word problems at
16 steps each. Prints both texts, how many answers are right, and how often chance makes such a difference. Nothing is
chosen by its result: the seed is 0, and the problems are the first of those in docs/results/answers.md, which
no training has seen. Alone means with the null circuit: the same code, and a circuit that knows nothing."""

ABOUT = """\
The network alone and with its circuit: the same prompts, seed and number of network calls.
Nothing is picked by its result (seed {seed}; --seed shows others)."""
NEXT = {
    "codd serve": "a playground in your browser",
    "codd chat": "ask the model yourself, and watch the answer resolve",
    "README.md": "all of it from Python: codd.load, codd.HMM, codd.Evidence",
}
LABELS = {"alone": "network alone", "circuit": "with the circuit"}
SOLVERS = {**LABELS, "checked": "drafts, checked by the causal twin"}
SENTENCE = "They walked[5 masks] the river, and in the evening[6 masks] the fire."
PASSAGE = "It was a cold night in November. The two men walked slowly along the river without speaking, until at last"
FILLED = "Masks filled in 2 network calls", f"{SENTENCE} Five or six masks in each call."
CONTINUED = "128 tokens of prose in 8 network calls", f"{PASSAGE} ... Sixteen tokens in each call."
FILL, CONTINUE = Options(gen_length=0, steps=2, temperature=1.0), Options(gen_length=128, steps=8, temperature=1.0)
SOLVE = Options(gen_length=128, steps=16)
PROBLEMS = 20
FILE = Path(__file__).with_name("questions.jsonl")
ANSWER = re.compile(r"####\s*\$?(-?\d[\d,]*)")


class Question(NamedTuple):
    """A word problem that no training has seen, its written-out solution, and the number that is right."""

    question: str
    answer: str
    result: int


def questions(seed: int) -> list[Question]:
    """All problems of the file, shuffled by the seed; 0: in the order of the file."""
    found = [Question(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]
    if seed:
        random.Random(seed).shuffle(found)
    return found


def extract_answer(text: str) -> int | None:
    """The number after the last "####" of a text (thousands may be separated by commas), or None."""
    start = text.rfind("####")
    found = ANSWER.match(text, start) if start >= 0 else None
    return int(found[1].replace(",", "")) if found else None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the seed, the number of problems, the circuit, and the forms of output."""
    parser.epilog = """\
examples:
  codd demo
  codd demo --problems 100 --seed 7
  codd demo --circuit static
  codd demo --json | python -m json.tool"""
    parser.add_argument(
        "--seed", type=console.seed, default=0, help="of the problems and of what is drawn (default: 0)"
    )
    parser.add_argument(
        "--problems",
        type=console.number(int, 1, len(questions(0))),
        metavar="N",
        default=PROBLEMS,
        help=f"how many are solved (default: {PROBLEMS})",
    )
    sampling.add_circuit_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object with all numbers instead of text")


def run(args: argparse.Namespace) -> int:
    """Compute the three parts, and show each as soon as it is known."""
    if args.circuit == "none":
        raise InvalidInput("the demo compares the network with and without a circuit: --circuit must not be none.")
    with console.working("loading the bundled model"):
        model = load(circuit=sampling.circuit_from(args))
    models = {"alone": model.with_circuit("null"), "circuit": model}
    assert model.tokenizer is not None, "the bundled model has a tokenizer"
    mask = model.tokenizer.mask_token or ""
    sentence = re.sub(r"\[(\d) masks\]", lambda count: int(count[1]) * mask, SENTENCE)
    parts: Iterable[tuple[str, Callable[[], dict[str, Any]], Callable[[Mapping[str, Any]], Section]]] = (
        ("filled", lambda: _written(models, sentence, FILL, args.seed), partial(_texts, *FILLED)),
        ("continued", lambda: _written(models, PASSAGE, CONTINUE, args.seed), partial(_texts, *CONTINUED)),
        ("problems", lambda: _solved(models, questions(args.seed)[: args.problems], args.seed), _scores),
    )
    results: dict[str, Any] = {"seed": args.seed}
    if not args.json:
        console.out().print(ABOUT.format(seed=args.seed))
    for name, compute, section in parts:
        results[name] = compute()
        if not args.json:
            tables.show([section(results[name])])
    if args.json:
        console.as_json(results)
    else:
        console.out().print()
        console.fields("Next", NEXT)
    return 0


def _written(models: Mapping[str, Model], prompt: str, options: Options, seed: int) -> dict[str, Any]:
    """The text of both ways, and the network calls of each."""
    with console.working("writing"):
        made = {name: model.generate(prompt, options, seed=seed, chat=False) for name, model in models.items()}
    texts = {name: sampling.printable(_text(each)).strip() for name, each in made.items()}
    return {"texts": texts, "calls": {name: each.steps[0] for name, each in made.items()}}


def _text(made: Generation) -> str:
    assert made.texts is not None, "the bundled model has a tokenizer"
    return made.texts[0]


def _solved(models: Mapping[str, Model], asked: Sequence[Question], seed: int) -> dict[str, Any]:
    """Right answers, network calls and seconds of all ways on the same problems."""
    ways: dict[str, Any] = {name: {"right": 0, "calls": 0, "seconds": 0.0, "answers": []} for name in SOLVERS}
    checked = Options(gen_length=SOLVE.gen_length, mode="speculative")
    runs = {**{name: (model, SOLVE) for name, model in models.items()}, "checked": (models["circuit"], checked)}
    with console.bar("solving word problems", len(asked)) as bar:
        for number, question in enumerate(asked):
            # In turn, and each first as often as the other: both see the same load of the machine.
            for name in sorted(runs, reverse=bool(number % 2)):
                begun, way, (model, options) = time.perf_counter(), ways[name], runs[name]
                made = model.generate(question.question, options, seed=seed)
                way["seconds"] += time.perf_counter() - begun
                way["calls"] += made.steps[0]
                way["answers"].append(extract_answer(_text(made)) == question.result)
            bar.advance()
    for way in ways.values():
        way["right"] = sum(way["answers"])
    pairs = list(zip(ways["circuit"]["answers"], ways["alone"]["answers"], strict=True))
    return {"ways": ways, "p": mcnemar(pairs.count((True, False)), pairs.count((False, True))), "count": len(asked)}


def _texts(title: str, before: str, found: Mapping[str, Any]) -> Section:
    row = ["", *(found["texts"][name] for name in LABELS)]
    return Section(title, [before], ["", *LABELS.values()], [row], prose=True)


def _scores(found: Mapping[str, Any]) -> Section:
    count, ways = found["count"], found["ways"]
    most = max(way["right"] for way in ways.values())
    rows: list[list[Cell]] = [
        [
            label,
            (f"{way['right']} of {count}", "green" if way["right"] == most else "red"),
            f"{way['calls'] / count:.1f}",
            f"{way['seconds'] / count:.2f}",
        ]
        for label, way in zip(SOLVERS.values(), ways.values(), strict=True)
    ]
    return Section(
        f"{count} word problems at 16 steps, about 8 tokens in each call",
        ["No training has seen them. An answer counts if the number after #### is right."],
        ["", "right answers", "calls", "seconds"],
        rows,
        [
            f"Chance alone makes the circuit's difference with probability {found['p']:.2g} (McNemar's test).",
            "Checked: network and circuit draft, and a causal model writes what it would write alone, in fewer calls "
            '(mode="speculative"; docs/results/speculative.md).',
            "codd's default lets each call write all tokens that are certain enough, from the first mask on. Beside "
            "the network's best rule of that kind (threshold 0.97), the circuit needs 1.65 times fewer calls for "
            "as many right answers, within noise (1,000 problems: docs/results/default.md).",
        ],
    )
