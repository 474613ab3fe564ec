"""What a run of the loop can be told, checked before anything is computed."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, get_args

from jaxtyping import Float, Int
from torch import Tensor

from codd.errors import InvalidInput

Mode = Literal["block", "full"]
Order = Literal["low_confidence", "margin", "entropy", "random", "left_to_right", "sharpened"]
Sampler = Literal["latent", "any_order", "factorized"]
Tempering = Literal["reference", "paper"]
Outside = Literal["factorized", "defer"]
Hook = Callable[[Float[Tensor, "R V"], Int[Tensor, " R"], Int[Tensor, " L"]], Float[Tensor, "R V"]]
"""Gets the logits of some masked positions, those positions, and the sequence; returns logits."""

ALIASES = {"maskgit_plus": "low_confidence", "topk_margin": "margin"}
"""Other people's names for the same orders."""
REFERENCE_ORDERS = ("topprob", "origin")
"""Orders that only the reference has."""


class Keywords(TypedDict, total=False):
    """The fields of `Options`, for editors and type checkers to complete and check."""

    gen_length: int
    block_length: int
    steps: int | None
    mode: Mode
    remasking: str
    sampler: Sampler
    temperature: float
    top_p: float | None
    top_k: int | None
    cfg_scale: float
    circuit_temperature: float
    tempering: Tempering
    activation: float | None
    outside: Outside
    threshold: float | None
    entropy_budget: float | None
    sharpening: float
    ban: Collection[int]
    hooks: Sequence[Hook]
    stop: bool
    preset: Literal["reference"] | None
    eps: float
    seed: int | Sequence[int]


