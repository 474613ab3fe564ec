import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from codd.serving.metrics import Metrics
from codd.serving.middleware import POLICY, Security, with_middleware

LOCAL = "http://127.0.0.1:8000"


async def echo(request: Request) -> JSONResponse:
    body = await request.body()
    return JSONResponse({"size": len(body), "id": request.state.request_id, "path": request.url.path})


async def broken(request: Request) -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        raise RuntimeError("in the middle")

    return StreamingResponse(parts())


PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/denoise", "/playground/page.js", "/openapi.json")


def app(**security: Any) -> Any:
    routes = [Route(path, echo, methods=["GET", "POST"]) for path in PATHS]
    return with_middleware(Starlette(routes=[*routes, Route("/broken", broken)]), Security(**security), Metrics())


def client(base_url: str = LOCAL, **security: Any) -> TestClient:
    return TestClient(app(**security), base_url=base_url)


def test_bodies_have_a_limit():
    small = client(max_body=100)
    assert small.post("/v1/denoise", content=b"x" * 100).json()["size"] == 100
    answer = small.post("/v1/denoise", content=b"x" * 101)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "100 bytes" in answer.json()["error"]["message"]
    assert small.post("/v1/denoise", content=iter([b"x" * 50] * 2)).json()["size"] == 100
    assert small.post("/v1/denoise", content=iter([b"x" * 50] * 3)).status_code == 413


