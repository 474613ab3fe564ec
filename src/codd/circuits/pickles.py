"""Pickles of arrays and leaves, read by ``pickle.Unpickler`` after a scan that leaves it nothing to run.

The scan follows what every instruction does to the stack, by the tables of ``pickletools`` and without making a value.
It refuses all instructions that could reach code, names outside of the list that the caller allows, calls of anything
but these, keys that are no text (whose hash could take for ever), memo numbers and sizes beyond the file, and a stream
that does not end where its pickle does. The names that are left stand for classes of this module, which only record
their arguments; nothing is imported or looked up. What is made is a small multiple of the file's size.
"""

import io
import math
import mmap
import pickle
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


class _Record:
    """What a pickle's names and calls stand for: it takes no state, unless a subclass knows the form of one."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise UnsafePickle(f"it sets the state of a {type(self).__name__[1:].lower()}, which has none.")


Calls = Mapping[tuple[str, str], type[_Record]]
"""The globals that a pickle may name, and the classes that they stand for."""


def _inert(record: Callable[..., object]) -> type[_Record]:
    """A class that records a call; called or instantiated, it gives what ``record`` makes of the arguments."""
    return type("_Name", (_Record,), {"__slots__": (), "__new__": lambda cls, *arguments: record(*arguments)})


def load(stream: _Stream, size: int, calls: Calls) -> object:
    """Read the pickle in ``stream``, a mapped file or bytes in memory, which has to fill all of its ``size`` bytes.

    Raises UnsafePickle if it asks for anything but plain data and ``calls``, FormatError if it is damaged.
    """
    try:
        _scan(stream, calls)
        if stream.tell() != size:
            raise FormatError(f"{size - stream.tell()} bytes follow the end of the pickle; expected none.")
        stream.seek(0)
        return _Unpickler(stream, calls).load()
    except (FormatError, MemoryError):
        raise
    except Exception as error:  # a damaged file may fail anywhere in the standard library's parsers or on the stack
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(f"not a readable pickle: truncated, damaged or another format ({reason}).") from error


class _Unpickler(pickle.Unpickler):
    """Takes globals from ``calls`` only; persistent ids and buffers out of band are errors."""

    def __init__(self, stream: _Stream, calls: Calls):
        super().__init__(stream)
        self._calls = calls

    def find_class(self, module: str, name: str) -> type[_Record]:
        return self._calls[module, name]


_PUT = {"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"}
_GET = {"BINGET", "LONG_BINGET", "GET"}
_TEXT = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_PLAIN = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "GLOBAL", "STACK_GLOBAL"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
_NAME = object()
"""What the scan has on its stack for a global. For text it has the text, else the kind of value in `pickletools`."""
_TARGETS = {
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _NAME),
    "BUILD": pickletools.anyobject,  # the outcome of a call
    **dict.fromkeys(("APPEND", "APPENDS"), pickletools.pylist),
    **dict.fromkeys(("SETITEM", "SETITEMS"), pickletools.pydict),
}
"""The only kind of value that an instruction may act upon."""
_ALLOWED = _PLAIN | _TEXT | _PUT | _GET | _TARGETS.keys()


def _scan(stream: _Stream, calls: Calls) -> None:
    """Follow the stack of the pickle, and raise if there is anything in it that there should not be."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):  # type: ignore[arg-type]  # reads only
        op, before, items = opcode.name, opcode.stack_before, []
        if count > _MAX_OPCODES:
            raise FormatError(f"more than {_MAX_OPCODES} pickle instructions; no chain of circuits needs as many.")
        if op not in _ALLOWED:
            raise UnsafePickle(
                f"it uses the pickle instruction {op}, which a circuit saved by PyJuice does not. Nothing was run."
            )
        if op == "PROTO" and argument > pickle.HIGHEST_PROTOCOL:
            raise FormatError(f"pickle protocol {argument}; codd reads protocols up to {pickle.HIGHEST_PROTOCOL}.")
        if op == "MARK":
            marks.append(len(stack))
            continue
        if op in _PUT:
            number = len(memo) if op == "MEMOIZE" else argument
            if number > len(memo):  # the unpickler's memo is an array
                raise FormatError(f"not a readable pickle: it numbers value {len(memo)} as {number}.")
            memo[number] = stack[-1]
            continue
        if pickletools.markobject in before:
            start = marks.pop()
            items, before = stack[start:], before[: before.index(pickletools.markobject)]
            del stack[start:]
        start = len(stack) - len(before)
        if start < (marks[-1] if marks else 0):
            raise FormatError("not a readable pickle: it takes a value from an empty stack.")
        taken = stack[start:]
        del stack[start:]
        if op in ("GLOBAL", "STACK_GLOBAL"):
            module, name = argument.split(" ", 1) if op == "GLOBAL" else taken
            _check_name(module, name, calls)
            stack.append(_NAME)
        elif op in _GET:
            stack.append(memo[argument])
        else:
            _check_use(op, taken, items)
            stack += [argument] if op in _TEXT else opcode.stack_after
    if stack or marks:
        raise FormatError("not a readable pickle: it leaves unused values behind.")