@dataclass(frozen=True)
class Options:
    """How masks become text. `codd.Model.generate` takes all of these by name.

    Length: ``gen_length`` masks are put after every prompt (0: fill only the masks in the prompt itself), in blocks of
    ``block_length`` (``mode="block"``) or all at once, the circuit on a window that moves (``mode="full"``).

    Speed: ``steps`` evaluations of the network for each sequence, None for one a token; tokens are divided among them
    evenly, and what is left over goes to the early ones. Instead: ``threshold``, commit every token at least so
    probable, and at least one; with the any-order sampler the probability is the conditional one, given the tokens
    already picked in the step; with the latent one it is that given one path, which makes every token look sure: use
    any_order. ``entropy_budget``: commit in order while the entropies sum to less.

    Order: ``remasking`` says which tokens come first; ties go to the leftmost. ``sharpened`` is low_confidence with
    logits divided by ``sharpening``.

    Tokens: ``temperature`` 0 takes the most probable one, else tokens are drawn, from the ``top_k`` most probable and
    from the smallest set whose probability exceeds ``top_p``. ``ban``: ids that are never written (the mask never is).
    ``hooks`` may change the logits. ``cfg_scale``: guidance, u + (cfg_scale + 1)(c - u), with u seeing no prompt.

    Circuit: ``sampler`` draws one latent path and then tokens (latent), picks tokens one by one, each given the others
    (any_order), or leaves the circuit out. ``circuit_temperature`` divides the logits before the product, and the
    latents are drawn from that ("reference" in ``tempering``); "paper" draws the latents untempered and tempers the
    tokens given them. The circuit acts while the share of masks in its window is below ``activation``. ``outside``:
    what becomes of tokens that are due but not in the window, in full mode.

    ``stop`` ends a sequence at its end-of-text token. ``seed`` fixes everything: one number for all sequences, or one
    for each; two equal prompts with equal seeds get equal answers, whatever else is in the batch.
    ``preset="reference"`` is the published implementation step by step; ``eps`` is its last time in full mode.
    """

    gen_length: int = 128
    block_length: int = 32
    steps: int | None = 32
    mode: Mode = "block"
    remasking: str = "low_confidence"
    sampler: Sampler = "latent"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    cfg_scale: float = 0.0
    circuit_temperature: float = 1.0
    tempering: Tempering = "reference"
    activation: float | None = None
    outside: Outside = "factorized"
    threshold: float | None = None
    entropy_budget: float | None = None
    sharpening: float = 0.2
    ban: Collection[int] = ()
    hooks: Sequence[Hook] = ()
    stop: bool = True
    preset: Literal["reference"] | None = None
    eps: float = 1e-3
    seed: int | Sequence[int] = 0

    @classmethod
    def of(cls, **given: Any) -> "Options":
        """From keywords; one that does not exist is an error that names those that do."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise InvalidInput(f"there is no option {name!r}; there are {', '.join(known)}.")
        return cls(**given)

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        object.__setattr__(self, "remasking", ALIASES.get(self.remasking, self.remasking))
        orders = (*get_args(Order), *(REFERENCE_ORDERS if self.reference else ()))
        for name, allowed in _CHOICES.items():
            _one_of(name, getattr(self, name), allowed)
        _one_of("remasking", self.remasking, orders)
        for name, least, optional in _COUNTS:
            _check_count(name, getattr(self, name), least, optional)
        for name, (low, high, optional) in _RANGES.items():
            _check_number(name, getattr(self, name), low, high, optional)
        seeds = self.seed if isinstance(self.seed, Sequence) else [self.seed]
        _check_whole("seed", [*seeds], "a whole number, or one for each prompt")
        _check_whole("ban", list(self.ban) if isinstance(self.ban, Iterable) else [None], "a list of ids")
        if self.threshold is not None and self.entropy_budget is not None:
            raise InvalidInput("threshold and entropy_budget both say how many tokens to commit: give one of them.")
        if self.reference:
            self._check_reference()
        elif self.circuit_temperature <= 0:
            raise InvalidInput(f"circuit_temperature must be positive, found {self.circuit_temperature}.")

    @property
    def reference(self) -> bool:
        """Whether the published implementation is to be followed."""
        return self.preset == "reference"

    @property
    def counted(self) -> bool:
        """Whether a schedule says how many tokens a step commits."""
        return self.threshold is None and self.entropy_budget is None

    def as_json(self) -> dict[str, Any]:
        """All that JSON can write: everything but the hooks."""
        found = {name: value for name, value in vars(self).items() if name != "hooks"}
        return {**found, "ban": list(self.ban)}

    def changed(self, **changes: Any) -> "Options":
        """The same with something different."""
        return replace(self, **changes)

    def _check_reference(self) -> None:
        foreign = {
            "threshold": self.threshold,
            "entropy_budget": self.entropy_budget,
            "sampler": self.sampler if self.sampler == "any_order" else None,
            "tempering": self.tempering if self.tempering == "paper" else None,
            "outside": self.outside if self.outside == "defer" else None,
            "remasking": self.remasking if self.remasking in ("left_to_right", "sharpened") else None,
        }
        for name, value in foreign.items():
            if value is not None:
                raise InvalidInput(f"the reference knows no {name}={value!r}: leave it out, or leave the preset out.")


_CHOICES: dict[str, tuple[object, ...]] = {
    "mode": get_args(Mode),
    "sampler": get_args(Sampler),
    "tempering": get_args(Tempering),
    "outside": get_args(Outside),
    "preset": (None, "reference"),
}
_COUNTS = (("gen_length", 0, False), ("block_length", 1, False), ("steps", 1, True), ("top_k", 1, True))
_ENOUGH = math.nextafter(0, 1)
_RANGES = {
    "temperature": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, True),
    "cfg_scale": (0.0, math.inf, False),
    "circuit_temperature": (0.0, math.inf, False),
    "activation": (0.0, math.inf, True),
    "threshold": (0.0, 1.0, True),
    "entropy_budget": (0.0, math.inf, True),
    "sharpening": (_ENOUGH, math.inf, False),
    "eps": (_ENOUGH, math.nextafter(1, 0), False),
}


def _one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{name} must be one of {', '.join(map(repr, allowed))}, found {value!r}.")


def _check_count(name: str, value: object, least: int, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InvalidInput(f"{name} must be a whole number of at least {least}, found {value!r}.")


def _check_number(name: str, value: object, low: float, high: float, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, Real) or not low <= float(value) <= high or float(value) == math.inf:
        least = "more than 0" if low == _ENOUGH else f"at least {low:g}"
        most = "" if high == math.inf else " and less than 1" if high < 1 else f" and at most {high:g}"
        raise InvalidInput(f"{name} must be a number of {least}{most}, found {value!r}.")


def _check_whole(name: str, values: list[object], wanted: str) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidInput(f"{name} must be {wanted}, found {value!r}.")
