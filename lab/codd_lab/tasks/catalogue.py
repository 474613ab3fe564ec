"""The tasks: those of the lm-eval harness with the paper's protocol, and our own.

A task's data comes from the hub, or from files in a folder (``data``) where there is no network. Prompts, filters and
metrics of the published tasks are the harness's own; only MBPP's are written here, since the harness would fetch code
from the hub and run what a model wrote unconfined.
"""

import difflib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from codd import validation
from codd.data.text_files import json_lines, open_text
from codd.decoding import Model
from codd.decoding.prompts import can_chat
from codd.errors import FormatError, InvalidInput, MissingDependency
from codd_lab.problems import problems
from codd_lab.puzzles import KINDS, puzzles
from codd_lab.tasks import passages
from codd_lab.tasks.answers import extract_code
from codd_lab.tasks.configs import EvalConfig
from codd_lab.tasks.sandbox import Limits, run_program
from codd_lab.tasks.templates import PromptTemplate

ASSISTANT = "You are a helpful assistant."
REASON = f"{ASSISTANT} Justify your final answer by first explaining your step-by-step derivation or reasoning."
CONCLUDE = f"{REASON} Conclude by presenting the final answer in the format: "
PAPER_LENGTH = 512
"""Tokens of an answer, for every task of the paper."""
OWN_LENGTH = 128
"""Tokens of an answer for our own tasks, and for models too small for the paper's length."""
PROBLEM_SEED = 200
"""Seed of the word problems: no training has used it. (Our first looks at samplers did: docs/results/answers.md.)"""
VALIDATION_SEED = 900
HARNESS_SEEDS = {
    "random_seed": 0,
    "numpy_random_seed": 1234,
    "torch_random_seed": 1234,
    "fewshot_random_seed": 1234,
    "document_seed": 0,
}
"""The harness's own; ``document_seed`` is ours, of what it draws while it prepares documents (GPQA's choices)."""
HELD_BACK = 1000
"""Problems at the end of GSM8K's training split that serve to choose settings."""

Documents = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A task and the protocol that it is run by."""

    name: str
    """The harness's, for published ones."""
    metric: str | None
    """The metric that decides whether an answer is right, "metric,filter"; None where a judge scores the text."""
    documents: Callable[[Path | None, str, int | None], dict[str, Documents]]
    """Rows by the split names of the harness's configuration, given a data folder, a split and a count."""
    config: Mapping[str, Any] | None = None
    """The harness's configuration; None for its own task of that name."""
    system: str | None = None
    gen_length: int = PAPER_LENGTH
    chat: bool = True
    splits: tuple[str, ...] = ("test",)
    harness: bool = True
    """Whether lm-eval makes the prompts and scores the answers; False for our own (`tasks.questions`)."""
    accepts: Callable[[Mapping[str, Any], str], bool] | None = None
    """Whether a text is a right answer to a row, where several are; None where the rule of the task reads it."""
    question: str | None = None
    """In the harness's language, what a prompt template has for {question}; None for the harness's whole prompt."""


class Question(NamedTuple):
    """A line of a file of questions."""

    question: str
    answer: str


class _Exercise(NamedTuple):
    problem: str
    solution: str


class _Program(NamedTuple):
    task_id: validation.Whole
    text: str
    test_list: validation.List[str]


def _lines(root: Path, name: str, kind: Any) -> Documents:
    """The rows of a JSON lines file, each with the fields of ``kind`` only; FormatError if there is no such file."""
    path = root / name
    if not path.is_file():
        raise FormatError(f"{path}: there is no such file; --data must be the folder that holds {name}.")
    return [
        validation.build(kind, {key: line[key] for key in kind._fields if key in line}, where)._asdict()
        for where, line in json_lines(path)
    ]


def _hub(path: str, name: str | None, split: str) -> Documents:
    import datasets

    try:
        return [dict(row) for row in datasets.load_dataset(path, name, split=split)]
    except Exception as error:  # the hub's, the network's and the library's own errors have no common root
        raise FormatError(
            f"{path}: the hub did not give this data set ({type(error).__name__}). Check the connection, or give a "
            "folder that holds it with --data."
        ) from error


