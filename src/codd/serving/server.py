"""The server process: binds a socket, reports its address, and drains on SIGINT or SIGTERM."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from codd.errors import CircuitSteppedAside, InvalidInput
from codd.serving.app import Settings, create_app
from codd.serving.engine import Engine
from codd.serving.protocol import OncePerMinute, bounded_protocol

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 128
"""Connections that wait to be accepted; asyncio accepts as many at once, before any of them is counted."""
_OWN_FILES = 64
"""File descriptors that are not connections, at most."""
_M_ARENA_MAX = -8
"""The number by which glibc's mallopt knows the limit of its heaps."""
_ONCE_PER_MINUTE = OncePerMinute()


class Server(uvicorn.Server):
    """A uvicorn server that drains on the first signal and exits at the second."""

    def __init__(self, config: uvicorn.Config, engine: Engine, on_ready: Callable[[str], None]):
        """``on_ready`` is called with the URL once requests are accepted."""
        super().__init__(config)
        self.engine, self.on_ready = engine, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report the URL, whose port may have been chosen by the system."""
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests and finish the others within the drain time; a second signal ends at once."""
        self.engine.drain()
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving. Unlike uvicorn, do not raise them again: they are the ordinary way to stop."""
        if threading.current_thread() is not threading.main_thread():  # only there can signals be listened to
            yield
            return
        loop = asyncio.get_running_loop()
        for each in _SIGNALS:
            loop.add_signal_handler(each, self.handle_exit, each, None)
        try:
            yield
        finally:
            for each in _SIGNALS:
                loop.remove_signal_handler(each)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `InvalidInput` if the address cannot be used. Call it before a slow model load."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error  # names have codes of their own
        raise InvalidInput(f"cannot listen on {host}, port {port}: {reason}.") from None


def create_server(engine: Engine, settings: Settings, *, drain: int, on_ready: Callable[[str], None]) -> Server:
    """A server; ``run(sockets=[...])`` starts it. ``drain``: seconds to finish requests when it is stopped."""
    # The circuit steps aside from texts that it gives no probability, which clients may send at any time.
    warnings.simplefilter("ignore", CircuitSteppedAside)
    _limit_arenas()
    connections = min(settings.connections, max(1, _file_limit() - _OWN_FILES))
    config = uvicorn.Config(
        create_app(engine, settings),
        lifespan="on",
        log_config=None,
        access_log=False,  # `RequestMetrics` logs one line a request, without the query
        server_header=False,
        timeout_graceful_shutdown=drain,
        http=bounded_protocol(connections, settings.io_timeout),
        ws="none",
        limit_concurrency=connections + 1,
        backlog=_BACKLOG,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_ONCE_PER_MINUTE)
    return Server(config, engine, on_ready)


def _limit_arenas(most: int = 2) -> None:
    """Keep glibc from giving every thread a heap of its own, each of which holds what its busiest moment took."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, most)


def _file_limit() -> int:
    """How many file descriptors the process may have, which bounds its connections."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
