"""Function calls: the functions of a request as one schema, and a text of that schema as a call."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from codd.serving.errors import APIError
from codd.serving.options import Strict

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


def functions_asked(
    tools: Sequence[Tool] | None, choice: Literal["none", "auto", "required"] | NamedTool | None
) -> list[Function]:
    """The functions of which the answer calls one, none if it is a text; a 400 where that is left to the model."""
    functions = [tool.function for tool in tools or []]
    if choice == "none" or (choice in (None, "auto") and not functions):
        return []
    if choice in (None, "auto"):
        message = (
            'tool_choice "auto", the default with tools, is not supported: give "required", a function, or "none".'
        )
        raise APIError(400, message, "tool_choice", "unsupported")
    named = choice.function.name if isinstance(choice, NamedTool) else None
    found = [function for function in functions if named in (None, function.name)]
    if not found:
        raise APIError(400, "tool_choice asks for a function that is not among the tools.", "tool_choice")
    if len({function.name for function in found}) < len(found):
        raise APIError(400, "tools has two functions of the same name.", "tools")
    return found


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
    return {"anyOf": calls, "$defs": {each.name: _moved(each) for each in functions}}


def _moved(function: Function) -> Any:
    """Its parameters as a definition under its name: references lead there. No string of JSON has a quote in it."""
    try:
        text = json.dumps(function.parameters).replace('"$ref": "#', f'"$ref": "#/$defs/{function.name}')
    except RecursionError:
        raise APIError(400, "tools is nested too deep.", "tools") from None
    return json.loads(text)


def call_in(text: str, functions: Sequence[Function]) -> dict[str, str]:
    """The function's name and arguments in a text of the schema."""
    if len(functions) == 1:
        return {"name": functions[0].name, "arguments": text}
    matched = _CALL.fullmatch(text)
    assert matched is not None, "a text outside of its schema"
    return {"name": matched[1], "arguments": matched[2]}