def _gsm8k(root: Path | None, split: str, count: int | None) -> dict[str, Documents]:
    part = "test" if split == "test" else "train"
    rows = _hub("openai/gsm8k", "main", part) if root is None else _lines(root, f"gsm8k/{part}.jsonl", Question)
    rows = rows if split == "test" else rows[-HELD_BACK:]
    return {"test": rows, "train": rows[:1]}


def _math500(root: Path | None, split: str, count: int | None) -> dict[str, Documents]:
    if root is not None:
        return {"test": _lines(root, "math/math500.jsonl", _Exercise)}
    rows = _hub("HuggingFaceH4/MATH-500", None, "test")
    return {"test": [{key: row[key] for key in _Exercise._fields} for row in rows]}


def _gpqa(root: Path | None, split: str, count: int | None) -> dict[str, Documents]:
    if root is None:
        return {"train": _hub("Idavidrein/gpqa", "gpqa_main", "train")}
    import csv

    path = root / "gpqa" / "gpqa_main.csv"
    if not path.is_file():
        raise FormatError(
            f"{path}: there is no such file. GPQA's authors ask that it not be posted: fetch it with your own access "
            "and put it there, or leave --data out to load it from the hub."
        )
    try:
        with open_text(path, newline="") as file:
            return {"train": list(csv.DictReader(file))}
    except csv.Error as error:
        raise FormatError(f"{path}: is not CSV ({error}). Fetch it again.") from error


def _mbpp(root: Path | None, split: str, count: int | None) -> dict[str, Documents]:
    if root is None:
        return {"test": _hub("google-research-datasets/mbpp", "full", split)}
    first, last = (11, 510) if split == "test" else (511, 600)
    return {"test": [row for row in _lines(root, "mbpp/mbpp.jsonl", _Program) if first <= row["task_id"] <= last]}


def _word_problems(root: Path | None, split: str, count: int | None) -> dict[str, Documents]:
    seed = PROBLEM_SEED if split == "test" else VALIDATION_SEED
    drawn = problems(count or 500, split="test", seed=seed)
    return {"test": [{"question": each.question, "answer": str(each.answer)} for each in drawn]}


def _puzzles(root: Path | None, split: str, count: int | None, *, kind: str) -> dict[str, Documents]:
    drawn = puzzles(kind, count or 500, PROBLEM_SEED if split == "test" else VALIDATION_SEED)
    return {"test": [{"question": each.question, "answer": each.answer, "puzzle": each} for each in drawn]}


def _solved(document: Mapping[str, Any], text: str) -> bool:
    return bool(document["puzzle"].accepts(text))


def _texts(root: Path | None, split: str, count: int | None, *, corpus: str) -> dict[str, Documents]:
    if root is None:
        raise InvalidInput(f"passages of {corpus} need its texts: give the folder that holds them with --data.")
    return {"test": passages.as_documents(passages.passages(corpus, root, count or 200, split=split))}


def _programs(responses: Iterable[Sequence[str]], documents: Iterable[Any]) -> list[list[str]]:
    return [[extract_code(text) for text in given] for given in responses]


def passed(references: Sequence[str], predictions: Sequence[Any], limits: Limits = Limits()) -> float:  # noqa: B008 frozen
    """1.0 if a program meets its asserts, else 0.0; it runs in the sandbox."""
    program = predictions[0] if isinstance(predictions[0], str) else predictions[0][0]
    return float(run_program(f"{program}\n{references[0]}", limits).passed)


