"""Attacks on the reader of pickles, one for each class of instructions, and that its records stay what they are."""

import io
import pickle
import struct
import tracemalloc

import numpy as np
import pytest

from codd.circuits import pickles
from codd.circuits.pickles import ARRAY_CALLS, LEAF_CALLS, Array, LeafRecord, latin1, load
from codd.errors import FormatError, UnsafePickle

CALLS = {**ARRAY_CALLS, **LEAF_CALLS}


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
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


NDARRAY = named("numpy", "ndarray")
EMPTY_ARRAY = named("numpy._core.multiarray", "_reconstruct") + NDARRAY + b"K\x00\x85C\x01b\x87R"
CATEGORICAL = named("pyjuice.nodes.distributions.categorical", "Categorical")
TRAP = named(__name__, "Trap")
EVIL = text("__import__('os').abort()")

UNSAFE = {
    "REDUCE of a builtin": named("builtins", "eval") + EVIL + b"\x85R",
    "REDUCE of a builtin by its old name": b"c__builtin__\neval\n" + EVIL + b"\x85R",
    "REDUCE of a class that is here": TRAP + b")R",
    "REDUCE of what a call gave": EMPTY_ARRAY + b")R",
    "REDUCE of a class of the reader": named("codd.circuits.pickles", "_Record") + b")R",
    "NEWOBJ of a class that is here": TRAP + b")\x81",
    "NEWOBJ of what a call gave": EMPTY_ARRAY + b")\x81",
    "NEWOBJ_EX": CATEGORICAL + b")}\x92",
    "INST": b"(i" + __name__.encode() + b"\nTrap\n",
    "INST of an allowed class": b"(inumpy\nndarray\n",
    "OBJ": b"(" + TRAP + b"o",
    "OBJ of an allowed class": b"(" + CATEGORICAL + b"o",
    "BUILD with a trap's __setstate__": TRAP + b")\x81}b",
    "BUILD on an allowed class": CATEGORICAL + b"}" + text("num_cats") + b"K\x05sb",
    "BUILD with slots on an allowed class": CATEGORICAL + b"N}" + text("__new__") + b"K\x05s\x86b",
    "BUILD of a dict's attributes": b"}}" + text("__class__") + b"K\x01sb",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x01",
    "EXT4": b"\x84\x01\x01\x00\x00",
    "PERSID": b"P1\n",
    "BINPERSID": b"K\x01Q",
    "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": b"\x97\x98",
    "sets": b"\x8f(K\x01\x90",
    "frozen sets": b"(K\x01\x91",
    "POP": b"K\x01K\x020",
    "POP_MARK": b"K\x01(K\x021",
    "DUP": b"K\x012\x86",
    "STRING": b"S'abc'\n",
    "STACK_GLOBAL with a dotted name": named("numpy", "ndarray.__class__.__base__"),
    "STACK_GLOBAL with a dotted module": named("codd.circuits.pickles.np", "load"),
    "STACK_GLOBAL of numbers": b"K\x01K\x02\x93",
    "STACK_GLOBAL of a list": b"]" + text("ndarray") + b"\x93",
    "GLOBAL with a dotted name": b"cos\npath.os.system\n",
    "GLOBAL of nothing": b"c\n\n",
    "a key that is a tuple": b"})K\x01s",
    "a key that is an array": b"}" + EMPTY_ARRAY + b"K\x01s",
    "keys of a DICT that are numbers": b"(K\x01K\x02d",
    "keys of SETITEMS that are numbers": b"}(" + text("x") + b"K\x01K\x02K\x03u",
    "APPEND to bytes that can grow": b"\x96" + struct.pack("<Q", 1) + b"x" + b"K\x01a",
    "SETITEM of a list by number": b"]K\x01aK\x00K\x02s",
}


@pytest.mark.parametrize("body", UNSAFE.values(), ids=UNSAFE.keys())
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


BOMBS = {
    "a memo number of two billion": b"]r" + struct.pack("<I", 2**31),
    "a memo number as text": b"]p999999999999\n",
    "a memo number that grows": b"".join(b"]r" + struct.pack("<I", 2**i) for i in range(28)) + b"t",
    "an integer of two gigabytes": b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\xff",
    "an integer of negative size": b"\x8b" + struct.pack("<i", -1),
    "text of four gigabytes": b"X" + struct.pack("<I", 2**32 - 1),
    "text of an exabyte": b"\x8d" + struct.pack("<Q", 2**60),
    "bytes of four gigabytes": b"B" + struct.pack("<I", 2**32 - 1),
    "bytes of an exabyte": b"\x8e" + struct.pack("<Q", 2**60),
    "bytes that can grow of an exabyte": b"\x96" + struct.pack("<Q", 2**60),
    "more than addresses": b"\x8e" + struct.pack("<Q", 2**64 - 1),
    "a frame of an exabyte": b"\x95" + struct.pack("<Q", 2**60) + b"N",
    "a decimal of a million digits": b"I" + b"7" * 1_000_000 + b"\n",
    "a memo that has no such number": b"h\x07",
    "marks without an end": b"(" * 100_000,
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_take_no_memory(body):
    data = b"\x80\x05" + body + b"."
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 + 40 * len(data)


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


def test_what_is_handed_out_is_inert():
    """Were the scan to miss something: the classes take no state, no attributes of instances, and no arguments."""
    for handed in (*CALLS.values(), latin1(1)):
        assert handed.__mro__[1:] == (pickles._Record, object)
        with pytest.raises(TypeError):
            handed.__setstate__({})  # as the unpickler would call it for a state of the class
        made = object.__new__(handed)
        assert not hasattr(made, "__dict__")
        with pytest.raises(UnsafePickle, match="sets the state"):
            made.__setstate__({"x": 1})


@pytest.mark.parametrize("data", [b"\x80\x04" + body + b"." for body in UNSAFE.values()], ids=UNSAFE.keys())
def test_the_unpickler_reaches_nothing_even_without_the_scan(data, monkeypatch):
    """The second line of defence, alone: whatever is made of these pickles, it is plain data or our records."""
    monkeypatch.setattr(pickles, "_scan", lambda stream, calls: stream.seek(0, io.SEEK_END))
    try:
        made = read(data)
    except FormatError:
        return
    plain = (int, str, bytes, bytearray, list, tuple, dict, set, frozenset, Array, LeafRecord)
    assert made is None or isinstance(made, plain) or made in CALLS.values()


def test_an_array_of_bytes_that_can_grow_is_not_changed_later():
    """Protocol 5 writes arrays as bytearrays; while an array looks at one, nothing can make it longer."""
    data = pickle.dumps(np.arange(4, dtype=np.float32), protocol=5)
    array = read(data)
    assert isinstance(array, Array)
    assert np.array_equal(array.numpy(), np.arange(4))
    with pytest.raises(UnsafePickle):  # the bytes are memo entry 2; appending to them is none of a circuit's business
        read(data[:-1] + b"h\x02K\x01a\x86.")
