"""Attacks on the reader of pickles, one for each class of instructions, and that its records stay what they are."""

import io
import pickle
import pickletools
import struct
import tracemalloc

import numpy as np
import pytest

from codd.circuits import pickles
from codd.circuits.pickles import ARRAY_CALLS, LEAF_CALLS, Array, LeafRecord, latin1, load
from codd.errors import FormatError, UnsafePickle

CALLS = {**ARRAY_CALLS, **LEAF_CALLS, ("_codecs", "encode"): latin1(1000)}


TOUCHED: list[str] = []


class Trap:
    """Whatever is done to it is remembered: nothing may be, for no pickle may reach it."""

    def __new__(cls, *_):
        TOUCHED.append("new")
        return super().__new__(cls)

    def __setstate__(self, state):
        TOUCHED.append("setstate")


@pytest.fixture(autouse=True)
def untouched():
    TOUCHED.clear()
    yield
    assert not TOUCHED


def test_the_trap_works():
    pickle.loads(b"\x80\x05" + TRAP + b")\x81}b.")
    assert TOUCHED == ["new", "setstate"]
    TOUCHED.clear()


def read(data: bytes, calls=CALLS) -> object:
    return load(io.BytesIO(data), len(data), calls)


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


NDARRAY = named("numpy", "ndarray")
EMPTY_ARRAY = named("numpy._core.multiarray", "_reconstruct") + NDARRAY + b"K\x00\x85C\x01b\x87R"
CATEGORICAL = named("pyjuice.nodes.distributions.categorical", "Categorical")
FROM_BUFFER = named("numpy._core.numeric", "_frombuffer")
REBUILD = named("numpy._core.multiarray", "_reconstruct")
DTYPE = named("numpy", "dtype")
TRAP = named(__name__, "Trap")


def dtype(code: str = "f4", order: str = "<") -> bytes:
    state = b"(K\x03" + text(order) + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
    return DTYPE + text(code) + b"\x89\x88\x87R" + state + b"b"


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(data)) + data


def array(shape: tuple[int, ...], data: bytes, kind: bytes = b"") -> bytes:
    size = b"(" + b"".join(map(integer, shape)) + b"t"
    content = b"B" + struct.pack("<I", len(data)) + data
    return EMPTY_ARRAY + b"(K\x01" + size + (kind or dtype()) + b"\x89" + content + b"tb"