_PROGRAM = "{{text}}\nYour code should pass these tests:\n{{test_list[0]}}\n{{test_list[1]}}\n{{test_list[2]}}"
_CHOICES = "{{Question}}\nChoices:\n(A) {{choice1}}\n(B) {{choice2}}\n(C) {{choice3}}\n(D) {{choice4}}"
_MBPP = {
    "output_type": "generate_until",
    "num_fewshot": 0,
    "test_split": "test",
    "doc_to_text": f"You are an expert Python programmer, and here is your task:\n{_PROGRAM}",
    "doc_to_target": "{{test_list[0]}}\n{{test_list[1]}}\n{{test_list[2]}}",
    "gen_prefix": "\n```python\n",
    "target_delimiter": "",
    "filter_list": [{"name": "extract_code", "filter": [{"function": "custom", "filter_fn": _programs}]}],
    "generation_kwargs": {"until": [], "do_sample": False},
}
BOTH = ("test", "validation")
_EXTRACTED = "exact_match,flexible-extract"
_own = partial(Task, gen_length=OWN_LENGTH, splits=BOTH, harness=False)
OWN_TEXT = "text:"
"""What the name of a task begins with whose passages are of a file in the data folder: text:FILE."""

TASKS = {
    task.name: task
    for task in (
        Task("gsm8k", _EXTRACTED, _gsm8k, system=ASSISTANT, splits=BOTH, question="{{question}}"),
        Task(
            "minerva_math500",
            "math_verify,none",
            _math500,
            system=f"{CONCLUDE}boxed{{ANSWER}}.",
            question="{{problem}}",
        ),
        Task("gpqa_main_generative_n_shot", _EXTRACTED, _gpqa, system=f"{CONCLUDE}(LETTER).", question=_CHOICES),
        Task("mbpp_instruct", "passed,extract_code", _mbpp, _MBPP, ASSISTANT, splits=BOTH, question=_PROGRAM),
        _own("word_problems", "exact_match,last-number", _word_problems),
        *(_own(kind, "solved,none", partial(_puzzles, kind=kind), accepts=_solved) for kind in KINDS),
        _own("books_text", None, partial(_texts, corpus="books"), chat=False),
        _own("wikitext_text", None, partial(_texts, corpus="wikitext"), chat=False),
    )
}


def task_of(name: str) -> Task | None:
    """One of `TASKS`, or passages of a user's own file (text:FILE); None for a harness's own task and a task file."""
    if name.startswith(OWN_TEXT):
        return _own(name, None, partial(_texts, corpus=name.removeprefix(OWN_TEXT)), chat=False, splits=("test",))
    return TASKS.get(name)


def system_of(config: EvalConfig) -> str | None:
    """The system message of a configuration, its template's or else its task's; None if there is none."""
    if config.template is not None and config.template.system is not None:
        return config.template.system
    task = task_of(config.task)
    return None if task is None else task.system


def converses(model: Model, name: str) -> bool:
    """Whether the prompts of a task go through the model's chat template, if it has one."""
    task = task_of(name)
    return model.tokenizer is not None and can_chat(model.tokenizer) and (task is None or task.chat)


def documents_of(name: str, data: Path | None, split: str, count: int | None) -> dict[str, Documents]:
    """The rows of one of `TASKS`; InvalidInput for a split that it lacks, FormatError for files that are not right."""
    task = task_of(name)
    assert task is not None, "only tasks of ours have rows here"
    if split not in task.splits:
        raise InvalidInput(f"the task {name} has no split {split!r}; it has {', '.join(task.splits)}.")
    return task.documents(data, split, count)


def harness_task(config: EvalConfig, data: Path | None, limits: Limits) -> Any:
    """A task object of the harness: one of its own tasks on our data, or one of ours. InvalidInput if unknown."""
    task = _untemplated(config.task, data, config.split, config.problems, limits)
    if config.template is not None:
        known = TASKS.get(config.task)
        _use_template(task, config.template, None if known is None else known.question)
    return task


def _use_template(task: Any, template: PromptTemplate, question: str | None) -> None:
    """Let a task of the harness ask by a template; InvalidInput where it asks no questions in text."""
    plain = task.doc_to_text

    def fill(doc: Any, *_: Any) -> str:
        asked = plain(doc) if question is None else plain(doc, question)
        if not isinstance(asked, str):
            raise InvalidInput(f"the task {task.config.task} asks no question in text: it takes no --templates.")
        return template.fill(asked)

    task.doc_to_text = fill


