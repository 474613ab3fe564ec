"""The chain over (latent, automaton state) on a GPU: a window's messages in one launch, by tables of the automaton.

A *row* holds the values of all latents for one state (or class, or group of classes), its largest value at one, with
the logarithm of what was taken out beside it; -inf marks a row that is zero, whose values are never read. All rows of
all states are kept, so that no launch depends on what the host knows of the text.
"""

from codd.circuits.ops.constrained.triton.leaf import commit as commit
from codd.circuits.ops.constrained.triton.leaf import leaf_parts as leaf_parts
from codd.circuits.ops.constrained.triton.marginals import token_marginals as token_marginals
from codd.circuits.ops.constrained.triton.messages import Messages as Messages
from codd.circuits.ops.constrained.triton.rows import DeviceRows as DeviceRows
from codd.circuits.ops.constrained.triton.rows import Place as Place
from codd.circuits.ops.constrained.triton.rows import stride_of as stride_of
from codd.circuits.ops.constrained.triton.rows import sums as sums
