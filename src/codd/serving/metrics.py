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
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter, histogram = self._counter, self._histogram
        self.requests = counter("requests", "Answered HTTP requests.", "route", "status")
        self.request_seconds = histogram("request_seconds", "From request to end of answer.", "route")
        self.queue_seconds = histogram("queue_seconds", "How long sequences waited for a slot.")
        self.refused = counter("refused", "Requests refused because the queue was full.")
        given_up = "Sequences and model calls given up: cancelled, late (deadline) or closing."
        self.evicted = counter("dropped", given_up, "reason")
        self.failures = counter("failures", "Sequences and model calls that ended in an unforeseen exception.")
        self.steps = counter("steps", "Denoising steps, counted for each sequence.")
        self.circuit_steps = counter("circuit_steps", "Steps in which the circuit acted.")
        self.tokens = counter("tokens", "Tokens committed.")
        seen = "Positions that the network saw in these steps: computed, or found in the KV cache."
        self.positions = counter("positions", seen, "source")
        self.finished = counter("sequences", "Sequences finished.")
        self.step_seconds = histogram("step_seconds", "One step of all sequences in the slots.")
        self.batch = histogram("batch_size", "Sequences that share a step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"codd_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"codd_{name}", text, labels, buckets=buckets, registry=self.registry)

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