KNOWN = {"MARK", "STOP", "PROTO", "FRAME", "GLOBAL", *pickles._PUT, *pickles._GET}
KNOWN |= pickles._CONSTANTS.keys() | pickles._ARGUMENTS | pickles._TAKEN.keys()
OPERANDS = {"INST": b"builtins\neval\n", "PERSID": b"1\n", "EXT1": b"\x01", "EXT2": b"\x01\x01"}
OPERANDS |= {"EXT4": b"\x01\x01\x00\x00", "STRING": b"'abc'\n", "SHORT_BINSTRING": b"\x01x"}
OPERANDS |= {"BINSTRING": b"\x01\x00\x00\x00x"}
NAMES = (
    *(("builtins", "eval"), ("__builtin__", "eval"), ("builtins", "getattr"), ("builtins", "object")),
    *(
        (__name__, "Trap"),
        ("os\ud800", "system\n"),
        ("os", "path.os.system"),
        ("", ""),
        ("codd.circuits.pickles.np", "load"),
    ),
    *(("numpy", "ndarray.__class__.__base__"), ("numpy", "ndarray.__reduce_ex__"), ("numpy", "load")),
    *(("numpy.testing._private.utils", "runstring"), ("numpy._core.multiarray", "scalar"), ("numpy", "_reconstruct")),
    *(("torch.storage", "_load_from_bytes"), ("copyreg", "_reconstructor"), ("_codecs", "decode")),
    ("pyjuice.nodes.distributions", "categorical.Categorical"),
)
UNSAFE = {
    **{
        op.name: CATEGORICAL + b")}(K\x01" + op.code.encode("latin-1") + OPERANDS.get(op.name, b"")
        for op in pickletools.opcodes
        if op.name not in KNOWN
    },
    **{f"{module}.{name}": named(module, name) + b")R" for module, name in NAMES},
    "GLOBAL": b"cos\npath.os.system\n",
    "GLOBAL of nothing": b"c\n\n",
    "STACK_GLOBAL of numbers": b"K\x01K\x02\x93",
    "STACK_GLOBAL of a list": b"]" + text("ndarray") + b"\x93",
    "REDUCE of what a call gave": EMPTY_ARRAY + b")R",
    "NEWOBJ of what a call gave": EMPTY_ARRAY + b")\x81",
    "BUILD with a trap's __setstate__": TRAP + b")\x81}b",
    "BUILD on an allowed class": CATEGORICAL + b"}" + text("num_cats") + b"K\x05sb",
    "BUILD with slots on an allowed class": CATEGORICAL + b"N}" + text("__new__") + b"K\x05s\x86b",
    "BUILD of a dict's attributes": b"}}" + text("__class__") + b"K\x01sb",
    "build on a list": b"]}b",
    "a key that is a tuple": b"})K\x01s",
    "a key that is an array": b"}" + EMPTY_ARRAY + b"K\x01s",
    "keys of a DICT that are numbers": b"(K\x01K\x02d",
    "keys of SETITEMS that are numbers": b"}(" + text("x") + b"K\x01K\x02K\x03u",
    "APPEND to bytes that can grow": b"\x96" + struct.pack("<Q", 1) + b"x" + b"K\x01a",
    "append to an array": EMPTY_ARRAY + b"K\x01a",
    "SETITEM of a list by number": b"]K\x01aK\x00K\x02s",
    "items of an array": EMPTY_ARRAY + text("__class__") + b"K\x01s",
    "call of text": text("os.system") + b")R",
    "call with a list": REBUILD + b"]R",
    "call with an array": REBUILD + EMPTY_ARRAY + b"R",
    "call of ndarray": NDARRAY + b"K\x05\x85R",
    "new object of ndarray": NDARRAY + b")\x81",
    "reconstruct of another class": REBUILD + DTYPE + b"K\x00\x85C\x01b\x87R",
    "reconstruct with a shape": REBUILD + NDARRAY + b"K\x09\x85C\x01b\x87R",
    "reconstruct of nothing": REBUILD + b")R",
    "encode by another codec": named("_codecs", "encode") + text("x") + text("zip") + b"\x86R",
    "encode of bytes": named("_codecs", "encode") + b"C\x01x" + text("latin1") + b"\x86R",
    "encode without codec": named("_codecs", "encode") + text("x") + b"\x85R",
}


ENDLESS = b"}" + b")" + b"q\x00h\x00\x86" * 64 + b"K\x01s"
"""A key that takes forever to hash."""


@pytest.mark.parametrize("body", [*UNSAFE.values(), ENDLESS], ids=[*UNSAFE.keys(), "endless"])
def test_each_class_of_instructions(body):
    """Alone, in a list, in a tuple, as a value, and fetched from the memo."""
    wrapped = [
        body + b".",
        b"]" + body + b"a.",
        body + b"\x85.",
        b"}" + text("x") + body + b"s.",
        b"](" + body + b"\x94h\x00e.",
    ]
    for each in wrapped:
        with pytest.raises(UnsafePickle):
            read(b"\x80\x05" + each)


STATES = {
    "dict": b"}" + text("__class__") + b"K\x01s",
    "attributes": b"}" + text("__dict__") + b"}s" + text("data") + b"C\x01xs",
    "pair of dicts": b"}}" + text("data") + b"C\x01xs\x86",
    "none": b"N",
    "empty tuple": b")",
    "version 2": b"(K\x02K\x01\x85" + dtype() + b"\x89C\x04abcdt",
    "list of objects": b"(K\x01K\x01\x85" + dtype() + b"\x89]K\x01at",
    "dtype that is text": b"(K\x01K\x01\x85" + text("f4") + b"\x89C\x04abcdt",
    "dtype without order": b"(K\x01K\x01\x85" + DTYPE + text("f4") + b"\x89\x88\x87R" + b"\x89C\x04abcdt",
    "order that is no flag": b"(K\x01K\x01\x85" + dtype() + b"K\x01C\x04abcdt",
    "shape that is a list": b"(K\x01]K\x01a" + dtype() + b"\x89C\x04abcdt",
    "shape of flags": b"(K\x01\x88\x85" + dtype() + b"\x89C\x04abcdt",
}


