"""Answers to clients who may leave before they have them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from codd.serving.answers import SSE_HEADERS, event
from codd.serving.engine import Engine
from codd.serving.problems import log, problem_of
from codd.serving.tickets import Broken, Ticket

Result = TypeVar("Result")


class Gone(Exception):
    """The client has closed the connection."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do it; if the client leaves meanwhile, stop at once."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.wait({task, watch})  # what was cancelled has let go of everything
        for each in (task, watch):
            if not each.cancelled():
                each.exception()  # it has been seen, or it is of no interest any more


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of tickets, which wait in line only while somebody listens.

    What goes wrong before the first event is an ordinary error; later it is the last event of the stream.
    """

    patience = 15.0
    """Seconds without an event after which a comment is sent instead."""

    def __init__(self, engine: Engine, tickets: list[Ticket], events: AsyncIterator[bytes], *, named: bool):
        """``named``: whether events have names, as those of /v1/denoise do, and OpenAI's do not."""
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self.engine, self.tickets, self.events, self.named = engine, tickets, events, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the tickets in line, and send what comes of them."""
        with self.engine.submit(self.tickets), suppress(Gone):
            await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._guarded()) as events:
            async for data in with_signs_of_life(events, self.patience):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _guarded(self) -> AsyncGenerator[bytes]:
        try:
            async for data in self.events:
                yield data
        except Exception as error:
            self._log(error)
            yield event(problem_of(error).as_json(), "error" if self.named else None)

    def _log(self, error: Exception) -> None:
        """What the engine has not logged itself, and nobody foresaw."""
        if problem_of(error).status == 500 and not isinstance(error, Broken):
            log.error("a stream failed", exc_info=error)


async def with_signs_of_life(events: AsyncIterator[bytes], patience: float) -> AsyncIterator[bytes]:
    """The same, with comments in long silences: whoever waits in a queue must not be taken for dead by a proxy."""
    coming: asyncio.Future[bytes] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({coming}, timeout=patience))[0]:
                yield b": waiting\n\n"
            try:
                yield coming.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})
            if not coming.cancelled():
                coming.exception()
