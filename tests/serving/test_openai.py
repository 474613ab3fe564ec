"""The real OpenAI client gets what `model.generate` gives."""

from typing import Any

import openai
import pytest

from codd.decoding import Options
from tests.support.live import bundled

QUESTION = "Mia has 84 stamps. She gives half of them to Tom. How many does she keep?"
SAID = [{"role": "user", "content": QUESTION}]
STORY = "It was a dark night, and the old man"
SHORT: dict[str, Any] = {"steps": 4, "block_length": 16}


def generated(prompt: Any, **options: Any) -> str:
    texts = bundled().generate(prompt, **{"gen_length": 16, **SHORT, **options}).texts
    assert texts is not None
    return texts[0]


@pytest.mark.parametrize(
    "how", [*({**SHORT, "sampler": each} for each in ("latent", "any_order", "factorized")), {"mode": "speculative"}]
)
def test_a_chat_is_what_generate_gives(client, how):
    drawn = {"temperature": 0.8, "seed": 7}
    [expected] = bundled().generate([SAID], gen_length=16, **drawn, **how).texts
    assert expected
    asked: dict[str, Any] = {"model": "mini", "messages": SAID, "max_tokens": 16, **drawn, "extra_body": how}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}


def test_a_completion_is_what_generate_gives(client):
    expected = [generated(STORY, chat=False, temperature=1.0, seed=3 + i) for i in range(2)]
    assert expected[0] != expected[1]
    asked: dict[str, Any] = {
        "model": "mini",
        "prompt": STORY,
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 3,
        "n": 2,
        "extra_body": {**SHORT, "chat": False},
    }
    whole = client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == expected
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_the_defaults_are_those_of_python(client, server):
    assert server.http.get("/v1/models/mini").json()["defaults"] == Options().as_json()
    found = client.chat.completions.create(model="mini", messages=SAID, max_tokens=16)
    [expected] = bundled().generate([SAID], gen_length=16).texts
    assert found.choices[0].message.content == expected


def test_a_stop_text_ends_the_answer_and_frees_the_slot(client, server):
    [whole] = bundled().generate([SAID], gen_length=16, steps=8).texts
    stop = whole[len(whole) // 2 :][:3]
    asked: dict[str, Any] = {
        "model": "mini",
        "messages": SAID,
        "stop": [stop],
        "max_tokens": 16,
        "extra_body": {"steps": 8},
    }
    found = client.chat.completions.create(**asked)
    assert found.choices[0].message.content == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == whole[: whole.index(stop)]
    server.until_idle()  # the step that was under way is the last


def test_models_are_listed(client):
    [model] = client.models.list().data
    assert model.id == "mini"
    assert client.models.retrieve("mini").owned_by == "codd"
    with pytest.raises(openai.NotFoundError, match="mini"):
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "hi"}])


def test_errors_are_what_the_client_knows(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="mini", prompt="x " * 500, max_tokens=4)
    assert error.value.param == "prompt"
    with pytest.raises(openai.UnprocessableEntityError) as wrong:
        client.completions.create(model="mini", prompt="x", extra_body={"stepps": 4})
    assert wrong.value.param == "stepps"
