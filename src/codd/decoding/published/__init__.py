"""The published implementation step by step (``preset="reference"``), quirks included: for comparison with its figures.

What differs from our own steps, all of it on purpose: confidences in the network's type, and (LLaDA) of noisy scores;
top-p, top-k and the temperature inside the confidences (Dream); scores of the circuit rounded to the network's type
and tempered a second time; tokens that are to be drawn (Dream) become the most probable ones throughout a step in which
PyTorch refuses the probabilities of any position, since they do not sum to 1 in the network's type; windows centred on
a target; targets outside the window forced; the mask may be written; no end at the end-of-text. The one thing that it
leaves open, which of equal confidences comes first, is settled as everywhere: the leftmost. Its random numbers are not
reproduced. Block-causal families have loops of their own (`codd.decoding.published.block_causal`).
"""

from collections.abc import Iterator

from jaxtyping import Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding import schedule as ours
from codd.decoding.options import Options
from codd.decoding.published import block_causal
from codd.decoding.published.check import check_block_causal, check_options
from codd.decoding.published.schedule import all_positions, bidirectional_steps, masked_positions
from codd.decoding.published.steps import block_step, full_step
from codd.decoding.state import SequenceState, StepInputs, StepPlan, StepResult, StopCondition
from codd.errors import InvalidInput

BLOCK_CAUSAL = ("sdar", "fast_dllm", "llada2")


def options_for(backbone: Backbone, options: Options) -> Options:
    """With the defaults of a block-causal family's own loop. Raises InvalidInput for one that has none."""
    family, size = backbone.family, backbone.block_size
    if size is None:
        return options
    if family not in BLOCK_CAUSAL:
        raise InvalidInput(f"{family} has no published loop with block-causal attention: leave the preset out.")
    return block_causal.with_defaults(options, family, size)


def check(backbone: Backbone, options: Options, circuit: ProbabilisticCircuit | None) -> None:
    """Raise InvalidInput for options that a family's published loop does not know."""
    if backbone.block_size is not None:
        check_block_causal(options, backbone.family, backbone.block_size, circuit)
    else:
        check_options(options, backbone.family, circuit)


def plan_steps(state: SequenceState, stop: StopCondition) -> Iterator[StepPlan]:
    """The steps of a sequence. Dream and block-causal families have their own loops, all others follow LLaDA's.

    Only block-causal ones heed ``stop``, unless the options say no.
    """
    if state.block_size is None:
        return bidirectional_steps(state)
    return block_causal.plan_steps(state, StopCondition() if state.options.stop is False else stop)


def positions(state: SequenceState, plan: StepPlan) -> Int[Tensor, " R"]:
    """The positions whose logits a step needs, ascending."""
    if state.block_size is not None:
        return ours.masked_positions(state, plan)
    options, full = state.options, state.options.mode == "full"
    windowed = full and state.circuit is not None and options.sampler != "factorized"
    everywhere = options.temperature > 0 and (windowed or (state.family == "dream" and not full))
    return (all_positions if everywhere else masked_positions)(state, plan)


def step(inputs: StepInputs) -> StepResult:
    """Which tokens to commit."""
    if inputs.state.block_size is not None:
        return block_causal.step(inputs)
    if inputs.options.mode == "full":
        return full_step(inputs)
    return block_step(inputs, dream=inputs.state.family == "dream")
