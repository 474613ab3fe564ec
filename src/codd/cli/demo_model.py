"""The bundled model in ``codd demo --more``: more and more tokens in a step, alone and multiplied with circuits."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from codd.backbones import Tokenizer
from codd.circuits import HMM
from codd.cli import figures, sampling
from codd.cli.tables import Cell, Section
from codd.decoding import Model, Options, Step
from codd.decoding.options import PACES
from codd.training.problems import Problem, extract_answer, generate

LABELS = {"factorized": "network alone", "null": "x null circuit", "circuit": "x trained circuit"}
FOREIGN = "x given circuit"
"""What a circuit is called that did not come with the model: nobody knows whether it was trained."""
SAMPLER: dict[str, Any] = {"sampler": "any_order"}
"""Tokens of a step one by one, each given the others; docs/results.md compares the samplers."""
AT_ONCE = (1, 4, 8)
"""Tokens in a step."""
NUM_PROBLEMS = 10
PROBLEM_LENGTH, QUESTION_LENGTH = 40, 60
"""Short problems only: the demo is to take a minute."""
PASSAGE = "It was a cold night in November. The two men walked slowly along the river without speaking, until at last"
PASSAGE_LENGTH = 32
PASSAGE_OPTIONS: dict[str, Any] = {"temperature": 0.7, "remasking": "random"}
"""The most probable prose is repetitive, and repetition hides what goes wrong."""


class Task(NamedTuple):
    """Something to write, and how."""

    kind: str
    """'problem' or 'prose'."""
    prompt: str
    right: int | None
    """The answer of a problem."""
    at_once: tuple[int, ...]
    options: dict[str, Any]


def tasks(tokenizer: Tokenizer, seed: int) -> list[Task]:
    """Word problems that the model has not seen, the first of them at every speed, and a passage to go on with."""
    found = []
    for number, problem in enumerate(short_problems(tokenizer, seed)):
        speeds = AT_ONCE if number == 0 else AT_ONCE[1:]
        options: dict[str, Any] = {"gen_length": PROBLEM_LENGTH, "seed": seed, **SAMPLER}
        found.append(Task("problem", problem.question, problem.answer, speeds, options))
    options = {"gen_length": PASSAGE_LENGTH, "seed": seed, **SAMPLER, **PASSAGE_OPTIONS}
    return [*found, Task("prose", PASSAGE, None, AT_ONCE, options)]


def short_problems(tokenizer: Tokenizer, seed: int) -> list[Problem]:
    """The first of the test stream that are short enough; nothing else decides."""

    def fits(problem: Problem) -> bool:
        solution, question = tokenizer.encode(problem.solution), tokenizer.encode_chat(problem.question)
        return len(solution) < PROBLEM_LENGTH and len(question) <= QUESTION_LENGTH

    stream = (generate(index, split="test", seed=seed) for index in itertools.count())
    return list(itertools.islice(filter(fits, stream), NUM_PROBLEMS))


def columns(model: Model) -> dict[str, Model]:
    """The same network alone, with the circuit that must change nothing, and with its own."""
    neutral = HMM.neutral(num_states=1, vocab_size=model.backbone.vocab_size).to(device=model.backbone.device)
    return {"factorized": replace(model, circuit=None), "null": replace(model, circuit=neutral), "circuit": model}


def compare(model: Model, seed: int, *, own: bool = True) -> dict[str, Any]:
    """Every task at every speed in every column; ``own``: whether the circuit is the one that belongs to the model."""
    assert model.tokenizer is not None
    contenders, todo = columns(model), tasks(model.tokenizer, seed)
    calls = len(contenders) * sum(-(-task.options["gen_length"] // k) for task in todo for k in task.at_once)
    for contender in contenders.values():  # what is compiled or cached at the first call is not to be timed
        sampling.answer(contender, contender.encode([PASSAGE], chat=False), Options(gen_length=8, steps=1))
    with sampling.bar("the bundled model writes", calls) as advance:
        done = [_attempt(task, contenders, lambda step: advance(1)) for task in todo]
    labels = {name: LABELS[name] if own or name != "circuit" else FOREIGN for name in contenders}
    return {"columns": labels, "tasks": done}


def _attempt(task: Task, contenders: dict[str, Model], watch: Callable[[Step], None]) -> dict[str, Any]:
    runs = []
    for at_once in task.at_once:
        options = sampling.options_of({**task.options, "tokens_per_step": at_once})
        for name, contender in contenders.items():
            ids = contender.encode([task.prompt], chat=task.kind == "problem")
            [found] = sampling.answer(contender, ids, options, watch)
            text = found.text or ""
            runs.append(
                {
                    "column": name,
                    "tokens_per_step": at_once,
                    "text": text,
                    "answer": extract_answer(text) if task.right is not None else None,
                    "network_evaluations": found.steps,
                    "circuit_evaluations": found.circuit_steps,
                    "seconds": found.seconds,
                }
            )
    settings = sampling.options_of(task.options).as_json()
    shared = {name: value for name, value in settings.items() if name not in PACES}
    return {"kind": task.kind, "prompt": task.prompt, "right": task.right, "settings": shared, "runs": runs}


def sections(results: dict[str, Any]) -> list[Section]:
    """What people are shown: a problem and a passage in full, and how many problems were right."""
    solved = [task for task in results["tasks"] if task["kind"] == "problem"]
    prose = [task for task in results["tasks"] if task["kind"] == "prose"]
    first = _texts(
        "A word problem, with 1, 4 and 8 tokens in a step of the network",
        solved[0],
        results["columns"],
        before=[solved[0]["prompt"]],
    )
    held = control(results["tasks"])
    rest = [_texts(f"{task['prompt']} ...", task, results["columns"], [_manner(task)], held) for task in prose]
    return [replace(first, figure=_costs(solved[0], results["columns"])), _score(solved, results["columns"]), *rest]


def _texts(
    title: str, task: dict[str, Any], names: Mapping[str, str], before: Sequence[str], after: Sequence[str] = ()
) -> Section:
    rows = []
    for at_once in dict.fromkeys(run["tokens_per_step"] for run in task["runs"]):
        cells = [written(_find(task, at_once, name), task["right"]) for name in names]
        rows.append([Cell(str(at_once)), *cells])
    header = ["a step", *names.values()]
    return Section(title, before, header, rows, after, prose=True)


def written(run: dict[str, Any], right: int | None) -> Cell:
    """A text, whether it is right, and what it cost."""
    cost = Cell(f"{run['network_evaluations']} calls, {run['seconds']:.1f} s", "faint")
    text = sampling.printable(run["text"]).strip()
    if right is None:
        return Cell(text, below=[cost])
    verdict = Cell(f"right: {right}", "good")
    if run["answer"] != right:
        shown = "no answer" if run["answer"] is None else run["answer"]
        verdict = Cell(f"wrong: {shown}, not {right}", "bad")
    return Cell(text, below=[verdict, cost])


def _score(solved: Sequence[dict[str, Any]], names: Mapping[str, str]) -> Section:
    """How many were right; few, so that nobody takes it for a result."""
    rows = []
    for at_once in dict.fromkeys(run["tokens_per_step"] for task in solved for run in task["runs"]):
        tried = [task for task in solved if any(run["tokens_per_step"] == at_once for run in task["runs"])]
        cells = []
        for name in names:
            right = sum(_find(task, at_once, name)["answer"] == task["right"] for task in tried)
            tone = "good" if right == len(tried) else "plain" if right else "bad"
            cells.append(Cell(f"{right} of {len(tried)}", tone))
        rows.append([Cell(str(at_once)), *cells])
    return Section(
        title="Problems with the right answer",
        before=[
            f"{len(solved)} short problems of the test stream: an illustration. With so few, any circuit may gain or "
            "lose by chance, even one that was never trained; docs/results.md has 300 of all lengths, with tests.",
        ],
        header=["a step", *names.values()],
        rows=rows,
    )


def control(tasks: Sequence[dict[str, Any]]) -> list[str]:
    """One line on whether the null circuit changed anything. It must not: every position has its own random numbers."""
    pairs = [
        (_find(task, run["tokens_per_step"], "factorized")["text"], run["text"])
        for task in tasks
        for run in task["runs"]
        if run["column"] == "null"
    ]
    same = sum(alone == null for alone, null in pairs)
    if same == len(pairs):
        return [f"The control holds: the null circuit gave the network's own text in all {same} runs."]
    return [f"The control fails: the null circuit changed {len(pairs) - same} of {len(pairs)} texts."]


def _manner(task: dict[str, Any]) -> str:
    settings = task["settings"]
    return f"Continued; drawn at temperature {settings['temperature']}, in {settings['remasking']} order."


def _costs(task: dict[str, Any], names: Mapping[str, str]) -> str:
    speeds = list(dict.fromkeys(run["tokens_per_step"] for run in task["runs"]))
    groups = [f"{k} a step, {_find(task, k, 'factorized')['network_evaluations']} network calls" for k in speeds]
    series = {label: [_find(task, k, name)["seconds"] for k in speeds] for name, label in names.items()}
    return figures.bars("Seconds for this answer", groups, series, "{:.2f} s".format)


def _find(task: dict[str, Any], at_once: int, column: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        run for run in task["runs"] if run["tokens_per_step"] == at_once and run["column"] == column
    )
    return found
