# ruff: noqa: RUF009 (the functions that declare options return fields of the dataclass)
"""Decoding options: the one list from which keywords, command-line flags, request fields and evaluation axes are made.

Every field of `Options` carries an `OptionInfo`: its range, its help, and whether it concerns the circuit only.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypedDict, get_args

from codd.constraints import Automaton, Language, Template
from codd.errors import InvalidInput, shown

Mode = Literal["block", "full", "speculative"]
Order = Literal["low_confidence", "margin", "entropy", "random", "left_to_right"]
Sampler = Literal["latent", "any_order", "factorized"]
Tempering = Literal["published", "paper"]
Outside = Literal["factorized", "defer"]
ActivationScope = Literal["window", "sequence"]
CacheKind = Literal["prefix", "dual"]
Blocks = Literal["sliding", "fixed"]
Hook = Callable[[Any, Any, Any], Any]
"""A function of logits (R, V), the masked positions (R,) that they are of, and the ids (L,); returns logits (R, V)."""
Constraint = Language | Template | Automaton
"""What a text can be asked to be: see `codd.constraints`."""
UNTYPED = ("hooks", "constraint", "verifier")
"""The options that JSON cannot hold, or that are not for a client of a server to choose."""

OTHER_NAMES = {"max_new_tokens": "gen_length"}
"""Other people's names for the same options."""
ALIASES = {"maskgit_plus": "low_confidence", "topk_margin": "margin"}
"""Other people's names for the same orders."""
PUBLISHED_ORDERS = ("topprob", "origin", "logit")
"""Orders that only the published implementation has."""
LARGEST = 2**31 - 1
"""No count of tokens or steps is larger: beyond it kernels would overflow instead of complaining."""
MOST_EDIT_STEPS = 1000
"""Edits may go round in circles: nobody should be able to ask a server for that without end."""
MOST_BITS = 1024
"""The most bits of a seed or an id: Python refuses to print very long numbers."""
HOTTEST = 1000.0
"""The highest temperature and guidance: beyond it, all tokens are alike, or logits overflow."""
COLDEST = 0.001
"""The lowest temperature of the circuit."""
PACES = ("steps", "threshold", "entropy_budget")
"""The options that say how many tokens a step commits: a run has one of them."""
RULE = (*PACES, "min_tokens", "blocks")
"""These, and the options that complete them: chosen together where nobody says."""
DEFAULT_BLOCK = 32
"""Tokens of a block where neither options nor network say."""
DEFAULT_THRESHOLD = 0.97
DEFAULT_GREEDY: Mapping[str, Any] = {"threshold": DEFAULT_THRESHOLD, "blocks": "sliding"}
"""The pace of a run that is told none, at temperature 0; chosen by measurement (docs/results/default.md)."""
DEFAULT_SAMPLED: Mapping[str, Any] = {**DEFAULT_GREEDY, "min_tokens": 5}
"""The pace of a run that is told none, above temperature 0, where few tokens of prose reach any threshold."""
HEAD_START = 4
"""Steps for which ``min_tokens`` demands nothing: an answer begins with steps that are sure of few tokens."""
DEFAULT_COUNTED: Mapping[str, Any] = {"steps": 32}
"""The pace where nobody can tell how sure a token is: the latent sampler and the published implementation."""
_UNSET: Any = type("Unset", (), {"__repr__": lambda self: "unset"})()


