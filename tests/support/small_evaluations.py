"""Small runs with made-up numbers, in the form that an evaluation leaves them."""

from pathlib import Path

from codd_lab.runs import Result, Run, Sample, write_json
from codd_lab.tasks.configs import EvalConfig

JUDGE = {"name": "smollm2", "description": "SmolLM2-135M-Instruct, Q4_1 (4-bit), instruction-tuned"}
PROVENANCE = {"machine": "a chip, 2 cores", "dtype": "float32", "versions": {"torch": "2.9"}, "revision": "abc"}


def pattern(right: int, of: int, first: int = 0) -> list[float]:
    """So many right answers in a row, from the first on, around the end."""
    return [1.0 if (i - first) % of < right else 0.0 for i in range(of)]


def add(
    run: Run,
    task: str,
    circuit: str,
    options: dict,
    *,
    correct: list[float] | None = None,
    texts: list[str] | None = None,
    targets: list[str] | None = None,
    calls: float = 16.0,
    seconds: float = 1.0,
    split: str = "test",
    prompt: str = "How many?",
    seed: int = 0,
) -> Result:
    """A finished config; without ``correct`` it is continued text."""
    size = len(correct if correct is not None else texts or [])
    config = EvalConfig(task, circuit, options, problems=size, split=split, seed=seed)
    samples = [
        Sample(
            doc_id=i,
            prompt=f"{prompt} {i}",
            target=targets[i] if targets else str(i),
            text=texts[i] if texts else f"{circuit} says {i}",
            tokens=10,
            calls=int(calls),
            seconds=seconds,
            seed=i,
            correct=None if correct is None else correct[i],
            answers={} if correct is None else {"strict": str(i)},
        )
        for i in range(size)
    ]
    result = Result(
        config=config,
        metric=None if correct is None else "exact_match,strict",
        accuracy=None if correct is None else sum(correct) / size,
        metrics={},
        problems=size,
        calls=calls,
        tokens=10.0,
        seconds=seconds,
        settings={"batch": 8, "stop": ["</s>"]},
        provenance={**PROVENANCE, "time": f"2026-01-01 {circuit}", "command": "codd eval"},
        folder=run.config_folder(config),
    )
    run.write_result(result, samples)
    return result


def judge(result: Result, nats: list[float], tokens: list[int], mauve: float | None = None) -> None:
    """What a judge said of continued text."""
    nll = sum(nats) / sum(tokens)
    measures = {"nll": {"value": nll, "low": nll - 0.1, "high": nll + 0.1}}
    measures["ppl"] = {"value": 2.718281828**nll, "low": None, "high": None}
    for name, value in {"rep_2": 0.1, "rep_4": 0.02, "distinct_2": 0.9, "diversity": 0.85}.items():
        measures[name] = {"value": value, "low": value - 0.01, "high": value + 0.01}
    found = {"judge": JUDGE, "nats": nats, "tokens": tokens, "measures": measures}
    if mauve is not None:
        found["mauve"] = {"value": mauve, "ceiling": 0.95, "seed": 0, "reference": "one-a-step"}
        found["true"] = {"measures": {**measures, "nll": {"value": 2.5}}, "mauve": mauve / 2, "mauve_deviation": 0.01}
    write_json(result.folder / "judged.json", found)


def around(mean: float, width: float = 0.1) -> dict[str, float]:
    return {"mean": mean, "low": mean - width, "high": mean + width}


def studies(run: Run) -> None:
    """One of each kind that a report knows."""
    ratios = []
    for ratio, lift in ((0.25, 0.2), (0.5, 0.5), (1.0, 1.5)):
        base = -1.5 - 2 * ratio
        scores = {
            "factorized": around(base),
            "sequential": around(base + lift),
            "dcd": around(base + 0.4 * lift),
            "circuit:trained": around(base + 0.6 * lift),
            "circuit:null": around(base),
        }
        closed = {"trained": around(0.6, 0.05), "null": around(0.0, 0.01)}
        ratios.append({"ratio": ratio, "tokens": int(32 * ratio), "scores": scores, "gap_closed": closed})
    told = {"settings": {"seed": 0, "block_length": 32}, "provenance": PROVENANCE}
    run.write_study("gap", {**told, "data": {"books": {"blocks": 12, "ratios": ratios}}})
    contexts = [
        {"context": context, "scores": {"factorized": around(-4.0 + context / 200), "circuit:trained": around(-3.2)}}
        for context in (20, 64, 256)
    ]
    data = {"wikitext103": {"texts": 9, "continuation": 64, "contexts": contexts}}
    run.write_study("continuations", {**told, "settings": {"scoring": "block by block"}, "data": data})
    rows = [
        {"way": "factorized", "circuit": "none", "steps": 16, "tokens": 128, "seconds": spread(1.0), "overhead": None},
        {"way": "any order", "circuit": "trained", "steps": 16, "tokens": 128, "seconds": spread(1.2),
         "overhead": spread(0.2)},
    ]  # fmt: skip
    run.write_study("cost", {**told, "data": {"rows": rows}})


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.01, "high": median + 0.01}


def whole_run(folder: Path, problems: int = 60) -> Run:
    """Everything that a report knows: two tasks, three circuits, budgets, an ablation, studies."""
    run = Run(folder, create=True)
    n = problems
    shares = {
        "none": {8: 0.3, 16: 0.5, 32: 0.7},
        "null": {8: 0.3, 16: 0.5, 32: 0.7},
        "trained": {8: 0.6, 16: 0.7, 32: 0.7},
        "static": {8: 0.35, 16: 0.55, 32: 0.7},
    }
    for circuit, budgets in shares.items():
        how = {} if circuit == "none" else {"sampler": "any_order"}
        for steps, share in budgets.items():
            seconds = steps / 20 * (1.0 if circuit == "none" else 1.1)
            add(run, "word_problems", circuit, {**how, "steps": steps}, correct=pattern(round(share * n), n),
                calls=float(steps), seconds=seconds)  # fmt: skip
        for threshold, calls in ((0.6, 12.0), (0.9, 24.0)):
            share = budgets[16] - 0.05 + 0.2 * (threshold > 0.8)
            add(run, "word_problems", circuit, {**how, "threshold": threshold}, correct=pattern(round(share * n), n),
                calls=calls, seconds=calls / 20)  # fmt: skip
    for circuit, nll in {"none": 3.5, "null": 3.5, "trained": 3.0}.items():
        for steps in (16, 32):
            options = {"steps": steps} if circuit == "none" else {"steps": steps, "sampler": "latent"}
            texts = [f"Once upon a time, {circuit} wrote {i} & <i>more</i>." for i in range(20)]
            config = add(run, "books_text", circuit, options, texts=texts, calls=float(steps), seconds=steps / 10)
            judge(
                config, [10 * (nll - steps / 64) + i % 5 for i in range(20)], [10] * 20, mauve=0.2 + 0.2 * (nll == 3.0)
            )
    for circuit in ("trained", "null"):
        for activation in (0.5, None):
            for temperature in (0.2, 1.0):
                options = {"steps": 16, "sampler": "any_order", "circuit_temperature": temperature}
                options |= {} if activation is None else {"activation": activation}
                right = round(n * (0.5 + 0.1 * (temperature == 1.0) + 0.1 * (circuit == "trained")))
                add(run, "word_problems", circuit, options, correct=pattern(right, n), split="validation")
    studies(run)
    return run
