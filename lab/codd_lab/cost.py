"""What the circuit costs: seconds of an answer at equal network calls, with and without it, one prompt at a time."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codd.decoding import Model
from codd.errors import InvalidInput
from codd_lab.problems import problems
from codd_lab.provenance import provenance

STEPS = (16, 32, 64)
SAMPLERS = {"factorized": "factorized", "coupled": "latent", "any order": "any_order"}
"""The samplers that are compared, by their names in the results."""
BASE = "factorized"
OWN_OPTIONS = ("sampler", "stop", "seed", "steps", "gen_length")
"""Decoding options that the study sets itself."""


def cost_study(
    model: Model,
    *,
    circuits: Sequence[str] = ("trained",),
    steps: Sequence[int] = STEPS,
    gen_length: int = 128,
    samplers: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    rounds: int = 10,
    prompt: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Seconds a sample of every sampler, and its overhead over the network alone at the same number of network calls.

    Samplers take turns, round after round, after one round that is not counted, so that kernels are compiled, graphs
    captured and a busy machine is busy for all. Sequences do not stop early: the time does not depend on the answer.
    Every run ends with a copy to the host, which waits for the device. Medians and quartiles over rounds; the overhead
    is paired by round. ``samplers``: those that the circuits are used with (default: all); the network alone is always
    there. ``options``: of decoding, the same for every way, such as mode and activation. ``seed``: of what the samplers
    draw. ``progress`` is called with the rounds done and the number of all. ``data`` has rows with way, circuit, steps,
    tokens, seconds and overhead.
    """
    if rounds < 1:
        raise InvalidInput(f"rounds must be at least 1, found {rounds}.")
    asked = prompt if prompt is not None else next(problems(1, split="test", seed=1)).question
    given = dict(options or {})
    used = [way for way, sampler in SAMPLERS.items() if way != BASE and sampler in (samplers or [sampler])]
    ways = [(BASE, None), *((way, circuit) for way in used for circuit in circuits)]
    models = {circuit: model.with_circuit(circuit) for _, circuit in ways}
    rows: list[dict[str, Any]] = []
    for i, count in enumerate(steps):
        common = {**given, "stop": False, "steps": count, "gen_length": gen_length, "seed": seed}
        seconds: dict[tuple[str, str | None], list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            first = turn % len(ways)
            for way, circuit in ways[first:] + ways[:first]:
                begun = time.perf_counter()
                models[circuit].generate(asked, **{**common, "sampler": SAMPLERS[way]})
                seconds[way, circuit].append(time.perf_counter() - begun)
            if turn:
                progress(i * rounds + turn, len(steps) * rounds)
        base = seconds[BASE, None][1:]
        for (way, circuit), found in seconds.items():
            overheads = [mine / alone - 1 for mine, alone in zip(found[1:], base, strict=True)]
            row = {"way": way, "circuit": circuit or "none", "steps": count, "tokens": gen_length}
            row |= {"seconds": _quartiles(found[1:]), "overhead": None if way == BASE else _quartiles(overheads)}
            rows.append(row)
    settings: dict[str, Any] = {"prompt": asked, "gen_length": gen_length, "batch": 1, "rounds": rounds, "warmup": 1}
    settings |= {"stop": False, "seed": seed, "options": given}
    where = provenance(model.backbone.device, model.backbone.precision)
    return {"settings": settings, "provenance": where, "data": {"rows": rows}}


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    return {"median": median, "low": low, "high": high}
