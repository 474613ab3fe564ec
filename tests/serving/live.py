"""A server that really listens, in a thread of the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

import codd
from codd.serving import server
from codd.serving.app import Settings
from codd.serving.engine import Engine


@cache
def bundled() -> codd.Model:
    return codd.load(device="cpu")


@dataclass
class Live:
    url: str
    engine: Engine
    http: httpx.Client

    def until_idle(self) -> None:
        """Wait until every slot has come back."""
        end = time.monotonic() + 30
        while self.engine.load.running or self.engine.load.waiting:
            assert time.monotonic() < end
            time.sleep(0.005)


@contextmanager
def live(model: codd.Model | None = None, settings: Settings | None = None, **engine: Any) -> Iterator[Live]:
    """Serve until the block is left, and see that the thread ends."""
    made = Engine(model or bundled(), **engine)
    found: list[str] = []
    ready = threading.Event()

    def tell(url: str) -> None:
        found.append(url)
        ready.set()

    running = server.create_server(made, settings or Settings(), drain=5, on_ready=tell)
    thread = threading.Thread(target=running.run, args=([server.listen("127.0.0.1", 0)],))
    thread.start()
    try:
        assert ready.wait(30)
        with httpx.Client(base_url=found[0], timeout=60) as client:
            yield Live(found[0], made, client)
    finally:
        running.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
