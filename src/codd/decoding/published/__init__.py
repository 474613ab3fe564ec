"""The published implementation step by step (``preset="reference"``), quirks included: for comparison with its figures.

What differs from our own steps, all of it on purpose: confidences in the network's type, and (LLaDA) of noisy scores;
top-p, top-k and the temperature inside the confidences (Dream); scores of the circuit rounded to the network's type
and tempered a second time; windows centred on a target; targets outside the window forced; the mask may be written;
no end at the end-of-text. The one thing that it leaves open, which of equal confidences comes first, is settled as
everywhere: the leftmost. Its random numbers are not reproduced.
"""

from functools import partial

from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import Options
from codd.decoding.published.check import check_options
from codd.decoding.published.schedule import masked_positions, plan_steps
from codd.decoding.published.steps import block_step, full_step
from codd.decoding.state import Algorithm


def algorithm_for(options: Options, family: str, circuit: ProbabilisticCircuit | None) -> Algorithm:
    """The published loop for a family: Dream has its own sampling, all others follow LLaDA's.

    Raises InvalidInput for options that it does not know.
    """
    check_options(options, family, circuit)
    step = full_step if options.mode == "full" else partial(block_step, dream=family == "dream")
    return Algorithm(plan_steps, masked_positions, step)
