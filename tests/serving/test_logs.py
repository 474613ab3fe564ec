"""Lines of the log, as the server's process would write them."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from codd.serving.app import Settings
from codd.serving.logs import formatted
from codd.serving.middleware import Security
from tests.support.live import Live, live, until
from tests.support.small_models import small

IDS = {"prompt": [3, 1, 4], "gen_length": 4, "stream": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(small(), Settings(security=Security(max_body=500))) as found:
        yield found


@pytest.fixture(params=["text", "json"])
def log(request) -> Iterator[tuple[str, io.StringIO]]:
    written, logger = io.StringIO(), logging.getLogger("codd.serving")
    handler = formatted(logging.StreamHandler(written), request.param)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield request.param, written
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_every_request_has_one_line_with_its_id(server, log):
    kind, written = log
    asked = {"mine-1": ("/v1/denoise", 200), "mine-2": ("/v1/denoise", 413), "mine-3": ("/nowhere", 404)}
    for id, (path, status) in asked.items():
        body = {**IDS, "prompt": [1] * 500} if status == 413 else IDS
        found = server.http.post(path, json=body, headers={"X-Request-Id": id})
        assert (found.status_code, found.headers["X-Request-Id"]) == (status, id)
    assert server.http.get("/health/live").status_code == 200  # which is routine
    made = server.http.get("/health", headers={"X-Request-Id": "two words"}).headers["X-Request-Id"]
    assert made != "two words"
    until(lambda: written.getvalue().count("\n") == 4)
    lines = written.getvalue().splitlines()
    for line, id, path, status in zip(
        lines,
        [*asked, made],
        ["/v1/denoise", "/v1/denoise", "other", "/health"],
        [200, 413, 404, 200],
        strict=True,
    ):
        if kind == "text":
            assert f" INFO {id} " in line
            assert f"{path} {status} " in line
        else:
            fields = json.loads(line)
            assert (fields["request_id"], fields["route"], fields["status"]) == (id, path, status)
            assert (fields["level"], fields["time"][-6:]) == ("INFO", "+00:00")
            assert 0 <= fields["seconds"] == pytest.approx(float(fields["message"].split()[-2]), abs=1e-3)


def test_what_fails_in_the_thread_of_the_model_has_the_id_of_its_request(server, log, monkeypatch):
    def fail() -> None:
        raise RuntimeError("a new kind of failure")

    kind, written = log
    monkeypatch.setattr("codd.serving.prompts.inspect", lambda *_, **__: fail())
    body = {"ids": [3, small().mask_id], "window": [1, 2]}
    assert server.http.post("/v1/inspect", json=body, headers={"X-Request-Id": "mine-4"}).status_code == 500
    until(lambda: "/v1/inspect 500" in written.getvalue())
    text = written.getvalue()
    if kind == "text":
        assert " ERROR mine-4 request mine-4: the model failed\nTraceback" in text
    else:
        failed, answered = map(json.loads, text.splitlines())
        assert (failed["request_id"], failed["message"]) == ("mine-4", "request mine-4: the model failed")
        assert failed["exception"].endswith("RuntimeError: a new kind of failure")
        assert answered["request_id"] == "mine-4"


def test_a_line_outside_of_requests_has_no_id(log):
    kind, written = log
    logging.getLogger("codd.serving").info("shutting down")
    line = written.getvalue()
    assert " INFO - shutting down" in line if kind == "text" else json.loads(line)["request_id"] is None
