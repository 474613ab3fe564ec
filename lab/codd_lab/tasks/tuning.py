"""Settings chosen on one split and reported on another; of equally good ones, those that change the network least."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from codd_lab.runs import Result
from codd_lab.tasks.configs import CONTROLS, NULL, EvalConfig

TUNED = ("activation", "circuit_temperature")
"""The options that are chosen on validation."""


def tuned_values(config: EvalConfig) -> tuple[float, float]:
    """Activation (infinite where the circuit acts always) and circuit temperature."""
    options = config.decoding
    return inf if options.activation is None else options.activation, options.circuit_temperature


def best(results: Sequence[Result], worth: Callable[[Result], float]) -> Result:
    """The result of the greatest worth; of equals that of the temperature nearest to 1, then the highest activation."""

    def rank(result: Result) -> tuple[float, float, float]:
        activation, temperature = tuned_values(result.config)
        return worth(result), -abs(temperature - 1), activation

    return max(results, key=rank)


def chosen(results: Sequence[Result], *, problems: int | None) -> list[EvalConfig]:
    """The most accurate configuration of each circuit and budget, moved to the test split, with its control.

    The null circuit is tuned by itself too, since temperature alone can help. Ties are broken as in `best`.
    """
    groups: dict[EvalConfig, list[Result]] = {}
    for result in results:
        options = {name: value for name, value in result.config.options.items() if name not in TUNED}
        groups.setdefault(replace(result.config, options=options), []).append(result)
    best_configs: list[EvalConfig] = []
    for group in groups.values():
        config = best(group, lambda result: result.accuracy or 0.0).config
        best_configs.append(config)
        if config.circuit not in CONTROLS:
            best_configs.append(config.with_circuit(NULL))
    return [replace(config, split="test", problems=problems) for config in dict.fromkeys(best_configs)]
