"""Values from YAML and JSON files against the types of our dataclasses: built whole, or an error names the field."""

import contextlib
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from codd.errors import FormatError, shown

LARGEST = 2**63
"""Whole numbers from here on are refused: nothing that we count comes near, and little else can hold them."""


def build(kind: Any, value: Any, where: str) -> Any:
    """``value`` as a ``kind``: a dataclass or NamedTuple from a mapping, a tuple from a list, a float from a whole
    number. FormatError if it is none; ``where`` says of what it is the value.
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return _build_section(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in arguments:
            raise FormatError(f"{where}: must be {' or '.join(map(repr, arguments))}, found {shown(value)}.")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return build(next(a for a in arguments if a is not type(None)), value, where)
    if origin in (Sequence, tuple):
        if not isinstance(value, list):
            raise FormatError(f"{where}: must be a list, found {shown(value)}.")
        return tuple(build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise FormatError(f"{where}: must be a section with fields, found {shown(value)}.")
        return {name: build(arguments[1], item, f"{where}: {shown(name)}") for name, item in value.items()}
    return _scalar(kind, value, where)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, str):  # YAML reads 1e-3 as text, for want of a point
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is int and abs(value) >= LARGEST:
        raise FormatError(f"{where}: must be below 2^63, found {shown(value)}.")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise FormatError(f"{where}: must be of type {kind.__name__}, found {shown(value)}.")
    return value


def _build_section(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise FormatError(f"{where}: must be a section with fields, found {shown(value)}.")
    hints, required = _fields(kind)
    if unknown := [name for name in value if name not in hints]:
        named = ", ".join(name[:100] if isinstance(name, str) else shown(name) for name in unknown[:5])
        raise FormatError(f"{where}: unknown field {named}; there are {', '.join(hints)}.")
    if missing := [name for name in required if name not in value]:
        raise FormatError(f"{where}: lacks the field {', '.join(missing)}.")
    return kind(**{name: build(hints[name], item, f"{where}: {name}") for name, item in value.items()})


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """The types of all fields, and the names of those that have no default."""
    hints = typing.get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        return hints, [name for name in kind._fields if name not in kind._field_defaults]
    missing = dataclasses.MISSING
    return hints, [f.name for f in dataclasses.fields(kind) if f.default is missing and f.default_factory is missing]
