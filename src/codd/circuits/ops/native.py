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


def _declare(found: ctypes.CDLL) -> ctypes.CDLL:
    found.codd_walk.argtypes = [_DATA] * 2 + [_SIZE] * 3 + [_REAL]
    found.codd_walk.restype = None
    found.codd_path.argtypes = [_DATA] * 6 + [_SIZE] * 4 + [_REAL]
    found.codd_path.restype = _SIZE
    return found


class _Walk(ctypes.Structure):
    """``walk`` of native.c."""

    _fields_ = (
        *((name, _DATA) for name in ("leaf", "products", "messages", "norms")),
        *((name, _SIZE) for name in ("length", "batch", "reverse", "keep")),
    )


@dataclass(frozen=True, eq=False)
class Walk:
    """A walk along chains of one length, with room for what comes of it."""

    matrix: Float[Tensor, "N N"]
    values: Float[Tensor, "L B N"]
    norms: Float[Tensor, "L B 1"]
    products: Float[Tensor, "L B N"]
    messages: Float[Tensor, "L B N"] | Float[Tensor, "1 B N"]
    reverse: bool
    keep_messages: bool
    every: int
    """Positions between two rescalings."""

    @classmethod
    def begun(
        cls,
        matrix: Float[Tensor, "N N"],
        first: Float[Tensor, " N"] | None,
        values: Float[Tensor, "L B N"],
        norms: Float[Tensor, "L B 1"],
        reverse: bool,
        keep_messages: bool,
        every: int,
    ) -> "Walk | None":
        """Before its first step; None if this case is not for here."""
        _, batch, states = values.shape
        if values.dtype != torch.float32 or batch * states * states > MAX_PRODUCT or library() is None:
            return None
        messages = torch.empty_like(values) if keep_messages else torch.empty_like(values[:1])
        messages[-1 if reverse and keep_messages else 0] = 1.0 if first is None else first
        return cls(matrix, values, norms, torch.empty_like(values), messages, reverse, keep_messages, every)

    @property
    def cost(self) -> int:
        """Multiplications."""
        return self.values.numel() * self.values.shape[-1]


def walk(walks: Sequence[Walk]) -> None:
    """Do walks that share matrix and rescaling, as ``chain.eager`` does one with NumPy.

    What becomes of one does not depend on the others, to the bit.
    """
    found = library()
    assert found is not None  # else there would be no walk
    rows = [(w.values, w.products, w.messages, w.norms) for w in walks]
    flags = [(*w.values.shape[:2], w.reverse, w.keep_messages) for w in walks]
    given = (_Walk * len(walks))(*(_Walk(*(x.data_ptr() for x in a), *b) for a, b in zip(rows, flags, strict=True)))
    matrix, tiny = walks[0].matrix, torch.finfo(torch.float32).tiny
    found.codd_walk(matrix.data_ptr(), given, len(walks), len(matrix), walks[0].every, tiny)


def path(
    matrix: Float[Tensor, "N N"],
    first: Float[Tensor, " N"],
    target: Float[Tensor, "L B N"],
    limits: Float[Tensor, "L S B"],
    faint: float,
) -> Int[Tensor, "L S B"] | None:
    """Paths by inverse CDF; None if this case is not for here, or needs logarithms."""
    if target.dtype != torch.float32 or (found := library()) is None:
        return None
    target = target.contiguous()
    out, work = torch.empty(limits.shape, dtype=torch.int64), torch.empty_like(first)
    length, samples, batch = limits.shape
    pointers = (x.data_ptr() for x in (matrix, first, target, limits, out, work))
    weak = found.codd_path(*pointers, length, samples, batch, len(first), faint)
    return None if weak else out
