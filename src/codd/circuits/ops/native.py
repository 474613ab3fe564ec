"""The sequential loops in C, compiled once by the machine's own compiler, if it has one.

A chain of 32 small products is over before Python has made as many calls. The library is kept in the user's cache,
under a name made of the source, the compiler and the processor; with no compiler (the log says so once), or with
CODD_NATIVE=0, ``library`` is None and NumPy does the same work.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.files import cache_folder

_log = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
_SIZE, _REAL, _DATA = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SMALLEST = 2.0**-62
"""The smallest number that 16 bits hold as `narrowed` makes them."""
PANEL = 32
"""Columns of the matrix that lie together in memory in the layout that `product` reads."""
MAX_ROWS = 64
"""Rows up to which `product` is worth its while."""
MAX_PRODUCT = 2**23
"""Multiplications a step up to which one core in C beats a threaded matrix product."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None, with one line in the log that says why, where it cannot be had or is not wanted."""
    if os.environ.get("CODD_NATIVE") == "0":
        return None
    try:
        return _declare(_loaded(_compiler()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as reason:  # RuntimeError: no home folder
        _log.warning(
            "codd: no compiled loops on this machine (%s): on the CPU circuits run in NumPy, which takes several times "
            "as long with 1,000 states; install a C compiler or name one in CC, or set CODD_NATIVE=0 to hide this line",
            str(reason).replace("\n", " "),
        )
        return None


def _compiler() -> list[str]:
    """The command of the C compiler: CC, which may hold arguments, or what is on the path. OSError if there is none."""
    if os.name != "posix":
        raise OSError(f"they are not built on {os.name}")
    named = shlex.split(os.environ.get("CC", ""))
    installed = (shutil.which(name) for name in ("cc", "gcc", "clang"))
    command = named or [path for path in installed if path is not None][:1]
    if not command:
        raise OSError("no C compiler found: CC is not set, and neither cc, gcc nor clang is on the path")
    return command


def _loaded(compiler: list[str]) -> ctypes.CDLL:
    """The library from the user's cache, compiled if it is not there or cannot be loaded."""
    name = f"native-{_key(compiler)}.so"
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK)
    except OSError:
        owned = False
    if not owned:  # a library that others could write to is not loaded
        with tempfile.TemporaryDirectory(prefix="codd-") as temporary:
            return _compiled(compiler, Path(temporary) / name)  # once loaded the file is not needed
    target = folder / name
    if target.exists():
        try:
            return ctypes.CDLL(str(target))
        except OSError:  # half a file, or of another kind of machine
            pass
    return _compiled(compiler, target)


def _compiled(compiler: list[str], target: Path) -> ctypes.CDLL:
    """Compile to ``target`` and load it."""
    errors = b""
    for flags in _FLAGS:
        handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
        os.close(handle)
        try:
            command = [*compiler, "-O3", *flags, "-shared", "-fPIC", "-o", name, str(_SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, timeout=120, check=False)
            if done.returncode == 0:
                os.replace(name, target)  # complete or not there at all, whoever else compiles it now
                return ctypes.CDLL(str(target))
            errors = done.stderr
        finally:
            Path(name).unlink(missing_ok=True)
    last = errors.decode(errors="replace").strip().splitlines()[-1:]
    raise OSError(" ".join([f"{shlex.join(compiler)} cannot compile {_SOURCE.name}", *last]))


def _key(compiler: list[str]) -> str:
    """A name for what the library is made of: source, compiler, and the processor that -march=native stands for.

    A home folder may be shared between machines, or copied to another one: each finds its own builds only.
    """
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=30, check=True).stdout
    macros = [*compiler, "-march=native", "-E", "-dM", "-x", "c", os.devnull]  # one for each set of instructions
    target = subprocess.run(macros, capture_output=True, timeout=30, check=False).stdout
    parts = (_SOURCE.read_bytes(), repr(_FLAGS).encode(), version, target)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:24]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "codd_pass": (None, [_DATA] * 5 + [_SIZE] * 5 + [_REAL]),
    "codd_smooth": (_SIZE, [_DATA] * 6 + [_SIZE] * 3 + [_REAL] * 2),
    "codd_path": (_SIZE, [_DATA] * 6 + [_SIZE] * 4 + [_REAL]),
    "codd_panels": (None, [_DATA] * 3 + [_SIZE] * 3),
    "codd_pick": (_SIZE, [_DATA, _DATA, _SIZE, _SIZE, _REAL, _SIZE, _REAL, _REAL, *[_DATA] * 4]),
    "codd_pair_sums": (_SIZE, [*[_DATA] * 7, _SIZE, _SIZE, _DATA, _DATA, _REAL]),
    "codd_product_pass": (None, [*[_DATA] * 11, _SIZE, _SIZE, _REAL, _DATA]),
}
"""What the functions of native.c return and take."""


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _serving(leaf: Float[Tensor, "*R N"], batch: int) -> ctypes.CDLL | None:
    """The library, if leaf values are of its type and a step has few enough products for one core."""
    return library() if leaf.dtype == torch.float32 and batch * leaf.shape[-1] ** 2 <= MAX_PRODUCT else None


