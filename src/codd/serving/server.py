"""The server process: binds a socket, reports its address, and drains on SIGINT or SIGTERM."""

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn

from codd.errors import CircuitSteppedAside, InvalidInput
from codd.serving.app import Settings, create_app
from codd.serving.engine import MAX_RETRY_AFTER, Engine
from codd.serving.protocol import OncePerMinute, bounded_protocol

_log = logging.getLogger("codd.serving")
_BACKLOG = 128
"""Connections that wait to be accepted; asyncio accepts as many at once, before any of them is counted."""
_LAST_WORDS = 1
"""Seconds, after draining, for the last bytes of answers."""
_OWN_FILES = 64
"""File descriptors that are not connections, at most."""
_KEEP_ALIVE = MAX_RETRY_AFTER + 15
"""Seconds that a connection may be idle: a client that comes again after Retry-After finds it open."""
_M_ARENA_MAX = -8
"""The number by which glibc's mallopt knows the limit of its heaps."""
_ONCE_PER_MINUTE = OncePerMinute()


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first signal and exits at the second."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain: int, on_ready: Callable[[str], None]):
        """``drain``: seconds to finish requests; ``on_ready`` is called with the URL once requests are accepted."""
        super().__init__(config)
        self.engine, self.drain, self.on_ready = engine, drain, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report the URL."""
        await super().startup(sockets=sockets)
        if self.started:
            self.on_ready(url_of(self.servers[0].sockets[0].getsockname()))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests and finish the others within the drain time; a second signal ends at once.

        Unlike uvicorn's, it does not have the signal raised again at the end: it is the ordinary way to stop.
        """
        self.engine.drain()  # whose lock a thread can take twice: this may interrupt one that holds it
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the requests that are under way, while new ones are answered with 503; then close the sockets."""
        self.engine.drain()
        started, count, left = time.monotonic(), len(self.server_state.tasks), set(self.server_state.tasks)
        _log.info("shutting down: %d requests under way have %d s to finish", count, self.drain)
        while left and not self.force_exit and time.monotonic() - started < self.drain:
            _, left = await asyncio.wait(left, timeout=0.1)  # seldom enough, and a second signal is seen soon
        if left and not self.force_exit:
            await self.engine.close()  # so that their clients are told
        await super().shutdown(sockets)
        _log.info(
            "shut down after %.1f s: %d requests finished, %d broken off",
            time.monotonic() - started,
            count - len(left),
            len(left),
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `InvalidInput` if the address cannot be used. Call it before a slow model load."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error  # names have codes of their own
        raise InvalidInput(f"cannot listen on {host}, port {port}: {reason}.") from None


def url_of(address: Sequence[Any]) -> str:
    """The URL of a listening socket's own address, whose port may have been chosen by the system."""
    host, port, *_ = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def create_server(engine: Engine, settings: Settings, *, drain: int, on_ready: Callable[[str], None]) -> Server:
    """A server; ``run(sockets=[...])`` starts it, at the first socket and, if there is one, the port of metrics.

    ``drain``: seconds to finish requests when it is stopped.
    """
    prepare_process()
    connections = min(settings.connections, max(1, _file_limit() - _OWN_FILES))
    config = uvicorn.Config(
        create_app(engine, replace(settings, connections=connections)),
        lifespan="on",
        log_config=None,
        access_log=False,  # `Envelope` logs one line a request, without the query
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_LAST_WORDS,
        http=bounded_protocol(connections, settings.io_timeout),
        ws="none",
        loop="asyncio",  # whose transports the protocol is written for; uvicorn would take uvloop where it is installed
        backlog=_BACKLOG,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_ONCE_PER_MINUTE)
    return Server(config, engine, drain, on_ready)


def prepare_process() -> None:
    """Settings of a process that serves: bounded heaps, and no warnings that clients can cause."""
    # The circuit steps aside from texts that it gives no probability, which clients may send at any time.
    warnings.simplefilter("ignore", CircuitSteppedAside)
    _limit_arenas()


def _limit_arenas() -> None:
    """Keep glibc from giving every thread a heap of its own, each of which holds what its busiest moment took."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def _file_limit() -> int:
    """How many file descriptors the process may have, which bounds its connections."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
