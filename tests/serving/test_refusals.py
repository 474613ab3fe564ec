"""What each route refuses: one table of (fields of the request, status, the field that is named, words)."""

import json
from typing import Any

import pytest

from tests.serving.test_tools import TOOLS, tool
from tests.support.live import bundled

MASK = bundled().mask_id
ROOM = bundled().backbone.max_length
assert ROOM is not None
USER, SYSTEM = {"role": "user", "content": "one"}, {"role": "system", "content": "Be brief."}
NAMED = {"type": "function", "function": {"name": "stop"}}
UNSUPPORTED, FORBIDDEN = {"a": {"$ref": "#/nowhere"}}, {"name": "a", "schema": {"not": {}}}
QUICK: dict[str, Any] = {"sampler": "latent", "steps": 4}
LONG = "x" * 10_000
JSON = {"Content-Type": "application/json"}
TOO_LONG = "<|eos|>" * 2000
"""More bytes than a sequence of the bundled model can have: 384 tokens of at most 16 bytes each."""
Row = tuple[dict[str, Any], int, str, str]

GUIDED: list[Row] = [
    ({"guided_regex": 3}, 422, "guided_regex", "text"),
    ({"guided_json": 3}, 422, "guided_json", ""),
    ({"guided_choice": []}, 422, "guided_choice", ""),
    ({"guided_regex": "(a"}, 400, "guided_regex", ""),
    ({"guided_regex": "[^\\x00-\\U0010ffff]"}, 400, "guided_regex", ""),
    ({"guided_regex": "a" * 40_000}, 400, "guided_regex", "bytes"),
    ({"guided_regex": ".*a.{12}"}, 400, "guided_regex", "too large"),
    ({"guided_regex": "(" * 500 + ")" * 500}, 400, "guided_regex", ""),
    ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice", "guided_regex and guided_choice"),
    ({"guided_json": {"properties": UNSUPPORTED}}, 400, "guided_json", "#/nowhere"),
    ({"guided_choice": [f"{i:x}" * 9 for i in range(1000, 2000)]}, 400, "guided_choice", "too large"),
]
DENOISE: list[Row] = [
    ({"stpes": 3}, 422, "stpes", "no such field"),
    ({"hooks": []}, 422, "hooks", "no such field"),
    ({"response_format": None}, 422, "response_format", "no such field"),
    *(({"steps": value}, 422, "steps", "must be a whole number") for value in ("3", 3.0, True, LONG)),
    ({"steps": 0}, 422, "steps", "must be at least 1"),
    *(({"gen_length": value}, 422, "gen_length", "") for value in (-1, 2**31)),
    ({"max_new_tokens": -1}, 422, "max_new_tokens", "must be at least 0"),
    ({"temperature": "1"}, 422, "temperature", "must be a number"),
    ({"mode": "blok"}, 422, "mode", "must be 'block', 'full'"),
    ({"mode": LONG}, 422, "mode", ""),
    *(({"ban": value}, 422, "ban", "") for value in ([-1], [1.5], 3)),
    *(({"seed": value}, 422, "seed", "") for value in (2**63, [1, 2])),
    *(({"stop": value}, 422, "stop", "") for value in ("end", 1)),
    ({"timeout": 0}, 422, "timeout", ""),
    ({"stream": 1}, 422, "stream", ""),
    ({"prompt": 3}, 422, "prompt", "must be a text, or must be a list"),
    *(({"prompt": value}, 422, "prompt", "") for value in ([], ["one"], [[1]])),
    ({"prompt": [1, -2]}, 422, "prompt.1", "must be at least 0"),
    ({"prompt": [True] * 40_000}, 422, "prompt.0", ""),
    ({"messages": {"str": 1}}, 422, "messages", "must be a list"),
    ({"messages": []}, 422, "messages", ""),
    ({"messages": [{"role": "user"}]}, 422, "messages.0.content", "is missing"),
    ({"messages": [{"role": "boss", "content": "x"}]}, 422, "messages.0.role", "'system'"),
    ({"messages": [{"role": LONG, "content": ""}]}, 422, "messages.0.role", ""),
    ({"messages": [{**USER, "content": None}]}, 422, "messages.0.content", ""),
    ({"messages": [{**USER, "content": [{"type": "text"}]}]}, 422, "messages.0.content.0.text", "missing"),
    ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, 422, "messages.0.content.0", ""),
    ({"messages": [{"role": "assistant", "content": "one", "tool_calls": [{}]}]}, 422, "messages.0.tool_calls", ""),
    ({"prompt": TOO_LONG}, 400, "prompt", "bytes"),
    ({"prompt": None, "messages": [{**USER, "content": TOO_LONG}]}, 400, "messages", "bytes"),
    ({"prompt": None, "messages": [{**USER, "content": ""}] * 2000}, 400, "messages", "bytes"),
    ({"prompt": None}, 400, "prompt", "prompt or messages"),
    ({"messages": [USER]}, 400, "prompt", "prompt or messages"),
    ({"prompt": None, "messages": [SYSTEM] * 2}, 400, "messages", ""),
    ({"gen_length": 999}, 400, "gen_length", "at most 384"),
    ({"circuit_temperature": 0}, 400, "circuit_temperature", ""),
    ({"threshold": 0.5, "entropy_budget": 1.0}, 400, "threshold", ""),
    ({"preset": "reference", "entropy_budget": 0.5}, 400, "entropy_budget", ""),
    ({"sampler": "latent", "threshold": 0.5}, 400, "threshold", ""),
    ({"sampler": "latent", "entropy_budget": 0.5}, 400, "entropy_budget", ""),
    ({"preset": "reference", "sampler": "any_order"}, 400, "sampler", ""),
    ({"remasking": "topprob"}, 400, "remasking", ""),
    *GUIDED,
]
INSPECT: list[Row] = [
    *(({"window": value}, 422, "window", "") for value in ([0], [0, 1, 2], [0, "1"], [-1, 1], 3)),
    *(({"window": value}, 400, "window", "") for value in ([0, 5], [1, 1], [2, 1], [0, 1])),
    *(({"candidates": value}, 422, "candidates", "") for value in (0, 33, True)),
    ({"ids": [5] * 385}, 400, "ids", "at most 384"),
    ({"ids": [3, 8192, MASK, 5]}, 400, "ids", ""),
    ({"written": [99]}, 400, "written", ""),
    ({"ban": [9000]}, 400, "ban", ""),
    ({"ban": list(range(8192))}, 400, "ban", ""),
    ({"circuit_temperature": 0}, 400, "circuit_temperature", ""),
    ({"guided_regex": r"\d{9}"}, 400, "guided_regex", ""),
]
COMPLETIONS: list[Row] = [
    *(({"prompt": value}, 422, "prompt", "") for value in ([], [[]], [1, "a"], [1.5], None, {"a": 1}, [[1], "a"])),
    *(({"logprobs": value}, 422, "logprobs", "") for value in (-1, True)),
    ({"model": "other"}, 404, "model", "there is"),
    ({"prompt": [5] * 380, "max_tokens": 5}, 400, "max_tokens", ""),
    ({"prompt": [5] * 380, "max_tokens": None, "gen_length": 5}, 400, "gen_length", ""),
    ({"prompt": [5] * ROOM, "max_tokens": None}, 400, "prompt", ""),
    ({"prompt": [5] * 385}, 400, "prompt", ""),
    ({"prompt": [5] * 384, "max_tokens": 1}, 400, "prompt", ""),
    ({"prompt": [*[5] * 383, MASK], "max_tokens": 1}, 400, "max_tokens", ""),
    ({"prompt": [*[5] * 383, MASK], "max_tokens": None}, 400, "prompt", "give max_tokens 0"),
    ({"max_tokens": 2**31 - 1}, 400, "max_tokens", ""),
    ({"prompt": "one " * 1000}, 400, "prompt", ""),
    ({"prompt": ["hi", TOO_LONG]}, 400, "prompt", "bytes"),
    ({"suffix": TOO_LONG}, 400, "suffix", "bytes"),
    ({f"field{number}": 1 for number in range(5000)}, 422, "body", "5003 fields"),
    ({"logit_bias": {str(number): "a" for number in range(5000)}}, 400, "logit_bias", "logit_bias is not supported"),
    ({"suffix": "one " * 400}, 400, "prompt", ""),
    ({"max_tokens": 0}, 400, "max_tokens", "nothing is to be written"),
    ({"prompt": [8192]}, 400, "prompt", ""),
    ({"prompt": "half \ud800"}, 400, "prompt", ""),
    ({"suffix": "half \ud800"}, 400, "suffix", ""),
    ({"prompt": ["one"] * 17}, 400, "prompt", ""),
    ({"prompt": ["one"] * 2, "n": 9}, 400, "n", ""),
    ({"ban": [8192]}, 400, "ban", ""),
    ({"ban": list(range(8192))}, 400, "ban", ""),
    ({"max_tokens": 320, "steps": 4, "block_length": 16}, 400, "steps", ""),
    ({"preset": "reference", "max_tokens": 33}, 400, "max_tokens", ""),
    *(({"preset": "reference", "steps": 2**31 - 1, "mode": each}, 400, "steps", "") for each in ("block", "full")),
    ({"suffix": "two", "chat": True}, 400, "chat", ""),
    ({"best_of": 2}, 400, "best_of", "not supported"),
    ({"best_of": 1, "n": 2}, 400, "best_of", "not supported"),
]
OTHERS: dict[str, Any] = {
    **{"frequency_penalty": 0.5, "presence_penalty": -1, "logit_bias": {"5": 100}, "functions": [{}], "store": True},
    **{"function_call": {"name": "f"}, "modalities": ["text", "audio"], "audio": {}, "prediction": {}},
    **{"web_search_options": {}, "moderation": {}},
}
"""Fields of OpenAI's chats that have a value which is refused."""
FORMATS: list[Any] = ["json", {"type": "grammar"}, {"type": "json_schema"}, {}, {"type": "json_object", "schema": {}}]
CHAT: list[Row] = [
    *(({"stop": value}, 422, "stop", "") for value in ("", [""], ["a"] * 5, 3)),
    *(({"response_format": value}, 422, "response_format", "") for value in FORMATS),
    *(({name: value}, 400, name, "not supported") for name, value in OTHERS.items()),
    ({"top_logprobs": 21}, 422, "top_logprobs", ""),
    ({"top_logprobs": 2}, 400, "top_logprobs", "give logprobs true"),
    ({"logprobs": True, "top_logprobs": 2, **QUICK}, 400, "top_logprobs", "any_order"),
    ({"messages": [{**SYSTEM, "content": TOO_LONG[:4000]}] * 3}, 400, "messages", "bytes"),
    ({"messages": [SYSTEM] * 2}, 400, "messages", "system message"),
    ({"messages": [{"role": "tool", "content": "4"}]}, 400, "messages", "the roles are"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, 400, "max_completion_tokens", "differ"),
    ({"tool_choice": "required"}, 400, "tool_choice", "not among"),
    ({"tools": TOOLS[:2], "tool_choice": NAMED}, 400, "tool_choice", "not among"),
    ({"tools": TOOLS * 2, "tool_choice": "required"}, 400, "tools", "same name"),
    ({"tools": [tool("f", UNSUPPORTED)], "tool_choice": "required"}, 400, "tools", ""),
    ({"tools": TOOLS, "tool_choice": "required", "guided_choice": ["a"]}, 400, "guided_choice", "tools and guided"),
    ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, 400, "guided_choice", "response_format and"),
    ({"response_format": {"type": "json_schema", "json_schema": FORBIDDEN}}, 400, "response_format", ""),
    ({"guided_regex": r"\d{40}", "max_tokens": 8}, 400, "guided_regex", ""),
    ({"guided_regex": "a*", "stop": ["aa"]}, 400, "stop", ""),
    ({"guided_regex": "a*", "preset": "reference", "steps": 2, "max_tokens": 4}, 400, "guided_regex", ""),
]
RESPONSES: list[Row] = [
    ({"store": True}, 400, "store", "no response is kept"),
    ({"previous_response_id": "resp-1"}, 400, "previous_response_id", "no response is kept"),
    ({"conversation": "conv-1"}, 400, "conversation", "no response is kept"),
    ({"background": True}, 400, "background", "no response is kept"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools", "not supported"),
    ({"truncation": "auto"}, 400, "truncation", "not supported"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "include"),
    ({"max_output_tokens": 999}, 400, "max_output_tokens", "tokens"),
    ({"input": "word " * 600}, 400, "input", "tokens"),
    ({"max_output_tokens": 16, "gen_length": 3}, 400, "gen_length", "differ"),
    ({"codd_provisional": True}, 400, "codd_provisional", "stream"),
    ({"text": {"format": {"type": "json_schema", **FORBIDDEN}}}, 400, "text", ""),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 422, "input.0.content.0", ""),
    ({"input": [{"role": "user", "content": []}]}, 422, "input.0.content", ""),
]
PLACE = {"first": ["New"], "second": ["York"]}
DECISIONS: list[Row] = [
    ({"messages": [USER]}, 400, "prompt", "prompt or messages"),
    ({"fields": {}}, 422, "fields", ""),
    ({"fields": {"first": ["New"]}}, 400, "fields", ""),
    ({"fields": {**PLACE, "second": [""]}}, 400, "fields", ""),
    ({"fields": {**PLACE, "second": ["York" * 40]}}, 400, "fields", ""),
    ({"fields": {**PLACE, "second": [f"{n:04}" for n in range(999)]}}, 400, "fields", ""),
    ({"fields": {**PLACE, "second": ["York" * 9000]}}, 400, "fields", "bytes"),
    ({"prompt": "a " * 3000}, 400, "prompt", ""),
    ({"top": 21}, 422, "top", ""),
]
ROUTES: dict[str, tuple[dict[str, Any], list[Row]]] = {
    "/v1/denoise": ({"prompt": "one"}, DENOISE),
    "/v1/inspect": ({"ids": [3, 4, MASK, MASK], "window": [0, 4]}, INSPECT),
    "/v1/constraint": ({}, [*GUIDED, ({}, 400, "guided_regex", "give one of them")]),
    "/v1/completions": ({"model": "mini", "prompt": [5], "max_tokens": 5}, COMPLETIONS),
    "/v1/chat/completions": ({"model": "mini", "messages": [USER]}, CHAT),
    "/v1/decisions": ({"prompt": "He came from", "template": " {first} {second}.", "fields": PLACE}, DECISIONS),
    "/v1/responses": ({"model": "mini", "input": "one"}, RESPONSES),
}


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_refused_names_the_field(server, route):
    base, rows = ROUTES[route]
    wrong = []
    for fields, status, param, words in rows:
        answer = server.http.post(route, content=json.dumps({**base, **fields}), headers=JSON)
        error = answer.json().get("error") or {"param": "", "message": "", "type": ""}
        named = f"{error['param']}.".startswith(f"{param}.") and len(error["param"]) <= 100
        right = answer.status_code == status and named and words in error["message"]
        if not right or LONG[:101] in answer.text or error["type"] != "invalid_request_error":
            wrong.append((str(fields)[:200], answer.status_code, error))
    assert not wrong


def test_every_field_of_openai_that_is_refused_is_tried(server):
    from codd.serving.schemas import ChatRequest

    neutral = {name: info.examples for name, info in ChatRequest.model_fields.items() if info.examples is not None}
    assert set(neutral) == set(OTHERS)
    for name, values in neutral.items():
        for value in (None, *values):
            ChatRequest.model_validate({"model": "m", "messages": [USER], name: value}).check_supported()
