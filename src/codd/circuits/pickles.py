"""Pickles of arrays and leaves, read by an interpreter of the few instructions that they need.

It knows plain data and the names that the caller lists, which stand for functions of this module; nothing is imported
or looked up, and `pickle` has no part in it. Every other instruction is refused, as are calls of anything but these
functions, keys that are not text (whose hash could take for ever) and a stream that does not end where its pickle
does. What is made is a small multiple of the file's size.
"""

import io
import math
import mmap
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from codd.errors import FormatError, UnsafePickle

# About a hundred instructions describe one position, so this is a chain of tens of thousands of them.
_MAX_OPCODES = 5_000_000


_Stream: TypeAlias = mmap.mmap | io.BytesIO
"""A mapped file, or bytes in memory. Both clip a read that asks for too much."""
Calls = Mapping[tuple[str, str], Callable[..., object]]
"""The globals that a pickle may name, and the functions that they stand for."""


def load(stream: _Stream, size: int, calls: Calls) -> object:
    """Read the pickle in ``stream``, a mapped file or bytes in memory, which has to fill all of its ``size`` bytes.

    Raises UnsafePickle if it asks for anything but plain data and ``calls``, FormatError if it is damaged.
    """
    try:
        made = _run(stream, calls)
        if stream.tell() != size:
            raise FormatError(f"{size - stream.tell()} bytes follow the end of the pickle; expected none.")
        return made
    except (FormatError, MemoryError):
        raise
    except Exception as error:  # a damaged file may fail anywhere in the standard library's parsers or on the stack
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(f"not a readable pickle: truncated, damaged or another format ({reason}).") from error


