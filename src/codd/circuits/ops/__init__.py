"""The operations of the engine, each in four implementations behind one signature.

"reference" is the float64 reference, the truth that the others are compared with; "eager" is PyTorch, and NumPy for
short loops on a CPU; "native" has these loops in C; "triton" are the GPU kernels.

``backend_for`` picks one by device, once; ``use`` overrides the choice, for tests and for study:

    with ops.use("reference"):
        hmm.log_partition(evidence)
"""

from codd.circuits.ops.backend import Backend as Backend
from codd.circuits.ops.backend import backend_for as backend_for
from codd.circuits.ops.backend import use as use
from codd.circuits.ops.scaled import Scaled as Scaled