@pytest.mark.parametrize("target", [EMPTY_ARRAY, DTYPE + text("f4") + b"\x89\x88\x87R"], ids=["array", "dtype"])
@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_states_that_records_refuse(target, state):
    with pytest.raises(FormatError):
        read(b"\x80\x04" + target + state + b"b.")


BAD_ARRAYS = {
    "objects": array((1,), b"\0" * 8, dtype("O8", "|")),
    "text": array((1,), b"\0" * 4, dtype("U1")),
    "half": array((1,), b"\0" * 2, dtype("f2")),
    "big-endian": array((1,), b"\0" * 4, dtype("f4", ">")),
    "dtype of fields": DTYPE + b"]\x89\x88\x87R",
    "dtype of a long text": DTYPE + text("f4," * 10_000) + b"\x89\x88\x87R",
    "negative shape": array((-1,), b"\0" * 4),
    "two negative sizes": array((-1, -1), b"\0" * 4),
    "zero shape": array((0,), b""),
    "huge shape": array((2**39, 2**39), b"\0" * 4),
    "shape of thousands of digits": array((2**40_000,), b"\0" * 4),
    "five axes": array((1,) * 5, b"\0" * 4),
    "too few bytes": array((2,), b"\0" * 4),
    "too many bytes": array((1,), b"\0" * 8),
    "set twice": array((1,), b"\0" * 4) + b"(K\x01K\x01\x85" + dtype() + b"\x89C\x04abcdtb",
    "never set": EMPTY_ARRAY,
    "buffer of odd order": FROM_BUFFER + b"(C\x04abcd" + dtype() + b"K\x01\x85NtR",
    "buffer of lies": FROM_BUFFER + b"(C\x04abcd" + dtype() + b"K\x09\x85" + text("C") + b"tR",
    "buffer of nothing": FROM_BUFFER + b")R",
}


@pytest.mark.parametrize("body", BAD_ARRAYS.values(), ids=BAD_ARRAYS.keys())
def test_bad_arrays_are_refused(body):
    with pytest.raises(FormatError):
        read(b"\x80\x04" + body + b".").numpy()


