"""Patience of PyTorch's threads, set before PyTorch is loaded: that is when its OpenMP runtime reads it.

Between two operations its threads spin, by default for long. If another process wants the same cores they spin in each
other's way: two processes with a thread a core do one fortieth of the work that one does alone. With a short spin alone
is as fast as before, and two share fairly (docs/results/cost.md). What the user has set stays.
"""

import os
import sys

SPIN = "3000"

if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
