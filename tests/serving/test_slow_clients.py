"""Clients that send half of a request, read nothing, come in hundreds, or ask for what takes long."""

import asyncio
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from codd.serving.app import Settings
from codd.serving.middleware import Security
from codd.serving.prompts import Limits
from codd.serving.protocol import OncePerMinute
from codd.serving.requests import DeadlineExceeded, before
from tests.support.live import IDS, PATIENCE, POST, Live, bundled, gated, live, raw, until
from tests.support.small_models import Gate, small

SHORT = Settings(io_timeout=0.3, connections=8, security=Security(api_key="sesame"))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(small(), SHORT) as found:
        yield found


@pytest.fixture(scope="module")
def talking() -> Iterator[Live]:
    """A server whose model reads text."""
    with live() as found:
        yield found


def received(wire: socket.socket) -> bytes:
    """Everything until the server closes the connection; it may also break it."""
    found = b""
    try:
        while part := wire.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        ("", b""),
        ("POST /v1/den", b"HTTP/1.1 408"),
        (POST, b"HTTP/1.1 408"),
        (POST + "Authorization: Bearer sesame\r\nContent-Length: 100\r\n\r\n{", b"HTTP/1.1 408"),
        (POST + "Authorization: Bearer sesame\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", b"HTTP/1.1 408"),
        (POST + "Content-Length: 100\r\n\r\n{", b"HTTP/1.1 401"),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he", b"HTTP/1.1 200"),
    ],
)
def test_half_of_a_request_is_not_waited_for_for_ever(server, sent, answer):
    with server.connect() as wire:
        wire.sendall(sent.encode())
        found = received(wire)
    assert found.startswith(answer)
    assert found.count(b"HTTP/1.1 ") == (2 if answer == b"HTTP/1.1 200" else bool(answer))


@pytest.mark.parametrize("key", ["", "Authorization: Bearer sesame\r\n"])
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_a_body_that_is_no_http_is_refused_once(server, caplog, key, pause):
    caplog.set_level(logging.ERROR)
    with server.connect() as wire:
        wire.sendall(f"{POST}{key}Transfer-Encoding: chunked\r\n\r\n".encode())
        time.sleep(pause)  # so that the application may have answered, which without a key it does before the body
        wire.sendall(b"no chunk\r\n")
        assert received(wire).startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
    assert not caplog.records


def test_who_sends_too_much_is_told_so(talking):
    """Though it reads nothing before all is sent: a connection closed early would be broken under it."""
    with talking.connect() as wire:
        wire.sendall(f"{POST}Content-Length: 1500000\r\n\r\n".encode() + b" " * 500_000)
        select.select([wire], [], [], PATIENCE)
        wire.sendall(b" " * 1_000_000)
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        found = received(wire)
    assert found.startswith(b"HTTP/1.1 413")
    assert b"HTTP/1.1 200" in found


def test_a_byte_now_and_then_does_not_keep_a_connection_open(server):
    with server.connect() as wire:
        wire.sendall(POST.encode() + b"Content-Length: 100000\r\n\r\n")
        with pytest.raises(ConnectionError):  # noqa: PT012 - the byte that breaks it is one of many
            for _ in range(PATIENCE * 50):
                wire.sendall(b" ")
                time.sleep(0.02)


def test_one_connection_too_many_takes_the_place_of_one_that_waits():
    with live(small(), Settings(connections=8)) as server, ExitStack() as stack:
        wires = [stack.enter_context(server.connect()) for _ in range(30)]
        for wire in wires:
            wire.settimeout(0.5)
            try:
                wire.sendall(POST.encode())
            except ConnectionError:
                continue
        assert server.http.get("/health").json()["status"] == "ok"
        until(lambda: sum(map(is_open, wires)) <= 8)


