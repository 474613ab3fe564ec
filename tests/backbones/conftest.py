from collections.abc import Iterator
from types import ModuleType

import pytest
import torch


@pytest.fixture
def kernels() -> Iterator[ModuleType]:
    """Memory that they leave unwritten is NaN."""
    found = pytest.importorskip("codd.backbones.triton")
    torch.use_deterministic_algorithms(True)
    yield found
    torch.use_deterministic_algorithms(False)
