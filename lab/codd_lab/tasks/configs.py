"""The configurations of an evaluation: a task, a circuit and decoding options each, and grids of them."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from codd import validation
from codd.decoding.options import CIRCUIT_OPTIONS, DEFAULTS, RULE, Options
from codd.errors import FormatError, InvalidInput
from codd.files import brief
from codd.validation import Section, Whole
from codd_lab.tasks.templates import PromptTemplate

NULL, NONE, TRAINED = "null", "none", "trained"
"""Names of circuits: the control, none (the network alone), and the checkpoint's own."""
CONTROLS = (NULL, NONE)
_FOLDER = re.compile(r"[^-./\\\0\ud800-\udfff][^/\\\0\ud800-\udfff]*")
"""Names that are safe as part of a folder's name: no path, no hidden file, nothing that reads as an option."""


@dataclass(frozen=True)
class EvalConfig(Section):
    """One configuration: a task with a model, a circuit, decoding options and a seed.

    Two that differ in the circuit only can be compared. InvalidInput for options that decoding would refuse.
    """

    task: str
    circuit: str = TRAINED
    """ "trained" (the checkpoint's own), "static", "null", "none", or a path."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `Options`; those that are not named have their defaults."""
    problems: Whole | None = None
    """How many problems of the task; None for all."""
    split: str = "test"
    seed: Whole = 0
    model: str | None = None
    """A path or hub id; None for the bundled model."""
    dtype: str = "float32"
    device: str = "cpu"
    """cpu or cuda: the two round differently, so a configuration's samples all come from one."""
    questions: str | None = None
    """The digest of a task file's questions (`tasks.questions`); None for a task with a name."""
    answer_rule: str | None = None
    """How the answers to a task file are read."""
    template: PromptTemplate | None = None
    """How the question is put; None for the task's own prompt."""

    def __post_init__(self) -> None:
        """Refuse options that decoding would refuse, before anything is computed."""
        for what, name in (("task", self.task), ("split", self.split)):
            if not _FOLDER.fullmatch(name) or len(name.encode()) > 100:
                raise InvalidInput(f"the {what} {name[:100]!r} can be no folder's name, which it becomes part of.")
        _ = self.decoding
        if "seed" in self.options:
            raise InvalidInput("a configuration has a seed of its own: give it as seed, not in options.")

    @cached_property
    def decoding(self) -> Options:
        """The options in full, defaults filled in."""
        return Options.of(**self.options)

    @property
    def slug(self) -> str:
        """A readable and unique name, for its folder."""
        digest = hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]
        words = [self.task, self.split if self.split != "test" else "", _plain(self.circuit), *self.words()]
        return "-".join([*filter(None, words), digest])

    @property
    def budget(self) -> str:
        """What decides how many tokens a step commits, in words: "16 steps", "threshold 0.9 and at least 4"."""
        options = self.decoding
        name, value = next(iter(options.commit_rule.items()))
        said = f"{value} steps" if name == "steps" else f"{name.replace('_', ' ')} {value:g}"
        said += f" and at least {options.min_tokens}" if options.min_tokens > 1 else ""
        return f"sliding {said}" if options.blocks == "sliding" else said

    def words(self) -> list[str]:
        """The budget, the template and all options that differ from their defaults, for the slug."""
        words = [_plain(self.budget), *([] if self.template is None else [_plain(self.template.name)])]
        for name, value in sorted(self.options.items()):
            if name not in RULE and value is not None and value != getattr(DEFAULTS, name, None):
                words.append(_plain(f"{name}{value}" if not isinstance(value, str) else value))
        return words

    def with_circuit(self, circuit: str) -> "EvalConfig":
        """The same configuration with another circuit."""
        return replace(self, circuit=circuit)

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON can write them."""
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], where: str = "a configuration") -> "EvalConfig":
        """The opposite of `as_json`; FormatError, which begins with ``where``, if the fields are not valid."""
        try:
            config: EvalConfig = validation.build(cls, stored, where)
        except (TypeError, OverflowError) as error:
            raise FormatError(f"{where}: is not a configuration of an evaluation ({brief(error)}).") from error
        return config

    def __hash__(self) -> int:
        """The hash of the JSON form: a dictionary of options has none."""
        return hash(json.dumps(self.as_json(), sort_keys=True))


def _plain(text: str) -> str:
    """The last part of a path, other characters than letters, digits and dots replaced; at most 40 characters."""
    return "".join(c if c.isalnum() or c == "." else "_" for c in text.rsplit("/", 1)[-1])[:40]


def grid(
    tasks: Sequence[str],
    circuits: Sequence[str],
    axes: Mapping[str, Sequence[Any]],
    budgets: Mapping[str, Sequence[Any]],
    *,
    control: bool = True,
    **common: Any,
) -> list[EvalConfig]:
    """Every task with every circuit, every combination of ``axes``, and every budget.

    ``budgets`` (steps, threshold, entropy_budget) are alternatives, not multiplied with each other; the latent sampler
    takes steps only, and other budgets of it are left out unless there are no others. Every configuration names its
    sampler and its budget, defaults too. ``control`` adds the null circuit where a trained one is asked for.
    """
    names = list(dict.fromkeys(circuits))
    if control and NULL not in names and any(name not in CONTROLS for name in names):
        names.append(NULL)
    alternatives = [{name: value} for name, values in budgets.items() for value in values] or [{}]
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    choices = [{**combined, **budget} for budget, combined in itertools.product(alternatives, combinations)]
    choices = [options for options in choices if not _latent_without_steps(options)] or choices
    configs = [
        EvalConfig(task, circuit, _named(options), **common)
        for task, options, circuit in itertools.product(tasks, choices, names)
    ]
    return list(dict.fromkeys(map(_simplified, configs)))


def _latent_without_steps(options: Mapping[str, Any]) -> bool:
    return options.get("sampler") == "latent" and any(name in options for name in ("threshold", "entropy_budget"))


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with sampler and budget named, since their defaults may change between versions."""
    chosen = Options.of(**options)
    return {**options, "sampler": chosen.sampler, **chosen.commit_rule}


def _simplified(config: EvalConfig) -> EvalConfig:
    """Drop options of circuits where there is none, so that configurations that cannot differ are equal."""
    if config.circuit != NONE:
        return config
    return replace(
        config, options={name: value for name, value in config.options.items() if name not in CIRCUIT_OPTIONS}
    )