def chain_pass(
    matrix: Float[Tensor, "N N"],
    first: Float[Tensor, " N"] | None,
    leaf: Float[Tensor, "L B N"],
    leaf_scale: Float[Tensor, "L B"],
    reverse: bool,
    rescale_every: int,
) -> tuple[Float[Tensor, "L B N"], Float[Tensor, "L B"]] | None:
    """Messages of one pass, as ``chain.eager`` computes them, and the logarithms of their scales; None if unsupported.

    A sequence's results do not depend on the others, to the bit.
    """
    length, batch, states = leaf.shape
    if (loaded := _serving(leaf, batch)) is None:
        return None
    taken = leaf_scale.double().contiguous()
    messages, scale = torch.empty_like(leaf), torch.zeros_like(taken)
    messages[-1 if reverse else 0] = 1.0 if first is None else first
    pointers = (x.data_ptr() for x in (matrix, leaf, taken, messages, scale))
    loaded.codd_pass(*pointers, length, batch, states, reverse, rescale_every, torch.finfo(torch.float32).tiny)
    return messages, scale


def smooth(
    matrix: Float[Tensor, "N N"],
    transposed: Float[Tensor, "N N"],
    first: Float[Tensor, " N"],
    rows: Float[Tensor, "R N"],
    numbers: Int[Tensor, "L B"],
    posterior: bool,
    flush: float,
    faint: float,
) -> tuple[Float[Tensor, " B"], Float[Tensor, "L B N"] | None] | None:
    """log Z and the posterior of chains whose leaf values are rows of a table; None: unsupported, or perhaps inexact.

    The smallest product of message and leaf value must be at least ``flush``, every sum at least ``faint``.
    """
    (length, batch), states = numbers.shape, len(first)
    if (loaded := _serving(rows, batch)) is None:
        return None
    leaf = rows.data_ptr() + numbers.contiguous() * (4 * states)
    out = torch.empty(length, batch, states) if posterior else None
    log_z = torch.zeros(batch, dtype=torch.float64)
    pointers = (x if x is None else x.data_ptr() for x in (matrix, transposed, first, leaf, out, log_z))
    return None if loaded.codd_smooth(*pointers, length, batch, states, flush, faint) else (log_z, out)


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


def in_panels(matrix: Float[Tensor, "K N"]) -> Float[Tensor, "P K 32"] | None:
    """A matrix as `product` reads it; None if unsupported (the caller multiplies with PyTorch)."""
    depth, width = matrix.shape
    fits = matrix.dtype == torch.float32 and matrix.device.type == "cpu" and width % PANEL == 0
    if not fits or library() is None:
        return None
    return matrix.reshape(depth, width // PANEL, PANEL).transpose(0, 1).contiguous()


def product(rows: Float[Tensor, "R K"], panels: Float[Tensor, "P K 32"]) -> Float[Tensor, "R N"]:
    """A few rows times a matrix in panels, on one core: with few rows PyTorch spends its time on packing the matrix."""
    loaded = library()
    assert loaded is not None  # else there would be no panels
    rows = rows.contiguous()
    (count, depth), width = rows.shape, len(panels) * PANEL
    out = torch.zeros(count, width)
    loaded.codd_panels(panels.data_ptr(), rows.data_ptr(), out.data_ptr(), count, depth, width)
    return out


def narrowed(matrix: Float[Tensor, "N N"]) -> Int[Tensor, "N N"] | None:
    """Probabilities in 16 bits, each within one part in 2048; None if some are too small for that."""
    if bool((matrix < _SMALLEST).any()) or bool((matrix > 1).any()):
        return None
    return ((matrix.contiguous().view(torch.int32) + 2**12) >> 13).to(torch.int16)  # the low half: 6 and 10 bits
