"""Right answers against seconds: all ways of decoding answer the same fresh word problems in turns, in one process.

    python benchmarks/seconds.py --problems 500 --seed 500 --threads 1 --out cpu.json
    python benchmarks/seconds.py --device cuda --batch 32 --problems 1000 --seed 500 --seconds 500 --out gpu.json
    python benchmarks/seconds.py --ways none:steps=128 none:threshold=0.8/0.9 trained:any_order,threshold=0.9/0.95

A way is CIRCUIT:OPTION,... with the circuits of `codd.load` (none: the network alone) and the options of `generate`; a
word alone is a sampler, and values with a slash between them are ways of their own. What is not named is the default,
so that `trained:` is what `codd.load().generate(question)` does.

With a batch of one, every problem is answered by all ways before the next one, beginning with another way each time, so
that a busy machine is busy for all of them. CPU seconds are those of all threads of the process, wall seconds those of
the clock, with the device waited for; a batch's are divided among its problems by network calls. Several processes
(--workers) find right answers and calls faster, and no seconds worth reading. What is answered is saved every few
seconds; the same command goes on where it was stopped.

The second table: what the network alone needs for as many right answers as a way with a circuit, by the best of its
rules (steps, threshold, entropy budget; straight lines between the measured points), over what that way needs.
Intervals are of 95%, by bootstrap over problems.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import codd
from codd.cli.sampling import parse_option
from codd.decoding.options import CIRCUIT_OPTIONS
from codd.evaluation.answering import problem_seed
from codd.evaluation.statistics import RESAMPLES, paired, share_interval
from codd.files import replacing, write_text
from codd_lab.problems import extract_answer, generate
from codd_lab.provenance import provenance
from codd_lab.report.figures import Chart, Curve, Panel, look, write_png
from codd_lab.report.frontier import reached
from codd_lab.report.labels import circuit_label, kind, option, rest, sampler, shared
from codd_lab.report.quality import ACCURACY, Estimate
from codd_lab.tasks.configs import NONE, EvalConfig

WAYS = (
    "none:steps=8/16/32/64/128",
    "none:threshold=0.5/0.7/0.8/0.9/0.95/0.98",
    "none:entropy_budget=0.1/0.3/0.6/1/2",
    "trained:any_order,threshold=0.7/0.8/0.9/0.95/0.98",
    "trained:any_order,steps=8/16/32/64",
    "null:any_order,threshold=0.9",
    "trained:",
)
COSTS = {"calls": 1, "CPU s": 2, "wall s": 3}
"""Where they stand in an answer."""
SAVED_EVERY = 10.0
"""Seconds."""

Floats = NDArray[np.float64]


class Answer(NamedTuple):
    """What became of one problem."""

    right: bool
    calls: int
    cpu: float
    wall: float


Answers = dict[str, dict[int, Answer]]
"""By way and number of the problem."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="CIRCUIT:OPTION,..")
    parser.add_argument(
        "--model", metavar="FOLDER", help="a checkpoint's folder or hub id (default: the bundled model)"
    )
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--seed", type=int, default=500, help="of the problems, and of what is drawn")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=1, help="problems at a time")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, in each process")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the problems")
    parser.add_argument("--busy", type=int, default=0, help="cores that other processes keep busy meanwhile")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so many")
    parser.add_argument("--out", type=Path, help="the answers, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="right answers against each cost")
    args = parser.parse_args()
    begun = time.time()
    configs = {name: config for text in args.ways for name, config in ways_from(text, args)}
    found = read(args, configs)
    saved = time.monotonic()
    with kept_busy(args.busy):
        for name, answers in answered(missing(args, configs, found), args, begun + args.seconds):
            found[name] |= answers
            if args.out and time.monotonic() > saved + SAVED_EVERY:
                write(args, configs, found)
                saved = time.monotonic()
    if args.out:
        write(args, configs, found)
    values = in_common(found)
    count, how = len(next(iter(values.values()))), f"{machine(args)}, {time.time() - begun:.0f} s"
    print(report(configs, values, how) if count else "no problem was answered by all ways in this time.")
    if args.plot and count:
        write_png(chart(configs, values, f"{count} word problems, {machine(args)}"), args.plot)


def ways_from(text: str, args: argparse.Namespace) -> Iterator[tuple[str, EvalConfig]]:
    """The ways that a word of the command line stands for, each with its name."""
    circuit, _, told = text.rpartition(":") if ":" in text else (text, "", "")
    items = [item if "=" in item else f"sampler={item}" for item in told.split(",") if item]
    choices = [[(name, value) for value in values.split("/")] for name, _, values in (i.partition("=") for i in items)]
    for chosen in itertools.product(*choices):
        options = {name: parse_option(name, value) for name, value in chosen}
        words = [value if name == "sampler" else f"{name}={value}" for name, value in chosen]
        said = {name: getattr(args, name) for name in ("seed", "model", "device", "dtype")}
        config = EvalConfig("word_problems", circuit, options, **said)
        yield f"{circuit}:{','.join(words)}", config


def told(args: argparse.Namespace, configs: Mapping[str, EvalConfig]) -> dict[str, Any]:
    """What must be the same for answers to be added to a file."""
    names = ("seed", "model", "device", "dtype", "batch", "threads", "workers", "busy")
    return {"ways": list(configs), **{name: getattr(args, name) for name in names}}


def read(args: argparse.Namespace, configs: Mapping[str, EvalConfig]) -> Answers:
    """What a file has already."""
    if args.out is None or not args.out.exists():
        return {name: {} for name in configs}
    file = json.loads(args.out.read_text())
    if file["settings"] != told(args, configs):
        sys.exit(f"{args.out}: has answers to other settings; give another --out, or the same settings to go on.")
    return {name: {i: Answer(*each) for i, *each in rows} for name, rows in file["answers"].items()}


def write(args: argparse.Namespace, configs: Mapping[str, EvalConfig], found: Answers) -> None:
    rows = {name: [[i, *answer] for i, answer in sorted(answers.items())] for name, answers in found.items()}
    made = {"settings": told(args, configs), "provenance": provenance(args.device, args.dtype), "answers": rows}
    with replacing(args.out.parent, args.out.name) as (temporary,):
        write_text(temporary, json.dumps(made) + "\n")


def machine(args: argparse.Namespace) -> str:
    name = torch.cuda.get_device_name() if args.device == "cuda" else provenance("cpu", args.dtype)["machine"]
    said = f"{name}, torch {torch.__version__}, {args.dtype}, batch {args.batch}, {args.threads} thread(s)"
    said += f", {args.workers} processes at once: seconds say nothing" if args.workers > 1 else ""
    return said + (f", {args.busy} busy neighbours" if args.busy else "")


class Task(NamedTuple):
    """Some problems for one way."""

    name: str
    config: EvalConfig
    numbers: Sequence[int]


def missing(args: argparse.Namespace, configs: Mapping[str, EvalConfig], found: Answers) -> list[Task]:
    """What is to be answered: some problems by all ways, then the next; another way begins each time."""
    tasks, names = [], list(configs)
    for turn, begin in enumerate(range(0, args.problems, args.batch)):
        first, numbers = turn % len(names), range(begin, min(args.problems, begin + args.batch))
        for name in names[first:] + names[:first]:
            if left := [number for number in numbers if number not in found[name]]:
                tasks.append(Task(name, configs[name], left))
    return tasks


def answered(
    tasks: Sequence[Task], args: argparse.Namespace, deadline: float
) -> Iterator[tuple[str, dict[int, Answer]]]:
    """The answers to each task, in their order or as processes finish them; none is begun after the deadline."""
    if args.workers == 1:
        torch.set_num_threads(args.threads)
        for task in {task.name: task for task in reversed(tasks)}.values():  # kernels are compiled, graphs captured
            answer(task, deadline)
        yield from ((task.name, answer(task, deadline)) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, context, torch.set_num_threads, (args.threads,)) as pool:
        waiting = {pool.submit(answer, task, deadline): task for task in tasks}
        yield from ((waiting[done].name, done.result()) for done in as_completed(waiting))


@cache
def model(source: str | None, circuit: str, device: str, dtype: str) -> codd.Model:
    """The network is loaded once, and shared by all circuits."""
    if circuit == NONE:
        return codd.load(source, circuit=None, device=device, dtype=getattr(torch, dtype))
    return model(source, NONE, device, dtype).with_circuit(circuit)


def answer(task: Task, deadline: float) -> dict[int, Answer]:
    """By one run of `generate`."""
    if time.time() > deadline:
        return {}
    config, numbers = task.config, task.numbers
    asked = [generate(number, split="test", seed=config.seed) for number in numbers]
    seeds = [problem_seed(config.seed, number, 0) for number in numbers]
    chosen = model(config.model, config.circuit, config.device, config.dtype)
    questions = [problem.question for problem in asked]
    cpu, wall = time.process_time(), time.perf_counter()
    made = chosen.generate(questions, **{**config.options, "seed": seeds})
    if config.device == "cuda":
        torch.cuda.synchronize()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert made.texts is not None
    answers = {}
    for number, problem, text, calls in zip(numbers, asked, made.texts, made.steps, strict=True):
        share = calls / sum(made.steps)
        right = extract_answer(text) == problem.answer
        answers[number] = Answer(right, calls, round(share * cpu, 6), round(share * wall, 6))
    return answers


@contextmanager
def kept_busy(cores: int) -> Iterator[None]:
    """By processes that only count."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def in_common(found: Answers) -> dict[str, Floats]:
    """A row for each problem that all ways have answered."""
    numbers = sorted(set.intersection(*(set(answers) for answers in found.values())))
    return {name: np.array([answers[each] for each in numbers], np.float64) for name, answers in found.items()}


def report(configs: Mapping[str, EvalConfig], values: Mapping[str, Floats], how: str) -> str:
    """Two tables in Markdown."""
    count = len(next(iter(values.values())))
    return "\n".join([f"{count} problems; {how}.", "", *ways_table(configs, values), "", *equal_table(configs, values)])


def ways_table(configs: Mapping[str, EvalConfig], values: Mapping[str, Floats]) -> list[str]:
    """Means over problems; the cost of a call is also a multiple of that of the network alone at the same budget."""
    lines = [
        "| way | right, % (95%) | against the slowest, points | calls | CPU s | wall s | ms per call, CPU / wall |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, config in configs.items():
        own = values[name]
        right, calls, cpu, wall = own.mean(0)
        low, high = share_interval(int(own[:, 0].sum()), len(own))
        alone = [
            other for other in configs if configs[other].circuit == NONE and shared(configs[other]) == shared(config)
        ]
        slowest = max(alone, key=lambda other: values[other][:, 1].mean(), default=name)
        against = "" if slowest == name else paired(own[:, 0].tolist(), values[slowest][:, 0].tolist())
        each, over = 1e3 * np.array([cpu, wall]) / calls, ""
        budget = {option: value for option, value in config.options.items() if option not in CIRCUIT_OPTIONS}
        for base in [values[other] for other in alone if configs[other].options == budget and other != name]:
            cpu_over, wall_over = each / (1e3 * base[:, 2:].mean(0) / base[:, 1].mean())
            over = f" (x{cpu_over:.2f} / x{wall_over:.2f})"
        lines.append(
            f"| {name} | {100 * right:.1f} ({100 * low:.1f} to {100 * high:.1f}) | {against} | {calls:.1f} | "
            f"{cpu:.3f} | {wall:.3f} | {each[0]:.1f} / {each[1]:.1f}{over} |"
        )
    return lines


def equal_table(configs: Mapping[str, EvalConfig], values: Mapping[str, Floats]) -> list[str]:
    """How many times less each way with a circuit needs than the best rule without one, at equal right answers."""
    lines = [
        "| way, against the best rule of the network alone at equal right answers | right, % | "
        + " | ".join(f"times fewer {cost}" for cost in COSTS)
        + " |",
        "|---|---|" + "---|" * len(COSTS),
    ]
    means = resampled(values)
    for name, config in configs.items():
        rules = rules_alone(configs, config)
        if config.circuit == NONE or not rules:
            continue
        figures = [f"{100 * means[name][0, 0]:.1f}"]
        for cost in COSTS.values():
            least = [min(need(rule, means, cost, i, means[name][i, 0]) for rule in rules) for i in range(RESAMPLES + 1)]
            cheapest = [min(means[other][0, cost] for other in rule) for rule in rules]
            bound = "at most " if least[0] in cheapest else ""  # a faster budget, not measured, might do
            figures.append(bound + times(np.array(least) / means[name][:, cost]))
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return lines


def resampled(values: Mapping[str, Floats]) -> dict[str, Floats]:
    """The mean answer of each way over all problems, and in the further rows over resamples of them."""
    count = len(next(iter(values.values())))
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    weights = np.concatenate([np.ones((1, count)), draws]) / count
    return {name: weights @ own for name, own in values.items()}


def rules_of(configs: Mapping[str, EvalConfig]) -> list[list[str]]:
    """The ways that differ in the value of their budget only."""
    rules: dict[tuple[str, ...], list[str]] = {}
    for name, config in configs.items():
        key = (config.circuit, sampler(config), kind(config), json.dumps(rest(config), sort_keys=True))
        rules.setdefault(key, []).append(name)
    return list(rules.values())


def rules_alone(configs: Mapping[str, EvalConfig], config: EvalConfig) -> list[list[str]]:
    """Those of the network alone that may be compared with a way."""
    return rules_of({n: each for n, each in configs.items() if each.circuit == NONE and shared(each) == shared(config)})


def chart(configs: Mapping[str, EvalConfig], values: Mapping[str, Floats], title: str) -> Chart:
    """A line for each rule, by each cost."""
    panels = []
    for cost, column in COSTS.items():
        curves = []
        for number, rule in enumerate(rules_of(configs)):
            config = configs[rule[0]]
            heat = option(config, "temperature")
            words = [circuit_label(config.circuit), sampler(config), f"by {kind(config)}"]
            words += [f"temperature {heat:g}"] if heat else []
            points = sorted((values[name][:, column].mean(), 100 * values[name][:, 0].mean()) for name in rule)
            line = [(x, Estimate(y)) for x, y in points]
            curves.append(Curve(", ".join(filter(None, words)), line, look(config.circuit, number)))
        panels.append(Panel(f"{cost} a problem", ACCURACY.title, curves, ratio_axis=True))
    return Chart("seconds", title, panels)


def need(rule: Sequence[str], means: Mapping[str, Floats], cost: int, draw: int, target: float) -> float:
    """What a rule of the network alone costs at so many right answers; infinite where it never has them."""
    points = sorted((float(means[name][draw, cost]), float(means[name][draw, 0])) for name in rule)
    found = reached([cost for cost, _ in points], [right for _, right in points], float(target), ACCURACY)
    return math.inf if found is None else found


def times(ratios: Floats) -> str:
    """The first of some ratios, and the middle 95% of the others."""
    low, high = np.percentile(ratios[1:], (2.5, 97.5), method="nearest")
    said = ["not reached alone" if math.isinf(ratio) else f"x{ratio:.2f}" for ratio in (ratios[0], low, high)]
    return f"{said[0]} ({said[1]} to {said[2]})"


if __name__ == "__main__":
    main()
