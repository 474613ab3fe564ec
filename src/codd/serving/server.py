"""The process: listens, says that it does, and stops when it is told to."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from codd.errors import CircuitSteppedAside, InvalidInput
from codd.serving.app import Settings, create_app
from codd.serving.engine import Engine

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """Drains on the first signal, and leaves at the second."""

    def __init__(self, config: uvicorn.Config, engine: Engine, ready: Callable[[str], None]):
        """``ready`` is told the address once requests are taken."""
        super().__init__(config)
        self.engine, self.ready = engine, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say where the server is, which may be a port that the system chose."""
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Nothing new is taken; what is under way is finished, if the patience of the settings allows."""
        self.engine.drain()
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal is the ordinary way to stop a server: it is not raised again afterwards."""
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
    """A socket for a server; before a model is loaded, since the address may be taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error  # names have codes of their own
        raise InvalidInput(f"cannot listen on {host}, port {port}: {reason}.") from None


def make(engine: Engine, settings: Settings, *, drain: int, ready: Callable[[str], None]) -> Server:
    """A server that waits for its ``run``, which takes the socket."""
    warnings.simplefilter("ignore", CircuitSteppedAside)  # a client's text may be impossible, which is no news
    config = uvicorn.Config(
        create_app(engine, settings),
        lifespan="on",
        log_config=None,
        access_log=False,  # `Counted` writes one line a request, without the query
        server_header=False,
        timeout_graceful_shutdown=drain,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return Server(config, engine, ready)
