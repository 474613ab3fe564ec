"""Structured output and log-probabilities over HTTP, as OpenAI's and vLLM's clients ask for them."""

import asyncio
import contextlib
import fcntl
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from pydantic import BaseModel

from codd.constraints import Regex, Vocabulary
from codd.serving import compiler_process
from codd.serving.app import Settings
from codd.serving.compiler import Compiler
from codd.serving.errors import APIError
from codd.serving.prompts import Compiled, Limits
from codd.serving.schemas import Constraint
from tests.support.live import PATIENCE, bundled, live, until

QUICK = {"sampler": "latent", "steps": 4}
ASKED: dict[str, Any] = {"model": "mini", "messages": [{"role": "user", "content": "Is 3 more than 2?"}]}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False},
    {"enum": ["yes", "no", None]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
]
EXPENSIVE = "((a?){100}){100}"
"""Ten thousand choices within each other: the subsets of their positions are as large as their number."""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory, and /proc")


class Answer(BaseModel):
    more: bool


@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "enum", "array"])
def test_a_schema_is_followed_streamed_or_not(client, schema):
    asked = {
        **ASKED,
        "max_tokens": 12,
        "temperature": 1.0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "extra_body": QUICK,
    }
    text = client.chat.completions.create(**asked).choices[0].message.content
    assert jsonschema_rs.is_valid(schema, json.loads(text))
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text


def test_formats_of_openai(client):
    asked: dict[str, Any] = {**ASKED, "max_tokens": 8, "extra_body": QUICK}
    parsed = client.chat.completions.parse(**asked, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    some, plain, unsaid = (
        client.chat.completions.create(**asked, **more).choices[0].message.content
        for more in ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "text"}}, {})
    )
    assert isinstance(json.loads(some), dict)
    assert plain == unsaid


@pytest.mark.parametrize("sampler", ["latent", "factorized", "any_order"])
def test_a_pattern_is_followed_in_both_routes_and_in_denoise(server, client, sampler):
    how = {"sampler": sampler, "steps": 2, "temperature": 1.0, "guided_regex": r"\d\d:\d\d"}
    asked: dict[str, Any] = {"model": "mini", "prompt": "At ", "max_tokens": 6, "extra_body": how}
    whole = server.http.post("/v1/denoise", json={"prompt": "At ", "gen_length": 6, "stream": False, **how}).json()
    texts = [
        client.chat.completions.create(**ASKED, max_tokens=6, extra_body=how).choices[0].message.content,
        client.completions.create(**asked).choices[0].text,
        client.completions.create(**asked, suffix=" sharp.").choices[0].text,
        whole["done"]["text"],
    ]
    assert all(re.fullmatch(r"\d\d:\d\d", text) for text in texts), texts


def test_choices_and_the_text_of_a_schema(client):
    how = {"model": "mini", "prompt": "Yes or no?", "max_tokens": 4, "n": 2, "temperature": 1.0}
    found = client.completions.create(**how, extra_body={**QUICK, "guided_choice": ["yes", "no"]})
    assert {choice.text for choice in found.choices} <= {"yes", "no"}
    found = client.completions.create(**how, extra_body={**QUICK, "guided_json": '{"type": "boolean"}'})
    assert {choice.text for choice in found.choices} <= {"true", "false"}


def test_a_text_that_fills_its_length_is_complete(client):
    """OpenAI's client takes "length" for JSON that is cut, and raises."""
    asked = {**ASKED, "max_tokens": 1, "extra_body": {"guided_choice": ["7"]}}
    whole = client.chat.completions.create(**asked)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("7", "stop")
    assert whole.usage.completion_tokens == 1
    *_, last = client.chat.completions.create(**asked, stream=True)
    assert last.choices[0].finish_reason == "stop"


def test_sizes_of_constraints_are_told(server):
    found = server.http.post("/v1/constraint", json={"guided_regex": r"(ab\d)?"})
    assert found.status_code == 200
    assert found.json()["states"] >= 3
    assert found.json()["shortest"] == 0


def state_and_parent(process: int) -> list[str]:
    """Of a process, as /proc has them; two empty words where it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["", ""]


def compiling_process() -> int:
    """The process that compiles for the server of this test."""
    ours = str(os.getpid())
    children = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    [found] = [
        child
        for child in children
        if state_and_parent(child)[1] == ours
        and compiler_process.__name__ in Path(f"/proc/{child}/cmdline").read_text()
    ]
    return found


@on_linux
def test_a_pattern_that_takes_long_keeps_nobody_else(server):
    """While one cannot be compiled, streams go on, and patterns that are known are answered."""
    known = {"prompt": "a", "gen_length": 3, "guided_regex": "a+", "stream": False, **QUICK, "steps": 2}
    assert server.http.post("/v1/denoise", json=known).status_code == 200
    process, answers = compiling_process(), queue.Queue[int]()
    asked = {"guided_regex": "b+", "timeout": 60.0}
    thread = threading.Thread(target=lambda: answers.put(server.http.post("/v1/constraint", json=asked).status_code))
    os.kill(process, signal.SIGSTOP)
    try:
        # Until the system has stopped it, it may still read: its signal waits for a processor, as it does.
        until(lambda: state_and_parent(process)[0] == "T")
        with open(f"/proc/{process}/fd/0", "rb") as pipe:
            thread.start()
            until(lambda: any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))))  # the pattern waits to be read
        with server.http.stream("POST", "/v1/denoise", json={"prompt": "a", "gen_length": 8, "steps": 8}) as stream:
            assert sum(line == "event: step" for line in stream.iter_lines()) == 8
        assert server.http.post("/v1/denoise", json=known).status_code == 200
        assert answers.empty()
    finally:
        os.kill(process, signal.SIGCONT)
    assert answers.get(timeout=PATIENCE) == 200
    thread.join()


def test_time_is_limited_and_the_next_one_is_served():
    settings = Settings(name="mini", limits=Limits(compile_seconds=0.2))
    with live(settings=settings) as server:
        refused = server.http.post("/v1/constraint", json={"guided_regex": EXPENSIVE})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
        assert "0.2 seconds" in refused.text
        # On a slow machine a small one may take as long, too: but the process is there again.
        assert any(server.http.post("/v1/constraint", json={"guided_regex": "ab"}).is_success for _ in range(20))


LIMITED = """
import os, time
from codd.serving import compiler_process

