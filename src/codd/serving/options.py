"""Request fields for the decoding options, generated from `codd.decoding.options` under the same names."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, create_model, model_validator

from codd.decoding.options import LARGEST, OPTIONS, OTHER_NAMES, RULE, UNTYPED, OptionInfo, Options, default_in_words
from codd.serving.errors import refusing
from codd.validation import STRICT

MAX_FIELDS = 1000
"""No object in a request has more fields."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
"""One wrong id is reported, not a hundred thousand."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
NULLABLE = frozenset(name for name, info in OPTIONS.items() if info.optional and name not in UNTYPED)
"""Options for which null means something."""
NOT_GENERATED = (*UNTYPED, "stop")
"""Hooks are code, and constraints have fields of their own (`codd.serving.schemas`); OpenAI's requests use stop for
texts as well, so that each kind of request declares its own."""


class Strict(BaseModel):
    """A part of a request: an unknown field is an error that names it, and "3" is not 3."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, data: Any) -> Any:
        """One error for a crowd of fields; one for each of a hundred thousand would keep the server for seconds."""
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"{len(data)} fields are too many")
        return data


class OptionFields(Strict):
    """A request of which some fields are decoding options.

    A field that is absent is the server's to choose. So is null, except for options that can be None themselves
    (threshold, steps, top_p ...): there it is said explicitly.
    """

    def given(self) -> dict[str, Any]:
        """The options that the client chose."""
        chosen = {name: getattr(self, name) for name in OPTIONS if name in self.model_fields_set}
        return {name: value for name, value in chosen.items() if value is not None or name in NULLABLE}

    def length(self) -> tuple[str, int | None]:
        """The name of the field with the requested length, and the length in tokens; None if there is none."""
        return "gen_length", getattr(self, "gen_length", None)

    def options(self, defaults: Options, **changes: Any) -> Options:
        """What the client chose, over the server's defaults; ``changes`` are worked out from both."""
        with refusing():
            return defaults.changed(**{**self.given(), **changes})


def option_field(name: str) -> tuple[Any, Any]:
    """The type and the documentation of one option as a request field."""
    info = OPTIONS[name]
    text = info.help[0].upper() + info.help[1:]
    if name == "seed":
        text += "; choice i of n uses seed + i"
    if name in RULE:
        text += f"; where neither request nor server gives a pace: {default_in_words(name)}"
    names = AliasChoices(name, *(other for other, own in OTHER_NAMES.items() if own == name))
    return _type(info) | None, Field(None, description=f"{text}.", validation_alias=names)


def _type(info: OptionInfo) -> Any:
    if info.kind == "choice":
        return Literal[info.choices]
    if info.kind == "count":
        return Annotated[int, Field(ge=info.low, le=info.high)]
    if info.kind == "number":
        limits: dict[str, Any] = {"ge": info.low}
        if info.high != math.inf:
            limits["le"] = info.high
        return Annotated[float, Field(**limits)]
    return {"ids": Ids, "seed": Seed}[info.kind]


def _model(name: str, doc: str, options: Iterable[str]) -> Any:
    generated: dict[str, Any] = {each: option_field(each) for each in options}
    return create_model(name, __base__=OptionFields, __doc__=doc, **generated)


if TYPE_CHECKING:

    class SamplingOptions(OptionFields):
        """Fields that exist at run time only."""

        def __getattr__(self, name: str) -> Any: ...

    InspectOptions = SamplingOptions
else:
    SamplingOptions = _model(
        "SamplingOptions",
        "Every decoding option that JSON can say, as a request field.",
        [name for name in OPTIONS if name not in NOT_GENERATED],
    )
    InspectOptions = _model(
        "InspectOptions",
        "The decoding options that change what network and joint say of a window.",
        ("circuit_temperature", "tempering", "cfg_scale", "ban"),
    )
