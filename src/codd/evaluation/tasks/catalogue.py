"""What is asked: tasks of the lm-eval harness with the paper's protocol, and our own beside them.

A task's data comes from the hub, or from files in a folder (``data``) where there is no network. Prompts, filters and
metrics of the published tasks are the harness's own; only MBPP's are written here, since the harness would fetch code
from the hub and run what a model wrote unconfined.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from codd.errors import FormatError, InvalidInput, MissingDependency
from codd.evaluation.tasks import passages
from codd.evaluation.tasks.answers import extract_code
from codd.evaluation.tasks.sandbox import Limits, run_program
from codd.training import typed
from codd.training.problems import extract_answer, problems
from codd.training.text_files import json_lines, open_text

ASSISTANT = "You are a helpful assistant."
REASON = f"{ASSISTANT} Justify your final answer by first explaining your step-by-step derivation or reasoning."
CONCLUDE = f"{REASON} Conclude by presenting the final answer in the format: "
PAPER_LENGTH = 512
"""Tokens of an answer, for every task of the paper."""
OWN_LENGTH = 128
"""For our own tasks, and for models too small for the paper's."""
PROBLEM_SEED = 200
"""Of the word problems: no training has used it. (Our first looks at samplers did: docs/results.md.)"""
VALIDATION_SEED = 900
HELD_BACK = 1000
"""Problems at the end of GSM8K's training split that serve to choose settings."""

Documents = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A task and the protocol that it is run by."""

    name: str
    """The harness's, for published ones."""
    metric: str | None
    """What makes an answer count as right: "metric,filter"; None where a judge scores the text."""
    documents: Callable[[Path | None, str, int | None], dict[str, Documents]]
    """The splits under the names that the harness's configuration asks for, given a folder, a split and a count."""
    config: Mapping[str, Any] | None = None
    """The harness's configuration; None: its own task of that name."""
    system: str | None = None
    gen_length: int = PAPER_LENGTH
    chat: bool = True
    splits: tuple[str, ...] = ("test",)


class _Question(NamedTuple):
    question: str
    answer: str


class _Exercise(NamedTuple):
    problem: str
    solution: str


class _Program(NamedTuple):
    task_id: int
    text: str
    test_list: tuple[str, ...]


