"""The published implementation step by step (``preset="reference"``), quirks included: for comparison with its figures.

What differs from our own steps, all of it on purpose: confidences in the network's type, and (LLaDA) of noisy scores;
top-p, top-k and the temperature inside the confidences (Dream); scores of the circuit rounded to the network's type
and tempered a second time; tokens that are to be drawn (Dream) become the most probable ones throughout a step in which
PyTorch refuses the probabilities of any position, since they do not sum to 1 in the network's type; windows centred on
a target; targets outside the window forced; the mask may be written; no end at the end-of-text. The one thing that it
leaves open, which of equal confidences comes first, is settled as everywhere: the leftmost. Its random numbers are not
reproduced. Block-causal families have loops of their own (`codd.decoding.published.block_causal`).
"""

from functools import partial

from codd.backbones.backbone import Backbone
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import Options
from codd.decoding.published import block_causal
from codd.decoding.published.check import check_block_causal, check_options
from codd.decoding.published.schedule import all_positions, masked_positions, plan_steps
from codd.decoding.published.steps import block_step, full_step
from codd.decoding.state import Algorithm, StopCondition
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


def algorithm_for(
    options: Options, backbone: Backbone, circuit: ProbabilisticCircuit | None, stop: StopCondition
) -> Algorithm:
    """The published loop for a family: Dream and block-causal ones have their own, all others follow LLaDA's.

    Only block-causal ones heed ``stop``, unless the options say no. Raises InvalidInput for options that the loop does
    not know.
    """
    family = backbone.family
    if backbone.block_size is not None:
        check_block_causal(options, family, backbone.block_size, circuit)
        heeded = StopCondition() if options.stop is False else stop
        return block_causal.algorithm(family, backbone.block_size, heeded)
    check_options(options, family, circuit)
    full, dream = options.mode == "full", family == "dream"
    windowed = full and circuit is not None and options.sampler != "factorized"
    everywhere = options.temperature > 0 and (windowed or (dream and not full))
    step = full_step if full else partial(block_step, dream=dream)
    return Algorithm(plan_steps, all_positions if everywhere else masked_positions, step)
