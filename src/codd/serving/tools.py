"""Function calls: the functions of a request as one schema, and a text of that schema as a call."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from codd.serving.errors import APIError
from codd.serving.options import Strict

BEGIN, END = "<tool_call>", "</tool_call>"
"""What models write around a call that they decide on, as templates that know functions ask for it."""
_LITERAL = ("const", "enum", "default", "examples", "example")
"""Keywords of JSON schemas that hold values, in which nothing is a reference."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value has schemas by names of one's own."""
_CALL = re.compile(r'\{"name": ?"([^"]+)", ?"arguments": ?(.*)\}', re.DOTALL)


class FunctionName(Strict):
    """Which function."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(FunctionName):
    """A function, as OpenAI's clients describe it."""

    description: str | None = Field(None, description="Ignored, as is strict: the schema is always followed.")
    parameters: dict[str, Any] = Field(
        {"type": "object", "additionalProperties": False}, description="The JSON schema of its arguments."
    )
    strict: bool | None = None


class Tool(Strict):
    """A function that the answer may call."""

    type: Literal["function"]
    function: Function


class NamedTool(Strict):
    """The function that the answer calls."""

    type: Literal["function"]
    function: FunctionName


class FunctionCall(Strict):
    """A call that an earlier answer made."""

    name: str
    arguments: str


class ToolCall(Strict):
    """One of the calls of an earlier answer, as clients send it back."""

    id: str | None = Field(None, description="Ignored: chat templates know the order only.")
    type: Literal["function"] = "function"
    function: FunctionCall

    def as_text(self) -> str:
        """The call as models write it."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return f"{BEGIN}\n{json.dumps({'name': self.function.name, 'arguments': arguments})}\n{END}"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class Calls:
    """How an answer calls functions: it has to, or the model decides."""

    functions: list[Function]
    required: bool
    """Whether the whole text is a call, by the schema of `schema_of`."""

    def may_begin(self, text: str) -> bool:
        """Whether a text that is still being written may turn out to be calls."""
        begun = text.lstrip()
        return self.required or begun.startswith(BEGIN) or BEGIN.startswith(begun)

    def found_in(self, text: str) -> list[dict[str, str]]:
        """Names and arguments; none if the model chose to answer with a text."""
        if self.required and len(self.functions) == 1:
            return [{"name": self.functions[0].name, "arguments": text}]
        if self.required:
            matched = _CALL.fullmatch(text)
            assert matched is not None, "a text outside of its schema"
            return [{"name": matched[1], "arguments": matched[2]}]
        before, *parts = (part.strip() for part in text.split(BEGIN))
        found = [self._call(part.removesuffix(END)) for part in parts if part.endswith(END)]
        calls = [each for each in found if each is not None]
        return calls if not before and len(calls) == len(parts) else []

    def _call(self, text: str) -> dict[str, str] | None:
        """One call that the model wrote by itself; None if it is not one of the functions."""
        try:
            call = json.loads(text)
            if call["name"] in [function.name for function in self.functions]:
                return {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, RecursionError, LookupError, TypeError):
            pass
        return None


def calls_of(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Calls | None:
    """How the answer calls functions; None if it is a text."""
    functions = [tool.function for tool in tools or []]
    if len({function.name for function in functions}) < len(functions):
        raise APIError(400, "tools has two functions of the same name.", "tools")
    if choice in (None, "auto", "none"):
        return Calls(functions, required=False) if functions and choice != "none" else None
    named = choice.function.name if isinstance(choice, NamedTool) else None
    found = [function for function in functions if named in (None, function.name)]
    if not found:
        raise APIError(400, "tool_choice asks for a function that is not among the tools.", "tool_choice")
    return Calls(found, required=True)


def schema_of(functions: Sequence[Function]) -> dict[str, Any]:
    """The schema of a call: of several functions an object with a name, of one its arguments alone."""
    if len(functions) == 1:
        return functions[0].parameters
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each.name}, "arguments": {"$ref": f"#/$defs/{each.name}"}},
            "required": ["name", "arguments"],
        }
        for each in functions
    ]
    try:
        return {
            "anyOf": calls,
            "$defs": {each.name: _moved(each.parameters, f"#/$defs/{each.name}") for each in functions},
        }
    except RecursionError:
        raise APIError(400, "tools is nested too deep.", "tools") from None


def _moved(schema: Any, place: str) -> Any:
    """A schema whose own references lead to ``place``, where it is put. Values that it compares with stay."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _NAMED and isinstance(value, dict):  # names of one's own, whatever they are
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in _LITERAL else _moved(value, place)
    return moved
