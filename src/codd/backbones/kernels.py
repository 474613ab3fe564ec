"""Whether a network takes PyTorch's functions or the kernels of `codd.backbones.triton`."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


@cache
def _triton() -> ModuleType | None:
    installed = importlib.util.find_spec("triton") is not None
    return importlib.import_module("codd.backbones.triton") if installed else None


def kernels_for(x: Tensor, weight: Tensor | None = None) -> ModuleType | None:
    """`codd.backbones.triton` where its kernels serve: on a GPU, without gradients, in one precision."""
    served = x.is_cuda and not torch.is_grad_enabled() and (weight is None or weight.dtype == x.dtype)
    return _triton() if served and not torch.compiler.is_compiling() else None