@dataclass(frozen=True)
class OptionInfo:
    """What an option takes and does, for whatever reads options from text or JSON."""

    kind: Literal["count", "number", "choice", "ids", "stop", "seed", "hooks", "constraint", "verifier"]
    help: str
    low: int | float = 0.0
    high: int | float = math.inf
    choices: tuple[str, ...] = ()
    optional: bool = False
    """Whether None is a valid value."""
    circuit: bool = False
    """Whether it concerns the circuit only: the network alone ignores it."""
    metavar: str = ""
    """What stands for a value in ``--help``."""

    def check(self, name: str, value: object) -> None:
        """Raise InvalidInput unless ``value`` is of the right type and in range."""
        if value is None and self.optional:
            return
        if self.kind == "choice" and not (isinstance(value, str) and value in self.choices):
            choices = (*map(repr, self.choices), *(("None",) if self.optional else ()))
            raise InvalidInput(f"{name} must be one of {', '.join(choices)}, found {shown(value)}.")
        if self.kind in ("count", "number") and not self._in_range(value):
            kind, form = ("whole number", "d") if self.kind == "count" else ("number", "g")
            most = f" and at most {self.high:{form}}" if self.high < math.inf else ""
            raise InvalidInput(f"{name} must be a {kind} of at least {self.low:{form}}{most}, found {shown(value)}.")

    def _in_range(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.kind == "count" else Real):
            return False
        number: Any = value  # compared as it is: a large integer has no float
        return bool(self.low <= number <= self.high and number != math.inf)


def _option(default: Any, kind: Any, help: str, metavar: str = "", **limits: Any) -> Any:
    return field(default=default, metadata={"info": OptionInfo(kind, help, metavar=metavar, **limits)})


def _count(default: Any, help: str, metavar: str = "N", *, low: int = 1, high: int = LARGEST, **flags: bool) -> Any:
    return _option(default, "count", help, metavar, low=low, high=high, **flags)


def _number(default: Any, help: str, metavar: str, **limits: Any) -> Any:
    return _option(default, "number", help, metavar, **limits)


def _choice(default: Any, help: str, choices: Sequence[str], metavar: str = "", **flags: bool) -> Any:
    return _option(default, "choice", help, metavar or "|".join(choices), choices=tuple(choices), **flags)


class Keywords(TypedDict, total=False):
    """The fields of `Options` and their other names, for editors and type checkers to complete and check."""

    gen_length: int
    max_new_tokens: int
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
    activation_scope: ActivationScope
    activation_targets: int
    outside: Outside
    threshold: float | None
    entropy_budget: float | None
    min_tokens: int
    blocks: Blocks
    editing_threshold: float | None
    max_post_steps: int
    ban: Collection[int]
    hooks: Sequence[Hook]
    constraint: Constraint | None
    stop: bool | str | Sequence[str]
    preset: Literal["reference"] | None
    verifier: Any
    cache: CacheKind | None
    refresh: int | None
    seed: int | Sequence[int]


