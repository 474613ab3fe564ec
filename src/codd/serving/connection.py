"""Client connections: work stops when the client disconnects, and event streams are kept alive."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from codd.serving.encoding import SSE_HEADERS
from codd.serving.engine import Engine
from codd.serving.errors import APIError, log, to_api_error
from codd.serving.requests import ModelFailure, QueuedRequest

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client has closed the connection."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work; if the client disconnects first, cancel it and raise `ClientDisconnected`."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await _cancelled(task, watch)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*futures: "asyncio.Future[Any]") -> None:
    """Cancel futures and wait until they have released everything; errors that nobody read are dropped."""
    for future in futures:
        future.cancel()
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()  # marks it as read, so that asyncio does not log it


class EventStream(Response):
    """A stream of server-sent events; its requests are queued only while the client is connected.

    What goes wrong before the first event is an ordinary error response; later it is the last event of the stream.
    """

    keep_alive = 15.0
    """Seconds without an event after which a comment is sent instead."""

    def __init__(
        self,
        engine: Engine,
        requests: list[QueuedRequest],
        events: AsyncIterator[bytes],
        failed: Callable[[APIError], bytes],
    ):
        """``failed``: makes an event of an error."""
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self.engine, self.requests, self.events, self.failed = engine, requests, events, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the requests and send their events, until they are finished or the client disconnects."""
        with self.engine.submit(self.requests), suppress(ClientDisconnected):
            await until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._with_error_event()) as events:
            async for data in with_keep_alive(events, self.keep_alive):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_error_event(self) -> AsyncGenerator[bytes]:
        """The events; an exception becomes the last of them, and is logged if nobody expected it."""
        try:
            async for data in self.events:
                yield data
        except Exception as error:
            reported = to_api_error(error)
            if reported.status == 500 and not isinstance(error, ModelFailure):  # which the engine has logged
                log.error("a stream failed", exc_info=error)
            yield self.failed(reported)


async def with_keep_alive(events: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    """The events, and a comment after each period of seconds without one: proxies cut connections that are silent."""
    following: asyncio.Future[bytes] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({following}, timeout=seconds))[0]:
                yield b": waiting\n\n"
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        if following is not None:
            await _cancelled(following)
