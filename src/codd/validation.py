"""What is in a file or a request, checked by pydantic: the types with their ranges, and errors of one line.

This imports pydantic, so that nothing imports it that `import codd` or `codd --help` would.
"""

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler, Strict, TypeAdapter, ValidationError
from pydantic_core import CoreSchema

from codd.errors import FormatError, InvalidInput, shown

LARGEST = 2**63
"""Whole numbers from here on are refused: nothing that we count comes near, and little else can hold them."""
LONGEST_NAME = 100
"""Bytes: a folder's name has a digest behind it, and file systems take 143 or 255."""
MOST_ERRORS = 8
"""Errors of one file that a message lists."""
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""An unknown field is an error, "3" is not 3, and neither NaN nor infinity is a number."""

Item = TypeVar("Item")
List = Annotated[tuple[Item, ...], Strict(False)]
"""A tuple, given as any list."""
Whole = Annotated[int, Field(gt=-LARGEST, lt=LARGEST)]
Natural = Annotated[int, Field(ge=0, lt=LARGEST)]
Count = Annotated[int, Field(gt=0, lt=LARGEST)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
BetweenZeroAndOne = Annotated[float, Field(gt=0, lt=1)]
"""Both excluded."""


def _check_folder_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name) or len(name.encode()) > LONGEST_NAME:
        raise ValueError(
            f"must be of letters, digits and . _ -, begin with a letter or digit, and have at most {LONGEST_NAME} "
            f"bytes, found {shown(name)}: a folder is named after it"
        )
    return name


FolderName = Annotated[str, AfterValidator(_check_folder_name)]
"""A name that becomes a folder's, or part of one."""


class _SectionType(type):
    """Lets a section that is made in Python raise our error in place of pydantic's."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """An instance; InvalidInput, in the words that a file's FormatError has, if the fields are not right."""
        try:
            return super().__call__(*args, **fields)
        except ValidationError as error:
            raise InvalidInput(f"{cls.__name__}: {one_line(error, cls)}.") from error


class Section(metaclass=_SectionType):
    """A base for dataclasses that are read from a mapping of a file, with `STRICT` fields."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Strictness is for the fields: of Python values, a strict dataclass would take instances and no mapping."""
        schema = handler(source)
        typing.cast(dict[str, Any], handler.resolve_ref_schema(schema))["strict"] = False
        return schema


def build(kind: Any, value: Any, where: str) -> Any:
    """``value`` as a ``kind``: a `Section` or NamedTuple from a mapping, or any other type that pydantic knows.

    FormatError if it is none; ``where`` is the file that the value is of, and begins the message.
    """
    try:
        return _validator(kind)(value)
    except ValidationError as error:
        raise FormatError(f"{where}: {one_line(error, kind)}.") from error


@functools.cache
def _validator(kind: Any) -> Callable[[Any], Any]:
    return TypeAdapter(kind, config=None if dataclasses.is_dataclass(kind) else STRICT).validate_python


def one_line(error: ValidationError, kind: Any) -> str:
    """Everything that is wrong with a value that should be a ``kind``, each with the path of its field."""
    named: dict[tuple[str, tuple[int | str, ...]], list[str]] = {}
    others = []
    for detail in error.errors(include_url=False):
        place = _by_name(kind, detail["loc"])
        *section, last = place or ("",)
        if detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]:
            continue  # pydantic counts the items that are right: the wrong ones have errors of their own
        if is_missing(detail):
            named.setdefault(("lacks the field", tuple(section)), []).append(str(last))
        elif is_unknown(detail):
            name = detail["input"] if detail["type"] == "invalid_key" else last
            named.setdefault(("unknown field", tuple(section)), []).append(_printable(name))
        elif detail["type"] == "value_error":  # the message has the value, if it is about one
            others.append(_at(place, explain(detail)))
        else:
            others.append(_at(place, f"{explain(detail)}, found {shown(detail['input'])}"))
    lines = []
    for (what, path), names in sorted(named.items(), key=lambda each: each[0][0], reverse=True):  # a slip comes first
        there = f"; there are {', '.join(_names(kind, path))}" if what == "unknown field" else ""
        lines.append(f"{_path(path)}: ".removeprefix(": ") + f"{what} {', '.join(names[:5])}{there}")
    lines += others
    rest = len(lines) - MOST_ERRORS
    return "; ".join([*lines[:MOST_ERRORS], *([f"and {rest} more"] if rest > 0 else [])])


def _by_name(kind: Any, path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A path whose first part is the name of a field, also where its value was given without it, by its place."""
    if not path or not isinstance(path[0], int) or not dataclasses.is_dataclass(kind):
        return path
    names = [field.name for field in dataclasses.fields(kind)]
    return (names[path[0]], *path[1:]) if path[0] < len(names) else path


def is_missing(detail: Mapping[str, Any]) -> bool:
    """Whether an error is that a field is not there."""
    return detail["type"] in ("missing", "missing_argument")


def is_unknown(detail: Mapping[str, Any]) -> bool:
    """Whether an error is that there is no such field."""
    return detail["type"] in ("extra_forbidden", "unexpected_keyword_argument", "invalid_key")


def explain(detail: Mapping[str, Any]) -> str:
    """What a value must be, after one of pydantic's errors: in lower case, without a full stop."""
    context = detail.get("ctx", {})
    if detail["type"] == "value_error":
        return str(context["error"]).removesuffix(".")
    if detail["type"] == "float_type" and type(detail.get("input")) is int:
        return "must be a number below 1e308"
    if said := _WORDS.get(detail["type"]):
        return said.format(**{name: _limit(value) for name, value in context.items()})
    if detail["type"] in _SECTIONS:
        return "must be a section with fields"
    text = str(detail["msg"]).removesuffix(".").replace("Input should be", "must be")
    return text[:1].lower() + text[1:]


def _limit(value: Any) -> str:
    return "2^63" if value == LARGEST else f"{value:g}" if isinstance(value, float) else str(value)


_SECTIONS = {f"{kind}_type" for kind in ("dataclass", "dataclass_exact", "namedtuple", "arguments", "mapping", "dict")}
_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be a text",
    "bool_type": "must be true or false",
    "none_required": "must be null",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have a length of at least {min_length}",
    "too_long": "must have a length of at most {max_length}",
}


def _at(path: tuple[int | str, ...], text: str) -> str:
    """A message about the field at a path: its own words where they are about several fields of a section."""
    if not path:
        return text
    return f"{_path(path)} {text}" if text.startswith("must ") else f"{_path(path)}: {text}"


def _path(path: tuple[int | str, ...]) -> str:
    """For example ``data[0].kind``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{_printable(part)}" for part in path).removeprefix(".")


def _printable(name: object) -> str:
    return name[:100] if isinstance(name, str) and name.isprintable() else shown(name)


def _names(kind: Any, path: tuple[int | str, ...]) -> list[str]:
    """The fields of the section at a path."""
    for part in path:
        if isinstance(kind, type) and isinstance(part, str):
            kind = typing.get_type_hints(kind)[part]
        else:
            kind = typing.get_args(kind)[typing.get_origin(kind) is Mapping]
        if typing.get_origin(kind) in (types.UnionType, typing.Union):
            kind = next(each for each in typing.get_args(kind) if each is not type(None))
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)
