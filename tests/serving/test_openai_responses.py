"""OpenAI's own client and /v1/responses; and what streams of all three routes have on request."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from codd.decoding import Options
from codd.serving.app import Settings
from codd.serving.prompts import Limits
from tests.support.live import PATIENCE, Live, bundled, live, until
from tests.support.small_models import Gate

QUESTION = "Mia has 84 stamps. She gives half of them to Tom. How many does she keep?"
SAID = [{"role": "user", "content": QUESTION}]
HOW: dict[str, Any] = {"steps": 8, "block_length": 16, "seed": 7}
ASKED: dict[str, Any] = {"model": "mini", "max_output_tokens": 16, "temperature": 0.8, "extra_body": HOW}
CHAT: dict[str, Any] = {"model": "mini", "messages": SAID, "max_tokens": 16, "temperature": 0.8, "extra_body": HOW}
SCHEMA = {"type": "object", "properties": {"stamps": {"type": "integer"}}, "required": ["stamps"]}


class Stamps(pydantic.BaseModel):
    stamps: int


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(settings=Settings(name="mini", limits=Limits(Options(gen_length=8)))) as found:
        yield found


def generated(messages: list[dict[str, str]], **options: Any) -> str:
    texts = bundled().generate([messages], **{"gen_length": 16, "temperature": 0.8, **HOW, **options}).texts
    assert texts is not None
    return texts[0]


def test_a_response_is_what_generate_gives(client):
    found = client.responses.create(input=QUESTION, top_p=0.9, metadata={"a": "b"}, **ASKED)
    assert found.output_text == generated(SAID, top_p=0.9)
    assert found.output_text
    assert (found.temperature, found.top_p, found.max_output_tokens) == (0.8, 0.9, 16)
    assert (found.object, found.model, found.metadata, found.store) == ("response", "mini", {"a": "b"}, False)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    chat = client.chat.completions.create(**CHAT, top_p=0.9)
    assert chat.choices[0].message.content == found.output_text
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (
        found.usage.input_tokens,
        found.usage.output_tokens,
    )
    reason = {"stop": ("completed", None), "length": ("incomplete", "max_output_tokens")}
    status = found.status, found.incomplete_details and found.incomplete_details.reason
    assert status == reason[chat.choices[0].finish_reason]


def test_items_and_instructions_are_a_conversation(client):
    first = client.responses.create(input=QUESTION, **ASKED)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And\nTom?"},
    ]
    items = [
        {"role": "user", "content": QUESTION},
        *(item.to_dict() for item in first.output),
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": each} for each in ("And", "Tom?")],
        },
    ]
    found = client.responses.create(input=items, instructions="Be brief.", **ASKED)
    assert found.output_text == generated(messages)
    assert found.instructions == "Be brief."


def test_a_stream_has_the_events_of_openai(client):
    whole = client.responses.create(input=QUESTION, **ASKED)
    events = list(client.responses.create(input=QUESTION, stream=True, **ASKED))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * len(deltas),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    done, part, item, last = events[-4:]
    assert done.text == part.part.text == item.item.content[0].text == last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert last.response.output[0].id == done.item_id == item.item.id


def test_the_stream_helper_of_the_client_follows(client):
    asked = {**ASKED, "extra_body": {**HOW, "guided_choice": ["forty two", "none"], "codd_provisional": True}}
    with client.responses.stream(input=QUESTION, **asked) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.codd_provisional" in seen
    assert final.output_text in ("forty two", "none")
    assert final.status == "completed"


def test_a_stream_that_breaks_off_ends_with_the_error_of_openai():
    gate = Gate()
    settings = Settings(name="mini", limits=Limits(Options(gen_length=8, hooks=(gate,))))
    with (
        live(settings=settings, drain=0) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        stream = client.responses.create(model="mini", input=QUESTION, stream=True)
        assert gate.reached.acquire(timeout=PATIENCE)
        server.running.handle_exit(signal.SIGTERM, None)
        until(lambda: server.engine._stopped)
        gate.open.release(1000)
        received = [line for line in stream.response.iter_lines() if line]
    numbers = [json.loads(line.removeprefix("data: "))["sequence_number"] for line in received[1::2]]
    assert numbers == list(range(len(numbers)))
    assert received[-2] == "event: error"
    event = openai.types.responses.ResponseErrorEvent.model_validate_json(received[-1].removeprefix("data: "))
    assert (event.type, event.code, event.param) == ("error", "shutting_down", None)
    assert event.to_dict()["error"]["message"] == event.message  # by which the client knows that it is to raise


def test_a_schema_binds_the_text(client):
    asked = {**ASKED, "temperature": 0.0}
    given = {"format": {"type": "json_schema", "name": "sold", "schema": SCHEMA, "strict": True}}
    found = client.responses.create(input=QUESTION, text=given, **asked)
    assert isinstance(json.loads(found.output_text)["stamps"], int)
    assert (found.status, found.text.format.to_dict()["schema"]) == ("completed", SCHEMA)
    parsed = client.responses.parse(input=QUESTION, text_format=Stamps, **asked)
    assert isinstance(parsed.output_parsed, Stamps)
    anything = client.responses.create(input=QUESTION, text={"format": {"type": "json_object"}}, **asked)
    assert isinstance(json.loads(anything.output_text), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_a_chat(client, stream):
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        events = list(client.responses.create(input=QUESTION, stream=True, **asked))
        found = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    else:
        found = client.responses.create(input=QUESTION, **asked).output[0].content[0].logprobs
    chat = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    expected = chat.choices[0].logprobs.content
    assert [one.token for one in found] == [one.token for one in expected]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-6)
    assert all(len(one.top_logprobs) == 2 for one in found)


def test_what_asks_for_nothing_is_accepted(client):
    assert client.responses.create(input=QUESTION, store=False, tools=[], truncation="disabled", **ASKED).output_text


def check_resolving(steps: list[tuple[str, list[str | None]]], text: str) -> None:
    """Each step that is not the last says how many masks are left, and what it shows resolves to the text."""
    model = bundled()
    how: dict[str, Any] = {"gen_length": 16, "temperature": 0.8, **HOW}
    run = list(model.denoise([SAID], **how))
    masks = [int((step.ids == model.mask_id).sum()) for step in run if not step.finished]
    assert [pieces.count(None) for _, pieces in steps] == masks
    assert any(piece for _, pieces in steps for piece in pieces), "something is written behind a mask"
    assert all(text.startswith(committed) for committed, _ in steps)


def test_provisional_text_comes_beside_the_committed_one(client):
    how = {**HOW, "codd_provisional": True}
    committed, steps = "", []
    for event in client.responses.create(input=QUESTION, stream=True, **{**ASKED, "extra_body": how}):
        if event.type == "response.output_text.delta":
            committed += event.delta
        elif event.type == "response.codd_provisional":
            steps.append((committed, event.codd_provisional))
    check_resolving(steps, committed)
    assert committed == generated(SAID)


@pytest.mark.parametrize("chat", [True, False])
def test_provisional_text_in_completions_and_their_usage(client, chat):
    common: dict[str, Any] = {"model": "mini", "max_tokens": 16, "temperature": 0.8, "stream": True}
    common |= {"stream_options": {"include_usage": True}, "extra_body": {**HOW, "codd_provisional": True}}
    if chat:
        chunks = list(client.chat.completions.create(messages=SAID, **common))
    else:
        chunks = list(client.completions.create(prompt=QUESTION, **common))
    committed, steps = "", []
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        text = choice.delta.content if chat else choice.text
        committed += text or ""
        if (pieces := (choice.model_extra or {}).get("codd_provisional")) is not None:
            assert not text
            steps.append((committed, pieces))
    check_resolving(steps, committed)
    assert committed == generated(SAID)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert 0 < chunks[-1].usage.completion_tokens <= 16


def test_text_that_is_held_back_for_a_stop_string_is_provisional(client):
    text = generated(SAID)
    how = {**HOW, "codd_provisional": True}
    stop = text[3:6] + "\x00"  # of which the text has all but the end
    asked = {**CHAT, "stop": [stop, text + "\x00"], "stream": True, "extra_body": how}
    held = [
        choice.model_extra["codd_provisional"]
        for chunk in client.chat.completions.create(**asked)
        for choice in chunk.choices
        if "codd_provisional" in (choice.model_extra or {})
    ]
    written = [pieces for pieces in held if pieces and pieces[0] is not None]
    assert written
    assert all(text.startswith(pieces[0]) for pieces in written)
