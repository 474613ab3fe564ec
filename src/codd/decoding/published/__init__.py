"""The published implementation step by step (``preset="reference"``), quirks included: for comparison with its figures.

What differs from our own steps, all of it on purpose: confidences in the network's type, and (LLaDA) of noisy scores;
top-p, top-k and the temperature inside the confidences (Dream); scores of the circuit rounded to the network's type
and tempered a second time; tokens that are to be drawn (Dream) become the most probable ones throughout a step in which
PyTorch refuses the probabilities of any position, since they do not sum to 1 in the network's type; windows centred on
a target; targets outside the window forced; the mask may be written; no end at the end-of-text. The one thing that it
leaves open, which of equal confidences comes first, is settled as everywhere: the leftmost. Its random numbers are not
reproduced. Bidirectional and block-causal families have loops of their own.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from jaxtyping import Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import PUBLISHED_ORDERS, Options
from codd.decoding.published import bidirectional, block_causal, causal_context, remasking
from codd.decoding.samplers import StepInputs, StepResult
from codd.decoding.sequence import SequenceState, StepPlan, StopCondition
from codd.errors import InvalidInput

MOST_STEPS = 100_000
COLDEST = 1e-3
"""The lowest temperature that does not overflow a half-precision logit."""


class Loop(Protocol):
    """The module of a published loop."""

    def plan_steps(self, state: SequenceState, stop: StopCondition) -> Iterator[StepPlan]:
        """The steps of a sequence."""

    def positions(self, state: SequenceState) -> Int[Tensor, " R"]:
        """The positions whose logits a step needs, ascending."""

    def step(self, inputs: StepInputs) -> StepResult:
        """Which tokens to commit."""


def loop_of(state: SequenceState) -> Loop:
    """Nemotron, DPLM and block-causal families have loops of their own, all others LLaDA's or Dream's."""
    if state.causal_context:
        return causal_context
    if state.block_size is not None:
        return block_causal
    return remasking if state.family == "esm" else bidirectional


def defaults(backbone: Backbone, options: Options) -> dict[str, Any]:
    """What a family's loop decides where the options leave it open."""
    if backbone.causal is not None and options.mode != "full":
        return {"steps": None if "steps" in options.unset else options.steps, "threshold": options.threshold}
    if backbone.block_size is not None:
        return block_causal.defaults(backbone.family, backbone.block_size, options)
    return {"steps": remasking.STEPS} if backbone.family == "esm" and "steps" in options.unset else {}


def never_written(backbone: Backbone) -> set[int]:
    """Tokens that a family's published loop never writes: of DPLM all special ones, of others none."""
    if backbone.family != "esm":
        return set()
    special = {getattr(backbone.special, name) for name in ("mask", "eos", "pad", "bos")}
    return (special | {remasking.UNKNOWN_RESIDUE}) - {None}


def check(backbone: Backbone, options: Options, circuit: ProbabilisticCircuit | None) -> None:
    """Raise InvalidInput for options that a family's published loop does not know, or a family that has none."""
    family, size, fixed = backbone.family, backbone.block_size, None if circuit is None else circuit.length
    causal = backbone.causal is not None and options.mode != "full"
    if causal:
        _check_causal_context(options, family)
    elif size is None:
        _check_bidirectional(options, family, fixed)
    elif family not in block_causal.LOOPS:
        raise InvalidInput(f"{family} has no published loop with block-causal attention: leave the preset out.")
    else:
        _check_block_causal(options, family, size)
    alone = causal or size is not None or family == "esm"
    if alone and circuit is not None and options.sampler != "factorized":
        raise InvalidInput(
            f'the published loop of {family} knows no circuit: give sampler="factorized", or leave the preset out.'
        )


