"""Where kernels are tested, a GPU or the host with Triton's interpreter, and random numbers there."""

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