def _lines(root: Path, name: str, kind: Any) -> Documents:
    """Of each line of a file the fields that the task looks at, which ``kind`` has."""
    path = root / name
    if not path.is_file():
        raise FormatError(f"{path}: there is no such file; --data must be the folder that holds {name}.")
    return [
        typed.build(kind, {key: line[key] for key in kind._fields if key in line}, where)._asdict()
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
    found = _hub("openai/gsm8k", "main", part) if root is None else _lines(root, f"gsm8k/{part}.jsonl", _Question)
    found = found if split == "test" else found[-HELD_BACK:]
    return {"test": found, "train": found[:1]}


def _math500(root: Path | None, split: str, count: int | None) -> dict[str, Documents]:
    if root is not None:
        return {"test": _lines(root, "math/math500.jsonl", _Exercise)}
    found = _hub("HuggingFaceH4/MATH-500", None, "test")
    return {"test": [{key: row[key] for key in _Exercise._fields} for row in found]}


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
    found = problems(count or 500, split="test", seed=seed)
    return {"test": [{"question": each.question, "answer": str(each.answer)} for each in found]}


def _texts(root: Path | None, split: str, count: int | None, *, corpus: str) -> dict[str, Documents]:
    if root is None:
        raise InvalidInput(f"the task {corpus}_text needs its texts: give the folder that holds them with --data.")
    return {"test": passages.as_documents(passages.passages(corpus, root, count or 200, split=split))}


def _numbers(responses: Iterable[Sequence[str]], documents: Iterable[Any]) -> list[list[str]]:
    """Our problems end with #### and the number."""
    return [[str(extract_answer(text)) for text in given] for given in responses]


def _programs(responses: Iterable[Sequence[str]], documents: Iterable[Any]) -> list[list[str]]:
    return [[extract_code(text) for text in given] for given in responses]


def passed(references: Sequence[str], predictions: Sequence[Any], limits: Limits = Limits()) -> float:  # noqa: B008 frozen
    """Whether a program meets its asserts, run in a process of its own that can do no harm."""
    program = predictions[0] if isinstance(predictions[0], str) else predictions[0][0]
    return float(run_program(f"{program}\n{references[0]}", limits).passed)


_GENERATED = {"output_type": "generate_until", "num_fewshot": 0, "test_split": "test"}
_MEAN = {"aggregation": "mean", "higher_is_better": True}
_WORD_PROBLEMS = {
    **_GENERATED,
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "exact_match", **_MEAN}],
    "filter_list": [
        {"name": "last-number", "filter": [{"function": "custom", "filter_fn": _numbers}, {"function": "take_first"}]}
    ],
    "generation_kwargs": {"until": [], "do_sample": False},
}
_MBPP = {
    **_GENERATED,
    "doc_to_text": "You are an expert Python programmer, and here is your task:\n{{text}}\nYour code should pass these "
    "tests:\n{{test_list[0]}}\n{{test_list[1]}}\n{{test_list[2]}}",
    "doc_to_target": "{{test_list[0]}}\n{{test_list[1]}}\n{{test_list[2]}}",
    "gen_prefix": "\n```python\n",
    "target_delimiter": "",
    "filter_list": [{"name": "extract_code", "filter": [{"function": "custom", "filter_fn": _programs}]}],
    "generation_kwargs": {"until": [], "do_sample": False},
}
_TEXT = {
    **_GENERATED,
    "doc_to_text": "{{prefix}}",
    "doc_to_target": "{{continuation}}",
    "metric_list": [{"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}],
    "generation_kwargs": {"until": [], "do_sample": False},
}
BOTH = ("test", "validation")

TASKS = {
    task.name: task
    for task in (
        Task("gsm8k", "exact_match,flexible-extract", _gsm8k, system=ASSISTANT, splits=BOTH),
        Task("minerva_math500", "math_verify,none", _math500, system=f"{CONCLUDE}boxed{{ANSWER}}."),
        Task("gpqa_main_generative_n_shot", "exact_match,flexible-extract", _gpqa, system=f"{CONCLUDE}(LETTER)."),
        Task("mbpp_instruct", "passed,extract_code", _mbpp, _MBPP, ASSISTANT, splits=BOTH),
        Task("word_problems", "exact_match,last-number", _word_problems, _WORD_PROBLEMS, None, OWN_LENGTH, splits=BOTH),
        Task("books_text", None, partial(_texts, corpus="books"), _TEXT, None, OWN_LENGTH, False, BOTH),
        Task("wikitext_text", None, partial(_texts, corpus="wikitext"), _TEXT, None, OWN_LENGTH, False, BOTH),
    )
}


def task_of(name: str) -> Task | None:
    """One of `TASKS`; None for a task that only the harness knows."""
    return TASKS.get(name)


def harness_task(name: str, data: Path | None, split: str, count: int | None, limits: Limits) -> Any:
    """What the harness is to evaluate: one of its own tasks, with the data where we want it, or one of ours."""
    task = TASKS.get(name)
    if task is None:
        return _published(name)
    if split not in task.splits:
        raise InvalidInput(f"the task {name} has no split {split!r}; it has {', '.join(task.splits)}.")

    def dataset(**_: Any) -> Any:
        return _as_dataset(task.documents(data, split, count))

    if task.config is None:
        return _published(name, custom_dataset=dataset)
    config = {**task.config, "task": name, "custom_dataset": dataset}
    if name == "mbpp_instruct":
        measure = partial(passed, limits=limits)
        measure.__name__ = "passed"  # type: ignore[attr-defined] # the harness asks a metric for its name
        config["metric_list"] = [{"metric": measure, **_MEAN}]
    return _modules().api.task.ConfigurableTask(config=config)


def _published(name: str, **changes: Any) -> Any:
    """One of the harness's own; a group of one is how its configuration language changes something of a task."""
    manager = _manager()
    if name not in manager.all_subtasks:
        near = ", ".join(difflib.get_close_matches(name, [*TASKS, *manager.all_subtasks], n=3))
        raise InvalidInput(
            f"there is no task {name!r}; ours are {', '.join(TASKS)}, and all single tasks of lm-eval can be named"
            + (f" ({near}?)." if near else ".")
        )
    try:
        return manager.load([{"group": "codd", "task": [{"task": name, **changes}]}])["tasks"][name]
    except ImportError as error:
        raise MissingDependency(f"the task {name} needs another package: pip install codd[eval] ({error})") from error


@cache
def _manager() -> Any:
    return _modules().tasks.TaskManager()


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
        raise MissingDependency(f"evaluation needs the lm-eval harness: pip install codd[eval] ({error})") from error
    return lm_eval
