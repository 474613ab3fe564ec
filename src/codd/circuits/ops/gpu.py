"""What the kernels of several operations ask of the device that they run on."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU, one program after the other: tests without a GPU."""


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has: programs that can run at the same time. In the interpreter: 1."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
