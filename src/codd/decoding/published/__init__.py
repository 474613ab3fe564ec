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

from jaxtyping import Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import PUBLISHED_ORDERS, Options
from codd.decoding.published import bidirectional, block_causal
from codd.decoding.samplers import StepInputs, StepResult
from codd.decoding.sequence import SequenceState, StepPlan, StopCondition
from codd.errors import InvalidInput

MOST_STEPS = 100_000
COLDEST = 1e-3
"""The lowest temperature that does not overflow a half-precision logit."""
BLOCK_CAUSAL = ("sdar", "fast_dllm", "llada2")


def plan_steps(state: SequenceState, stop: StopCondition) -> Iterator[StepPlan]:
    """The steps of a sequence. Dream and block-causal families have their own loops, all others follow LLaDA's.

    Only block-causal ones heed ``stop``, unless the options say no.
    """
    if state.block_size is None:
        return bidirectional.plan_steps(state)
    return block_causal.plan_steps(state, StopCondition() if state.options.stop is False else stop)


def positions(state: SequenceState) -> Int[Tensor, " R"]:
    """The positions whose logits a step needs, ascending."""
    assert state.plan is not None
    return bidirectional.positions(state) if state.block_size is None else state.masked_in(state.plan.block)


def step(inputs: StepInputs) -> StepResult:
    """Which tokens to commit."""
    return bidirectional.step(inputs) if inputs.state.block_size is None else block_causal.step(inputs)


def check(backbone: Backbone, options: Options, circuit: ProbabilisticCircuit | None) -> None:
    """Raise InvalidInput for options that a family's published loop does not know, or a family that has none."""
    family, size = backbone.family, backbone.block_size
    if size is None:
        _check_bidirectional(options, family, circuit)
    elif family not in BLOCK_CAUSAL:
        raise InvalidInput(f"{family} has no published loop with block-causal attention: leave the preset out.")
    else:
        _check_block_causal(options, family, size, circuit)


def _check_bidirectional(options: Options, family: str, circuit: ProbabilisticCircuit | None) -> None:
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


def _check_block_causal(options: Options, family: str, size: int, circuit: ProbabilisticCircuit | None) -> None:
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
