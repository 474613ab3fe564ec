"""Where a figure comes from: machine, versions, revision, command."""

import contextlib
import functools
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import codd.errors

PACKAGES = "codd-lm codd-lab torch lm_eval datasets transformers numpy tokenizers math-verify".split()  # noqa: SIM905


def provenance(device: torch.device | str, dtype: torch.dtype | str) -> dict[str, Any]:
    """Machine, versions, revision and command of a measurement, as JSON can write them."""
    device = torch.device(device)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine(device),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "revision": revision(),
    }


def machine(device: torch.device) -> str:
    """The name of the GPU, or of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {os.cpu_count()} cores"


@functools.cache
def _processor() -> str:
    """The processor's name: from /proc on Linux, elsewhere what Python says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the installed packages that can change a figure."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


@functools.cache
def revision() -> str | None:
    """The commit of the checkout that codd is run from, marked if files were changed; None if it is installed."""
    root = Path(codd.errors.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    told = ("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", "src")
    try:
        commit, changed = (
            subprocess.check_output(["git", "-C", str(root), *each], text=True, stderr=subprocess.DEVNULL).strip()
            for each in told
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}{'+changes' if changed else ''}"