_PUT = {"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"}
_GET = {"BINGET", "LONG_BINGET", "GET"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
"""Instructions whose value is their argument."""
_TAKEN = {
    **dict.fromkeys(("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"), 0),
    **dict.fromkeys(("TUPLE1", "APPEND"), 1),
    **dict.fromkeys(("TUPLE2", "SETITEM", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"), 2),
    "TUPLE3": 3,
    **dict.fromkeys(("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"), None),
}
"""How many values an instruction takes from the stack; None: all since the last mark."""


def _run(stream: _Stream, calls: Calls) -> object:
    """Run the instructions on a stack of plain data, records and listed functions."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):  # type: ignore[arg-type]  # reads only
        op, taken = opcode.name, []
        if count > _MAX_OPCODES:
            raise FormatError(f"more than {_MAX_OPCODES} pickle instructions; no chain of circuits needs as many.")
        if op in _TAKEN:
            number = _TAKEN[op]
            start = marks.pop() if number is None else len(stack) - number
            if start < (marks[-1] if marks else 0):
                raise FormatError("not a readable pickle: it takes a value from an empty stack.")
            taken = stack[start:]
            del stack[start:]
        if op in _ARGUMENTS:
            stack.append(argument)
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op == "MARK":
            marks.append(len(stack))
        elif op in _PUT:
            memo[len(memo) if op == "MEMOIZE" else argument] = stack[-1]
        elif op in _GET:
            stack.append(memo[argument])
        elif "TUPLE" in op:
            stack.append(tuple(taken))
        elif op in ("EMPTY_LIST", "LIST"):
            stack.append(taken)
        elif op in ("EMPTY_DICT", "DICT"):
            stack.append(_items(op, taken))
        elif op in ("APPEND", "APPENDS"):
            _require(op, type(stack[-1]) is list)
            stack[-1].extend(taken)
        elif op in ("SETITEM", "SETITEMS"):
            _require(op, type(stack[-1]) is dict)
            stack[-1].update(_items(op, taken))
        elif op in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_named(taken or argument.split(" ", 1), calls))
        elif op in ("REDUCE", "NEWOBJ"):
            _require(op, callable(taken[0]) and type(taken[1]) is tuple)
            stack.append(taken[0](*taken[1]))
        elif op == "BUILD":
            _require(op, isinstance(taken[0], _Record))
            taken[0].build(taken[1])
            stack.append(taken[0])
        elif op not in ("PROTO", "FRAME", "STOP"):
            raise UnsafePickle(
                f"it uses the pickle instruction {op}, which a circuit saved by PyJuice does not. Nothing was run."
            )
    if len(stack) != 1 or marks:
        raise FormatError("not a readable pickle: it does not leave one value.")
    return stack[0]


def _items(op: str, taken: list[Any]) -> dict[str, Any]:
    _require(op, all(type(key) is str for key in taken[::2]))
    return dict(zip(taken[::2], taken[1::2], strict=True))


def _named(names: list[Any], calls: Calls) -> Callable[..., object]:
    if not all(isinstance(name, str) for name in names):
        raise UnsafePickle("it names a global by something other than text.")
    module, name = names
    if (module, name) not in calls:
        raise UnsafePickle(
            f"it asks for {f'{module}.{name}'[:200]!a}, which is neither an array nor a leaf that codd reads. "
            "Nothing was run. Do not open this file with pickle or PyJuice unless you trust it."
        )
    return calls[module, name]


def _require(op: str, fits: bool) -> None:
    if not fits:
        raise UnsafePickle(f"its instruction {op} acts on a value of a kind that it does not have in a circuit.")


class _Record:
    """What a call gives, and `BUILD` completes."""

    def build(self, state: object) -> None:
        """Take the state; FormatError if it is not of the form that is known."""
        raise NotImplementedError


_DTYPES = {"f4": "<f4", "f8": "<f8", "i8": "<i8", "i4": "<i4", "b1": "|b1"}


class _DType(_Record):
    """A recorded ``numpy.dtype``: usable once its byte order has been set."""

    def __init__(self, code: str):
        self.code = code
        self.numpy: np.dtype[Any] | None = None

    def build(self, state: object) -> None:
        if state != (3, _DTYPES[self.code][0], None, None, None, -1, -1, 0):
            raise FormatError(f"an array of dtype {self.code} that is not plain and little-endian; save it as float32.")
        self.numpy = np.dtype(_DTYPES[self.code])


class Array(_Record):
    """A recorded array: a view of the file's bytes by the dtype, shape and order that come with them."""

    def __init__(self) -> None:
        """An array that has no content yet."""
        self._values: NDArray[Any] | None = None

    def build(self, state: object) -> None:
        """Take the content from NumPy's state: a version, the shape, dtype, order and bytes."""
        if not (isinstance(state, tuple) and len(state) == 5 and is_int(state[0]) and state[0] == 1):
            raise FormatError("an array whose state is not that of a plain NumPy array.")
        self.fill(*state[1:])

    def fill(self, shape: object, dtype: object, fortran: object, data: object) -> None:
        """Record the content, once, if the shape, dtype and bytes fit together."""
        if self._values is not None:
            raise FormatError("an array whose content is set twice.")
        if not isinstance(dtype, _DType) or dtype.numpy is None:
            raise FormatError("an array whose dtype is not one; expected float32, float64, int64, int32 or bool.")
        if not (isinstance(shape, tuple) and len(shape) <= 4 and all(is_int(n) and 0 < n < 2**40 for n in shape)):
            raise FormatError("an array whose shape is not up to four positive sizes.")
        if not isinstance(data, bytes | bytearray) or type(fortran) is not bool:
            raise FormatError("an array that does not hold its values as bytes (object arrays are not read).")
        expected = math.prod(shape) * dtype.numpy.itemsize
        if len(data) != expected:
            raise FormatError(f"an array of shape {shape} needs {expected} bytes, but has {len(data)}.")
        self._values = np.frombuffer(data, dtype.numpy).reshape(shape, order="F" if fortran else "C")

    def numpy(self) -> NDArray[Any]:
        """The values; FormatError if there are none."""
        if self._values is None:
            raise FormatError("an array without content.")
        return self._values


class LeafRecord(_Record):
    """A recorded leaf distribution: the name of its class and the number of its categories."""

    def __init__(self, class_name: str, num_cats: int | None):
        """``num_cats`` is None until a state says it."""
        self.class_name = class_name
        self.num_cats = num_cats

    def build(self, state: object) -> None:
        """Take the number of categories from the state; FormatError if it holds more than that and empty hooks."""
        hooks = ("post_fw_fns", "post_bp_fns", "sampling_fns")
        if (
            self.num_cats is not None
            or not isinstance(state, dict)
            or not is_int(state.get("num_cats"))
            or any(key not in hooks or value != [] for key, value in state.items() if key != "num_cats")
        ):
            raise FormatError(f"a {self.class_name} leaf whose state is not just a number of categories.")
        self.num_cats = state["num_cats"]


def latin1(budget: int) -> Callable[..., bytes]:
    """``_codecs.encode``, by which protocols before 3 store bytes as text; it makes at most ``budget`` bytes in all."""

    def encode(*arguments: object) -> bytes:
        nonlocal budget
        if len(arguments) != 2 or arguments[1] not in ("latin1", "latin-1") or not isinstance(arguments[0], str):
            raise UnsafePickle("it calls _codecs.encode for something other than text in latin-1.")
        budget -= len(arguments[0])
        if budget < 0:  # each text is encoded once, so that all bytes together are no more than the file
            raise FormatError("it encodes more bytes than the file holds.")
        return arguments[0].encode("latin-1")

    return encode


def _array(*arguments: object) -> Array:
    if arguments != (_refused, (0,), b"b"):
        raise UnsafePickle("it reconstructs something other than an empty numpy.ndarray.")
    return Array()


def _array_of_buffer(*arguments: object) -> Array:
    """How protocol 5 (Python 3.14's default) writes an array: bytes, dtype, shape, order."""
    if len(arguments) != 4 or arguments[3] not in ("C", "F"):
        raise FormatError("an array that is neither in C nor in Fortran order.")
    data, dtype, shape, order = arguments
    array = Array()
    array.fill(shape, dtype, order == "F", data)
    return array


def _dtype(*arguments: object) -> _DType:
    code = arguments[0] if arguments else None
    if not isinstance(code, str) or code not in _DTYPES or arguments[1:] != (False, True):
        shown = ascii(code[:20]) if isinstance(code, str) else f"a {type(code).__name__}"
        raise FormatError(f"an array of dtype {shown}; expected one of {', '.join(_DTYPES)}.")
    return _DType(code)


def _refused(*_: object) -> None:
    raise UnsafePickle("it calls numpy.ndarray, which is not a call that a circuit needs. Nothing was run.")


def _leaf(class_name: str, *lengths: int) -> Callable[..., LeafRecord]:
    """The function of a leaf, which takes as many arguments as ``lengths`` says: categories, then flags."""

    def record(*arguments: object) -> LeafRecord:
        num_cats = arguments[0] if arguments else None
        plain = (num_cats is None or is_int(num_cats)) and all(type(flag) is bool for flag in arguments[1:])
        if len(arguments) not in lengths or not plain:
            raise FormatError(f"a {class_name} leaf with unexpected arguments; expected a number of categories.")
        return LeafRecord(class_name, num_cats if is_int(num_cats) else None)

    return record


ARRAY_CALLS: Calls = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy.core.numeric", "_frombuffer"): _array_of_buffer,
    ("numpy._core.numeric", "_frombuffer"): _array_of_buffer,
    ("numpy", "ndarray"): _refused,
    ("numpy", "dtype"): _dtype,
}
_LEAF_MODULE = "pyjuice.nodes.distributions"
LEAF_CALLS: Calls = {
    (f"{_LEAF_MODULE}.categorical", "Categorical"): _leaf("Categorical", 0, 1),
    (f"{_LEAF_MODULE}.external_categorical", "ExternProductCategorical"): _leaf("ExternProductCategorical", 1),
    (f"{_LEAF_MODULE}.softevi_categorical", "SoftEvidenceCategorical"): _leaf("SoftEvidenceCategorical", 1, 2),
}


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer and nothing else."""
    return type(value) is int  # bool is an int, too