def compute(seconds):
    begun = time.process_time()
    while time.process_time() < begun + seconds:
        pass

def ends_with(function, limit, starved):
    compiler_process.STARVED = starved
    child = os.fork()
    if child == 0:
        with compiler_process._limited(limit):
            function()
        compute(limit)  # no limit any more
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print([ends_with(*case) for case in (
    (lambda: time.sleep(1), 0.5, 1000), (lambda: compute(60), 0.5, 1000), (lambda: time.sleep(60), 0.05, 10)
)])
"""


@on_linux
def test_the_time_is_the_processors():
    """On a busy machine the process may wait for seconds before it gets a turn, but not for ever."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([0, -signal.SIGPROF.value, 1])


def test_a_server_that_ends_tells_who_still_waits_for_a_pattern():
    def compilers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("codd-compiler")}

    settings, before = Settings(name="mini", limits=Limits(compile_seconds=60.0)), compilers()
    with live(settings=settings, drain=0) as server, ThreadPoolExecutor(1) as pool:
        body = {"guided_regex": EXPENSIVE}
        asked = pool.submit(httpx.post, f"{server.url}/v1/constraint", json=body, timeout=PATIENCE)
        until(lambda: bool(compilers() - before))
        server.running.config.timeout_graceful_shutdown = 0
        server.running.handle_exit(signal.SIGTERM, None)
        found = asked.result(PATIENCE)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "shutting_down")
    until(lambda: not compilers() - before)  # with its process, which may have been started after all


def compiled_alone(pattern: str, limits: Limits) -> Compiled | None:
    """By a process that is started for it."""
    compiler = Compiler(bundled(), limits)
    wanted = Constraint("guided_regex", "regex", pattern)
    try:
        return asyncio.run(compiler(wanted, "client", time.monotonic() + PATIENCE))
    finally:
        compiler.close()


@on_linux
def test_memory_is_limited():
    with pytest.raises(APIError, match="5 seconds or 1 MiB of memory"):
        compiled_alone("ab", Limits(compile_memory=1 << 20))


def test_nothing_is_kept_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "codd" / "constraints"
    assert compiled_alone("on disk", Limits(compile_seconds=60.0)) is not None
    assert not kept.exists()
    Regex("on disk").compile(bundled().vocabulary)  # as anybody else's is
    assert list(kept.iterdir())


@pytest.mark.parametrize(
    "how",
    [
        {"sampler": "any_order", "threshold": 0.5},
        {"sampler": "factorized", "steps": 3},
        {"sampler": "any_order", "steps": 3, "mode": "full"},
        {"sampler": "any_order", "steps": 2, "guided_regex": r"\d{2} = \d{2}"},
    ],
    ids=["joint", "network", "full", "constrained"],
)
def test_log_probabilities_of_a_chat(client, how):
    asked: dict[str, Any] = {**ASKED, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    endless = {} if "guided_regex" in how else {"ban": list(bundled().stop_ids)}  # so that there are tokens to look at
    asked |= {"temperature": 0.7, "extra_body": {**how, **endless}}
    [choice] = client.chat.completions.create(**asked).choices
    found = choice.logprobs.content
    assert found
    assert b"".join(bytes(each.bytes) for each in found).decode() == choice.message.content
    for each in found:
        top = {tuple(other.bytes): other.logprob for other in each.top_logprobs}
        assert each.logprob <= 0
        assert sum(map(math.exp, top.values())) <= 1 + 1e-5
        assert list(top.values()) == sorted(top.values(), reverse=True)
        if tuple(each.bytes) in top:
            assert top[tuple(each.bytes)] == pytest.approx(each.logprob, abs=1e-4)
        else:
            assert each.logprob <= min(top.values()) + 1e-4
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content] == found


def test_log_probabilities_of_a_completion(client):
    asked: dict[str, Any] = {"model": "mini", "prompt": "Tom has", "max_tokens": 8, "echo": True, "stop": [" a"]}
    asked["extra_body"] = {"chat": False, "steps": 8}
    [plain] = client.completions.create(**asked).choices
    assert plain.logprobs is None
    for count in (0, 2):
        [choice] = client.completions.create(**asked, logprobs=count).choices
        found = choice.logprobs
        assert choice.text == plain.text
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            assert choice.text[offset:].startswith(token[: len(choice.text) - offset])
        assert all(len(top) <= count for top in found.top_logprobs)


def test_the_latent_sampler_knows_no_alternatives(client):
    found = client.chat.completions.create(**ASKED, max_tokens=4, logprobs=True, extra_body={**QUICK, "stop": False})
    assert all(each.top_logprobs == [] for each in found.choices[0].logprobs.content)


@pytest.mark.parametrize(("fault", "named"), [(MemoryError(), "too much memory"), (KeyError("x"), "KeyError: 'x'")])
def test_a_fault_of_the_compiler_is_named_and_ends_nothing(fault, named, monkeypatch):
    def broken(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(compiler_process, "compiled", broken)
    monkeypatch.setattr(compiler_process, "_limited", lambda _: contextlib.nullcontext())
    assert named in compiler_process._answer(b'[1, "regex", "a", 2, 3]', Vocabulary((b"a",)))["error"]
