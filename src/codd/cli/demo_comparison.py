"""The first screen of ``codd demo``: right answers, network calls and seconds, with the circuit and without."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from codd.cli import figures, sampling
from codd.cli.demo_model import written
from codd.cli.tables import Cell, Section
from codd.decoding import Model, Options
from codd.evaluation.statistics import mcnemar
from codd.training.problems import Problem, extract_answer, generate

PROBLEMS = 24
SECONDS = 45
"""After so many no problem is begun: the demo is to take less than a minute."""
OPTIONS = {
    "alone": Options(entropy_budget=0.3),
    "circuit": Options(),
}
"""How each writes. Alone: the network's own best rule, at which it gets about as many right (docs/results.md)."""
LABELS = {"alone": "network alone", "circuit": "with the circuit"}
CHANCE = 0.05
"""A difference that chance makes more often than this is called none."""
SAME = 0.05
"""Ratios nearer to 1 than this are called the same."""


COSTS = {
    "network_evaluations": ("network calls", ".1f"),
    "seconds": ("seconds", ".2f"),
    "cpu_seconds": ("CPU seconds", ".2f"),
}
"""What is counted for each problem: its heading, and how it is written."""


def compare(model: Model, seed: int, count: int | None = None) -> dict[str, Any]:
    """Problems of the test stream, each solved both ways; ``count``: so many, and not as many as there is time for."""
    models = {"alone": replace(model, circuit=None), "circuit": model}
    for each in models.values():  # what is compiled or cached at the first call is not to be timed
        sampling.answer(each, each.encode(["What is 7 + 8?"], chat=True), Options(gen_length=8, steps=1))
    begun = time.monotonic()
    solved: list[dict[str, Any]] = []
    with sampling.bar("solving word problems", count or PROBLEMS) as advance:
        for index in range(count or PROBLEMS):
            if count is None and solved and time.monotonic() - begun > SECONDS:
                break
            # In turn, and each first as often as the other: both see the same load of the machine.
            order = list(models) if index % 2 == 0 else list(reversed(models))
            problem = generate(index, split="test", seed=seed)
            runs = {name: _solve(problem, models[name], OPTIONS[name].changed(seed=seed)) for name in order}
            solved.append({"question": problem.question, "right": problem.answer, "runs": runs})
            advance(1)
    return {
        "ways": {name: _total(name, solved) for name in models},
        "p": _chance(solved),
        "problems": solved,
    }


def _solve(problem: Problem, model: Model, options: Options) -> dict[str, Any]:
    cpu = time.process_time()
    [found] = sampling.answer(model, model.encode([problem.question], chat=True), options)
    text = found.text or ""
    return {
        "text": text,
        "answer": extract_answer(text),
        "network_evaluations": found.steps,
        "circuit_evaluations": found.circuit_steps,
        "seconds": found.seconds,
        "cpu_seconds": time.process_time() - cpu,
    }


def _total(name: str, solved: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Right answers, and the mean of every cost."""
    means = {cost: sum(problem["runs"][name][cost] for problem in solved) / len(solved) for cost in COSTS}
    return {"settings": OPTIONS[name].as_json(), "right": sum(_right(problem, name) for problem in solved), **means}


def _right(problem: dict[str, Any], name: str) -> bool:
    return bool(problem["runs"][name]["answer"] == problem["right"])


def _chance(solved: Sequence[dict[str, Any]]) -> float:
    """How likely so uneven a split of the problems that one way alone solved is by chance."""
    pairs = [(_right(problem, "circuit"), _right(problem, "alone")) for problem in solved]
    return mcnemar(pairs.count((True, False)), pairs.count((False, True)))


def headline(ways: Mapping[str, Mapping[str, Any]], p: float) -> str:
    """What the counts say, whatever that is; ``p``: how often chance makes such a difference of right answers."""
    alone, circuit = ways["alone"], ways["circuit"]
    answers = "The same number of right answers"
    if circuit["right"] != alone["right"]:
        more = "More" if circuit["right"] > alone["right"] else "Fewer"
        counts = f"{circuit['right']}, not {alone['right']}"
        answers = (
            f"{more} right answers ({counts})" if p < CHANCE else f"As many right answers, up to chance ({counts}),"
        )
    calls, seconds = (alone[name] / circuit[name] for name in ("network_evaluations", "seconds"))
    calls_in_words = _in_words(calls, "fewer network calls", "more network calls", "the same number of network calls")
    return f"{answers} in {calls_in_words} and {_in_words(seconds, 'less time', 'more time', 'the same time')}"


def _in_words(ratio: float, fewer: str, more: str, same: str) -> str:
    if abs(ratio - 1) < SAME:
        return same
    return f"{ratio:.2f} times {fewer}" if ratio > 1 else f"{1 / ratio:.2f} times {more}"


def sections(results: dict[str, Any]) -> list[Section]:
    """What people are shown: the counts, and the first problem in full."""
    ways, solved = results["ways"], results["problems"]
    first, rules = solved[0], {name: _rule(options) for name, options in OPTIONS.items()}
    counts = Section(
        title=headline(ways, results["p"]),
        before=[
            f"{len(solved)} word problems that the bundled model was not trained on, one at a time. The network alone "
            f"writes in each call {rules['alone']}, each by itself: its own best rule. With the circuit, the default, "
            f"it is {rules['circuit']}, given those that the call has written already.",
        ],
        header=["", "right answers", *(heading for heading, _ in COSTS.values())],
        rows=[*(_row(name, ways[name], len(solved)) for name in LABELS), _ratios(ways)],
        after=[
            "Calls and seconds are means a problem, counted in this run; one token a call was not run. So few problems "
            f"say little of right answers (their difference: p = {results['p']:.2f}); docs/results.md has hundreds."
        ],
        figure=_figure(ways),
    )
    texts = [written(first["runs"][name], first["right"]) for name in LABELS]
    example = Section(
        title="The first of them",
        before=[first["question"]],
        header=["", *LABELS.values()],
        rows=[[Cell(""), *texts]],
        after=["The final answer stands after ####."],
        prose=True,
    )
    return [counts, example]


def _rule(options: Options) -> str:
    if options.threshold is not None:
        return f"every token that is at least {options.threshold:.0%} probable"
    if options.entropy_budget is not None:
        return f"the surest tokens while their entropies sum to less than {options.entropy_budget:g} nats"
    return f"as many tokens as fill {options.gen_length} places in {options.steps} calls"


def _row(name: str, way: Mapping[str, Any], count: int) -> list[Cell]:
    return [
        Cell(LABELS[name]),
        Cell(f"{way['right']} of {count}"),
        *(Cell(f"{way[cost]:{form}}") for cost, (_, form) in COSTS.items()),
    ]


def _ratios(ways: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
    cells = []
    for name in COSTS:
        ratio = ways["alone"][name] / ways["circuit"][name]
        cells.append(Cell(f"x{ratio:.2f}", "good" if ratio >= 1 + SAME else "bad" if ratio <= 1 - SAME else "plain"))
    return [Cell("ratio"), Cell(""), *cells]


def _figure(ways: Mapping[str, Mapping[str, Any]]) -> str:
    series = {LABELS[name]: [way["seconds"]] for name, way in ways.items()}
    return figures.bars("Seconds a problem", ["a problem"], series, "{:.2f} s".format)