def _untemplated(name: str, data: Path | None, split: str, count: int | None, limits: Limits) -> Any:
    task = TASKS.get(name)
    if task is None:
        return _frozen(_published(name))

    def dataset(**_: Any) -> Any:
        return _as_dataset(documents_of(name, data, split, count))

    if task.config is None:
        return _frozen(_published(name, custom_dataset=dataset))
    config = {**task.config, "task": name, "custom_dataset": dataset}
    if name == "mbpp_instruct":
        measure = partial(passed, limits=limits)
        measure.__name__ = "passed"  # type: ignore[attr-defined] # the harness asks a metric for its name
        config["metric_list"] = [{"metric": measure, "aggregation": "mean", "higher_is_better": True}]
    return _modules().api.task.ConfigurableTask(config=config)


def _published(name: str, **changes: Any) -> Any:
    """One of the harness's own tasks, changed: its configuration language does that by a group of one."""
    manager = _manager(_FOLDERS.get(name))
    if name not in manager.all_subtasks:
        manager = _manager()
    if name not in manager.all_subtasks:
        near = difflib.get_close_matches(name, sorted({*TASKS, *manager.all_subtasks}), n=3)
        raise InvalidInput(
            f"there is no task {name!r}; ours are {', '.join(TASKS)}, and all single tasks of lm-eval can be named"
            + (f" (did you mean {', '.join(near)}?)." if near else ".")
        )
    try:
        return manager.load([{"group": "codd", "task": [{"task": name, **changes}]}])["tasks"][name]
    except ImportError as error:
        raise MissingDependency(f"the task {name} needs another package: pip install codd-lab ({error})") from error


def _frozen(task: Any) -> Any:
    """The task with documents that are the same at every access, in every process and on every machine.

    The harness calls a task's ``process_docs`` whenever it looks at the documents: for the prompts, and again for the
    scores. GPQA's shuffles the choices, so that the right letter would not be the prompt's. Here it is called once,
    with random numbers of a fixed seed and without the data set library's cache on the disk.
    """
    process = task.config.process_docs
    if process is None:
        return task
    import datasets
    import numpy

    processed: dict[str, Any] = {}

    def once(rows: Any) -> Any:
        key = str(rows._fingerprint)
        if key not in processed:
            states, cached = (random.getstate(), numpy.random.get_state()), datasets.is_caching_enabled()
            random.seed(HARNESS_SEEDS["document_seed"])
            numpy.random.seed(HARNESS_SEEDS["document_seed"])
            datasets.disable_caching()
            try:
                processed[key] = process(rows)
            finally:
                random.setstate(states[0])
                numpy.random.set_state(states[1])
                if cached:
                    datasets.enable_caching()
        return processed[key]

    task.config.process_docs = once
    return task


_FOLDERS = {"gsm8k": "gsm8k", "minerva_math500": "minerva_math", "gpqa_main_generative_n_shot": "gpqa"}
"""Where the harness has tasks of ours."""


@cache
def _manager(folder: str | None = None) -> Any:
    """The harness's tasks, or those of one of its folders: to find all of them takes it seconds."""
    tasks = _modules().tasks
    if folder is None:
        return tasks.TaskManager()
    return tasks.TaskManager(include_path=Path(tasks.__file__).parent / folder, include_defaults=False)


def _as_dataset(splits: Mapping[str, Documents]) -> Any:
    import datasets

    for name, rows in splits.items():
        if not rows:
            raise FormatError(f"the split {name!r} of this data is empty.")
    return datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})


def _modules() -> Any:
    try:
        import lm_eval.api.task
        import lm_eval.tasks
    except ImportError as error:
        raise MissingDependency(f"evaluation needs the lm-eval harness: pip install codd-lab ({error})") from error
    return lm_eval