@dataclass(frozen=True)
class Options:
    """How masks become text. `codd.Model.generate` takes an object of these, or all of them by name.

    Length: ``gen_length`` masks are put after every prompt (0: fill only the masks in the prompt itself), in blocks of
    ``block_length`` (``mode="block"``) or all at once, the circuit on a window that moves (``mode="full"``). A network
    with block-causal attention brings its own blocks, counted from the text's first token: ``block_length`` is then
    theirs by default, or divides them into sub-blocks.

    Speed, one of: ``steps``, network evaluations for each sequence (None: one per token) among which tokens are divided
    evenly, the early ones taking what is left over; ``threshold``, commit every token at least so probable, and at
    least one (with the any-order sampler the probability is conditional on the tokens already picked in the step);
    ``entropy_budget``, commit in order while the entropies (nats) sum to less. Two of them at once are an error, and so
    are the last two with the latent sampler: given one path every token looks sure. With the last two steps commit at
    least ``min_tokens`` on average, the first `HEAD_START` not counted: one that would fall behind takes the first ones
    of its block in the order, at most ``min_tokens``. With ``blocks="sliding"`` a step begins at the first mask and
    also sees as much of the next block, of whose tokens it commits those that the rule lets pass. If no speed is given,
    it is `DEFAULT_GREEDY` at temperature 0, `DEFAULT_SAMPLED` above, and `DEFAULT_COUNTED` with the latent sampler or
    the preset; `changed` chooses anew while nobody gave one.

    Order: ``remasking`` says which tokens come first; ties go to the leftmost. Under a threshold all that
    reach it are committed whatever the order, which then only says which one is committed where none does.

    Editing: with ``editing_threshold`` a step also replaces tokens that it wrote before in the same block, where the
    network prefers another with a probability above it; a block without masks is gone over again until nothing changes,
    at most ``max_post_steps`` times.

    Tokens: ``temperature`` 0 takes the most probable one, else tokens are drawn, from the ``top_k`` most probable and
    from the smallest set whose probability exceeds ``top_p``. ``ban``: ids that are never written (the mask never is).
    ``hooks`` may change the logits. ``constraint``: a language of `codd.constraints` that the text, up to its end, is
    in: network and circuit given that, exactly. With ``gen_length=0`` it is about the prompt's masks, with what stands
    between the first and the last. ``cfg_scale``: guidance, u + (cfg_scale + 1)(c - u), with u seeing no prompt.

    Circuit: ``sampler`` picks tokens one by one, each given the others (any_order, the default), draws one latent path
    and then tokens (latent, the default of the preset), or leaves the circuit out. ``circuit_temperature`` divides the
    logits before the product, and the latents are drawn from that ("published" in ``tempering``); "paper" draws the
    latents untempered and tempers the tokens given them, and with any_order each token's conditional given the others.
    The circuit acts while the share of masks is below ``activation``: the share in its window, or with
    ``activation_scope="sequence"`` that of all positions that the run is to write. In full mode it acts only where its
    window covers at least ``activation_targets`` of the due tokens; ``outside``: what becomes of those beside it.

    KV cache: None computes every position in every step, exactly. With "prefix" a step computes its block and what
    follows, with "dual" its block alone; all else is seen as it was in the full pass that began the block, or in the
    latest one, if there is another after every ``refresh`` others. Block-causal networks always have their exact cache.

    ``stop`` ends a sequence at its end-of-text token (True), or also before any of the given texts. ``seed`` fixes
    everything: one number for all sequences, or one for each; two equal prompts with equal seeds get equal answers,
    whatever else is in the batch. ``preset="reference"`` is the published implementation step by step; that of
    block-causal networks may have ``steps`` (in a block) and ``threshold`` at once.

    Raises InvalidInput for a value out of its range, and for options that contradict each other.
    """

    gen_length: int = _count(128, "masks put after each prompt; 0: only the masks in the prompt are filled", low=0)
    block_length: int = _count(_UNSET, "tokens of a block; by default a block-causal network's own")
    steps: int | None = _count(_UNSET, "network evaluations for each prompt; null: one for each token", optional=True)
    mode: Mode = _choice(
        "block", "block after block, everything at once, or drafts that a causal model checks", get_args(Mode)
    )
    remasking: str = _choice(
        "low_confidence",
        f"which tokens come first: {', '.join(get_args(Order)[:-1])} or {get_args(Order)[-1]}",
        (*get_args(Order), *ALIASES, *PUBLISHED_ORDERS),
        "ORDER",
    )
    sampler: Sampler = _choice(
        _UNSET,
        "how the circuit is used: any_order, latent, or factorized for not at all",
        get_args(Sampler),
        "NAME",
        circuit=True,
    )
    temperature: float = _number(0.0, "of the tokens; 0 takes the most probable one", "T", high=HOTTEST)
    top_p: float | None = _number(
        None, "draw from the smallest set of tokens that is more probable than this", "P", high=1.0, optional=True
    )
    top_k: int | None = _count(None, "draw from so many of the most probable tokens", "K", optional=True)
    cfg_scale: float = _number(0.0, "guidance by the prompt; 0 is none", "X", high=HOTTEST)
    circuit_temperature: float = _number(
        1.0, "divides the logits before the product with the circuit", "T", high=HOTTEST, circuit=True
    )
    tempering: Tempering = _choice(
        "published",
        "whether circuit_temperature divides the logits, or sharpens what the product says of each token",
        get_args(Tempering),
        circuit=True,
    )
    activation: float | None = _number(
        None,
        "the circuit acts while the share of masks is below this; null: always",
        "RATIO",
        optional=True,
        circuit=True,
    )
    activation_scope: ActivationScope = _choice(
        "window",
        "where masks are counted for activation: in the circuit's window, or in all that is to be written",
        get_args(ActivationScope),
        circuit=True,
    )
    activation_targets: int = _count(
        1, "in full mode the circuit acts where so many due tokens are in its window", circuit=True
    )
    outside: Outside = _choice(
        "factorized",
        "what becomes of due tokens outside of the window in full mode",
        get_args(Outside),
        circuit=True,
    )
    threshold: float | None = _number(
        None, "commit all tokens at least so probable instead of a fixed number", "P", high=1.0, optional=True
    )
    entropy_budget: float | None = _number(
        None, "commit tokens while their entropies (nats) sum to less", "NATS", optional=True
    )
    min_tokens: int = _count(
        _UNSET, f"by threshold or entropy budget, tokens per step on average, at least, after the first {HEAD_START}"
    )
    blocks: Blocks = _choice(
        _UNSET,
        "sliding: by threshold or entropy budget a step begins at the first mask and looks beyond its block; or fixed",
        get_args(Blocks),
    )
    editing_threshold: float | None = _number(
        None,
        "replace written tokens of the block where another is more probable than this",
        "P",
        high=1.0,
        optional=True,
    )
    max_post_steps: int = _count(
        16, "evaluations at most that only edit, for each block without masks", low=0, high=MOST_EDIT_STEPS
    )
    ban: Collection[int] = _option((), "ids", "token ids that are never written", "ID,ID")
    hooks: Sequence[Hook] = _option((), "hooks", "functions that change the logits")
    constraint: Constraint | None = _option(None, "constraint", "a language that the text must be in", optional=True)
    stop: bool | str | Sequence[str] = _option(True, "stop", "end at the end-of-text token, or also before a text")
    preset: Literal["reference"] | None = _choice(
        None, "follow the published implementation step by step", ("reference",), optional=True
    )
    verifier: Any = _option(
        None,
        "verifier",
        "the causal model that checks drafts, or its folder; by default the network's own",
        "PATH",
        optional=True,
    )
    cache: CacheKind | None = _choice(
        None,
        "a KV cache where attention is to all positions: of all before the block, or of all outside of it",
        get_args(CacheKind),
        optional=True,
    )
    refresh: int | None = _count(
        None, "a full pass after so many with the cache, beside those that begin a block", optional=True
    )
    seed: int | Sequence[int] = _option(0, "seed", "fixes everything that is drawn", "N")

    unset: ClassVar[frozenset[str]] = frozenset()
    """Options left unset, of sampler, pace and block length. Not compared; `changed` chooses them anew."""

    @classmethod
    def of(cls, **given: Any) -> "Options":
        """From keywords; one that does not exist is an error that names those that do."""
        return cls(**_by_name(given))

    def changed(self, **changes: Any) -> "Options":
        """A copy with some options replaced; a new pace takes the place of the old one.

        ``steps=None`` is a pace, one token per step; None for the others withdraws them. What nobody gave of sampler,
        pace and block length is chosen anew, by the other options.
        """
        changes = _by_name(changes)
        dropped = set(self.unset)
        own = {"steps", *self.commit_rule} - {"min_tokens", "blocks"}
        if own & changes.keys() or any(changes.get(name) is not None for name in PACES):
            dropped.update(RULE if "steps" in changes else PACES)
        kept = {name: getattr(self, name) for name in OPTIONS if name not in dropped}
        return Options(**{**kept, **changes})

    def __post_init__(self) -> None:
        """Refuse values out of their range and options that contradict each other."""
        self._choose_defaults()
        for name, info in OPTIONS.items():
            info.check(name, getattr(self, name))
        object.__setattr__(self, "remasking", ALIASES.get(self.remasking, self.remasking))
        if self.remasking in PUBLISHED_ORDERS and not self.published:
            known = ", ".join(map(repr, get_args(Order)))
            raise InvalidInput(f"remasking must be one of {known}, found {self.remasking!r}.")
        _check_whole(
            "seed",
            self.seed if isinstance(self.seed, Sequence) else [self.seed],
            "a whole number, or one for each prompt",
        )
        if not isinstance(self.ban, Collection):
            raise InvalidInput(f"ban must be a list of ids, found {shown(self.ban)}.")
        _check_whole("ban", self.ban, "a list of ids")
        _check_hooks(self.hooks)
        _check_stop(self.stop)
        self._check_constraint()
        self._check_rule()
        if self.mode == "speculative" and not self.published:
            from codd.decoding.speculative import check_options

            check_options(self)
        if self.published:
            from codd.decoding.published import check_known

            check_known(self)
        elif self.sampler == "latent" and not self.fixed_count:
            name, value = next(iter(self.commit_rule.items()))
            raise InvalidInput(
                f'{name}={value:g} does not go with sampler="latent", to which every token looks sure: '
                'sampler="any_order" does it exactly, or give steps.'
            )
        if self.circuit_temperature < COLDEST and not (self.published and self.circuit_temperature == 0):
            raise InvalidInput(
                f"circuit_temperature must be at least {COLDEST:g}, found {self.circuit_temperature!r}; 0 is known to "
                'preset="reference" alone, for which it means 1.'
            )

    def _check_rule(self) -> None:
        fixed, sliding = self.fixed_count or self.published, self.blocks == "sliding"
        if fixed and (sliding or self.min_tokens > 1):
            name, value = ("blocks", "'sliding'") if sliding else ("min_tokens", self.min_tokens)
            raise InvalidInput(f"{name}={value} is about steps by threshold or entropy_budget: give one, or drop it.")
        if sliding and (self.mode != "block" or self.editing_threshold is not None):
            other = "editing_threshold" if self.mode == "block" else f"mode={self.mode!r}"
            raise InvalidInput(f"blocks='sliding' does not go with {other}, which has blocks of its own: drop one.")

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        if not isinstance(self.constraint, Constraint):
            raise InvalidInput(
                "constraint must be a Regex, JsonSchema, Choice, Template or Automaton of codd.constraints, found "
                f"{shown(self.constraint)}."
            )
        others = {
            "preset": self.published,
            "editing_threshold": self.editing_threshold is not None,
            "stop": bool(self.stop_strings),
        }
        for name in (name for name, given in others.items() if given):
            raise InvalidInput(f"a constraint does not go with {name}, which could leave the language: drop one.")

    def _choose_defaults(self) -> None:
        """Exactly one of steps, threshold and entropy_budget, a sampler and a block length, by what was given."""
        paces: Mapping[str, Any] = {
            name: value for name in PACES if (value := getattr(self, name)) is not None and value is not _UNSET
        }
        if len(paces) > 1 and not (self.published and paces.keys() == {"steps", "threshold"}):
            one, other = list(paces.items())[:2]
            raise InvalidInput(
                f"{one[0]}={shown(one[1])} and {other[0]}={shown(other[1])} both say how many tokens a step commits: "
                f"drop {one[0]} to commit by {other[0]}, or drop {other[0]}."
            )
        unset = set()
        if self.block_length is _UNSET:
            unset.add("block_length")
            object.__setattr__(self, "block_length", DEFAULT_BLOCK)
        if self.sampler is _UNSET:
            unset.add("sampler")
            object.__setattr__(self, "sampler", "latent" if self.published else "any_order")
        rule: dict[str, Any] = {"steps": None, "min_tokens": 1, "blocks": "fixed"}
        if self.steps is _UNSET and not paces:
            unset.update(PACES)
            counted = self.published or self.sampler == "latent"
            rule |= DEFAULT_COUNTED if counted else DEFAULT_GREEDY if self.temperature == 0 else DEFAULT_SAMPLED
            if self.mode != "block" or self.editing_threshold is not None:
                rule["blocks"] = "fixed"
        unset.update(name for name in RULE[-2:] if getattr(self, name) is _UNSET)
        for name in RULE:
            if name in unset or getattr(self, name) is _UNSET:
                object.__setattr__(self, name, rule.get(name))
        object.__setattr__(self, "unset", frozenset(unset))

    @property
    def published(self) -> bool:
        """Whether the published implementation is to be followed step by step."""
        return self.preset == "reference"

    @property
    def commit_rule(self) -> dict[str, Any]:
        """The one of steps (may be None), threshold and entropy_budget by which it commits, and what completes it.

        That is ``min_tokens`` where it is not 1, and ``blocks`` where they are not fixed.
        """
        pace = {name: value for name in PACES[1:] if (value := getattr(self, name)) is not None}
        more = {"min_tokens": self.min_tokens} if self.min_tokens > 1 else {}
        return (pace or {"steps": self.steps}) | more | ({} if self.blocks == "fixed" else {"blocks": self.blocks})

    @property
    def fixed_count(self) -> bool:
        """Whether the schedule says how many tokens a step commits."""
        return self.threshold is None and self.entropy_budget is None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts before which a sequence ends."""
        if isinstance(self.stop, bool):
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stops(self) -> bool:
        """Whether a sequence may end before all of its masks are filled."""
        return self.stop is not False and not self.published

    def as_json(self) -> dict[str, Any]:
        """All options but hooks, constraint and verifier, which JSON cannot hold."""
        values = {name: getattr(self, name) for name in OPTIONS if name not in UNTYPED}
        return {**values, "ban": list(self.ban)}


OPTIONS: dict[str, OptionInfo] = {each.name: each.metadata["info"] for each in fields(Options)}
"""Every option by its name."""
CIRCUIT_OPTIONS = tuple(name for name, info in OPTIONS.items() if info.circuit)
"""The options that only a circuit heeds: without one, they change nothing."""


def _by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options by our own names. Raises InvalidInput for one that does not exist, or that is given by two names."""
    found: dict[str, Any] = {}
    for given_name, value in given.items():
        name = OTHER_NAMES.get(given_name, given_name)
        if name not in OPTIONS:
            close = difflib.get_close_matches(given_name, [*OPTIONS, *OTHER_NAMES], 1)
            known = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(OPTIONS)}."
            raise InvalidInput(f"there is no option {given_name!r}: {known}")
        if name in found:
            twice = " and ".join(other for other in given if OTHER_NAMES.get(other, other) == name)
            raise InvalidInput(f"{twice} are one option: give one.")
        found[name] = value
    return found


