"""Requests in the engine: their deadline, timing and cancellation, whose turn it is, and how their results arrive."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from codd.decoding.sequence import SequenceState, Step
from codd.serving.errors import INTERNAL, APIError

REQUEST_ID: ContextVar[str] = ContextVar("codd_request_id", default="-")
"""The id of the HTTP request that is being answered; "-" if there is none."""
Result = TypeVar("Result")


class QueueFull(APIError):
    """The engine has no place left in its queue."""

    def __init__(self, retry_after: int):
        """``retry_after``: seconds after which the client should try again."""
        message = f"the server is busy: try again in {retry_after} s."
        super().__init__(429, message, code="queue_full", headers={"Retry-After": str(retry_after)})


class ShuttingDown(APIError):
    """The engine takes no new requests, or has stopped before this one was finished."""

    def __init__(self) -> None:
        """Another server may have taken its place in 5 seconds; this connection does not lead there."""
        headers = {"Retry-After": "5", "Connection": "close"}
        super().__init__(503, "the server is shutting down.", code="shutting_down", headers=headers)


class DeadlineExceeded(APIError):
    """The request's deadline passed before it was finished."""

    def __init__(self) -> None:
        """The message that clients get."""
        super().__init__(504, "the deadline passed.", "timeout", "deadline_passed")


async def before(deadline: float | None, work: Awaitable[Result]) -> Result:
    """Await the work; DeadlineExceeded at ``deadline`` (seconds of `time.monotonic`), whatever keeps it."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            return await work
    except TimeoutError:
        raise DeadlineExceeded from None


class ModelFailure(APIError):
    """The model raised something that is not the client's fault; the engine has logged it."""

    def __init__(self) -> None:
        """The message reveals nothing about it."""
        super().__init__(500, INTERNAL, code="internal_error")


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
        """Hand a result, or an exception in place of one, to whoever awaits it: nobody, once it is cancelled."""
        if not self.cancelled:
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


Item = TypeVar("Item", bound=QueuedRequest)


class FairQueue(Generic[Item]):
    """A bounded queue in which a client with a hundred requests delays one with a single request by one, not a hundred.

    Not thread-safe: callers hold a lock. Nothing stops a caller from pushing beyond ``capacity``: check ``free`` first.
    """

    def __init__(self, capacity: int):
        """``capacity``: how many items may wait."""
        self.capacity = capacity
        self._by_client: OrderedDict[Hashable, deque[Item]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """How many items wait."""
        return self._size

    def __iter__(self) -> Iterator[Item]:
        """All items, in the order in which they go if no more are pushed."""
        for turns in zip_longest(*self._by_client.values()):
            yield from (item for item in turns if item is not None)

    @property
    def free(self) -> int:
        """How many more items fit; negative if the queue holds more than its capacity."""
        return self.capacity - self._size

    def push(self, item: Item) -> int:
        """Append an item behind its client's others. Returns how many items are ahead of it if no more are pushed."""
        items = self._by_client.setdefault(item.client, deque())
        # Each round pops one item of every client. So of another client go as many as there are full rounds before this
        # item, and one more if that client comes earlier in the round.
        clients = list(self._by_client)
        place = clients.index(item.client)
        ahead = sum(min(len(self._by_client[c]), len(items) + (i < place)) for i, c in enumerate(clients))
        items.append(item)
        self._size += 1
        return ahead

    def pop(self) -> Item | None:
        """Remove and return the next item; None if the queue is empty."""
        item = next(iter(self), None)
        if item is not None:
            self.take(item)
        return item

    def take(self, item: Item) -> None:
        """Remove an item whose turn it is, and move its client to the end of the round.

        Unless it overtakes others of its client, which do not lose their place to it.
        """
        first = self._by_client[item.client][0] is item
        self.remove(item)
        if first and item.client in self._by_client:
            self._by_client.move_to_end(item.client)

    def remove(self, item: Item) -> None:
        """Take an item out of the queue, wherever it is; KeyError or ValueError if it is not in it."""
        items = self._by_client[item.client]
        items.remove(item)
        self._size -= 1
        if not items:
            del self._by_client[item.client]


async def merged_steps(requests: Sequence[SequenceRequest]) -> AsyncIterator[tuple[SequenceRequest, Step]]:
    """The steps of sequences that share a result queue, in order, until all are finished or cancelled.

    If one fails, its exception is raised.
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
