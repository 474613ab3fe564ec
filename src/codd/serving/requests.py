"""Requests in the engine: their deadline, timing and cancellation, and the queue on which their results arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from codd.decoding.sequence import SequenceState, Step

REQUEST_ID: ContextVar[str] = ContextVar("codd_request_id", default="-")
"""The id of the HTTP request that is being answered; "-" if there is none."""
Result = TypeVar("Result")


class QueueFull(Exception):
    """The engine has no place left in its queue."""

    def __init__(self, retry_after: int):
        """``retry_after``: seconds after which the client should try again."""
        super().__init__(f"the server is busy: try again in {retry_after} s.")
        self.retry_after = retry_after


class ShuttingDown(Exception):
    """The engine takes no new requests, or has stopped before this one was finished."""

    retry_after = 5
    """Seconds after which another server may have taken its place."""

    def __init__(self) -> None:
        """The message that clients get."""
        super().__init__("the server is shutting down.")


class DeadlineExceeded(Exception):
    """The request's deadline passed before it was finished."""


async def before(deadline: float | None, work: Awaitable[Result]) -> Result:
    """Await the work; DeadlineExceeded at ``deadline`` (seconds of `time.monotonic`), whatever keeps it."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            return await work
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed.") from None


class ModelFailure(Exception):
    """The model raised something that is not the client's fault; the engine has logged it."""


class QueuedRequest:
    """Work for the model's thread, and the queue on which its results arrive.

    Created, read and cancelled on the event loop, where ``deliver`` is called too. The model's thread only reads
    ``cancelled`` and ``deadline``, and sets ``started_at`` and ``finished_at``.
    """

    def __init__(self, client: Hashable, deadline: float | None, results: "ResultQueue | None" = None):
        """``deadline`` in seconds of `time.monotonic`. Requests that are awaited together share ``results``."""
        self.id = REQUEST_ID.get()
        self.client = client
        self.deadline = deadline
        self.cancelled = False
        self.ahead = 0
        """How many requests were ahead of this one when it was queued."""
        self.queued_at = time.monotonic()
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self.results: ResultQueue = asyncio.Queue() if results is None else results

    @property
    def queued_seconds(self) -> float:
        """Seconds in the queue, so far or in all."""
        return (time.monotonic() if self.started_at is None else self.started_at) - self.queued_at

    @property
    def seconds(self) -> float:
        """Seconds since the first step, until the last; 0 before it."""
        if self.started_at is None:
            return 0.0
        return (time.monotonic() if self.finished_at is None else self.finished_at) - self.started_at

    def expired(self, now: float) -> bool:
        """Whether the deadline has passed at ``now`` (seconds of `time.monotonic`)."""
        return self.deadline is not None and now >= self.deadline

    def deliver(self, result: Any) -> None:
        """Hand a result, or an exception in place of one, to whoever awaits it."""
        self.results.put_nowait((self, result))


ResultQueue = asyncio.Queue[tuple[QueuedRequest, Any]]


class SequenceRequest(QueuedRequest):
    """A sequence to denoise; its results are steps."""

    def __init__(
        self, state: SequenceState, client: Hashable, deadline: float | None = None, results: ResultQueue | None = None
    ):
        """``state``: the sequence before its first step."""
        super().__init__(client, deadline, results)
        self.state = state
        self.turn_began = 0.0
        """When it got its slot, this time."""

    async def steps(self) -> AsyncIterator[Step]:
        """The sequence's steps as they are taken; raises what ended it early."""
        async for _, step in merged_steps([self]):
            yield step


class ModelCall(QueuedRequest):
    """A function of the model that runs once, between two denoising steps; its result is what it returns."""

    def __init__(self, function: Callable[[], Any], client: Hashable, deadline: float | None = None):
        """``function`` runs in the model's thread."""
        super().__init__(client, deadline)
        self.function = function

    async def result(self) -> Any:
        """What the function returned; raises what it raised, or what kept it from running."""
        _, result = await before(self.deadline, self.results.get())
        if isinstance(result, BaseException):
            raise result
        return result


async def merged_steps(requests: Sequence[SequenceRequest]) -> AsyncIterator[tuple[SequenceRequest, Step]]:
    """The steps of sequences that share a result queue, as they are taken, until all are finished or cancelled.

    Raises what ended any of them early.
    """
    unfinished = {request for request in requests if not request.state.finished}
    while unfinished := {request for request in unfinished if not request.cancelled}:
        request, result = await before(requests[0].deadline, requests[0].results.get())
        if request.cancelled or not isinstance(request, SequenceRequest):
            continue
        if isinstance(result, BaseException):
            raise result
        if result.finished:
            unfinished.discard(request)
        yield request, result
