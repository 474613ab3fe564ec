"""Errors as a client gets them, from a small application with the real schemas."""

import logging
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from codd.errors import CoddError, InvalidEvidence, InvalidInput
from codd.serving import errors
from codd.serving.errors import RESPONSES, APIError, to_api_error
from codd.serving.metrics import Metrics
from codd.serving.middleware import Security, with_middleware
from codd.serving.requests import DeadlineExceeded, QueueFull, ShuttingDown
from codd.serving.schemas import ChatRequest, CompletionRequest, DenoiseRequest

RAISED: list[Exception] = []


def made() -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None)
    errors.install_handlers(app)

    @app.post("/v1/denoise", responses=RESPONSES)
    async def denoise(request: DenoiseRequest) -> dict[str, Any]:
        return request.given()

    @app.post("/v1/completions", responses=RESPONSES)
    async def completions(request: CompletionRequest) -> dict[str, Any]:
        request.check_supported()
        return {}

    @app.post("/v1/chat/completions", responses=RESPONSES)
    async def chat(request: ChatRequest) -> dict[str, Any]:
        request.check_supported()
        return {}

    @app.get("/raise")
    async def fail() -> None:
        raise RAISED.pop()

    return app


CLIENT = TestClient(with_middleware(made(), Security(max_body=300_000), Metrics()), base_url="http://127.0.0.1")
JSON = {"Content-Type": "application/json"}


def error_of(status: int, path: str = "/v1/denoise", headers: Any = JSON, **sent: Any) -> dict[str, Any]:
    answer = CLIENT.post(path, headers=headers, **sent)
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["type"] == "invalid_request_error"
    return found


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"{", 422, "body"),
        (b'{"steps": }', 422, "body"),
        (b"", 422, "body"),
        (b"null", 422, "body"),
        (b"\xff\xfe\xff", 400, "body"),
        (b'{"prompt": "\xe9"}', 400, "body"),
        (b"[" * 100_000, 400, "body"),
        (b"[" * 100_000 + b"]" * 100_000, 400, "body"),
        (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "body"),
        (b'{"a":' * 40_000 + b"1" + b"}" * 40_000, 400, "body"),
        (b'{"steps": ' + b"9" * 5_000 + b"}", 400, "body"),
        (b'{"steps": ' + b"9" * 4_000 + b"}", 422, "steps"),
        (b'{"temperature": 1e999}', 422, "temperature"),
        (b'{"temperature": NaN}', 422, "temperature"),
        (b'{"temperature": ' + b"9" * 400 + b"}", 422, "temperature"),
        (b'{"prompt": [' + b"[" * 900 + b"]" * 900 + b"]}", 422, "prompt"),
        (b'{"\\ud800": 1}', 422, "body"),  # a name that cannot be said
    ],
)
def test_what_is_no_json_and_odd_numbers_and_depths(content, status, param):
    assert error_of(status, content=content)["param"].partition(".")[0] == param


def test_bodies_that_do_not_say_that_they_are_json_are_not_read_as_such():
    """A page of another site can send text without asking, but not JSON."""
    assert error_of(422, headers={"Content-Type": "text/plain"}, content=b'{"prompt": "x"}')["param"] == "body"


def test_addresses_and_methods():
    answer = CLIENT.get("/nowhere")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = CLIENT.get("/v1/denoise")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    ("raised", "status", "kind", "param"),
    [
        (APIError(400, "no", "steps"), 400, "invalid_request_error", "steps"),
        (InvalidInput("the published loop knows no sampler='any_order'"), 400, "invalid_request_error", "sampler"),
        (InvalidInput("circuit_temperature must be positive"), 400, "invalid_request_error", "circuit_temperature"),
        (InvalidInput("nothing is left"), 400, "invalid_request_error", "body"),
        (InvalidEvidence("the potentials are infinite"), 400, "invalid_request_error", "circuit_temperature"),
        (HTTPException(403, "no"), 403, "permission_error", None),
        (QueueFull(7), 429, "rate_limit_error", None),
        (ShuttingDown(), 503, "server_error", None),
        (DeadlineExceeded(), 504, "timeout", "timeout"),
        (CoddError("secret"), 500, "server_error", None),
        (RuntimeError("secret"), 500, "server_error", None),
    ],
)
def test_what_is_raised_becomes_an_answer(raised, status, kind, param, caplog):
    RAISED.append(raised)
    with caplog.at_level(logging.ERROR, "codd.serving"):
        answer = CLIENT.get("/raise")
    assert answer.status_code == status
    assert answer.json() == to_api_error(raised).as_json()
    assert (answer.json()["error"]["type"], answer.json()["error"]["param"]) == (kind, param)
    assert "secret" not in answer.text
    assert bool(caplog.records) == (status == 500)
    if status == 500:
        assert caplog.records[0].exc_info is not None
    if status == 429:
        assert answer.headers["Retry-After"] == "7"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_document_describes_the_errors():
    found = CLIENT.get("/openapi.json").json()
    answers = found["paths"]["/v1/denoise"]["post"]["responses"]
    assert set(answers) == {"200", *map(str, RESPONSES)}
    assert answers["422"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
