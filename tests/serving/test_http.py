"""A running server and its clients: right ones, and those that are too many, too long, wrong, gone, or strangers."""

import json
import logging
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from codd.constraints import Choice
from codd.serving.app import Settings
from codd.serving.streaming import EventStream
from tests.support.browser import serving
from tests.support.live import IDS, PATIENCE, Live, bundled, gated, live, raw, until
from tests.support.small_models import Gate, small

PROMPT = "What is 7 + 8?"
QUICK: dict[str, Any] = {"prompt": PROMPT, "gen_length": 8, "steps": 2}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Live, Gate]]:
    gate = Gate()
    with live(small(), gated(gate), slots=1, queue=1) as found:
        yield found, gate


@pytest.fixture
def held(shared: tuple[Live, Gate]) -> Iterator[tuple[Live, Gate]]:
    """A server with one slot and one place in its queue whose every step waits at a gate, and the gate, shut."""
    server, gate = shared
    gate.reset()
    yield server, gate
    gate.open.release(1000)
    server.until_idle()


def error(response: httpx.Response) -> dict[str, Any]:
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_denoise_streams_the_steps_of_model_denoise(server):
    how: dict[str, Any] = {"gen_length": 16, "steps": 4, "sampler": "any_order", "temperature": 0.7, "seed": 5}
    (first, start), *steps, (last, done) = events(server.http.post("/v1/denoise", json={"prompt": PROMPT, **how}))
    assert (first, last) == ("start", "done")
    expected = list(bundled().denoise(PROMPT, **how))
    assert [name for name, _ in steps] == ["step"] * len(expected)
    for (_, step), wanted in zip(steps, expected, strict=True):
        assert step["positions"] == wanted.positions.tolist()
        assert step["tokens"] == wanted.tokens.tolist()
        assert step["scores"] == pytest.approx(wanted.scores.tolist(), abs=1e-6)
        assert (step["circuit"], step["window"]) == (wanted.circuit, list(wanted.window))
    assert start["ids"][: start["prompt_length"]] == bundled().encode(PROMPT)[0]
    assert start["ids"][start["prompt_length"] :] == [bundled().mask_id] * 16
    assert start["pieces"][-1] is None
    assert set(start) == {"id", "model", "prompt_length", "ids", "pieces", "options", "ahead"}
    counts = {"steps", "circuit_steps", "computed", "cached", "tokens", "seconds", "queued_seconds"}
    assert set(done) == {"text", "finish_reason", *counts}
    assert done["text"] == bundled().generate(PROMPT, **how).texts[0]
    assert done["steps"] == len(expected)
    whole = server.http.post("/v1/denoise", json={"prompt": PROMPT, **how, "stream": False}).json()
    assert whole["steps"] == [step for _, step in steps]
    assert whole["done"]["text"] == done["text"]


def test_inspect_says_what_network_and_joint_believe(server):
    model = bundled()
    ids = [*model.encode(PROMPT)[0], *[model.mask_id] * 8]
    body = {"ids": ids, "window": [len(ids) - 8, len(ids)], "candidates": 4}
    found = server.http.post("/v1/inspect", json=body).json()
    assert found["positions"] == list(range(len(ids) - 8, len(ids)))
    for kind in ("network", "joint"):
        assert [len(each) for each in found[kind]] == [4] * 8
        assert all(0 < candidate["probability"] <= 1 for each in found[kind] for candidate in each)
    assert found["circuit"]
    assert max(map(max, found["mutual_information"])) > 0.01
    wrong = server.http.post("/v1/inspect", json={**body, "window": [0, 3]})
    assert (wrong.status_code, error(wrong)["param"]) == (400, "window")


PLACE = {
    "prompt": "He had come from the other side of the country, from",
    "chat": False,
    "template": " {first} {second}.",
    "fields": {"second": ["York", "Francisco"], "first": ["New", "San"]},
}


def test_decisions_are_those_of_the_model(server):
    fields = {name: Choice(values) for name, values in PLACE["fields"].items()}
    own = bundled().decide(PLACE["prompt"], fields, template=PLACE["template"], chat=False)
    found = server.http.post("/v1/decisions", json={**PLACE, "top": 2}).json()
    assert found["best"] == own.best == {"second": "York", "first": "New"}
    assert [tuple(each["values"].values()) for each in found["joint"]] == list(own.joint)[:2]
    assert [each["probability"] for each in found["joint"]] == pytest.approx(list(own.joint.values())[:2], abs=1e-5)
    assert found["mass"] == pytest.approx(sum(list(own.joint.values())[:2]), abs=1e-5)
    assert found["marginals"]["first"] == pytest.approx(own.marginals["first"], abs=1e-5)


def test_a_decision_among_too_many_alike_is_given_up(server, monkeypatch):
    """Fifteen fields of twenty letters: the beginnings that are as probable as the best whole have no end."""
    monkeypatch.setattr("codd.decoding.decisions.MOST_STATES", 20_000)
    fields = {f"f{i}": list("abcdefghijklmnopqrst") for i in range(15)}
    body = {
        "prompt": "Say some letters:",
        "chat": False,
        "fields": fields,
        "template": " ".join(f"{{{name}}}" for name in fields),
    }
    refused = server.http.post("/v1/decisions", json=body)
    assert (refused.status_code, error(refused)["param"]) == (400, "fields")
    assert "beginnings of assignments of the 15 fields" in error(refused)["message"]


