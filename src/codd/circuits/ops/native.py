"""The sequential loops in C, compiled once by the machine's own compiler, if it has one.

A chain of 32 small products is over before Python has made as many calls. The library is kept in the user's cache,
under a name made of the source, the compiler and the processor; with no compiler, or with CODD_NATIVE=0, ``library``
is None and NumPy does the same work.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
_SIZE, _REAL, _DATA = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
MAX_PRODUCT = 2**23
"""Multiplications a step up to which one core in C beats a threaded matrix product."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if os.environ.get("CODD_NATIVE") == "0" or compiler is None or os.name != "posix":
        return None
    try:
        return _declare(ctypes.CDLL(str(_compiled(compiler))))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home folder
        return None


def _compiled(compiler: str) -> Path:
    """The path of the library, compiled if it is not in the cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=True).stdout
    key = hashlib.sha256(_SOURCE.read_bytes() + version + _processor()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "codd"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK)
    except OSError:
        owned = False
    if not owned:  # a library that others could write to is not loaded
        folder = Path(tempfile.mkdtemp(prefix="codd-"))
    target = folder / f"native-{key}.so"
    if not target.exists():
        _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    for flags in _FLAGS:
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
        command = [compiler, "-O3", *flags, "-shared", "-fPIC", "-o", name, str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        if done.returncode == 0:
            os.replace(name, target)  # complete or not there at all, whoever else compiles it now
            return
        os.unlink(name)
    raise OSError(f"{compiler} cannot compile {_SOURCE.name}")


def _processor() -> bytes:
    """What -march=native depends on: a home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = ""
    return f"{platform.machine()} {platform.processor()} {flags}".encode()


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.codd_run_passes.argtypes = [_DATA] * 2 + [_SIZE] * 3 + [_REAL]
    loaded.codd_run_passes.restype = None
    loaded.codd_path.argtypes = [_DATA] * 6 + [_SIZE] * 4 + [_REAL]
    loaded.codd_path.restype = _SIZE
    return loaded


class _ChainPass(ctypes.Structure):
    """``chain_pass`` of native.c."""

    _fields_ = (
        *((name, _DATA) for name in ("leaf", "products", "messages", "norms")),
        *((name, _SIZE) for name in ("length", "batch", "reverse", "keep")),
    )


@dataclass(frozen=True, eq=False)
class ChainPass:
    """One pass of messages along B chains of one length, forward or in reverse, with room for its results."""

    matrix: Float[Tensor, "N N"]
    values: Float[Tensor, "L B N"]
    norms: Float[Tensor, "L B 1"]
    products: Float[Tensor, "L B N"]
    messages: Float[Tensor, "L B N"] | Float[Tensor, "1 B N"]
    reverse: bool
    keep_messages: bool
    rescale_every: int
    """Positions between two rescalings."""

    @classmethod
    def prepared(
        cls,
        matrix: Float[Tensor, "N N"],
        first: Float[Tensor, " N"] | None,
        values: Float[Tensor, "L B N"],
        norms: Float[Tensor, "L B 1"],
        reverse: bool,
        keep_messages: bool,
        rescale_every: int,
    ) -> "ChainPass | None":
        """A pass before its first step; None if unsupported (the caller falls back to NumPy)."""
        _, batch, states = values.shape
        if values.dtype != torch.float32 or batch * states * states > MAX_PRODUCT or library() is None:
            return None
        messages = torch.empty_like(values) if keep_messages else torch.empty_like(values[:1])
        messages[-1 if reverse and keep_messages else 0] = 1.0 if first is None else first
        return cls(matrix, values, norms, torch.empty_like(values), messages, reverse, keep_messages, rescale_every)

    @property
    def cost(self) -> int:
        """Multiplications that the pass takes."""
        return self.values.numel() * self.values.shape[-1]


def run_passes(passes: Sequence[ChainPass]) -> None:
    """Run passes that share matrix and rescaling as one batch, as ``chain.eager`` runs one with NumPy.

    The results of one pass do not depend on the others, to the bit.
    """
    loaded = library()
    assert loaded is not None  # else `ChainPass.prepared` would have made none
    arrays = [(p.values, p.products, p.messages, p.norms) for p in passes]
    sizes = [(*p.values.shape[:2], p.reverse, p.keep_messages) for p in passes]
    structs = (_ChainPass(*(x.data_ptr() for x in a), *b) for a, b in zip(arrays, sizes, strict=True))
    arguments = (_ChainPass * len(passes))(*structs)
    matrix, tiny = passes[0].matrix, torch.finfo(torch.float32).tiny
    loaded.codd_run_passes(matrix.data_ptr(), arguments, len(passes), len(matrix), passes[0].rescale_every, tiny)


def path(
    matrix: Float[Tensor, "N N"],
    first: Float[Tensor, " N"],
    target: Float[Tensor, "L B N"],
    limits: Float[Tensor, "L S B"],
    faint: float,
) -> Int[Tensor, "L S B"] | None:
    """Paths by inverse CDF; None if unsupported or too faint for float32 (the caller falls back)."""
    if target.dtype != torch.float32 or (loaded := library()) is None:
        return None
    target = target.contiguous()
    out, work = torch.empty(limits.shape, dtype=torch.int64), torch.empty_like(first)
    length, samples, batch = limits.shape
    pointers = (x.data_ptr() for x in (matrix, first, target, limits, out, work))
    weak = loaded.codd_path(*pointers, length, samples, batch, len(first), faint)
    return None if weak else out
