"""One configuration through the harness: its requests, its samples and scores."""

import logging
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from codd.decoding import Model
from codd.distributed import DistributedContext
from codd.errors import CircuitSteppedAside, InvalidInput
from codd.evaluation.answering import Answerer, Request
from codd.evaluation.harness import CoddLM, request_of
from codd_lab.runs import Sample, Scored
from codd_lab.tasks.catalogue import HARNESS_SEEDS, converses, harness_task, system_of, task_of
from codd_lab.tasks.configs import EvalConfig
from codd_lab.tasks.sandbox import Limits


def requests_of(config: EvalConfig, model: Model, data: Path | None) -> list[Request]:
    """The requests of a configuration; InvalidInput for a task that asks for likelihoods instead of answers."""
    lm = CoddLM(model)
    with _quiet():
        task = harness_task(config, data, Limits())
        if task.OUTPUT_TYPE != "generate_until":
            raise InvalidInput(f"the task {config.task} asks for likelihoods: it cannot be prepared, only run.")
        task.set_config(key="num_fewshot", value=0)
        chat = converses(model, config.task)
        task.build_all_requests(
            limit=config.problems,
            rank=0,
            world_size=1,
            system_instruction=system_of(config),
            apply_chat_template=chat,
            fewshot_as_multiturn=True,
            chat_template=lm.apply_chat_template if chat else None,
            tokenizer_name=lm.tokenizer_name if chat else "",
        )
    return [request_of(instance) for instance in task.instances]


def evaluate(
    config: EvalConfig, answerer: Answerer, context: DistributedContext, data: Path | None, limits: Limits
) -> Scored | None:
    """Ask and score all problems; None on all processes but the main one.

    The harness's `simple_evaluate` would do the same, and then ask git and pip about the folder that it is run in.
    """
    from lm_eval import evaluate
    from lm_eval.tasks import TaskManager

    lm = CoddLM(answerer=answerer, context=context)
    with _quiet():
        task = harness_task(config, data, limits)
        random.seed(HARNESS_SEEDS["random_seed"])
        numpy.random.seed(HARNESS_SEEDS["numpy_random_seed"])
        torch.manual_seed(HARNESS_SEEDS["torch_random_seed"])
        task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=HARNESS_SEEDS["fewshot_random_seed"])
        scored = evaluate(
            lm,
            TaskManager(include_defaults=False).load([task]),  # it is loaded: none need be looked for
            limit=config.problems,
            apply_chat_template=converses(lm.model, config.task),
            fewshot_as_multiturn=True,
            system_instruction=system_of(config),
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=not limits.confined,
        )
    costs = context.gather(lm.costs)
    if scored is None or costs is None:
        return None
    return _scored(config, scored, {key: line for each in costs for key, line in each.items()})


def _scored(config: EvalConfig, scored: Mapping[str, Any], costs: Mapping[str, Mapping[str, Any]]) -> Scored:
    """The samples from the harness's scores and the log lines of the answers."""
    task = task_of(config.task)
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in scored["samples"][config.task]:
        groups.setdefault(line["doc_id"], []).append(line)
    metrics = _metrics(scored["results"][config.task])
    metric = task.metric if task else next(iter(metrics), None)
    by_problem = _by_problem(costs)
    samples = [_sample(doc, lines, by_problem.get(doc, {}), metric) for doc, lines in sorted(groups.items())]
    return Scored(metric, metrics, samples)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence loggers, progress bars and warnings of the harness and its libraries; our own warnings are kept."""
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


def _metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """The means of all metrics; the harness's alias and its standard errors are left out."""
    return {
        name: float(value)
        for name, value in results.items()
        if isinstance(value, int | float) and "," in name and not name.startswith("bypass") and "_stderr" not in name
    }


def _by_problem(costs: Mapping[str, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The log line of the first request of each problem, by the problem's number."""
    first: dict[int, Mapping[str, Any]] = {}
    for key, line in sorted(costs.items()):
        first.setdefault(int(key.split("/")[-3]), line)
    return first


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


def _text(filtered: Any) -> str:
    """The answer that a filter extracted, without the lists around it."""
    while isinstance(filtered, list | tuple) and len(filtered) == 1:
        filtered = filtered[0]
    return str(filtered)
