"""Continued texts of a run before a judge: likelihood, repetition, distances to true text and to one token a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from codd.decoding.options import DEFAULTS
from codd.errors import FormatError
from codd.files import brief
from codd_lab.runs import Result, Run, write_json
from codd_lab.tasks.configs import NONE
from codd_lab.text.distance import FEWEST, average_distance, compare
from codd_lab.text.judge import Assessed, Judge, Score
from codd_lab.text.measures import Figure, measures

Progress = Callable[[int, int], None]
FEATURES = "features.npy"
"""The file with the judge's features of a configuration's texts, a row per text."""
MOST = 100
"""Tokens of a continuation that a judge reads: true texts are longer, and likelihoods and features depend on length."""


def to_be_judged(run: Run, judge: str | None = None) -> list[Result]:
    """Results of continued text that this judge has not scored; without a judge, all of them."""
    texts = [result for result in run.results() if result.metric is None]
    return [r for r in texts if judge is None or (r.judged or {}).get("judge", {}).get("name") != judge]


def judge_run(run: Run, judge: Judge, progress: Progress | None = None) -> None:
    """Score what this judge has not scored, then compare all texts with those of one token a step, where there are any.

    N-grams are of words, so that they do not depend on a tokenizer. A text that several configurations share (the null
    circuit writes what the network alone writes) is read once.
    """
    waiting = to_be_judged(run, judge.name)
    known = _known([result for result in to_be_judged(run) if result not in waiting])
    for number, result in enumerate(waiting):
        _judge(result, judge, known)
        if progress:
            progress(number + 1, len(waiting))
    for group in _groups(to_be_judged(run)):
        _compare(group)


def _known(results: Sequence[Result]) -> dict[tuple[str, str], Assessed]:
    """Earlier scores of the judge, by prompt and text."""
    known = {}
    for result in results:
        judged = result.judged or {}
        scores = [Score(*each) for each in zip(judged["nats"], judged["tokens"], judged["bytes"], strict=True)]
        for sample, score, feature in zip(result.samples, scores, _features(result), strict=True):
            known[sample.prompt, sample.text] = Assessed(score, feature)
    return known


def _judge(result: Result, judge: Judge, known: dict[tuple[str, str], Assessed]) -> None:
    written = [(sample.prompt, sample.text) for sample in result.samples]
    true = [(sample.prompt, sample.target) for sample in result.samples]
    fresh = [pair for pair in dict.fromkeys([*written, *true]) if pair not in known]
    assessed = judge.assess([prompt for prompt, _ in fresh], [text for _, text in fresh], most=MOST)
    known |= dict(zip(fresh, assessed, strict=True))
    scores = [known[pair].score for pair in written]
    features, truth = (torch.stack([known[pair].feature for pair in pairs]) for pairs in (written, true))
    np.save(result.folder / FEATURES, features.numpy().astype(np.float16))
    write_json(
        result.folder / "judged.json",
        {
            "judge": {"name": judge.name, "description": judge.description},
            "nats": [score.nats for score in scores],
            "tokens": [score.tokens for score in scores],
            "bytes": [score.bytes for score in scores],
            "measures": _measured(written, known),
            "true": {"measures": _measured(true, known)} | _to_truth(features, truth),
        },
    )


def _measured(pairs: Sequence[tuple[str, str]], known: Mapping[tuple[str, str], Assessed]) -> dict[str, Figure]:
    """The measures of texts, of each as much as the judge read."""
    nats, tokens, sizes = zip(*(known[pair].score for pair in pairs), strict=True)
    read = [text.encode()[:size].decode(errors="ignore") for (_, text), size in zip(pairs, sizes, strict=True)]
    return measures([text.split() for text in read], nats, tokens, sizes)


def _to_truth(features: Float[Tensor, "n d"], truth: Float[Tensor, "n d"]) -> dict[str, Any]:
    """MAUVE against the true continuations; nothing if there are too few texts."""
    if len(truth) < FEWEST:
        return {}
    mauve, deviation = average_distance(truth, features)
    return {"mauve": mauve, "mauve_deviation": deviation}


def _groups(results: Sequence[Result]) -> list[list[Result]]:
    """Results that may be compared: of one task, split, temperature, order and judge."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        config = result.config
        how = (config.options.get("temperature"), config.options.get("remasking", DEFAULTS.remasking))
        judge = (result.judged or {}).get("judge", {}).get("name")
        groups.setdefault((config.task, config.split, *how, result.problems, judge), []).append(result)
    return list(groups.values())


def _compare(results: Sequence[Result]) -> None:
    """Add MAUVE against the network alone at one token a step; a second seed of that gives the ceiling."""
    alone = [r for r in results if r.config.circuit == NONE and r.calls >= 0.99 * r.tokens]
    if not alone or alone[0].problems < FEWEST:
        return
    reference = min(alone, key=lambda r: r.config.seed)
    again = [r for r in alone if r.config == replace(reference.config, seed=r.config.seed) and r is not reference]
    if not again:
        return
    known, second = _features(reference), _features(again[0])
    for result in results:
        if result.folder == reference.folder or "mauve" in (result.judged or {}):
            continue
        compared = compare(known, second, _features(result))
        write_json(
            result.folder / "judged.json",
            {**(result.judged or {}), "mauve": {**compared, "reference": reference.folder.name}},
        )


def _features(result: Result) -> Float[Tensor, "n d"]:
    path: Path = result.folder / FEATURES
    try:
        features = np.load(path, allow_pickle=False)
        return torch.from_numpy(features.astype(np.float32).reshape(len(result.samples), -1))
    except (OSError, ValueError, EOFError) as error:
        raise FormatError(
            f"{path}: is damaged ({brief(error)}). Remove judged.json beside it to judge again."
        ) from error
