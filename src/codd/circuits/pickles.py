"""A pickle machine that builds plain data and runs nothing.

Names are never imported or looked up: the few that arrays and leaves need stand for functions of this module, which
only record their arguments. Every other instruction that could reach code is refused.
"""

import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from codd.errors import FormatError, UnsafePickle

# About a hundred instructions describe one position, so this is a chain of tens of thousands of them.
_MAX_OPCODES = 5_000_000


@runtime_checkable
class _Stream(Protocol):
    """What the machine reads from: a mapped file, or bytes in memory. Both clip a read that asks for too much."""

    def read(self, n: int, /) -> bytes: ...

    def tell(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Name:
    """A global that the pickle names."""

    module: str
    name: str


class _StandIn:
    """What a call leaves on the stack: a record that accepts one state of a known form."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Take the state of the pickle's BUILD instruction."""
        raise UnsafePickle(f"it sets the state of a {type(self).__name__[1:].lower()}, which has none.")


_Calls = Mapping[tuple[str, str], Callable[[tuple[object, ...]], object] | None]

_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Machine:
    """The data part of the pickle machine. ``calls`` says which globals may be named, and what calling one records."""

    def __init__(self, calls: _Calls):
        self.calls = calls
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self, stream: _Stream, size: int) -> object:
        """Execute the pickle in ``stream``, which has to fill all of its ``size`` bytes, and return what it builds."""
        try:
            self._execute(stream)
            value = self.stack.pop()
        except (FormatError, MemoryError):
            raise
        except Exception as error:  # a damaged file may fail anywhere in the standard library's parser or on the stack
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise FormatError(f"not a readable pickle: truncated, damaged or another format ({reason}).") from error
        if self.stack or self.marks:
            raise FormatError("not a readable pickle: it leaves unused values behind.")
        if stream.tell() != size:
            raise FormatError(f"{size - stream.tell()} bytes follow the end of the pickle; expected none.")
        return value

    def _execute(self, stream: _Stream) -> None:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):  # type: ignore[arg-type]  # reads only
            if count > _MAX_OPCODES:
                raise FormatError(f"more than {_MAX_OPCODES} pickle instructions; no chain of circuits needs as many.")
            self._step(opcode.name, argument)

    def _step(self, op: str, argument: Any) -> None:
        stack = self.stack
        if op in _LITERALS:
            stack.append(argument)
        elif op in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[len(self.memo) if op == "MEMOIZE" else argument] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op == "MARK":
            self.marks.append(len(stack))
        elif op in _TUPLES:
            stack.append(tuple(self._pop_last(_TUPLES[op])))
        elif op == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif op == "LIST":
            stack.append(self._pop_to_mark())
        elif op in ("APPEND", "APPENDS"):
            self._append(self._pop_last(1) if op == "APPEND" else self._pop_to_mark())
        elif op in ("SETITEM", "SETITEMS"):
            self._set_items(self._pop_last(2) if op == "SETITEM" else self._pop_to_mark())
        elif op == "DICT":
            items = self._pop_to_mark()
            stack.append({})
            self._set_items(items)
        elif op in ("GLOBAL", "INST"):
            self._name(*argument.split(" ", 1))
            if op == "INST":
                raise UnsafePickle("it makes an instance of a class (INST); a circuit saved by PyJuice does not.")
        elif op == "STACK_GLOBAL":
            self._name(*self._pop_last(2))
        elif op in ("REDUCE", "NEWOBJ"):  # a class called, or instantiated without __init__: both only record here
            self._call(*self._pop_last(2))
        elif op == "BUILD":
            self._build(*self._pop_last(1))
        elif op == "PROTO":
            if argument > 5:
                raise FormatError(f"pickle protocol {argument}; codd reads protocols up to 5.")
        elif op not in ("FRAME", "STOP"):
            raise UnsafePickle(
                f"it uses the pickle instruction {op}, which a circuit saved by PyJuice does not. Nothing was run."
            )

    def _pop_last(self, n: int) -> list[Any]:
        if len(self.stack) < n:
            raise FormatError("not a readable pickle: it takes a value from an empty stack.")
        items = self.stack[-n:]
        del self.stack[-n:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise UnsafePickle(f"it appends to a {type(target).__name__}; only lists may be appended to.")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # Only strings: the hash of a nested tuple that holds the same tuple many times over would take for ever.
        if type(target) is not dict or len(items) % 2 or any(type(key) is not str for key in items[::2]):
            raise UnsafePickle("it sets items of something other than a dict with text keys.")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _name(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise UnsafePickle("it names a global by something other than text.")
        if (module, name) not in self.calls:
            raise UnsafePickle(
                f"it asks for {f'{module}.{name}'[:200]!a}, which is neither an array nor a leaf that codd reads. "
                "Nothing was run. Do not open this file with pickle or PyJuice unless you trust it."
            )
        self.stack.append(_Name(module, name))

    def _call(self, target: object, arguments: object) -> None:
        call = self.calls[target.module, target.name] if isinstance(target, _Name) else None
        if call is None or not isinstance(arguments, tuple):
            shown = f"{target.module}.{target.name}" if isinstance(target, _Name) else f"a {type(target).__name__}"
            raise UnsafePickle(f"it calls {shown}, which is not a call that a circuit needs. Nothing was run.")
        self.stack.append(call(arguments))

    def _build(self, state: object) -> None:
        target = self.stack[-1]
        if not isinstance(target, _StandIn):
            raise UnsafePickle(f"it sets the state of a {type(target).__name__}; only arrays and leaves have one.")
        target.build(state)


_DTYPES = {"f4": "<f4", "f8": "<f8", "i8": "<i8", "i4": "<i4", "b1": "|b1"}


class _DType(_StandIn):
    """A recorded ``numpy.dtype``: usable once its byte order has been set."""

    __slots__ = ("code", "ready")

    def __init__(self, code: str):
        self.code = code
        self.ready = False

    def build(self, state: object) -> None:
        if state != (3, _DTYPES[self.code][0], None, None, None, -1, -1, 0):
            raise FormatError(f"an array of dtype {self.code} that is not plain and little-endian; save it as float32.")
        self.ready = True

    def numpy(self) -> np.dtype[Any]:
        if not self.ready:
            raise FormatError(f"an array of dtype {self.code} without a byte order.")
        return np.dtype(_DTYPES[self.code])


class Array(_StandIn):
    """A recorded array: bytes of the file, with the dtype, shape and order to read them by."""

    __slots__ = ("data", "dtype", "fortran", "shape")

    def __init__(self) -> None:
        self.data: bytes | bytearray | None = None
        self.dtype = np.dtype(np.float32)
        self.shape: tuple[int, ...] = ()
        self.fortran = False

    def build(self, state: object) -> None:
        """Shape, dtype, order and bytes."""
        if not (isinstance(state, tuple) and len(state) == 5 and is_int(state[0]) and state[0] == 1):
            raise FormatError("an array whose state is not that of a plain NumPy array.")
        self.fill(*state[1:])

    def fill(self, shape: object, dtype: object, fortran: object, data: object) -> None:
        """Record the content, once, if the shape, dtype and bytes fit together."""
        if self.data is not None:
            raise FormatError("an array whose content is set twice.")
        if not isinstance(dtype, _DType):
            raise FormatError("an array whose dtype is not one; expected float32, float64, int64, int32 or bool.")
        if not (isinstance(shape, tuple) and len(shape) <= 4 and all(is_int(n) and 0 < n < 2**40 for n in shape)):
            raise FormatError("an array whose shape is not up to four positive sizes.")
        if not isinstance(data, bytes | bytearray) or type(fortran) is not bool:
            raise FormatError("an array that does not hold its values as bytes (object arrays are not read).")
        expected = math.prod(shape) * dtype.numpy().itemsize
        if len(data) != expected:
            raise FormatError(f"an array of shape {shape} needs {expected} bytes, but has {len(data)}.")
        self.data, self.dtype, self.shape, self.fortran = data, dtype.numpy(), shape, fortran

    def numpy(self) -> NDArray[Any]:
        """The values, as a view of the bytes."""
        if self.data is None:
            raise FormatError("an array without content.")
        return np.frombuffer(self.data, self.dtype).reshape(self.shape, order="F" if self.fortran else "C")


class LeafRecord(_StandIn):
    """A recorded leaf distribution: the name of its class and the number of its categories."""

    __slots__ = ("class_name", "num_cats")

    def __init__(self, class_name: str, num_cats: int | None):
        self.class_name = class_name
        self.num_cats = num_cats

    def build(self, state: object) -> None:
        """The number of categories, and hooks that must be empty."""
        hooks = ("post_fw_fns", "post_bp_fns", "sampling_fns")
        if (
            self.num_cats is not None
            or not isinstance(state, dict)
            or not is_int(state.get("num_cats"))
            or any(key not in hooks or value != [] for key, value in state.items() if key != "num_cats")
        ):
            raise FormatError(f"a {self.class_name} leaf whose state is not just a number of categories.")
        self.num_cats = state["num_cats"]


class Latin1:
    """``_codecs.encode`` for the bytes of protocols before 3, which are stored as text."""

    def __init__(self, budget: int):
        self.budget = budget  # each text is encoded once, so that all bytes together are no more than the file

    def __call__(self, arguments: tuple[object, ...]) -> bytes:
        """The bytes that a text stands for."""
        if len(arguments) != 2 or arguments[1] not in ("latin1", "latin-1") or not isinstance(arguments[0], str):
            raise UnsafePickle("it calls _codecs.encode for something other than text in latin-1.")
        self.budget -= len(arguments[0])
        if self.budget < 0:
            raise FormatError("it encodes more bytes than the file holds.")
        return arguments[0].encode("latin-1")


def _record_array(arguments: tuple[object, ...]) -> Array:
    if arguments != (_Name("numpy", "ndarray"), (0,), b"b"):
        raise UnsafePickle("it reconstructs something other than an empty numpy.ndarray.")
    return Array()


def _record_buffer(arguments: tuple[object, ...]) -> Array:
    """How protocol 5 (Python 3.14's default) writes an array: bytes, dtype, shape, order."""
    if len(arguments) != 4 or arguments[3] not in ("C", "F"):
        raise FormatError("an array that is neither in C nor in Fortran order.")
    data, dtype, shape, order = arguments
    array = Array()
    array.fill(shape, dtype, order == "F", data)
    return array


def _record_dtype(arguments: tuple[object, ...]) -> _DType:
    code = arguments[0] if arguments else None
    if not isinstance(code, str) or code not in _DTYPES or arguments[1:] != (False, True):
        shown = ascii(code[:20]) if isinstance(code, str) else f"a {type(code).__name__}"
        raise FormatError(f"an array of dtype {shown}; expected one of {', '.join(_DTYPES)}.")
    return _DType(code)


def _recorder(class_name: str, lengths: tuple[int, ...]) -> Callable[[tuple[object, ...]], LeafRecord]:
    """Record a leaf called with a number of categories and possibly a flag, or with nothing and a state to follow."""

    def record(arguments: tuple[object, ...]) -> LeafRecord:
        num_cats = arguments[0] if arguments else None
        plain = (num_cats is None or is_int(num_cats)) and all(type(flag) is bool for flag in arguments[1:])
        if len(arguments) not in lengths or not plain:
            raise FormatError(f"a {class_name} leaf with unexpected arguments; expected a number of categories.")
        return LeafRecord(class_name, num_cats if is_int(num_cats) else None)

    return record


ARRAY_CALLS: _Calls = {
    ("numpy.core.multiarray", "_reconstruct"): _record_array,
    ("numpy._core.multiarray", "_reconstruct"): _record_array,
    ("numpy.core.numeric", "_frombuffer"): _record_buffer,
    ("numpy._core.numeric", "_frombuffer"): _record_buffer,
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _record_dtype,
}
_LEAF_MODULE = "pyjuice.nodes.distributions"
LEAF_CALLS: _Calls = {
    (f"{_LEAF_MODULE}.categorical", "Categorical"): _recorder("Categorical", (0, 1)),
    (f"{_LEAF_MODULE}.external_categorical", "ExternProductCategorical"): _recorder("ExternProductCategorical", (1,)),
    (f"{_LEAF_MODULE}.softevi_categorical", "SoftEvidenceCategorical"): _recorder("SoftEvidenceCategorical", (1, 2)),
}


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an integer and nothing else."""
    return type(value) is int  # bool is an int, too
