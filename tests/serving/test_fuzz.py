"""Requests that no client library would send, over raw sockets: the server refuses or closes, and goes on.

``CODD_FUZZ=5000 pytest tests/serving/test_fuzz.py`` sends as many.
"""

import json
import logging
import os
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor

from codd.serving.app import Settings
from codd.serving.middleware import Security
from tests.support.live import IDS, Live, live
from tests.support.small_models import small

COUNT = int(os.environ.get("CODD_FUZZ", "200"))
BODIES = [
    ("/v1/denoise", {**IDS, "temperature": 0.5, "seed": 3, "ban": [7]}),
    ("/v1/denoise", {**IDS, "stream": False, "timeout": 60.0, "sampler": "any_order"}),
    ("/v1/denoise", {"messages": [{"role": "user", "content": [{"type": "text", "text": "h\u00e9"}]}], "chat": None}),
    ("/v1/completions", {"model": "codd", "prompt": ["a", "b"], "max_tokens": 4, "stop": ["\n"], "n": 2}),
    ("/v1/chat/completions", {"model": "codd", "messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("/v1/inspect", {"ids": [3, 4, 5, 6], "window": [0, 2], "candidates": 3}),
]
PIECES = [
    *(b"\r\n", b"\n", b"\r\n\r\n", b"\x00", b"\xff", b" ", b":", b"{", b"[" * 2000, b'"', b"\\ud800", b"1e999", b"-1"),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Expect: 100-continue\r\n"),
    *(b"Upgrade: websocket\r\nConnection: Upgrade\r\n", b"X: " + b"y" * 20_000 + b"\r\n", b"Host: evil.example\r\n"),
    *(
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"HTTP/9.9",
        b"%00",
        b"/../",
        b"?" + b"a" * 3000,
        b"0\r\n\r\n",
    ),
    *(b"ffffffffffffffff\r\n", b"null", b"true", b"9" * 5000, b"\xf0\x9f\x92\xa9", b"CONNECT x:1 HTTP/1.1\r\n\r\n"),
]


def request(rng: random.Random) -> bytes:
    """A request that is right, with its body as it is, in chunks, or changed before it is measured."""
    path, fields = rng.choice(BODIES)
    body = json.dumps(fields).encode()
    if rng.random() < 0.5:
        body = mutated(body, rng)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n".encode()
    )
    if rng.random() < 0.3:
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with up to three changes."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randint(1, 20))
        change = rng.choice(("flip", "cut", "repeat", "insert", "insert", "end"))
        if change == "flip":
            data = data[:at] + bytes(rng.randrange(256) for _ in data[at:end]) + data[end:]
        elif change == "cut":
            data = data[:at] + data[end:]
        elif change == "repeat":
            data = data[:end] + data[at:end] * rng.randint(1, 50) + data[end:]
        elif change == "insert":
            data = data[:at] + rng.choice(PIECES) + data[at:]
        else:
            data = data[:at]
    return data


def statuses(server: Live, seed: int) -> tuple[bytes, list[int]]:
    """What is sent, in one or more pieces, and the statuses of all responses until the server closes."""
    rng = random.Random(seed)
    data = request(rng) if rng.random() < 0.3 else mutated(request(rng), rng)
    found = b""
    with server.connect() as wire:
        try:
            for part in (data[: len(data) // 2], data[len(data) // 2 :]) if rng.random() < 0.5 else (data,):
                wire.sendall(part)
            if rng.random() < 0.3:
                wire.shutdown(socket.SHUT_WR)
            while part := wire.recv(65536):
                found += part
        except TimeoutError:
            raise
        except OSError:  # the server has closed or broken the connection
            pass
    return data, [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)]


def test_nothing_that_is_sent_breaks_the_server(caplog, monkeypatch):
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr("codd.serving.server._KEEP_ALIVE", 1)  # seconds: clients wait until the server closes
    settings = Settings(io_timeout=0.5, connections=64, security=Security(max_body=50_000))
    with live(small(), settings) as server, ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda seed: statuses(server, seed), range(COUNT)))
        server.until_idle()
        found = server.http.post("/v1/denoise", json={**IDS, "stream": False})
    broken = [(data, status) for data, all in answers for status in all if status >= 500 and status != 504]
    assert broken == []
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    given = {status for _, all in answers for status in all}
    assert {200, 400, 422} <= given, "the requests are all of one kind"
    wanted = list(small().denoise([IDS["prompt"]], **{name: IDS[name] for name in IDS if name != "prompt"}))
    assert [step["tokens"] for step in found.json()["steps"]] == [step.tokens.tolist() for step in wanted]