def _check_whole(name: str, values: Iterable[object], expected: str) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value).bit_length() > MOST_BITS:
            raise InvalidInput(f"{name} must be {expected}, found {shown(value)}.")


def _check_hooks(hooks: object) -> None:
    if callable(hooks):
        raise InvalidInput("hooks must be a list of functions, found one function: give hooks=[function].")
    if not isinstance(hooks, Sequence) or isinstance(hooks, str) or not all(map(callable, hooks)):
        raise InvalidInput(f"hooks must be a list of functions of logits, positions and ids, found {shown(hooks)}.")


def _check_stop(stop: object) -> None:
    texts = [stop] if isinstance(stop, bool | str) else list(stop) if isinstance(stop, Sequence) else [None]
    if not all(isinstance(text, bool) or (isinstance(text, str) and text) for text in texts) or (
        not isinstance(stop, bool) and any(isinstance(text, bool) for text in texts)
    ):
        raise InvalidInput(
            f"stop must be True, False, a text or a list of texts that are not empty, found {shown(stop)}."
        )


DEFAULTS = Options()
"""What a run does that is told nothing."""


def default_in_words(name: str) -> str:
    """What an option is where nobody says, for ``--help`` and tables: of the pace it depends on other options."""
    if name not in RULE:
        value = getattr(DEFAULTS, name)
        return "none" if value is None or value == () else str(value)
    cases = {
        "where no pace is given": DEFAULT_GREEDY,
        "above temperature 0": {k: v for k, v in DEFAULT_SAMPLED.items() if DEFAULT_GREEDY.get(k) != v},
        "with sampler latent": DEFAULT_COUNTED,
    }
    said = ", ".join(f"{pace[name]} {case}" for case, pace in cases.items() if name in pace) or "none"
    return said + {"min_tokens": ", else 1", "blocks": ", else fixed"}.get(name, "")