def _check_bidirectional(options: Options, family: str, circuit_length: int | None) -> None:
    """Raise InvalidInput for what the published loop of a bidirectional family cannot do.

    LLaDA's loop divides gen_length and steps into blocks without remainder, and knows fewer orders than Dream's.
    """
    _refuse(options, "threshold", "editing_threshold", "cache", remasking=options.remasking == "left_to_right")
    dreams = ("topprob", "origin") if family == "dream" or options.mode == "full" else ()
    known = ("logit",) if family == "esm" else dreams
    if options.remasking in PUBLISHED_ORDERS and options.remasking not in known:
        raise InvalidInput(f"the published loop of {family} knows no remasking={options.remasking!r} in block mode.")
    if options.mode == "full" or family == "esm":
        return
    dream = family == "dream"
    blocks, rest = divmod(options.gen_length, options.block_length)
    steps = options.steps or options.gen_length
    if family != "a2d" and (rest or not blocks or (steps % blocks and not dream) or steps < blocks):
        raise InvalidInput(
            f"the published implementation needs gen_length ({options.gen_length}) to be a multiple of block_length "
            f"({options.block_length}), and steps ({steps}) of the number of blocks. Without the preset any will do."
        )
    if circuit_length is not None and options.block_length < circuit_length:
        raise InvalidInput(
            f"the published implementation needs block_length to be the circuit's {circuit_length}, not "
            f"{options.block_length}."
        )


def _check_block_causal(options: Options, family: str, size: int) -> None:
    """Raise InvalidInput for what the published loop of a block-causal family cannot do, or is not known to do here."""
    orders: Mapping[str, tuple[str, ...]] = {"sdar": ("low_confidence", "left_to_right")}
    by_threshold = family == "fast_dllm" or options.editing_threshold is not None
    _refuse(
        options,
        *("temperature", "cfg_scale"),
        remasking=options.remasking not in orders.get(family, ("low_confidence",)),
        editing_threshold=family != "llada2",
        steps=by_threshold,
        threshold=options.remasking == "left_to_right",
        cache=family != "fast_dllm" or options.cache != "dual",
    )
    blocks, rest = divmod(options.gen_length, size)
    if family == "stable_diffcoder" and (rest or not blocks or (options.steps or 0) % blocks):
        raise InvalidInput(
            f"the published loop of stable_diffcoder needs gen_length ({options.gen_length}) to be a multiple of {size}"
            f", and steps ({options.steps}) of the number of blocks."
        )
    if family == "stable_diffcoder" and options.threshold is not None and options.steps != options.gen_length:
        raise InvalidInput(
            "with a threshold the published loop of stable_diffcoder may leave a block before it is whole: give steps "
            f"{options.gen_length}, as many as tokens, not {options.steps}."
        )
    if family == "fast_dllm" and options.gen_length < size:
        raise InvalidInput(
            f"the published loop of fast_dllm writes whole blocks of {size}, found gen_length {options.gen_length}."
        )
    if family != "fast_dllm" and options.block_length != size:
        raise InvalidInput(
            f"the published loop of {family} has no sub-blocks: give block_length {size}, not {options.block_length}."
        )


def _check_causal_context(options: Options, family: str) -> None:
    """Raise InvalidInput for what Nemotron's published loops cannot do, or are not known to do here."""
    unknown = ("temperature", "cfg_scale", "editing_threshold", "steps", "cache")
    _refuse(options, *unknown, remasking=options.remasking != "low_confidence")
    if options.mode == "block" and options.gen_length % options.block_length:
        raise InvalidInput(
            f"the published loop of {family} writes whole blocks: give a gen_length that is a multiple of "
            f"{options.block_length}, not {options.gen_length}."
        )


def check_known(options: Options) -> None:
    """Raise InvalidInput for options that no published loop has."""
    if 0 < options.temperature < COLDEST:
        raise InvalidInput(
            "the published implementation divides by the temperature in the network's own precision, found "
            f"temperature={options.temperature!r}: give 0, or at least {COLDEST:g}."
        )
    if options.steps is not None and options.steps > MOST_STEPS:
        raise InvalidInput(f"steps must be at most {MOST_STEPS} for the published implementation, which takes all.")
    _refuse(
        options,
        "entropy_budget",
        sampler=options.sampler == "any_order",
        tempering=options.tempering == "paper",
        outside=options.outside == "defer",
        activation_scope=options.activation_scope == "sequence",
        activation_targets=options.activation_targets > 1,
    )


def _refuse(options: Options, *unknown: str, **wrong: bool) -> None:
    """Raise InvalidInput for the first option that is set and unknown, or set to something wrong."""
    for name in (*unknown, *(name for name, refused in wrong.items() if refused)):
        value = getattr(options, name)
        if value is not None and (value or name not in ("temperature", "cfg_scale")):  # which are off at 0
            raise InvalidInput(
                f"the published implementation knows no {name}={value!r} here: leave it out, or leave the preset out."
            )
