"""The bundled model in ``codd demo --more``: more and more tokens in a step, alone and multiplied with circuits."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from codd.backbones import Tokenizer
from codd.circuits import HMM
from codd.cli import console, sampling
from codd.cli.questions import Question, extract_answer, questions
from codd.cli.tables import Cell, Section
from codd.decoding import Model, Options, Step

LABELS = {"factorized": "network alone", "null": "x null circuit", "circuit": "x trained circuit"}
FOREIGN = "x given circuit"
"""The label of a circuit that did not come with the model: it may not be trained."""
AT_ONCE = (1, 4, 8)
"""Tokens in a step."""
NUM_PROBLEMS = 10
PROBLEM_LENGTH, QUESTION_LENGTH = 40, 60
"""Tokens of the longest solution and question: short ones, because the demo is to take a minute."""
PASSAGE = "It was a cold night in November. The two men walked slowly along the river without speaking, until at last"
PASSAGE_LENGTH = 32


def tasks(tokenizer: Tokenizer, seed: int) -> list[dict[str, Any]]:
    """Short problems of the test split, the first of them at every speed, and a passage to continue.

    Each has a prompt, the right answer (None: prose), options, and speeds ``at_once``.
    """

    def fits(problem: Question) -> bool:
        solution, question = tokenizer.encode(problem.answer), tokenizer.encode_chat(problem.question)
        return len(solution) < PROBLEM_LENGTH and len(question) <= QUESTION_LENGTH

    options = {"gen_length": PROBLEM_LENGTH, "seed": seed, "sampler": "any_order"}
    found: list[dict[str, Any]] = [
        {"prompt": each.question, "right": each.result, "options": options, "at_once": AT_ONCE[1:]}
        for each in itertools.islice(filter(fits, questions(seed)), NUM_PROBLEMS)
    ]
    found[0]["at_once"] = AT_ONCE
    # Drawn, because the most probable prose is repetitive, and repetition hides what goes wrong.
    drawn = {**options, "gen_length": PASSAGE_LENGTH, "temperature": 0.7, "remasking": "random"}
    return [*found, {"prompt": PASSAGE, "right": None, "options": drawn, "at_once": AT_ONCE}]


def warm_up(models: Iterable[Model]) -> None:
    """Run each model once, so that what is compiled or cached at the first call is not timed."""
    for model in models:
        sampling.answer(model, model.encode(["What is 7 + 8?"], chat=True), Options(gen_length=8, steps=1))


def answer(
    model: Model, prompt: str, options: Options, *, chat: bool = True, watch: Callable[[Step], None] = lambda step: None
) -> dict[str, Any]:
    """The text for a prompt, the final answer of a problem, network and circuit evaluations, and seconds."""
    cpu = time.process_time()
    [found] = sampling.answer(model, model.encode([prompt], chat=chat), options, watch)
    text = found.text or ""
    return {
        "text": text,
        "answer": extract_answer(text) if chat else None,
        "network_evaluations": found.steps,
        "circuit_evaluations": found.circuit_steps,
        "seconds": found.seconds,
        "cpu_seconds": time.process_time() - cpu,
    }


def compare(model: Model, seed: int, *, own: bool = True) -> dict[str, Any]:
    """Every task with its ``runs``, by tokens in a step and column: alone, with the null and with the model's circuit.

    ``own``: whether that circuit is the one that came with the model.
    """
    assert model.tokenizer is not None
    null = HMM.neutral(num_states=1, vocab_size=model.backbone.vocab_size).to(device=model.backbone.device)
    models = {"factorized": replace(model, circuit=None), "null": replace(model, circuit=null), "circuit": model}
    todo = tasks(model.tokenizer, seed)
    calls = len(models) * sum(-(-task["options"]["gen_length"] // k) for task in todo for k in task["at_once"])
    warm_up(models.values())
    with console.bar("the bundled model writes", calls) as bar:
        done = [attempt(task, models, lambda step: bar.advance()) for task in todo]
    return {"columns": LABELS if own else {**LABELS, "circuit": FOREIGN}, "tasks": done}


def attempt(task: dict[str, Any], models: Mapping[str, Model], watch: Callable[[Step], None]) -> dict[str, Any]:
    """The task with its runs."""
    chat, runs = task["right"] is not None, {}
    for at_once in task["at_once"]:
        options = sampling.options_of({**task["options"], "tokens_per_step": at_once})
        runs[at_once] = {
            name: answer(model, task["prompt"], options, chat=chat, watch=watch) for name, model in models.items()
        }
    return {**task, "runs": runs}


def sections(results: dict[str, Any]) -> list[Section]:
    """A problem in full, how many problems were right, and the passage in full."""
    names = results["columns"]
    *solved, prose = results["tasks"]
    title = "A word problem, with 1, 4 and 8 tokens in a step of the network"
    manner = "Continued; drawn at temperature {temperature}, in {remasking} order.".format_map(prose["options"])
    return [
        _texts(title, solved[0], names, before=[solved[0]["prompt"]]),
        score(solved, names),
        _texts(f"{prose['prompt']} ...", prose, names, before=[manner], after=[control(results["tasks"])]),
    ]


def _texts(title: str, task: dict[str, Any], names: Mapping[str, str], **paragraphs: Sequence[str]) -> Section:
    rows = [[Cell(str(k)), *(written(runs[name], task["right"]) for name in names)] for k, runs in task["runs"].items()]
    return Section(title, header=["a step", *names.values()], rows=rows, prose=True, **paragraphs)


def written(run: dict[str, Any], right: int | None) -> Cell:
    """A text, whether it is right, and what it cost."""
    cost = Cell(f"{run['network_evaluations']} calls, {run['seconds']:.1f} s", "faint")
    text = sampling.printable(run["text"]).strip()
    if right is None:
        return Cell(text, below=[cost])
    shown = "no answer" if run["answer"] is None else run["answer"]
    verdict = ("right: {1}", "good") if run["answer"] == right else ("wrong: {0}, not {1}", "bad")
    return Cell(text, below=[Cell(verdict[0].format(shown, right), verdict[1]), cost])


def score(solved: Sequence[dict[str, Any]], names: Mapping[str, str]) -> Section:
    """How many problems were right at each speed."""
    rows = []
    for at_once in solved[0]["runs"]:
        tried = [(task["right"], task["runs"][at_once]) for task in solved if at_once in task["runs"]]
        counts = [sum(runs[name]["answer"] == right for right, runs in tried) for name in names]
        tones = ["good" if count == len(tried) else "plain" if count else "bad" for count in counts]
        cells = [Cell(f"{count} of {len(tried)}", tone) for count, tone in zip(counts, tones, strict=True)]
        rows.append([Cell(str(at_once)), *cells])
    return Section(
        title="Problems with the right answer",
        before=[
            f"{len(solved)} short problems of the test split: an illustration. With so few, any circuit may gain or "
            "lose by chance, even one that was never trained; docs/results has 300 of all lengths, with tests.",
        ],
        header=["a step", *names.values()],
        rows=rows,
    )


def control(tasks: Sequence[dict[str, Any]]) -> str:
    """One line on whether the null circuit changed a text. It must not: every position has its own random numbers."""
    runs = [runs for task in tasks for runs in task["runs"].values()]
    changed = sum(each["factorized"]["text"] != each["null"]["text"] for each in runs)
    if changed:
        return f"The control fails: the null circuit changed {changed} of {len(runs)} texts."
    return f"The control holds: the null circuit gave the network's own text in all {len(runs)} runs."