def is_open(wire: socket.socket) -> bool:
    wire.setblocking(False)
    try:
        return wire.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_requests_under_way_are_not_displaced_and_one_more_is_told_so():
    """But probes and metrics pass when nothing else does."""
    gate = Gate()
    with live(small(), gated(gate, connections=3)) as server, ExitStack() as stack:
        wires = [stack.enter_context(server.connect()) for _ in range(3)]
        for wire in wires:
            wire.sendall(raw({**IDS, "stream": False}, "Connection: close\r\n"))
        until(lambda: server.engine.load.running + server.engine.load.waiting == 3)
        refused = server.http.get("/health")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert refused.json()["error"]["code"] == "too_many_requests"
        passing = ("/health/live", "/health/ready", "/metrics")
        assert [server.http.get(path).status_code for path in passing] == [200] * 3
        gate.open.release(1000)
        assert [received(wire)[:12] for wire in wires] == [b"HTTP/1.1 200"] * 3
        until(lambda: server.http.get("/health").status_code == 200)


def test_who_does_not_read_is_cut_off(server):
    """Responses are asked for until no buffer takes any more, and none is read."""
    with server.connect() as wire:
        wire.setblocking(False)
        wanted = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        end = time.monotonic() + PATIENCE
        with pytest.raises(ConnectionError):  # noqa: PT012 - the server breaks the connection at some time
            while time.monotonic() < end:
                try:
                    wire.send(wanted * 100)
                except BlockingIOError:
                    time.sleep(0.01)
    assert server.http.get("/health").status_code == 200


def test_a_deadline_is_kept_though_the_model_is_busy():
    gate = Gate()
    with live(small(), gated(gate), slots=1) as server:
        with ExitStack() as stack:
            stack.callback(gate.open.release, 1000)
            busy = threading.Thread(target=server.http.post, args=("/v1/denoise",), kwargs={"json": IDS})
            busy.start()
            assert gate.reached.acquire(timeout=PATIENCE)
            late = server.http.post("/v1/denoise", json={**IDS, "stream": False, "timeout": 0.1})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_passed")
            late = server.http.post("/v1/denoise", json={**IDS, "timeout": 0.1})
            assert "deadline_passed" in late.text
            ids = [3, 1, server.engine.model.mask_id]
            late = server.http.post("/v1/inspect", json={"ids": ids, "window": [0, 3], "timeout": 0.1})
            assert late.status_code == 504
        busy.join(PATIENCE)


def test_work_in_another_thread_is_not_waited_for_after_the_deadline():
    free = threading.Event()

    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            await before(time.monotonic() + 0.05, asyncio.to_thread(free.wait, PATIENCE))
        free.set()
        assert await before(time.monotonic() + PATIENCE, asyncio.to_thread(free.wait, PATIENCE))
        with pytest.raises(DeadlineExceeded):
            await before(time.monotonic() - 1, asyncio.sleep(PATIENCE))
        await before(None, asyncio.sleep(0))

    asyncio.run(main())


def test_the_limit_of_a_text_is_the_servers_if_that_is_less():
    assert Limits().max_text(bundled()) == 384 * 16
    assert Limits(text=1000).max_text(bundled()) == 1000
    assert Limits(length=10).max_text(bundled()) == 10 * 16
    whole = "understanding " * 300
    with live(settings=Settings(limits=Limits(text=len(whole)))) as server:
        assert server.http.post("/v1/denoise", json={"prompt": whole, "gen_length": 1}).status_code == 200
        found = server.http.post("/v1/denoise", json={"prompt": whole + ".", "gen_length": 1})
        assert found.json()["error"]["message"].startswith(f"prompt has {len(whole) + 1} bytes")


def test_a_line_is_logged_once_a_minute(caplog):
    log = logging.getLogger("test.once")
    log.addFilter(OncePerMinute(seconds=60.0, kinds=3))
    for _ in range(1000):
        log.warning("no more sockets")
    log.warning("another")
    assert caplog.messages == ["no more sockets", "another"]
    caplog.clear()
    log.filters[0].seconds = 0.0  # a minute later
    log.warning("no more sockets")
    assert caplog.messages == ["no more sockets (999 times more since the last such line)"]
    for number in range(1000):
        log.warning(str(number))
    assert len(log.filters[0]._seen) <= 3
