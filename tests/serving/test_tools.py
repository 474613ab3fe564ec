"""Function calls: required ones, and those that the model decides on."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

import codd
from codd.backbones import chat
from codd.serving.app import Settings
from codd.serving.prompts import Limits
from codd.serving.tools import Function, schema_of
from tests.support.live import Live, live

QUICK = {"sampler": "latent", "steps": 4}
ASKED: dict[str, Any] = {"model": "mini", "messages": [{"role": "user", "content": "Is 3 more than 2?"}]}


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], **more}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


COUNT = {"$defs": {"Count": {"type": "integer", "minimum": 0, "maximum": 9}}}
TOOLS = [
    tool("add", {"n": {"$ref": "#/$defs/Count"}}, **COUNT),
    tool("say-it", {"loud": {"type": "boolean"}}),
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.parametrize("choice", ["required", *(each["function"]["name"] for each in TOOLS)])
def test_functions_are_called_by_their_schemas_streamed_or_not(client, choice):
    named = {"type": "function", "function": {"name": choice}}
    asked: dict[str, Any] = {**ASKED, "max_tokens": 24, "temperature": 1.0, "n": 2, "tools": TOOLS}
    asked |= {"tool_choice": choice if choice == "required" else named, "extra_body": QUICK, "logprobs": True}
    choices = client.chat.completions.create(**asked).choices
    allowed = {each["function"]["name"]: each["function"].get("parameters", {"maxProperties": 0}) for each in TOOLS}
    for each in choices:
        assert (each.message.content, each.finish_reason) == (None, "tool_calls")
        [call] = each.message.tool_calls
        assert choice in ("required", call.function.name)
        assert jsonschema_rs.is_valid(allowed[call.function.name], json.loads(call.function.arguments))
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    for each in choices:
        of_it = [chunk for chunk in chunks if chunk.index == each.index]
        [call] = [call for chunk in of_it for call in chunk.delta.tool_calls or []]
        assert call.function.model_dump() == each.message.tool_calls[0].function.model_dump()
        assert not any(chunk.delta.content for chunk in of_it)
        assert of_it[-1].finish_reason == "tool_calls"
        assert [log for chunk in of_it if chunk.logprobs for log in chunk.logprobs.content] == each.logprobs.content


def test_a_template_that_knows_no_tools_leaves_a_text(client):
    plain, *others = (
        client.chat.completions.create(**ASKED, max_tokens=4, extra_body=QUICK, **more).choices[0].message
        for more in ({}, *({"tools": TOOLS, **how} for how in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"})))
    )
    assert all(other == plain for other in others)


TELLING = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + chat.CHATML
CALL = '<tool_call>{{"name": "{}", "arguments": {{"n": 3}}}}</tool_call>'


@pytest.fixture(scope="module")
def told() -> Iterator[Live]:
    """A model whose template tells it of functions."""
    model = codd.load(device="cpu")
    assert model.tokenizer is not None
    model.tokenizer.chat_template = TELLING
    with live(model, settings=Settings(name="mini", limits=Limits(compile_seconds=60.0))) as found:
        yield found


@pytest.mark.parametrize(
    ("text", "called"),
    [
        (CALL.format("add"), ["add"]),
        (CALL.format("add") + "\n" + CALL.format("stop"), ["add", "stop"]),
        (CALL.format("unknown"), []),
        ("So: " + CALL.format("add"), []),
        ("<tool_call>3</tool_call>", []),
        ("<tool", []),
        ("Three.", []),
    ],
)
def test_the_model_decides_whether_it_calls(told, text, called):
    """What it writes is made certain by a constraint, so that the parsing alone is asked."""
    asked: dict[str, Any] = {
        **ASKED,
        "max_tokens": 120,
        "tools": TOOLS,
        "extra_body": {**QUICK, "guided_choice": [text]},
    }
    with openai.OpenAI(base_url=f"{told.url}/v1", api_key="none", max_retries=0) as client:
        [choice] = client.chat.completions.create(**asked).choices
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == called
    assert all(json.loads(call.function.arguments) == {"n": 3} for call in calls)
    assert choice.message.content == (None if called else text)
    assert choice.finish_reason == chunks[-1].finish_reason == ("tool_calls" if called else "stop")
    streamed = [call.function.model_dump() for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert streamed == [call.function.model_dump() for call in calls]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ("" if called else text)


def test_the_template_is_given_the_functions_and_what_became_of_a_call(told):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"n": 3}'}}
    said = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    said += [{"role": "tool", "content": "4", "tool_call_id": "1"}]

    def tokens(**more: Any) -> int:
        body = {**ASKED, **QUICK, "max_tokens": 4, **more}
        return int(told.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    tokenizer = told.engine.model.tokenizer
    assert tokenizer is not None
    plain = [{"role": "user", "content": ASKED["messages"][0]["content"]}]
    plain += [{"role": "assistant", "content": CALL.format("add").replace(">{", ">\n{").replace("}<", "}\n<")}]
    plain += [{"role": "tool", "content": "4"}]
    assert tokens(messages=said) == len(tokenizer.encode_chat(plain))
    named = [{"function": {"name": each["function"]["name"]}} for each in TOOLS]
    assert tokens(messages=said, tools=TOOLS) == len(tokenizer.encode_chat(plain, tools=named))
    assert tokens(tools=TOOLS, tool_choice="none") == tokens() < tokens(tools=TOOLS)


REFERRED = {"$defs": {"Own": {"const": {"$ref": "#/a"}}}, "properties": {"$ref": {"$ref": "#/$defs/Own"}}}


def test_references_are_moved_and_values_are_not():
    functions = [Function(name=name, parameters={"type": "object", **REFERRED}) for name in ("one", "two")]
    schema = schema_of(functions)
    for arguments, valid in ({"$ref": {"$ref": "#/a"}}, True), ({"$ref": {"$ref": "#/$defs/one/a"}}, False):
        assert jsonschema_rs.is_valid(schema, {"name": "one", "arguments": arguments}) == valid
