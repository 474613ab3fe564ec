"""Tasks that need no harness: our own, and files of a user with a question and its answer on each line."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codd import validation
from codd.data.text_files import json_lines
from codd.decoding import Model
from codd.distributed import DistributedContext
from codd.errors import FormatError, InvalidInput
from codd.evaluation.answering import Answerer, Line, Request
from codd_lab.runs import Run, Sample, Scored, write_lines
from codd_lab.tasks.answers import MARKED_NUMBER, AnswerRule, answer_rule, default_rule
from codd_lab.tasks.catalogue import TASKS, Documents, Question, converses, documents_of, system_of, task_of
from codd_lab.tasks.configs import EvalConfig
from codd_lab.tasks.templates import PromptTemplate, chosen_templates

FOLDER = "task_files"
"""Copies of task files in a run folder: a run can be resumed and scored without the original."""


def is_own(config: EvalConfig) -> bool:
    """Whether a configuration needs no harness."""
    task = task_of(config.task)
    return config.questions is not None or (task is not None and not task.harness)


def add_task_file(path: Path, rule: str | None, run: Run) -> dict[str, str]:
    """Check a task file and copy it into a run folder: its ``questions`` and ``answer_rule`` for an `EvalConfig`.

    Without a ``rule`` the one that fits all answers is taken. FormatError for lines without question and answer, and
    for an answer that the rule cannot read.
    """
    if path.stem in TASKS:
        raise InvalidInput(f"{path}: {path.stem} is the name of another task; rename the file.")
    documents = [_line(row, where)._asdict() for where, row in json_lines(path)]
    if not documents:
        raise FormatError(f'{path}: is empty; expected lines like {{"question": "1 + 1?", "answer": "2"}}.')
    chosen = answer_rule(rule or default_rule(document["answer"] for document in documents))
    for number, document in enumerate(documents, start=1):
        if not chosen.name.startswith("regex:") and not chosen.read(document["answer"]):
            raise FormatError(
                f"{path}: the rule {chosen.name} reads nothing of {document['answer']!r:.60}, answer {number}. Give "
                "another --answer-rule, or correct it."
            )
    digest = hashlib.sha256("".join(json.dumps(each) for each in documents).encode()).hexdigest()[:16]
    copy = _copy(run, path.stem, digest)
    if not copy.exists():
        write_lines(copy, documents)
    return {"questions": digest, "answer_rule": chosen.name}


def templates_for(
    names: Sequence[str] | None, run: Run, task: str, rule: str | None = None
) -> list[PromptTemplate | None]:
    """The prompt templates to run a task with: only its own prompt (None) without ``names``, those of --templates.

    InvalidInput for continued text, which asks nothing, and if the run has another template of the same name.
    """
    if names is None:
        return [None]
    known = task_of(task)
    if known is not None and known.metric is None:
        raise InvalidInput(f"the task {task} continues texts and asks no question: leave --templates out.")
    templates = chosen_templates(names, task, rule)
    earlier = {
        config.template.name: config.template
        for config in run.configs()
        if config.template is not None and (config.task, config.answer_rule) == (task, rule)
    }
    for template in templates:
        if template is not None and earlier.get(template.name, template) != template:
            raise InvalidInput(
                f"{run.folder}: has results of {task} under another template {template.name!r}: rename this one, or "
                "give another --out."
            )
    return templates


def _line(row: Mapping[str, Any], where: str) -> Question:
    """A line of a task file; other fields are ignored, and an answer may be a number."""
    fields = {name: row[name] for name in Question._fields if name in row}
    if type(fields.get("answer")) in (int, float):
        fields["answer"] = str(fields["answer"])
    line: Question = validation.build(Question, fields, where)
    return line


def _copy(run: Run, task: str, digest: str) -> Path:
    return run.folder / FOLDER / f"{task}-{digest}.jsonl"


def _documents(config: EvalConfig, run: Run, data: Path | None) -> Documents:
    """The questions and answers of a configuration, at most as many as it asks for."""
    if config.questions is None:
        documents = documents_of(config.task, data, config.split, config.problems)["test"]
    elif config.split != "test":
        raise InvalidInput(f"the task file {config.task} has no split {config.split!r}: leave --split and --tune out.")
    else:
        path = _copy(run, config.task, config.questions)
        if not path.is_file():
            raise FormatError(f"{path}: there is no such file; codd eval --task-file writes it.")
        documents = [validation.build(Question, line, where)._asdict() for where, line in json_lines(path)]
    return documents[: config.problems]


def _rule(config: EvalConfig) -> AnswerRule | None:
    """How answers are read; None for continued text, which a judge scores."""
    if config.questions is not None:
        return answer_rule(config.answer_rule or "exact")
    return MARKED_NUMBER if config.task == "word_problems" else None


def requests_of(config: EvalConfig, model: Model, run: Run, data: Path | None) -> list[Request]:
    """The requests of a configuration, in the order of the questions."""
    return _requests(config, model, _documents(config, run, data))


def _requests(config: EvalConfig, model: Model, documents: Documents) -> list[Request]:
    return [_request(config, model, number, str(each["question"])) for number, each in enumerate(documents)]


def _request(config: EvalConfig, model: Model, number: int, question: str) -> Request:
    prompt = question if config.template is None else config.template.fill(question)
    system = system_of(config)
    if converses(model, config.task):
        assert model.tokenizer is not None
        messages = [{"role": "system", "content": system}] if system else []
        prompt = model.tokenizer.render_chat([*messages, {"role": "user", "content": prompt}])
    digest = hashlib.sha256(prompt.encode()).hexdigest()[:12]
    return Request(f"{config.task}/{number}/0/{digest}", number, 0, prompt)


def evaluate(
    config: EvalConfig, answerer: Answerer, context: DistributedContext, run: Run, data: Path | None
) -> Scored | None:
    """Ask all questions, each process its share, and score the answers; None on all processes but the main one."""
    documents = _documents(config, run, data)
    requests = _requests(config, answerer.model, documents)
    gathered = context.gather(answerer.answers(requests[context.rank :: context.world_size]))
    if gathered is None:
        return None
    answers = {key: line for part in gathered for key, line in part.items()}
    metric = _metric(config)
    samples = [
        _sample(config, document, request, answers[request.key], metric)
        for document, request in zip(documents, requests, strict=True)
    ]
    scores = [sample.correct for sample in samples if sample.correct is not None]
    return Scored(metric, {metric: sum(scores) / len(scores)} if metric else {}, samples)


def _metric(config: EvalConfig) -> str | None:
    task = task_of(config.task)
    if task is not None and config.questions is None:
        return task.metric
    return f"exact_match,{config.answer_rule or 'exact'}"


def _sample(
    config: EvalConfig, document: Mapping[str, Any], request: Request, line: Line, metric: str | None
) -> Sample:
    correct, answers = _graded(config, document, str(line["text"]))
    return Sample(
        request.doc_id,
        request.prompt,
        str(document["answer"]),
        **{name: line[name] for name in ("text", "tokens", "calls", "seconds", "seed")},
        correct=correct,
        answers=answers,
        scores={} if metric is None or correct is None else {metric: correct},
    )


def _graded(config: EvalConfig, document: Mapping[str, Any], text: str) -> tuple[float | None, dict[str, str]]:
    """1 for a right answer, 0 for a wrong one, None for continued text; and what the task's rule read."""
    task = task_of(config.task)
    if task is not None and task.accepts is not None and config.questions is None:
        return float(task.accepts(document, text)), {}
    rule = _rule(config)
    if rule is None:
        return None, {}
    answer = rule.read(text)
    right = answer is not None and answer == _truth(rule, str(document["answer"]))
    return float(right), {rule.name: str(answer)}


def _truth(rule: AnswerRule, answer: str) -> str | None:
    """A right answer in the rule's normal form; those of word problems and of regular expressions are bare."""
    if rule is MARKED_NUMBER:
        return answer
    return answer_rule("exact").read(answer) if rule.name.startswith("regex:") else rule.read(answer)
