import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from pydantic import ValidationError

from codd.decoding.options import ALIASES, COLDEST, PUBLISHED_ORDERS, UNTYPED, Options, Order
from codd.errors import InvalidInput
from codd.serving.options import NULLABLE, option_field
from codd.serving.schemas import ChatRequest, CompletionRequest, DenoiseRequest, InspectRequest

OPTIONS = {field.name for field in fields(Options)} - set(UNTYPED)
GUIDED = {"guided_regex", "guided_json", "guided_choice"}
SAID = [{"role": "user", "content": "one"}]
DEFAULTS = Options(gen_length=64, threshold=0.9, temperature=0.5)
OPENAI_COMPLETION = {
    *("model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n"),
    *("presence_penalty", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user"),
}


def denoise(**fields: Any) -> DenoiseRequest:
    return DenoiseRequest.model_validate({"prompt": "one", **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "one", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": SAID, **fields})


def looking(**fields: Any) -> InspectRequest:
    return InspectRequest.model_validate({"ids": [1, 2], "window": [0, 2], **fields})


def accepted(make: Callable[..., Any], **fields: Any) -> bool:
    try:
        make(**fields)
    except (ValidationError, InvalidInput, TypeCheckError):
        return False
    return True


def test_the_fields_are_the_options():
    own = {"prompt", "messages", "chat", "timeout", "stream"}
    assert set(DenoiseRequest.model_fields) - own - GUIDED == OPTIONS
    assert set(CompletionRequest.model_fields) > OPTIONS
    assert set(ChatRequest.model_fields) > OPTIONS
    assert set(InspectRequest.model_fields) & OPTIONS == {"circuit_temperature", "tempering", "cfg_scale", "ban"}
    assert all(DenoiseRequest.model_fields[name].default is None for name in OPTIONS)
    assert denoise().given() == {}
    assert denoise().options(DEFAULTS) == DEFAULTS


def test_what_openai_documents_is_known():
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat

    assert set(CompletionRequest.model_fields) > OPENAI_COMPLETION
    assert set(Chat.__annotations__) <= set(ChatRequest.model_fields)


def test_the_orders_are_those_of_the_options():
    order, _ = get_args(option_field("remasking")[0])
    assert set(get_args(order)) == {*get_args(Order), *ALIASES, *PUBLISHED_ORDERS}
    assert denoise(remasking="topk_margin").options(DEFAULTS).remasking == "margin"


@pytest.mark.parametrize("make", [denoise, completion, chat])
def test_the_length_has_the_name_that_transformers_gives_it(make):
    assert make(max_new_tokens=3).options(DEFAULTS).gen_length == 3


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-3, 3),
    st.sampled_from([0.0, 1.0, 1e-300, math.nextafter(1, 2), math.nextafter(0, -1)]),
)
VALUES = st.one_of(NUMBERS, st.booleans(), st.text(max_size=3), st.sampled_from(["block", "full", "paper", "defer"]))


REALS = {field.name for field in fields(Options) if float in (field.type, *get_args(field.type))}


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(OPTIONS - {"ban", "seed", "stop"})), value=VALUES)
def test_the_schema_takes_what_the_options_take(name, value):
    if isinstance(value, bool):
        assert not accepted(denoise, **{name: value})  # to Python, True is a number
        return
    as_typed = float(value) if isinstance(value, int) and name in REALS else value
    preset = {"preset": "reference"} if name == "circuit_temperature" else {}  # where it may be 0, but not nearly
    assume(name != "circuit_temperature" or not isinstance(value, float) or not 0 < value < COLDEST)
    assert accepted(denoise, **{name: value}) == accepted(Options, **{name: as_typed}, **preset)


def test_null_is_the_default_unless_it_means_something():
    nothing = dict.fromkeys(OPTIONS)
    assert denoise(**nothing).given() == dict.fromkeys(NULLABLE)
    found = denoise(threshold=None, temperature=None, steps=None).options(DEFAULTS)
    assert (found.threshold, found.temperature, found.steps) == (None, 0.5, None)
    assert {field.name for field in fields(Options) if type(None) in get_args(field.type)} & OPTIONS == NULLABLE


def test_the_client_comes_before_the_server():
    found = denoise(entropy_budget=1, gen_length=7, ban=[3]).options(DEFAULTS)
    assert (found.entropy_budget, found.threshold) == (1.0, None)
    assert (found.gen_length, list(found.ban), found.temperature) == (7, [3], 0.5)


def test_the_length_has_three_names():
    assert completion(max_tokens=5).given() == {"gen_length": 5}
    assert chat(max_completion_tokens=5, max_tokens=5).length() == ("max_tokens", 5)
    assert chat(max_completion_tokens=5).length() == ("max_completion_tokens", 5)
    assert completion(gen_length=5).length() == ("gen_length", 5)
    assert completion().length() == ("max_tokens", None)


def test_stop_is_a_switch_or_texts():
    assert (completion(stop=False).given(), completion(stop=False).stops) == ({"stop": False}, ())
    assert (completion(stop="x").given(), completion(stop="x").stops) == ({}, ("x",))
    assert chat(stop=["x", "yy"]).stops == ("x", "yy")
    assert chat(stop=None).options(DEFAULTS).stop is True


def test_what_is_ignored():
    chat(
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        reasoning_effort="low",
        verbosity="low",
        safety_identifier="s",
        prompt_cache_key="k",
        stream_options={"include_usage": True, "include_obfuscation": False},
    ).check_supported()
    completion(best_of=2, n=2, frequency_penalty=0, logit_bias={}).check_supported()


def test_messages_as_templates_take_them():
    said = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None, "annotations": []},
    ]
    assert [message.plain() for message in chat(messages=said).messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three"},
    ]


@pytest.mark.parametrize("prompt", ["", "one", ["one", "two"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_completions(prompt):
    assert completion(prompt=prompt).prompt == prompt


def test_the_schema_states_the_ranges():
    assert looking().candidates == 8
    found = DenoiseRequest.model_json_schema()["properties"]
    assert {"maximum": 1, "minimum": 0, "type": "number"} in found["top_p"]["anyOf"]
    assert all("description" in found[name] for name in OPTIONS)
