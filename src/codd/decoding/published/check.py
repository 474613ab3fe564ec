"""What the published implementations cannot be told."""

from collections.abc import Mapping

from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import PUBLISHED_ORDERS, Options
from codd.errors import InvalidInput

MOST_STEPS = 100_000
COLDEST = 1e-3
"""The lowest temperature that does not overflow a half-precision logit."""


def check_options(options: Options, family: str, circuit: ProbabilisticCircuit | None) -> None:
    """Raise InvalidInput for what the published loop of a bidirectional family cannot do.

    LLaDA's loop divides gen_length and steps into blocks without remainder, and knows fewer orders than Dream's.
    """
    _refuse(
        threshold=options.threshold,
        editing_threshold=options.editing_threshold,
        remasking=options.remasking if options.remasking == "left_to_right" else None,
        cache=options.cache,
    )
    if options.mode == "full":
        return
    dream = family == "dream"
    if not dream and options.remasking in PUBLISHED_ORDERS:
        raise InvalidInput(f"the published loop of {family} knows no remasking={options.remasking!r} in block mode.")
    blocks, rest = divmod(options.gen_length, options.block_length)
    steps = options.steps or options.gen_length
    if rest or not blocks or (steps % blocks and not dream) or steps < blocks:
        raise InvalidInput(
            f"the published implementation needs gen_length ({options.gen_length}) to be a multiple of block_length "
            f"({options.block_length}), and steps ({steps}) of the number of blocks. Without the preset any will do."
        )
    fixed = None if circuit is None else circuit.length
    if fixed is not None and options.block_length < fixed:
        raise InvalidInput(
            f"the published implementation needs block_length to be the circuit's {fixed}, not {options.block_length}."
        )


def check_block_causal(options: Options, family: str, size: int, circuit: ProbabilisticCircuit | None) -> None:
    """Raise InvalidInput for what the published loop of a block-causal family cannot do, or is not known to do here."""
    orders: Mapping[str, tuple[str, ...]] = {"sdar": ("low_confidence", "left_to_right")}
    by_threshold = family == "fast_dllm" or options.editing_threshold is not None
    _refuse(
        temperature=options.temperature or None,
        cfg_scale=options.cfg_scale or None,
        remasking=None if options.remasking in orders.get(family, ("low_confidence",)) else options.remasking,
        editing_threshold=options.editing_threshold if family != "llada2" else None,
        steps=options.steps if by_threshold else None,
        threshold=options.threshold if options.remasking == "left_to_right" else None,
        cache=options.cache if family != "fast_dllm" or options.cache != "dual" else None,
    )
    if circuit is not None and options.sampler != "factorized":
        raise InvalidInput(
            f'the published loop of {family} knows no circuit: give sampler="factorized", or leave the preset out.'
        )
    if family == "fast_dllm" and options.gen_length < size:
        raise InvalidInput(
            f"the published loop of fast_dllm writes whole blocks of {size}, found gen_length {options.gen_length}."
        )
    if family != "fast_dllm" and options.block_length != size:
        raise InvalidInput(
            f"the published loop of {family} has no sub-blocks: give block_length {size}, not {options.block_length}."
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
        entropy_budget=options.entropy_budget,
        sampler=options.sampler if options.sampler == "any_order" else None,
        tempering=options.tempering if options.tempering == "paper" else None,
        outside=options.outside if options.outside == "defer" else None,
        activation_scope=options.activation_scope if options.activation_scope == "sequence" else None,
        activation_targets=options.activation_targets if options.activation_targets > 1 else None,
    )


def _refuse(**foreign: object) -> None:
    """Raise InvalidInput for the first option that has a value."""
    for name, value in foreign.items():
        if value is not None:
            raise InvalidInput(
                f"the published implementation knows no {name}={value!r} here: leave it out, or leave the preset out."
            )