def call(target: Any, headers: dict[str, str], messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Speak ASGI: what was sent, and how many of the messages were read."""
    sent: list[dict[str, Any]] = []
    left = list(reversed(messages))

    async def receive() -> Any:
        return left.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/denoise", "headers": raw, "query_string": b""}
    anyio.run(target, scope, receive, send)
    return sent, len(messages) - len(left)


def test_no_more_is_read_than_needed():
    part = {"type": "http.request", "body": b"x" * 60, "more_body": True}
    sent, read = call(app(max_body=100), {"Host": "localhost"}, [part] * 9)
    assert (sent[0]["status"], read) == (413, 2)
    for length in ("101", "9" * 5000):
        sent, read = call(app(max_body=100), {"Host": "localhost", "Content-Length": length}, [part] * 9)
        assert (sent[0]["status"], read) == (413, 0)
        assert "error" in json.loads(sent[1]["body"])


def test_a_disconnect_is_still_seen_after_the_body():
    seen = []

    async def listening(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([await receive(), await receive()])

    whole, gone = {"type": "http.request", "body": b"x", "more_body": False}, {"type": "http.disconnect"}
    call(with_middleware(listening, Security(), Metrics()), {"Host": "localhost"}, [whole, gone])
    assert seen == [whole, gone]
    seen.clear()
    part = {"type": "http.request", "body": b"x", "more_body": True}
    call(with_middleware(listening, Security(), Metrics()), {"Host": "localhost"}, [part, gone])
    assert seen == [part, gone]


def test_streams_are_not_collected():
    order = []

    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2):
            order.append("made")
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def send(message: Any) -> None:
        order.append("sent" if message["type"] == "http.response.body" else "begun")

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/v1/denoise", "headers": [(b"host", b"localhost")]}
    anyio.run(with_middleware(streaming, Security(origins=("http://a.example",)), Metrics()), scope, receive, send)
    assert order == ["begun", "made", "sent", "made", "sent"]


KEY = "geheim-schlüssel"


FREE = ("/", "/health", "/playground/page.js")
"""Paths that need no key."""
BEARER = f"Bearer {KEY}".encode()
KEYS: list[tuple[str, bytes | None, int]] = [
    *((path, None, 200 if path in FREE else 401) for path in PATHS),
    *((path, BEARER, 200) for path in PATHS),
    *(("/v1/models", wrong, 401) for wrong in (b"", b"Bearer", b"Bearer ", b"Bearer x", b"Bearer \xff\xfe")),
    *(("/v1/models", wrong, 401) for wrong in (b"Basic " + KEY.encode(), KEY.encode(), BEARER + b"x", BEARER[:-2])),
    ("/v1/models", b"bearer  " + KEY.encode(), 200),
    ("/playground/../v1/models", None, 401),
    *((path, None, 401) for path in ("//v1/models", "/V1/models", "/v1/models/", "/health/")),
]


@pytest.mark.parametrize(("path", "key", "status"), KEYS)
def test_the_key_is_asked_for_where_there_is_something_to_protect(path, key, status):
    headers = {} if key is None else {"Authorization": key}
    answer = client(api_key=KEY).get(LOCAL + path, headers=headers, follow_redirects=False)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["Cache-Control"] == "no-store"


NAMES: list[tuple[dict[str, Any], list[str], list[str | None]]] = [
    (
        {},
        ["127.0.0.1:8000", "localhost", "LOCALHOST:9", "localhost.", "[::1]:8000", "127.8.9.10"],
        [
            *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.5"),
            *("", None, "localhost:x", "a@localhost", "[::1", "é"),
        ],
    ),
    ({"bound": "192.168.1.5"}, ["192.168.1.5:80"], ["192.168.1.6"]),
    ({"bound": "0.0.0.0"}, ["192.168.1.6"], ["evil.example"]),
    ({"bound": "::"}, ["[fe80::1]"], []),
    ({"hosts": ("codd.example",)}, ["codd.example"], ["a.codd.example"]),
    ({"hosts": ("*.codd.example",)}, ["a.codd.example:1"], ["acodd.example"]),
    ({"hosts": ("*",)}, ["evil.example"], []),
]


@pytest.mark.parametrize(
    ("security", "host", "known"),
    [
        (security, host, hosts is known)
        for security, known, strange in NAMES
        for hosts in (known, strange)
        for host in hosts
    ],
)
def test_names_of_the_server(security, host, known):
    sent, _ = call(app(**security), {} if host is None else {"Host": host}, [{"type": "http.request"}])
    assert sent[0]["status"] == (200 if known else 400)
    if not known:
        assert json.loads(sent[1]["body"])["error"]["param"] == "Host"


def test_headers_for_browsers():
    for path in ("/", "/v1/models", "/nowhere"):
        headers = client().get(path).headers
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "camera=()" in headers["Permissions-Policy"]
        assert headers["Cache-Control"] == ("no-cache" if path == "/" else "no-store")
        assert "Access-Control-Allow-Origin" not in headers


def test_other_sites_only_if_they_are_named():
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    shared = client(origins=("https://a.example",), api_key=KEY)
    answer = shared.options("/v1/denoise", headers=asked)
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, "https://a.example")
    answer = shared.get("/v1/models", headers={"Origin": "https://a.example"})
    assert answer.status_code == 401
    assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "cross-origin"
    assert shared.options("/v1/denoise", headers={**asked, "Origin": "https://b.example"}).status_code == 400
    assert "Access-Control-Allow-Origin" not in client().options("/v1/denoise", headers=asked).headers


@pytest.mark.parametrize(
    ("security", "origin", "welcome"),
    [
        ({}, LOCAL, True),
        ({}, "http://evil.example", False),
        ({}, "http://127.0.0.1:3000", False),
        ({}, "null", False),
        ({"origins": ("https://a.example",)}, "https://a.example", True),
        ({"origins": ("https://a.example",)}, "https://b.example", False),
        ({"origins": ("*",)}, "https://b.example", True),
        ({"hosts": ("codd.example",)}, "https://codd.example", True),
        ({"hosts": ("*.codd.example",)}, "https://a.codd.example:8443", True),
        ({"hosts": ("codd.example",)}, "https://evil.example", False),
        ({"hosts": ("*",)}, "https://evil.example", True),
    ],
)
def test_pages_of_strangers_may_not_call(security, origin, welcome):
    answer = client(**security).post("/v1/denoise", json={}, headers={"Origin": origin})
    assert answer.status_code == (200 if welcome else 403)
    if not welcome:
        assert answer.json()["error"]["param"] == "Origin"


def test_requests_have_names():
    one, two = (client().get("/v1/models") for _ in range(2))
    assert one.headers["X-Request-Id"] == one.json()["id"] != two.json()["id"]
    own = client().get("/v1/models", headers={"X-Request-Id": "mine-1"})
    assert own.headers["X-Request-Id"] == own.json()["id"] == "mine-1"
    for odd in ("x" * 65, "a b", "", "\xe9"):
        kept = client().get("/v1/models", headers={"X-Request-Id": odd.encode("latin-1")})
        assert kept.json()["id"] not in (odd, "")


def test_an_error_in_the_middle_of_a_stream_is_not_hidden():
    with pytest.raises(RuntimeError, match="in the middle"):
        client().get("/broken")


def test_what_is_no_request_passes():
    with client(api_key=KEY) as started:
        assert started.get("/health").status_code == 200
