"""What the published implementation cannot be told."""

from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import PUBLISHED_ORDERS, Options
from codd.errors import InvalidInput

MOST_STEPS = 100_000
COLDEST = 1e-3
"""The lowest temperature that does not overflow a half-precision logit."""


def check_options(options: Options, family: str, circuit: ProbabilisticCircuit | None) -> None:
    """Raise InvalidInput for what the published loop of a family cannot do.

    LLaDA's loop divides gen_length and steps into blocks without remainder, and knows fewer orders than Dream's.
    """
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


def check_known(options: Options) -> None:
    """Raise InvalidInput for options that no published loop has."""
    foreign = {
        "threshold": options.threshold,
        "entropy_budget": options.entropy_budget,
        "sampler": options.sampler if options.sampler == "any_order" else None,
        "tempering": options.tempering if options.tempering == "paper" else None,
        "outside": options.outside if options.outside == "defer" else None,
        "remasking": options.remasking if options.remasking in ("left_to_right", "sharpened") else None,
    }
    if 0 < options.temperature < COLDEST:
        raise InvalidInput(
            "the published implementation divides by the temperature in the network's own precision, found "
            f"temperature={options.temperature!r}: give 0, or at least {COLDEST:g}."
        )
    if options.steps is not None and options.steps > MOST_STEPS:
        raise InvalidInput(f"steps must be at most {MOST_STEPS} for the published implementation, which takes all.")
    for name, value in foreign.items():
        if value is not None:
            raise InvalidInput(
                f"the published implementation knows no {name}={value!r}: leave it out, or leave the preset out."
            )
