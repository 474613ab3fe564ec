"""How a product is cut into tiles, one per program."""

import os
from typing import NamedTuple

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels run on a CPU in Triton's interpreter, which is slow: tiles are small there."""
PROGRAMS = 128
"""About one for each of a large GPU's processors: with fewer, the keys of a cache are shared out."""


class Tile(NamedTuple):
    """The part of a product that one program computes: rows and columns of the result, and depth a step."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    splits: int = 1
    """Programs that share the depth, and write sums that are added later."""
