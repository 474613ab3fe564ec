"""What an answer costs: seconds at equal network calls, with and without the joint, one prompt at a time."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from codd.decoding import Model
from codd.errors import InvalidInput
from codd.evaluation.provenance import provenance
from codd.evaluation.timing import Spread, Timing, interleaved
from codd.training.problems import problems

STEPS = (16, 32, 64)
WAYS: dict[str, dict[str, Any]] = {
    "factorized": {"sampler": "factorized"},
    "coupled": {"sampler": "latent"},
    "any order": {"sampler": "any_order"},
}
BASE = "factorized"


def cost_study(
    model: Model,
    *,
    circuits: Sequence[str] = ("trained",),
    steps: Sequence[int] = STEPS,
    gen_length: int = 128,
    rounds: int = 10,
    prompt: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Seconds a sample of every way, and how much longer it is than the network alone at the same number of calls.

    All ways take turns, round after round, after one round that is not counted, so that kernels are compiled, graphs
    captured and a busy machine is busy for all. Sequences do not stop early: the time does not depend on the answer.
    Every run ends with a copy to the host, which waits for the device. Medians and quartiles over rounds; the overhead
    is paired by round. ``seed``: of what the samplers draw. ``progress`` is called with the rounds done and the
    number of all. ``data`` has rows with way, circuit, steps, tokens, seconds and overhead.
    """
    if rounds < 1:
        raise InvalidInput(f"rounds must be at least 1, found {rounds}.")
    asked = prompt if prompt is not None else next(problems(1, split="test", seed=1)).question
    rows: list[dict[str, Any]] = []
    total, done = len(steps) * rounds, itertools.count(1)
    for count in steps:
        functions: dict[tuple[str, str | None], Callable[[], object]] = {}
        for way, options in WAYS.items():
            for circuit in (None,) if way == BASE else circuits:
                chosen = model.with_circuit(circuit)
                same = {"steps": count, "gen_length": gen_length, "seed": seed}
                functions[way, circuit] = _run(chosen, asked, {**options, **same})
        names = {f"{way}/{circuit}": (way, circuit) for way, circuit in functions}
        times = interleaved(
            {n: functions[k] for n, k in names.items()},
            rounds=rounds,
            warmup=1,
            burst=1,
            progress=lambda _: progress(next(done), total),
        )
        base = times[f"{BASE}/{None}"]
        rows += [_row(*names[name], count, gen_length, found, base) for name, found in times.items()]
    settings = {
        "prompt": asked,
        "gen_length": gen_length,
        "batch": 1,
        "rounds": rounds,
        "warmup": 1,
        "stop": False,
        "seed": seed,
    }
    where = provenance(model.backbone.device, model.backbone.precision)
    return {"settings": settings, "provenance": where, "data": {"rows": rows}}


def _run(model: Model, prompt: str, options: dict[str, Any]) -> Callable[[], object]:
    return lambda: model.generate(prompt, stop=False, **options)


def _row(way: str, circuit: str | None, steps: int, tokens: int, found: Timing, base: Timing) -> dict[str, Any]:
    return {
        "way": way,
        "circuit": "none" if circuit is None else circuit,
        "steps": steps,
        "tokens": tokens,
        "seconds": _spread(Spread.of(found.seconds)),
        "overhead": None if found is base else _spread(found.over(base), less=1.0),
    }


def _spread(found: Spread, less: float = 0.0) -> dict[str, float]:
    return {"median": found.median - less, "low": found.lower - less, "high": found.upper - less}
