"""The first screen of ``codd demo``: right answers, network calls and seconds, with the circuit and without."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from codd.cli import console
from codd.cli.demo_model import answer, warm_up, written
from codd.cli.questions import questions
from codd.cli.tables import Cell, Section
from codd.decoding import Model, Options
from codd.evaluation.statistics import mcnemar

PROBLEMS = 24
SECONDS = 45
"""After so many seconds no problem is begun: the demo is to take less than a minute."""
OPTIONS = {"alone": Options(entropy_budget=0.3), "circuit": Options()}
"""Alone, the network uses its own best rule, at which it gets about as many right (docs/results/default.md)."""
LABELS = {"alone": "network alone", "circuit": "with the circuit"}
COSTS = {
    "network_evaluations": ("network calls", ".1f"),
    "seconds": ("seconds", ".2f"),
    "cpu_seconds": ("CPU seconds", ".2f"),
}
"""What is counted for each problem: its heading and its number format."""
CHANCE = 0.05
"""A difference that chance makes more often than this is called none."""
SAME = 0.05
"""Ratios nearer to 1 than this are called the same."""


def compare(model: Model, seed: int, count: int | None = None) -> dict[str, Any]:
    """Solve ``count`` problems of the test split both ways; None: as many of `PROBLEMS` as `SECONDS` allow."""
    models = {"alone": replace(model, circuit=None), "circuit": model}
    warm_up(models.values())
    begun = time.monotonic()
    solved: list[dict[str, Any]] = []
    with console.bar("solving word problems", count or PROBLEMS) as bar:
        for index, problem in enumerate(questions(seed)[: count or PROBLEMS]):
            if count is None and solved and time.monotonic() - begun > SECONDS:
                break
            # In turn, and each first as often as the other: both see the same load of the machine.
            order = list(models) if index % 2 == 0 else list(reversed(models))
            runs = {name: answer(models[name], problem.question, OPTIONS[name].changed(seed=seed)) for name in order}
            solved.append({"question": problem.question, "right": problem.result, "runs": runs})
            bar.advance()
    right = {name: [each["runs"][name]["answer"] == each["right"] for each in solved] for name in models}
    pairs = list(zip(right["circuit"], right["alone"], strict=True))
    ways = {
        name: {
            "settings": OPTIONS[name].as_json(),
            "right": sum(right[name]),
            **{cost: sum(each["runs"][name][cost] for each in solved) / len(solved) for cost in COSTS},
        }
        for name in models
    }
    p = mcnemar(pairs.count((True, False)), pairs.count((False, True)))
    return {"ways": ways, "p": p, "problems": solved}


def headline(ways: Mapping[str, Mapping[str, Any]], p: float) -> str:
    """One sentence on the counts; ``p``: how often chance makes such a difference of right answers."""
    alone, circuit = ways["alone"]["right"], ways["circuit"]["right"]
    counts = f"({circuit}, not {alone})"
    if circuit == alone:
        answers = "The same number of right answers"
    elif p < CHANCE:
        answers = f"{'More' if circuit > alone else 'Fewer'} right answers {counts}"
    else:
        answers = f"As many right answers, up to chance {counts},"
    calls, seconds = (ways["alone"][cost] / ways["circuit"][cost] for cost in ("network_evaluations", "seconds"))
    calls_in_words = _in_words(calls, "fewer network calls", "more network calls", "the same number of network calls")
    return f"{answers} in {calls_in_words} and {_in_words(seconds, 'less time', 'more time', 'the same time')}"


def _in_words(ratio: float, fewer: str, more: str, same: str) -> str:
    if abs(ratio - 1) < SAME:
        return same
    return f"{ratio:.2f} times {fewer}" if ratio > 1 else f"{1 / ratio:.2f} times {more}"


def sections(results: dict[str, Any]) -> list[Section]:
    """The counts, and the first problem in full."""
    ways, solved = results["ways"], results["problems"]
    first = solved[0]
    rows = [
        [Cell(label), Cell(f"{ways[name]['right']} of {len(solved)}")]
        + [Cell(f"{ways[name][cost]:{form}}") for cost, (_, form) in COSTS.items()]
        for name, label in LABELS.items()
    ]
    counts = Section(
        title=headline(ways, results["p"]),
        before=[
            f"{len(solved)} word problems that the bundled model was not trained on, one at a time. The network alone "
            "writes in each call the surest tokens while their entropies sum to less than "
            f"{OPTIONS['alone'].entropy_budget:g} nats, each by itself: its own best rule. With the circuit, the "
            f"default, it is every token that is at least {OPTIONS['circuit'].threshold:.0%} probable, given those "
            "that the call has written already.",
        ],
        header=["", "right answers", *(heading for heading, _ in COSTS.values())],
        rows=[*rows, _ratios(ways)],
        after=[
            "Calls and seconds are means a problem, counted in this run; one token a call was not run. So few problems "
            f"say little of right answers (their difference: p = {results['p']:.2f}); docs/results has hundreds."
        ],
    )
    example = Section(
        title="The first of them",
        before=[first["question"]],
        header=["", *LABELS.values()],
        rows=[[Cell(""), *(written(first["runs"][name], first["right"]) for name in LABELS)]],
        after=["The final answer stands after ####."],
        prose=True,
    )
    return [counts, example]


def _ratios(ways: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
    ratios = [ways["alone"][cost] / ways["circuit"][cost] for cost in COSTS]
    tones = ["plain" if abs(ratio - 1) < SAME else "good" if ratio > 1 else "bad" for ratio in ratios]
    return [Cell("ratio"), Cell(""), *(Cell(f"x{r:.2f}", tone) for r, tone in zip(ratios, tones, strict=True))]