BOMBS = {
    "an integer of two gigabytes": b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\xff",
    "an integer of negative size": b"\x8b" + struct.pack("<i", -1),
    "text of four gigabytes": b"X" + struct.pack("<I", 2**32 - 1),
    "text of an exabyte": b"\x8d" + struct.pack("<Q", 2**60),
    "bytes of four gigabytes": b"B" + struct.pack("<I", 2**32 - 1),
    "bytes of an exabyte": b"\x8e" + struct.pack("<Q", 2**60),
    "bytes that can grow of an exabyte": b"\x96" + struct.pack("<Q", 2**60),
    "more than addresses": b"\x8e" + struct.pack("<Q", 2**64 - 1),
    "a decimal of a million digits": b"I" + b"7" * 1_000_000 + b"\n",
    "a memo that has no such number": b"h\x07",
    "marks without an end": b"(" * 100_000,
}
DAMAGED = {
    **{name: b"\x80\x05" + body + b"." for name, body in BOMBS.items()},
    "text": b"hello, world\n",
    "zip": b"PK\x03\x04" + b"\0" * 100,
    "json": b'{"a": 1}',
    "zeros": bytes(1000),
    "stop at once": b"\x80\x04.",
    "memo that is not there": b"\x80\x04h\x05.",
    "tuple without a mark": b"\x80\x04t.",
    "too short for a pair": b"\x80\x04K\x01\x86.",
    "call of nothing": b"\x80\x04R.",
    "append to nothing": b"\x80\x04a.",
    "append to nothing but an item": b"\x80\x04K\x01a.",
    "build on nothing": b"\x80\x04}b.",
    "odd items": b"\x80\x04}(" + text("x") + b"u.",
    "values left behind": b"\x80\x04K\x01].",
    "decimal of many digits": b"L" + b"9" * 100_000 + b"L\n.",
    "bad UTF-8": b"\x80\x04X\x02\0\0\0\xff\xfe.",
    "global without end": b"\x80\x04cnumpy",
    "global that is not ASCII": b"c\xff\n\xff\n.",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_what_is_damaged_is_refused_and_takes_no_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 + 40 * len(data)


def test_encoding_cannot_make_more_bytes_than_the_file_has():
    calls = {**CALLS, ("_codecs", "encode"): latin1(15_000)}
    once = named("_codecs", "encode") + b"h\x00" + text("latin1") + b"\x86R"
    body = b"\x80\x04](" + text("x" * 10_000) + b"q\x00"
    assert b"x" * 10_000 in read(body + once + b"e.", calls)
    with pytest.raises(FormatError, match="more bytes than the file"):
        read(body + once * 100 + b"e.", {**CALLS, ("_codecs", "encode"): latin1(15_000)})


def test_too_many_instructions(monkeypatch):
    monkeypatch.setattr(pickles, "_MAX_OPCODES", 1000)
    with pytest.raises(FormatError, match="more than 1000 pickle instructions"):
        read(b"\x80\x04" + b"N" * 2000 + b".")


def test_laughs_stay_references():
    """Lists of ten times the list before: ten to the sixtieth values, which are never written out."""
    body = b"]\x94" + b"".join(b"](" + (b"h" + bytes([i])) * 10 + b"e\x94" for i in range(60))
    data = b"\x80\x04(" + body + b"l."
    found = read(data)
    assert isinstance(found, list)
    assert len(found) == 61
    assert len(found[-1]) == 10
    assert found[-1][0] is found[-2]


@pytest.mark.parametrize("kind", ["lists", "tuples", "dicts"])
def test_deep_nesting_neither_recurses_nor_breaks(kind):
    depth = 200_000
    body = {
        "lists": b"]" * depth + b"a" * (depth - 1),
        "tuples": b")" + b"\x85" * depth,
        "dicts": (b"}" + text("x")) * depth + b"N" + b"s" * depth,
    }
    assert type(read(b"\x80\x04" + body[kind] + b".")) is {"lists": list, "tuples": tuple, "dicts": dict}[kind]


def test_every_prefix_of_a_pickle_is_refused():
    for protocol in range(6):
        calls = {**ARRAY_CALLS, ("_codecs", "encode"): latin1(10_000)}
        data = pickle.dumps([{"params": np.arange(6.0).reshape(2, 3), "chs": (1, 2), "type": "Sum"}], protocol)
        assert np.array_equal(read(data, calls)[0]["params"].numpy(), np.arange(6.0).reshape(2, 3))
        for size in range(len(data)):
            with pytest.raises(FormatError):
                read(data[:size], calls)


def test_recorders_keep_no_state_between_pickles():
    """Two leaves from one pickle and one from the next: each has its own number, and the classes have none."""
    state = b"}" + text("num_cats") + b"K%cs"
    one, two = (CATEGORICAL + b")\x81" + state % n + b"b" for n in (3, 4))
    first = read(b"\x80\x04(" + one + two + b"l.")
    assert [leaf.num_cats for leaf in first] == [3, 4]
    with pytest.raises(FormatError, match="state is not just a number"):
        read(b"\x80\x04" + CATEGORICAL + b"K\x05\x85R" + state % 6 + b"b.")
    plain = read(b"\x80\x04" + CATEGORICAL + b")\x81.")
    assert isinstance(plain, LeafRecord)
    assert plain.num_cats is None


def test_an_array_of_bytes_that_can_grow_is_not_changed_later():
    """Protocol 5 writes arrays as bytearrays; while an array looks at one, nothing can make it longer."""
    data = pickle.dumps(np.arange(4, dtype=np.float32), protocol=5)
    array = read(data)
    assert isinstance(array, Array)
    assert np.array_equal(array.numpy(), np.arange(4))
    with pytest.raises(UnsafePickle):  # the bytes are memo entry 2; appending to them is none of a circuit's business
        read(data[:-1] + b"h\x02K\x01a\x86.")
