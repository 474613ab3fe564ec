"""Continuous batching: sequences join and leave between denoising steps, and one thread does all of the model's work.

What becomes of a sequence does not depend on who shares its steps (`codd.decoding.loop.advance`), so the engine is free
to put together whatever there is.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from codd.decoding import Model
from codd.decoding.loop import Step, advance
from codd.errors import CoddError
from codd.serving.metrics import Metrics
from codd.serving.tickets import Broken, Busy, Closing, Denoising, Late, Question, Ticket
from codd.serving.waiting import FairQueue

_log = logging.getLogger("codd.serving")
LONGEST_WAIT = 60
"""The most seconds after which a client is told to come again."""
_SMOOTHING = 0.1
"""How much the latest sequence counts in the running mean of what one takes."""


@dataclass(frozen=True)
class Load:
    """How much the engine has to do."""

    running: int
    slots: int
    waiting: int
    queue: int


class Engine:
    """A model, the thread that works it, and those who wait for it.

    ``submit`` and ``cancel`` are called on the event loop on which ``start`` was.
    """

    def __init__(
        self, model: Model, *, slots: int = 8, queue: int = 64, exact: bool = False, metrics: Metrics | None = None
    ):
        """``slots`` sequences share a step; ``queue`` more may wait; ``exact`` as in `advance`."""
        self.exact = exact
        self.model = model
        self.slots = slots
        self.metrics = metrics or Metrics()
        self._waiting: FairQueue[Denoising] = FairQueue(queue)
        self._calls: FairQueue[Question] = FairQueue(queue)
        self._running: list[Denoising] = []
        self._changed = threading.Condition()
        self._closing = self._stopped = False
        self._typical = 1.0  # seconds that a sequence takes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="codd-model", daemon=True)
        self.metrics.watch(lambda: self.load)

    @property
    def load(self) -> Load:
        """As things are."""
        return Load(len(self._running), self.slots, len(self._waiting) + len(self._calls), self._waiting.bound)

    @property
    def closing(self) -> bool:
        """Whether nothing new is taken."""
        return self._closing

    def start(self) -> None:
        """Begin to work; results arrive on the event loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def drain(self) -> None:
        """Take nothing new; what is here is finished."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    async def close(self) -> None:
        """Give up whatever is left, and stop; ``drain`` and wait before, to leave nothing undone."""
        self.drain()
        with self._changed:
            self._stopped = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    @contextlib.contextmanager
    def submit(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """Put them all in line, or none; whoever leaves the block before they are done cancels them."""
        self._push(tickets)
        try:
            yield
        finally:
            self.cancel(tickets)

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for them any more: their slots are free after the step that is under way."""
        with self._changed:
            for ticket in tickets:
                ticket.cancelled = True
            self._changed.notify()

    def _push(self, tickets: Sequence[Ticket]) -> None:
        sequences = [ticket for ticket in tickets if isinstance(ticket, Denoising) and not ticket.course.finished]
        calls = [ticket for ticket in tickets if isinstance(ticket, Question)]
        with self._changed:
            if self._closing:
                raise Closing
            if len(sequences) > self._room() or len(calls) > self._calls.room:
                self.metrics.refused.inc()
                raise Busy(self._retry_after())
            for sequence in sequences:
                sequence.ahead = self._waiting.push(sequence)
            for call in calls:
                call.ahead = self._calls.push(call)
            self._changed.notify()

    def _room(self) -> int:
        """Free slots count: they are filled at once, so that an idle server never refuses what it could do."""
        return self._waiting.room + max(0, self.slots - len(self._running))

    def _retry_after(self) -> int:
        rounds = (len(self._waiting) + 1) / self.slots
        return max(1, min(LONGEST_WAIT, math.ceil(rounds * self._typical)))

    # What follows runs in the thread of the model.

    @torch.no_grad()
    def _work(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException:  # nobody may wait for a thread that is no more
            _log.exception("the thread of the model died")
            with self._changed:
                self._closing = self._stopped = True
                gone = self._dropped()
            self._deliver(gone)

    def _turn(self) -> bool:
        """Look who is here, answer one question, take one step; False once there is nothing more to do, ever."""
        with self._changed:
            while not (self._running or self._waiting or self._calls or self._closing):
                self._changed.wait()
            gone = self._dropped()
            call = None if self._stopped else self._calls.pop()
            self._admit()
            running = list(self._running)
            more = bool(running or self._waiting or self._calls or call) or not self._closing
        self._deliver(gone)
        if call is not None:
            self._deliver([(call, self._called(call))])
        if running:
            self._advance(running)
        return more

    def _dropped(self) -> list[tuple[Ticket, Any]]:
        """Those who have gone, whose time is up, or for whom there is none left; with the lock held."""
        now, found = time.monotonic(), []
        for ticket in [*self._running, *self._waiting, *self._calls]:
            if not (ticket.cancelled or ticket.late(now) or self._stopped):
                continue
            if ticket in self._running:
                self._running.remove(ticket)
            else:
                (self._waiting if isinstance(ticket, Denoising) else self._calls).remove(ticket)
            reason = "cancelled" if ticket.cancelled else "closing" if self._stopped else "late"
            self.metrics.dropped.labels(reason).inc()
            ticket.ended = now
            found.append((ticket, Closing() if self._stopped else Late("the deadline passed.")))
        return found

    def _admit(self) -> None:
        """Fill the free slots; with the lock held."""
        while len(self._running) < self.slots and (sequence := self._waiting.pop()) is not None:
            sequence.begun = time.monotonic()
            self.metrics.queued.observe(sequence.queued_seconds)
            self._running.append(sequence)

    def _called(self, call: Question) -> Any:
        call.begun = time.monotonic()
        found = self._guarded(call.function)
        call.ended = time.monotonic()
        return found

    def _advance(self, running: list[Denoising]) -> None:
        """One step of all; what came of it goes to those who wait for it."""
        courses = [sequence.course for sequence in running]
        begun = time.monotonic()
        found = self._guarded(lambda: advance(self.model.backbone, courses, exact=self.exact))
        outcomes = found if isinstance(found, list) else [found] * len(running)
        now = time.monotonic()
        self.metrics.stepped([step for step in outcomes if isinstance(step, Step)], now - begun)
        done = [
            sequence
            for sequence, outcome in zip(running, outcomes, strict=True)
            if not isinstance(outcome, Step) or outcome.finished
        ]
        for sequence in done:
            sequence.ended = now
            self._typical += _SMOOTHING * (sequence.seconds - self._typical)
        with self._changed:
            self._running = [sequence for sequence in self._running if sequence not in done]
        self._deliver(list(zip(running, outcomes, strict=True)))

    def _guarded(self, function: Callable[[], Any]) -> Any:
        """What it returns; or the exception that clients are to see, the rest of the server none the worse for it."""
        try:
            return function()
        except CoddError as error:
            return error
        except Exception:
            _log.exception("the model failed")
            return Broken("the server failed at this; its log says why.")

    def _deliver(self, events: list[tuple[Ticket, Any]]) -> None:
        if events and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_hand_over, events)


def _hand_over(events: list[tuple[Ticket, Any]]) -> None:
    for ticket, event in events:
        ticket.deliver(event)