def _check_name(module: object, name: object, calls: Calls) -> None:
    if not (isinstance(module, str) and isinstance(name, str)):
        raise UnsafePickle("it names a global by something other than text.")
    if (module, name) not in calls:
        raise UnsafePickle(
            f"it asks for {f'{module}.{name}'[:200]!a}, which is neither an array nor a leaf that codd reads. "
            "Nothing was run. Do not open this file with pickle or PyJuice unless you trust it."
        )


def _check_use(op: str, taken: list[Any], items: list[Any]) -> None:
    """Raise unless a call is of a name with a tuple, a state is for the outcome of a call, and keys are text."""
    wrong = op in _TARGETS and taken[0] is not _TARGETS[op]
    if op in ("REDUCE", "NEWOBJ"):
        wrong |= taken[1] is not pickletools.pytuple
    elif op in ("SETITEM", "SETITEMS", "DICT"):
        wrong |= not all(isinstance(key, str) for key in (items or taken[1:])[::2])
    if wrong:
        raise UnsafePickle(f"its instruction {op} acts on a value of a kind that it does not have in a circuit.")


_DTYPES = {"f4": "<f4", "f8": "<f8", "i8": "<i8", "i4": "<i4", "b1": "|b1"}


class _DType(_Record):
    """A recorded ``numpy.dtype``: usable once its byte order has been set."""

    __slots__ = ("code", "numpy")

    def __init__(self, code: str):
        self.code = code
        self.numpy: np.dtype[Any] | None = None

    def __setstate__(self, state: object) -> None:
        if state != (3, _DTYPES[self.code][0], None, None, None, -1, -1, 0):
            raise FormatError(f"an array of dtype {self.code} that is not plain and little-endian; save it as float32.")
        self.numpy = np.dtype(_DTYPES[self.code])


class Array(_Record):
    """A recorded array: a view of the file's bytes by the dtype, shape and order that come with them."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        """An array that has no content yet."""
        self._values: NDArray[Any] | None = None

    def __setstate__(self, state: object) -> None:
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

    __slots__ = ("class_name", "num_cats")

    def __init__(self, class_name: str, num_cats: int | None):
        """``num_cats`` is None until a state says it."""
        self.class_name = class_name
        self.num_cats = num_cats

    def __setstate__(self, state: object) -> None:
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


def latin1(budget: int) -> type[_Record]:
    """``_codecs.encode``, by which protocols before 3 store bytes as text; it makes at most ``budget`` bytes in all."""

    def encode(*arguments: object) -> bytes:
        nonlocal budget
        if len(arguments) != 2 or arguments[1] not in ("latin1", "latin-1") or not isinstance(arguments[0], str):
            raise UnsafePickle("it calls _codecs.encode for something other than text in latin-1.")
        budget -= len(arguments[0])
        if budget < 0:  # each text is encoded once, so that all bytes together are no more than the file
            raise FormatError("it encodes more bytes than the file holds.")
        return arguments[0].encode("latin-1")

    return _inert(encode)


def _array(*arguments: object) -> Array:
    if arguments != (_NDARRAY, (0,), b"b"):
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


def _leaf(class_name: str, *lengths: int) -> type[_Record]:
    """The class of a leaf, which may be called with as many arguments as ``lengths`` says: categories, then flags."""

    def record(*arguments: object) -> LeafRecord:
        num_cats = arguments[0] if arguments else None
        plain = (num_cats is None or is_int(num_cats)) and all(type(flag) is bool for flag in arguments[1:])
        if len(arguments) not in lengths or not plain:
            raise FormatError(f"a {class_name} leaf with unexpected arguments; expected a number of categories.")
        return LeafRecord(class_name, num_cats if is_int(num_cats) else None)

    return _inert(record)


_NDARRAY, _RECONSTRUCT, _FROM_BUFFER = map(_inert, (_refused, _array, _array_of_buffer))
ARRAY_CALLS: Calls = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy.core.numeric", "_frombuffer"): _FROM_BUFFER,
    ("numpy._core.numeric", "_frombuffer"): _FROM_BUFFER,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _inert(_dtype),
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
