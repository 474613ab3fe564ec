"""HTTP connections with bounds: clients that are too slow or too many hold neither sockets nor memory for long.

uvicorn knows how long a connection may be idle between requests. Here are the rest: deadlines for a request that is
being sent and for a response that is being read, and a limit on sockets.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, in which each phase that depends on the client has a deadline.

    The phases: the headers of a request, its body, and the time in which the client leaves a part of a response unread.
    One more connection than ``max_connections`` takes the place of another that is still to send a request: of the
    address with the most connections the one that has been in its phase for the longest time.
    """

    max_connections = 256
    timeout = 30.0
    """Seconds of each phase."""

    def __init__(self, *args: Any, **kwargs: Any):
        """As uvicorn calls it."""
        super().__init__(*args, **kwargs)
        self._phase: tuple[Any, ...] = ()
        self._since = math.inf
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, in place of another one if there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called if anything is left unread
        self._watch_reading()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        super().connection_lost(exc)
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and see what is still to come."""
        super().data_received(data)
        self._watch_reading()

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        super().on_response_complete()
        self._watch_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; an application that has begun with such a request sees that its client has gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # a response has been sent already, or a part of it
            self.transport.close()

    def pause_writing(self) -> None:
        """The client leaves something unread: from here on it has a limited number of seconds to read it."""
        super().pause_writing()
        self._writing = self.loop.call_later(self.timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read everything."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    @property
    def owes_request(self) -> bool:
        """Whether the client has not yet sent all of a request, or nothing of the next one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _make_room(self) -> None:
        """Break off a connection if there are too many; nothing happens if all of them have a request under way."""
        others = [each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self]
        others = [each for each in others if not each.transport.is_closing()]
        waiting = [each for each in others if each.owes_request]
        if len(others) >= self.max_connections and waiting:
            counts = Counter(each.client and each.client[0] for each in others)
            max(waiting, key=lambda each: (counts[each.client and each.client[0]], -each._since)).transport.abort()

    def _watch_reading(self) -> None:
        """Set the deadline of a new phase of the request; uvicorn has one for the time between two requests."""
        idle = self.cycle is not None and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        phase = (self.conn.their_state, self.cycle, idle)
        if phase == self._phase:
            return
        self._phase, self._since = phase, time.monotonic()
        if self._reading is not None:
            self._reading.cancel()
        timed = self.owes_request and not idle
        self._reading = self.loop.call_later(self.timeout, self._end_reading) if timed else None

    def _end_reading(self) -> None:
        """Close the connection; with an answer if a part of a request is here that has none yet."""
        in_body = self.conn.their_state is h11.SEND_BODY
        if not self.cycle.response_started if in_body else self.conn.trailing_data[0]:
            self.transport.write(_TOO_SLOW)
        self.transport.close()


def bounded_protocol(max_connections: int, timeout: float) -> type[BoundedProtocol]:
    """The protocol with other bounds than the default ones, as uvicorn takes it: as a class."""
    return type("BoundedProtocol", (BoundedProtocol,), {"max_connections": max_connections, "timeout": timeout})


class OncePerMinute(logging.Filter):
    """Lets a line of the log pass once a minute, and says how often it was repeated: clients can cause any number."""

    def __init__(self, seconds: float = 60.0, kinds: int = 100):
        """``kinds``: how many different lines are remembered."""
        super().__init__()
        self.seconds, self.kinds = seconds, kinds
        self._seen: dict[Any, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line passes."""
        key = (record.name, record.msg, record.exc_info and record.exc_info[0])
        now = time.monotonic()
        last, dropped = self._seen.get(key, (-math.inf, 0))
        if now - last < self.seconds:
            self._seen[key] = (last, dropped + 1)
            return False
        if len(self._seen) >= self.kinds:
            self._seen.clear()
        self._seen[key] = (now, 0)
        if dropped:
            record.msg = f"{record.msg} ({dropped} times more since the last such line)"
        return True
