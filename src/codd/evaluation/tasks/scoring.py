"""One cell through the harness: what is asked, what counts as right, and all that is needed to repeat it."""

import logging
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from codd.decoding import Model
from codd.errors import CircuitSteppedAside, InvalidInput
from codd.evaluation.runs import Result, Sample
from codd.evaluation.tasks.answering import Request
from codd.evaluation.tasks.catalogue import harness_task, task_of
from codd.evaluation.tasks.cells import Cell
from codd.evaluation.tasks.harness import CoddLM, chats, request_of
from codd.evaluation.tasks.sandbox import Limits

SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}
"""The harness's own, which order GPQA's choices."""


def requests_of(cell: Cell, model: Model, data: Path | None) -> list[Request]:
    """What a cell asks, for a machine that has no harness."""
    lm = CoddLM(model)
    with _quiet():
        task = _task(cell, data, Limits())
        if task.OUTPUT_TYPE != "generate_until":
            raise InvalidInput(f"the task {cell.task} asks for likelihoods: it cannot be prepared, only run.")
        task.set_config(key="num_fewshot", value=0)
        chat = _converses(model, cell.task)
        task.build_all_requests(
            limit=cell.problems,
            rank=0,
            world_size=1,
            system_instruction=_system(cell.task),
            apply_chat_template=chat,
            fewshot_as_multiturn=True,
            chat_template=lm.apply_chat_template if chat else None,
            tokenizer_name=lm.tokenizer_name if chat else "",
        )
    return [request_of(instance) for instance in task.instances]


def evaluated(lm: CoddLM, cell: Cell, data: Path | None, limits: Limits) -> Any:
    """What the harness finds; None on the processes that do not lead."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with _quiet():
        return simple_evaluate(
            lm,
            tasks=[_task(cell, data, limits)],
            task_manager=TaskManager(include_defaults=False),  # the task is loaded: none need be looked for
            num_fewshot=0,
            limit=cell.problems,
            apply_chat_template=_converses(lm.model, cell.task),
            system_instruction=_system(cell.task),
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=not limits.confined,
            **SEEDS,
        )


def _task(cell: Cell, data: Path | None, limits: Limits) -> Any:
    random.seed(SEEDS["random_seed"])  # as the harness does before it loads tasks: GPQA's draw
    return harness_task(cell.task, data, cell.split, cell.problems, limits)


def _system(task: str) -> str | None:
    known = task_of(task)
    return None if known is None else known.system


def _converses(model: Model, task: str) -> bool:
    known = task_of(task)
    return chats(model) and (known is None or known.chat)


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness talks a lot, and so do the libraries it brings; the loop's own warnings are kept."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    levels = [logger.level for logger in loggers]
    import datasets
    from tqdm import tqdm

    bars = datasets.utils.logging.is_progress_bar_enabled()
    plain = tqdm.__init__  # the harness gives no way to switch its bars off

    def hidden(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "disable": True})

    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bar()
    tqdm.__init__ = hidden
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", CircuitSteppedAside)
            yield
    finally:
        tqdm.__init__ = plain
        if bars:
            datasets.enable_progress_bar()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def result_of(
    cell: Cell,
    lm: CoddLM,
    found: Mapping[str, Any],
    costs: Mapping[str, Mapping[str, Any]],
    *,
    folder: Path,
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> tuple[Result, list[Sample]]:
    """The figures of a cell and its samples, from what the harness found and what the answers cost."""
    known = task_of(cell.task)
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in found["samples"][cell.task]:
        groups.setdefault(line["doc_id"], []).append(line)
    metrics = _metrics(found["results"][cell.task])
    metric = known.metric if known else next(iter(metrics), None)
    by_problem = _by_problem(costs)
    samples = [_sample(doc, lines, by_problem.get(doc, {}), metric) for doc, lines in sorted(groups.items())]
    correct = [sample.correct for sample in samples if sample.correct is not None]
    result = Result(
        cell=cell,
        metric=metric,
        accuracy=fmean(correct) if correct else None,
        metrics=metrics,
        problems=len(samples),
        calls=fmean(sample.calls for sample in samples),
        tokens=fmean(sample.tokens for sample in samples),
        seconds=median(sample.seconds for sample in samples),
        settings={
            **settings,
            "options": {**lm.options.as_json(), "seed": cell.seed},
            "system": _system(cell.task),
            "chat": _converses(lm.model, cell.task),
            "chat_template": lm.tokenizer.chat_template,
            "harness_seeds": SEEDS,
        },
        provenance=provenance,
        folder=folder,
    )
    return result, samples


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    """Without the harness's alias and its errors, which we do not ask for."""
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and "," in name and not name.startswith("bypass") and "_stderr" not in name
    }


def _by_problem(costs: Mapping[str, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The first request of each problem, by its number."""
    found: dict[int, Mapping[str, Any]] = {}
    for key, line in sorted(costs.items()):
        found.setdefault(int(key.split("/")[-3]), line)
    return found


def _sample(doc_id: int, lines: Sequence[Mapping[str, Any]], cost: Mapping[str, Any], metric: str | None) -> Sample:
    first = lines[0]
    named = [(f"{name},{line['filter']}", line[name]) for line in lines for name in line["metrics"]]
    scores = {name: float(value) for name, value in named if isinstance(value, int | float)}
    return Sample(
        doc_id=doc_id,
        prompt=str(first["arguments"][0][0]),
        target=str(first["target"]),
        text=str(cost.get("text", "")),
        tokens=int(cost.get("tokens", 0)),
        calls=int(cost.get("calls", 0)),
        seconds=float(cost.get("seconds", 0.0)),
        seed=int(cost.get("seed", 0)),
        correct=None if metric is None else scores.get(metric),
        answers={line["filter"]: _text(line["filtered_resps"]) for line in lines} if metric else {},
        scores=scores,
    )


def _text(found: Sequence[Any]) -> str:
    """What a filter gave, whatever it wrapped it into."""
    while isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    return str(found)