def test_a_full_queue_says_when_to_come_again(held, clients):
    server, gate = held
    asked = [clients.submit(server.http.post, "/v1/denoise", json=IDS)]
    assert gate.reached.acquire(timeout=PATIENCE)
    asked.append(clients.submit(server.http.post, "/v1/denoise", json=IDS))
    until(lambda: server.engine.load.waiting == 1)
    for stream in (True, False):
        refused = server.http.post("/v1/denoise", json={**IDS, "stream": stream})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert error(refused)["code"] == "queue_full"
    gate.open.release(8)
    assert [each.result(PATIENCE).status_code for each in asked] == [200, 200]


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_frees_the_slot_within_one_step(held, stream):
    server, gate = held
    with server.connect() as wire:
        wire.sendall(raw({**IDS, "stream": stream}))
        assert gate.reached.acquire(timeout=PATIENCE)
        [request] = server.engine._running
    evicted = server.engine.metrics.evicted.labels("cancelled")._value
    before = evicted.get()
    until(lambda: request.cancelled)  # the server has heard that the client has gone, while the step is under way
    gate.open.release()
    server.until_idle()
    assert gate.reached.acquire(blocking=False) is False, "another step was taken for nobody"
    assert (request.state.evaluations, evicted.get() - before) == (1, 1)
    gate.open.release(4)
    assert server.http.post("/v1/denoise", json={**IDS, "stream": False}).status_code == 200


def late(server: Live, gate: Gate, clients: ThreadPoolExecutor, **fields: Any) -> httpx.Response:
    """The response to a request whose deadline passes during its first step."""
    response = clients.submit(server.http.post, "/v1/denoise", json={**IDS, **fields, "timeout": 20})
    assert gate.reached.acquire(timeout=PATIENCE)
    [request] = server.engine._running
    assert request.deadline is not None
    assert request.deadline - request.queued_at <= 20
    request.deadline = time.monotonic()
    gate.open.release(100)
    return response.result(PATIENCE)


def test_a_deadline_ends_a_request(held, clients):
    server, gate = held
    found = late(server, gate, clients, stream=False)
    assert (found.status_code, error(found)["code"]) == (504, "deadline_passed")
    assert events(server.http.post("/v1/denoise", json=IDS))[-1][0] == "done"


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(held, clients):
    server, gate = held
    names, bodies = zip(*events(late(server, gate, clients)), strict=True)
    # On a busy machine the stream may begin to wait for the step when its deadline has passed.
    assert names in (("start", "step", "error"), ("start", "error"))
    assert bodies[-1]["error"]["code"] == "deadline_passed"


def test_a_client_that_waits_long_hears_that_the_server_is_still_there(held, monkeypatch):
    monkeypatch.setattr(EventStream, "keep_alive", 0.02)
    server, gate = held
    lines = []
    with server.http.stream("POST", "/v1/denoise", json=IDS) as response:
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(": waiting") == 3:
                gate.open.release(4)
    assert lines.count(": waiting") >= 3
    assert lines.count("event: step") == 4
    assert lines.count("event: done") == 1


def test_the_page_comes_with_headers_that_guard_it(server):
    found = server.http.get("/")
    assert found.status_code == 200
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert found.headers["x-content-type-options"] == "nosniff"
    assert server.http.get("/playground/main.js").headers["content-type"].startswith("text/javascript")
    assert server.http.get("/playground/..%2fapp.py").status_code == 404
    assert server.http.get("/playground/nothing.js").status_code == 404


def test_no_word_of_a_request_is_logged_unless_that_was_asked_for(server, caplog):
    secret = "The password is Rumpelstilzchen"
    caplog.set_level(logging.DEBUG)
    server.http.post("/v1/denoise", json={**QUICK, "prompt": secret})
    server.http.post("/v1/denoise", json={"prompt": secret, "steps": secret})
    until(lambda: "POST /v1/denoise 200" in caplog.text and "POST /v1/denoise 422" in caplog.text)
    assert "Rumpelstilzchen" not in caplog.text
    with live(settings=Settings(log_text=True)) as server:
        server.http.post("/v1/denoise", json={**QUICK, "prompt": secret})
    assert "Rumpelstilzchen" in caplog.text


def test_metrics_count_what_happened(server):
    server.http.post("/v1/denoise", json=QUICK)
    server.http.get("/nowhere")
    for counted in ('codd_requests_total{route="/v1/denoise",status="200"}', 'route="other",status="404"'):
        until(lambda counted=counted: counted in server.http.get("/metrics").text)  # counted after the last byte
    server.until_idle()
    text = server.http.get("/metrics").text
    for name in ("codd_running 0.0", "codd_slots 8.0", "codd_steps_total", "codd_batch_size_bucket"):
        assert name in text


def test_sigterm_finishes_what_is_under_way_and_takes_nothing_new():
    """The whole thing as a process, with a key in its environment."""
    key = {"Authorization": "Bearer k"}
    body = {"prompt": PROMPT, "gen_length": 64, "steps": 16, "stop": False}
    with serving("--drain-timeout", str(PATIENCE), logged=True, CODD_API_KEY="k") as server:
        with httpx.stream("POST", f"{server.url}/v1/denoise", json=body, headers=key, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: start"
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "event: done" in rest
        assert sum(line == "event: step" for line in rest) == 16
        assert server.process.wait(PATIENCE) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert server.process.stderr is not None
        logged = server.process.stderr.read()
    assert "Traceback" not in logged
    assert "POST /v1/denoise 200" in logged
