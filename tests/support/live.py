"""A server that really listens, in a thread of the test."""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

import codd
from codd.decoding import Options
from codd.serving import server
from codd.serving.app import Settings
from codd.serving.engine import Engine
from codd.serving.prompts import Limits
from tests.support.small_models import Gate

PATIENCE = 180
"""Seconds that a test waits for anything; only a failure takes them."""


@cache
def bundled() -> codd.Model:
    return codd.load(device="cpu")


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; only a failure takes all of `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


IDS: dict[str, Any] = {"prompt": [3, 1, 4], "gen_length": 8, "block_length": 8, "steps": 4, "stop": False}
"""A request that the small model answers in four steps."""

POST = "POST /v1/denoise HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def raw(body: dict[str, Any], header: str = "") -> bytes:
    """A request of /v1/denoise as its bytes."""
    sent = json.dumps(body).encode()
    return f"{POST}{header}Content-Length: {len(sent)}\r\n\r\n".encode() + sent


def gated(gate: Gate, **settings: Any) -> Settings:
    """With the gate among the defaults of requests, so that it holds every one."""
    return Settings(limits=Limits(Options(hooks=(gate,))), **settings)


@dataclass
class Live:
    url: str
    engine: Engine
    http: httpx.Client
    running: server.Server

    def connect(self) -> socket.socket:
        """A connection on which the test itself says what is sent."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)

    def until_idle(self) -> None:
        """Wait until every slot is free and nothing is queued."""
        until(lambda: not (self.engine.load.running or self.engine.load.waiting))


@contextmanager
def live(
    model: codd.Model | None = None, settings: Settings | None = None, *, drain: int = 30, **engine: Any
) -> Iterator[Live]:
    """Serve until the block is left, and see that the thread ends."""
    made = Engine(model or bundled(), **engine)
    urls: queue.Queue[str] = queue.Queue()

    running = server.create_server(made, settings or Settings(), drain=drain, on_ready=urls.put)
    thread = threading.Thread(target=running.run, args=([server.listen("127.0.0.1", 0)],))
    thread.start()
    try:
        url = urls.get(timeout=PATIENCE)
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            yield Live(url, made, client, running)
    finally:
        running.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
