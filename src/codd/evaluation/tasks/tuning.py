"""Settings chosen on one split and reported on another."""

from collections.abc import Sequence
from dataclasses import replace

from codd.evaluation.runs import Result
from codd.evaluation.tasks.configs import CONTROLS, NULL, EvalConfig


def chosen(
    results: Sequence[Result], tuned: Sequence[str], *, problems: int | None, split: str = "test"
) -> list[EvalConfig]:
    """The most accurate configuration of each circuit and budget, moved to another split, with its control.

    ``tuned`` are the options that were varied. The null circuit is tuned by itself too, since temperature alone can
    help. Ties go to the first.
    """
    groups: dict[EvalConfig, list[Result]] = {}
    for result in results:
        options = {name: value for name, value in result.config.options.items() if name not in tuned}
        groups.setdefault(replace(result.config, options=options), []).append(result)
    best_configs: list[EvalConfig] = []
    for group in groups.values():
        best = max(group, key=lambda result: result.accuracy or 0.0).config
        best_configs.append(best)
        if best.circuit not in CONTROLS:
            best_configs.append(best.with_circuit(NULL))
    return [replace(config, split=split, problems=problems) for config in dict.fromkeys(best_configs)]
