"""Prometheus metrics of the engine and of HTTP requests."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from codd.decoding import Step

if TYPE_CHECKING:
    from codd.serving.engine import Load

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The server's metrics, in a registry of their own so that two servers in a process do not add up."""

    def __init__(self) -> None:
        """Everything starts at zero."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("codd_requests", "Answered HTTP requests.", ("route", "status"), registry=registry)
        self.request_seconds = Histogram(
            "codd_request_seconds", "From request to end of answer.", ("route",), buckets=_SECONDS, registry=registry
        )
        self.queue_seconds = Histogram(
            "codd_queue_seconds", "How long sequences waited for a slot.", buckets=_SECONDS, registry=registry
        )
        self.refused = Counter("codd_refused", "Requests refused because the queue was full.", registry=registry)
        self.evicted = Counter(
            "codd_dropped",
            "Sequences and model calls given up: cancelled, late (deadline) or closing.",
            ("reason",),
            registry=registry,
        )
        self.failures = Counter(
            "codd_failures", "Sequences and model calls that ended in an unforeseen exception.", registry=registry
        )
        self.steps = Counter("codd_steps", "Denoising steps, counted for each sequence.", registry=registry)
        self.circuit_steps = Counter("codd_circuit_steps", "Steps in which the circuit acted.", registry=registry)
        self.tokens = Counter("codd_tokens", "Tokens committed.", registry=registry)
        self.positions = Counter(
            "codd_positions",
            "Positions that the network saw in these steps: computed, or found in the KV cache.",
            ("source",),
            registry=registry,
        )
        self.finished = Counter("codd_sequences", "Sequences finished.", registry=registry)
        self.step_seconds = Histogram(
            "codd_step_seconds", "One step of all sequences in the slots.", buckets=_SECONDS, registry=registry
        )
        self.batch = Histogram(
            "codd_batch_size", "Sequences that share a step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=registry
        )

    def track_load(self, load: Callable[[], "Load"]) -> None:
        """Export the engine's load as gauges, read at every scrape."""
        for name in ("running", "slots", "waiting", "queue", "cache_slots", "cache_held"):
            gauge = Gauge(f"codd_{name}", f"The engine's load: {name}.", registry=self.registry)
            gauge.set_function(lambda name=name: getattr(load(), name))  # type: ignore[misc]

    def observe_step(self, steps: Sequence[Step], seconds: float) -> None:
        """Record one step of a batch: the steps of its sequences, and how long it took."""
        self.step_seconds.observe(seconds)
        self.batch.observe(len(steps))
        self.steps.inc(len(steps))
        self.circuit_steps.inc(sum(step.circuit for step in steps))
        self.tokens.inc(sum(len(step.positions) for step in steps))
        self.positions.labels("computed").inc(sum(step.computed for step in steps))
        self.positions.labels("cached").inc(sum(step.cached for step in steps))
        self.finished.inc(sum(step.finished for step in steps))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
