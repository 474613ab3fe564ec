"""Whoever says nothing gets the same run everywhere, and what is refused is refused everywhere."""

import io
import json
import sys
from typing import Any

import pytest

import codd
from codd.cli import main, sampling
from codd.decoding.options import DEFAULT_GREEDY, DEFAULT_SAMPLED, Options
from codd.errors import InvalidInput
from codd.serving.errors import APIError
from codd.serving.prompts import Limits, chat_generations, completion_generations, denoise_generations
from codd.serving.schemas import ChatRequest, CompletionRequest, DenoiseRequest

QUESTION = (
    "A store sells 26 scarves on Thursday. On Friday it sells 284 more scarves than on Thursday. How many scarves are "
    "sold in all?"
)
SAID = [{"role": "user", "content": QUESTION}]
WAYS = [({}, DEFAULT_GREEDY), ({"temperature": 0.7}, DEFAULT_SAMPLED)]


@pytest.fixture(scope="module")
def bundled():
    return codd.load(device="cpu")


@pytest.fixture
def verb(bundled, monkeypatch, capsys):
    """Runs a verb on the question; its code, and what it printed."""
    monkeypatch.setattr(sampling, "load", lambda *given, **named: bundled)

    def run(name: str, given: dict[str, Any]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
        typed = [text for key, value in given.items() for text in (f"--{key.replace('_', '-')}", str(value))]
        return main([name, "--json", *typed]), *capsys.readouterr()

    return run


def requested(model: codd.Model, limits: Limits, given: dict[str, Any]) -> list[Options]:
    """What the server makes of a request on each of its routes."""
    denoise = DenoiseRequest.model_validate({"prompt": QUESTION, **given})
    complete = CompletionRequest.model_validate({"model": "m", "prompt": QUESTION, **given})
    chat = ChatRequest.model_validate({"model": "m", "messages": SAID, **given})
    found = [
        *denoise_generations(denoise, model, limits),
        *completion_generations(complete, model, limits),
        *chat_generations(chat, model, limits),
    ]
    return [each.options for each in found]


@pytest.mark.parametrize(("given", "pace"), WAYS)
def test_the_same_run_everywhere(given, pace, bundled, verb):
    wanted = {**Options(**given, gen_length=6).as_json(), "sampler": "any_order", **pace}
    short = {"gen_length": 6, **given}
    assert [each.as_json() for each in requested(bundled, Limits(), short)] == [wanted] * 3
    answers = []
    for name in ("generate", "chat"):
        code, out, _ = verb(name, short)
        record = json.loads(out)
        assert code == 0
        assert record["settings"].items() >= wanted.items()
        answers.append((record["text"], record["steps"]))
    found, said = (bundled.generate(QUESTION, **short, **more) for more in ({}, {"sampler": "any_order", **pace}))
    assert answers == [(found.texts[0], found.steps[0])] * 2 == [(said.texts[0], said.steps[0])] * 2


def test_a_question_is_answered_by_who_says_nothing(bundled):
    found = bundled.generate(QUESTION)
    assert found.texts[0].endswith("#### 336")
    assert found.steps[0] < len(found.completions[0]) / 2


def test_what_the_server_was_told_holds_for_requests_that_say_nothing(bundled):
    told = Limits(Options(threshold=0.8))
    assert requested(bundled, told, {"temperature": 0.7})[0].commit_rule == {"threshold": 0.8}
    assert requested(bundled, told, {"steps": None})[0].commit_rule == {"steps": None}
    warm = Limits(Options(temperature=0.7))
    assert [each.commit_rule for each in requested(bundled, warm, {})] == [DEFAULT_SAMPLED] * 3
    assert [each.commit_rule for each in requested(bundled, warm, {"temperature": 0})] == [DEFAULT_GREEDY] * 3


@pytest.mark.parametrize("pace", [{"threshold": 0.9}, {"entropy_budget": 0.5}])
def test_one_latent_path_and_how_sure_it_is(pace, bundled, verb):
    given = {"sampler": "latent", **pace}
    with pytest.raises(InvalidInput, match="or give steps") as error:
        bundled.generate(QUESTION, **given)
    message = str(error.value)
    with pytest.raises(APIError) as refused:
        requested(bundled, Limits(), given)
    assert (refused.value.status, refused.value.param, refused.value.message) == (400, next(iter(pace)), message)
    with pytest.raises(APIError, match="sampler"):
        requested(bundled, Limits(Options(**pace)), {"sampler": "latent"})
    for name in ("generate", "chat"):
        assert verb(name, given) == (1, "", f"codd: {message}\n")
