"""A request on its way through the engine, as those who wait for it see it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

from codd.decoding.course import Course
from codd.decoding.loop import Step


class Refused(Exception):
    """The engine takes nothing more, for now or for good."""


class Busy(Refused):
    """All places to wait are taken."""

    def __init__(self, retry_after: int):
        """``retry_after``: seconds after which to come again."""
        super().__init__(f"the server is busy: come again in {retry_after} s.")
        self.retry_after = retry_after


class Closing(Refused):
    """The server is about to stop."""

    def __init__(self) -> None:
        """It takes nothing new, and may have given up what it had."""
        super().__init__("the server is shutting down.")


class Late(Exception):
    """The deadline passed before the answer was complete."""


class Broken(Exception):
    """Something went wrong that is not the client's fault; the log has it."""


class Ticket:
    """Something to be done by the thread of the model, and where its results arrive.

    Made, read and cancelled on the event loop; ``deliver`` is called there, too. The thread of the model only reads
    ``cancelled`` and sets the times.
    """

    def __init__(self, client: Hashable, deadline: float | None, inbox: "Inbox | None" = None):
        """``deadline`` as `time.monotonic` counts. Tickets that are waited for together share an ``inbox``."""
        self.client = client
        self.deadline = deadline
        self.cancelled = False
        self.ahead = 0
        """How many waited before it when it came."""
        self.came = time.monotonic()
        self.begun: float | None = None
        self.ended: float | None = None
        self.inbox: Inbox = asyncio.Queue() if inbox is None else inbox

    @property
    def queued_seconds(self) -> float:
        """How long it waited."""
        return (time.monotonic() if self.begun is None else self.begun) - self.came

    @property
    def seconds(self) -> float:
        """How long it has been at work."""
        if self.begun is None:
            return 0.0
        return (time.monotonic() if self.ended is None else self.ended) - self.begun

    def late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and now >= self.deadline

    def deliver(self, event: Any) -> None:
        """A result, or the exception that there is instead of one."""
        self.inbox.put_nowait((self, event))


Inbox = asyncio.Queue[tuple[Ticket, Any]]


class Denoising(Ticket):
    """A sequence to be denoised."""

    def __init__(self, course: Course, client: Hashable, deadline: float | None = None, inbox: Inbox | None = None):
        """``course``: what it is, before its first step."""
        super().__init__(client, deadline, inbox)
        self.course = course

    async def steps(self) -> AsyncIterator[Step]:
        """What comes of it, step by step."""
        async for _, step in steps_of([self]):
            yield step


class Question(Ticket):
    """A question to the model that is answered at once, between two steps."""

    def __init__(self, function: Callable[[], Any], client: Hashable, deadline: float | None = None):
        """``function`` runs in the thread of the model."""
        super().__init__(client, deadline)
        self.function = function

    async def answer(self) -> Any:
        """What the function returned; or what it raised."""
        _, event = await self.inbox.get()
        if isinstance(event, BaseException):
            raise event
        return event


async def steps_of(tickets: Sequence[Denoising]) -> AsyncIterator[tuple[Denoising, Step]]:
    """The steps of sequences that share an inbox, as they come, until all have ended; of cancelled ones no more."""
    left = {ticket for ticket in tickets if not ticket.course.finished}
    while left := {ticket for ticket in left if not ticket.cancelled}:
        ticket, event = await tickets[0].inbox.get()
        if ticket.cancelled or not isinstance(ticket, Denoising):
            continue
        if isinstance(event, BaseException):
            raise event
        if event.finished:
            left.discard(ticket)
        yield ticket, event
