"""What the server counts, for Prometheus."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codd.decoding.loop import Step

if TYPE_CHECKING:
    from codd.serving.engine import Load

_log = logging.getLogger("codd.serving")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters with a registry of their own: two servers in a process do not add up."""

    def __init__(self) -> None:
        """All at zero."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("codd_requests", "Answered HTTP requests.", ("route", "status"), registry=registry)
        self.request_seconds = Histogram(
            "codd_request_seconds", "From request to end of answer.", ("route",), buckets=_SECONDS, registry=registry
        )
        self.queued = Histogram(
            "codd_queue_seconds", "How long sequences waited for a slot.", buckets=_SECONDS, registry=registry
        )
        self.refused = Counter("codd_refused", "Requests refused because the queue was full.", registry=registry)
        self.dropped = Counter(
            "codd_dropped",
            "Sequences and questions given up: cancelled, late or closing.",
            ("reason",),
            registry=registry,
        )
        self.steps = Counter("codd_steps", "Denoising steps, counted for each sequence.", registry=registry)
        self.circuit_steps = Counter("codd_circuit_steps", "Steps in which the circuit acted.", registry=registry)
        self.tokens = Counter("codd_tokens", "Tokens committed.", registry=registry)
        self.finished = Counter("codd_sequences", "Sequences finished.", registry=registry)
        self.step_seconds = Histogram(
            "codd_step_seconds", "One step of all sequences in the slots.", buckets=_SECONDS, registry=registry
        )
        self.batch = Histogram(
            "codd_batch_size", "Sequences that share a step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=registry
        )

    def watch(self, load: Callable[[], "Load"]) -> None:
        """Show how much there is to do, as it is when somebody looks."""
        for name in ("running", "slots", "waiting", "queue"):
            gauge = Gauge(f"codd_{name}", f"The engine's load: {name}.", registry=self.registry)
            gauge.set_function(lambda name=name: getattr(load(), name))  # type: ignore[misc]

    def stepped(self, steps: Sequence[Step], seconds: float) -> None:
        """A step was taken, by so many sequences."""
        self.step_seconds.observe(seconds)
        self.batch.observe(len(steps))
        self.steps.inc(len(steps))
        self.circuit_steps.inc(sum(step.circuit for step in steps))
        self.tokens.inc(sum(len(step.positions) for step in steps))
        self.finished.inc(sum(step.finished for step in steps))

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self.registry)


class Counted:
    """Counts and logs requests. Of what was asked the log has the address only: texts stand in bodies."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]):
        """``paths``: the addresses that are counted by name; all others are one."""
        self.app, self.metrics, self.paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the status on its way out, and at the clock when all is over."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun, status = time.monotonic(), 499  # unless something is answered, the client has gone

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            seconds = time.monotonic() - begun
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.request_seconds.labels(path).observe(seconds)
            _log.info("%s %s %d %.3f s", scope["method"], path, status, seconds)
