"""The scheduler: continuous batching. Sequences join and leave the batch between denoising steps.

One thread does all of the model's work. What becomes of a sequence does not depend on which others share its steps
(`codd.decoding.loop.advance`), so the engine is free to batch whatever is there.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from codd.backbones.kv_cache import default_memory
from codd.decoding import Model
from codd.decoding.loop import advance
from codd.decoding.runner import CachedRunner
from codd.decoding.sequence import Step
from codd.errors import CoddError, InvalidInput
from codd.serving.metrics import Metrics
from codd.serving.requests import (
    DeadlineExceeded,
    FairQueue,
    ModelCall,
    ModelFailure,
    QueuedRequest,
    QueueFull,
    SequenceRequest,
    ShuttingDown,
)

_log = logging.getLogger("codd.serving")
MAX_RETRY_AFTER = 60
"""The longest time, in seconds, after which a refused client is told to try again."""
TURN = 2.0
"""Seconds after which a sequence leaves its slot to one that waits, if that is fair, and waits itself."""
CACHE_MEMORY = 1 << 30
"""Bytes for the KV caches of all sequences on a CPU."""
_SMOOTHING = 0.1
"""The weight of the latest sequence in the moving average of seconds per sequence."""


@dataclass(frozen=True)
class Load:
    """How busy the engine is."""

    running: int
    """Sequences in the batch."""
    slots: int
    """The maximum batch size."""
    waiting: int
    """Sequences and model calls in the queues."""
    queue: int
    """How many may wait."""
    cache_slots: int
    """Sequences that have room in the KV cache."""
    cache_held: int
    """How many of these are taken, by sequences in the batch and such that have left it for a while."""


class Engine:
    """A model, the thread that runs it, and the queues of requests for it.

    ``submit`` and ``cancel`` are called on the event loop on which ``start`` was.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 8,
        queue: int = 64,
        exact: bool = False,
        cache_memory: int | None = None,
        cache_length: int = 4096,
    ):
        """``slots``: maximum batch size; ``queue``: how many more sequences may wait; ``exact``: on a GPU, too,
        evaluate the network for one sequence at a time, so that each is what it is alone, to the bit.

        Of ``cache_memory`` bytes (None: 1 GiB, on a GPU half of what is free) are made KV caches for sequences of the
        model's length, at most ``cache_length``: two for each slot if there are as many, as who leaves the batch for a
        while keeps its own; none if none fits.
        """
        self.runner = _runner(model, 2 * slots, cache_memory, cache_length, exact)
        self.model = model
        self.slots = slots
        self.metrics = Metrics()
        self._waiting: FairQueue[SequenceRequest] = FairQueue(queue)
        self._calls: FairQueue[ModelCall] = FairQueue(queue)
        self._running: list[SequenceRequest] = []
        self._condition = threading.Condition()
        """Guards the queues, the batch and the flags; notified when any of them changes."""
        self._stopped = False
        self.draining = False
        """Whether new requests are refused because the server is about to stop."""
        self.failed = False
        """Whether the model's thread has died, so that nothing will be answered any more."""
        self.turn = TURN
        self._mean_seconds = 1.0
        """Moving average of the seconds that a sequence takes."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="codd-model", daemon=True)
        self.metrics.track_load(lambda: self.load)

    @property
    def load(self) -> Load:
        """The current load."""
        waiting, cache = len(self._waiting) + len(self._calls), self.runner.memory.slots
        return Load(len(self._running), self.slots, waiting, self._waiting.capacity, cache, cache - self.runner.free)

    def start(self) -> None:
        """Start the model's thread; results arrive on the event loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def drain(self) -> None:
        """Refuse new requests; those that are queued or running are finished."""
        with self._condition:
            self.draining = True
            self._condition.notify()

    async def close(self) -> None:
        """Stop after the current step, and fail whatever is left with `ShuttingDown`; ``drain`` first to finish it."""
        self.drain()
        with self._condition:
            self._stopped = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)

    @contextlib.contextmanager
    def submit(self, requests: Sequence[QueuedRequest]) -> Iterator[None]:
        """Queue all of the requests or none; leaving the block cancels those that are not finished.

        Raises `QueueFull` if they do not all fit, `ShuttingDown` if the engine is draining, and InvalidInput for a
        sequence that asks for a KV cache and is too long for any that there is.
        """
        self._enqueue(requests)
        try:
            yield
        finally:
            self.cancel(requests)
            for request in requests:  # what is left there holds its request: a cycle, which would keep its memory
                while not request.results.empty():
                    request.results.get_nowait()

    def cancel(self, requests: Sequence[QueuedRequest]) -> None:
        """Give up the requests: their slots are free after the current step."""
        with self._condition:
            for request in requests:
                request.cancelled = True
            self._condition.notify()

    def _enqueue(self, requests: Sequence[QueuedRequest]) -> None:
        sequences = [r for r in requests if isinstance(r, SequenceRequest) and not r.state.finished]
        calls = [r for r in requests if isinstance(r, ModelCall)]
        try:
            for sequence in sequences:
                self.runner.lacking(sequence.state)
        except InvalidInput as error:
            raise InvalidInput(f"{error} Leave it out, or give the server more (codd serve --cache-memory).") from None
        with self._condition:
            if self.draining:
                raise ShuttingDown
            if len(sequences) > self._free_places() or len(calls) > self._calls.free:
                self.metrics.refused.inc()
                raise QueueFull(self._retry_after())
            for sequence in sequences:
                sequence.ahead = self._waiting.push(sequence)
            for call in calls:
                call.ahead = self._calls.push(call)
            self._condition.notify()

    def _free_places(self) -> int:
        """How many sequences fit. Free slots count: they are filled at once, so that an idle engine never refuses."""
        return self._waiting.free + max(0, self.slots - len(self._running))

    def _retry_after(self) -> int:
        """Seconds until a place should be free, from the length of the queue and the mean time of a sequence."""
        batches = (len(self._waiting) + 1) / self.slots
        return max(1, min(MAX_RETRY_AFTER, math.ceil(batches * self._mean_seconds)))

    # The methods below run in the model's thread.

    @torch.no_grad()
    def _run(self) -> None:
        # Matrix products may round differently with another number of threads, which is a setting of each thread.
        torch.set_num_threads(self._torch_threads)
        try:
            while self._schedule_step():
                pass
        except BaseException:  # nobody may wait for a thread that is no more
            _log.exception("the model's thread died")
            with self._condition:
                self.draining = self._stopped = self.failed = True
                evicted = self._evict()
            self._deliver(evicted)

    def _schedule_step(self) -> bool:
        """Evict, admit, run one model call and one step of the batch; False when drained and nothing is left to do."""
        with self._condition:
            while not (self._running or self._waiting or self._calls or self.draining):
                self._condition.wait()
            evicted = self._evict()
            call = None if self._stopped else self._calls.pop()
            self._admit()
            batch = list(self._running)
            more = bool(batch or self._waiting or self._calls or call) or not self.draining
        self._deliver(evicted)
        if call is not None:
            self._deliver([(call, self._run_call(call))])
        if batch:
            self._step_batch(batch)
        return more

    def _evict(self) -> list[tuple[QueuedRequest, Exception]]:
        """Remove cancelled and expired requests, or all once stopped, each with its error; call with the lock held."""
        now = time.monotonic()
        evicted: list[tuple[QueuedRequest, Exception]] = []
        for request in [*self._running, *self._waiting, *self._calls]:
            if not (request.cancelled or request.expired(now) or self._stopped):
                continue
            if request in self._running:
                self._running.remove(request)
            else:
                (self._waiting if isinstance(request, SequenceRequest) else self._calls).remove(request)
            if isinstance(request, SequenceRequest):
                self.runner.release(request.state)
            reason = "cancelled" if request.cancelled else "closing" if self._stopped else "late"
            self.metrics.evicted.labels(reason).inc()
            request.finished_at = now
            error = ShuttingDown() if self._stopped else DeadlineExceeded()
            evicted.append((request, error))
        return evicted

    def _admit(self) -> None:
        """Move waiting sequences into slots that are free, or whose turn is over; call with the lock held."""
        now = time.monotonic()
        while (sequence := self._next()) is not None:
            preempted = self._turn_over(sequence.client, now) if len(self._running) >= self.slots else None
            if preempted is not None:
                self._running.remove(preempted)
            elif len(self._running) >= self.slots:
                return
            self._waiting.take(sequence)
            self.runner.admit(sequence.state)
            if preempted is not None:  # behind the one that takes its slot, even if that is of the same client
                self._waiting.push(preempted)
            if sequence.started_at is None:
                sequence.started_at = now
                self.metrics.queue_seconds.observe(sequence.queued_seconds)
            sequence.turn_began = now
            self._running.append(sequence)

    def _next(self) -> SequenceRequest | None:
        """The first waiting sequence that has its KV cache, needs none, or finds room for one.

        Nobody overtakes another to take room that it waits for, so that what comes free adds up until it suffices. Who
        has a cache can always go on, so that some does come free.
        """
        room = self.runner.free
        for sequence in self._waiting:
            lacking = self.runner.lacking(sequence.state)
            if lacking <= room:
                return sequence
            room = 0
        return None

    def _turn_over(self, client: Hashable, now: float) -> SequenceRequest | None:
        """A sequence whose turn is over and that can make room for one of ``client``: its own, or of who has more."""
        slots = Counter(sequence.client for sequence in self._running)
        over = [sequence for sequence in self._running if now - sequence.turn_began > self.turn]
        return next((each for each in over if each.client == client or slots[each.client] > slots[client]), None)

    def _run_call(self, call: ModelCall) -> Any:
        call.started_at = time.monotonic()
        try:
            result = call.function()
        except Exception as error:
            result = self._foreseen(call, error)
        call.finished_at = time.monotonic()
        return result

    def _step_batch(self, batch: list[SequenceRequest]) -> None:
        """One denoising step of every sequence in the batch; finished and failed ones free their slots."""
        states = [sequence.state for sequence in batch]
        started = time.monotonic()
        outcomes = advance(self.runner, states)
        results = [self._foreseen(*each) for each in zip(batch, outcomes, strict=True)]
        now = time.monotonic()
        self.metrics.observe_step([step for step in results if isinstance(step, Step)], now - started)
        done = [
            sequence
            for sequence, result in zip(batch, results, strict=True)
            if not isinstance(result, Step) or result.finished
        ]
        for sequence in done:
            self.runner.release(sequence.state)
            sequence.finished_at = now
            self._mean_seconds += _SMOOTHING * (sequence.seconds - self._mean_seconds)
        with self._condition:
            self._running = [sequence for sequence in self._running if sequence not in done]
        self._deliver(list(zip(batch, results, strict=True)))

    def _foreseen(self, request: QueuedRequest, result: Any) -> Any:
        """A result as clients are to see it; in place of an unforeseen exception, which is logged, a failure."""
        if not isinstance(result, Exception) or isinstance(result, CoddError):
            return result
        self.metrics.failures.inc()
        _log.error("request %s: the model failed", request.id, exc_info=result, extra={"request_id": request.id})
        return ModelFailure()

    def _deliver(self, results: Sequence[tuple[QueuedRequest, Any]]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for request, result in results:
                self._loop.call_soon_threadsafe(request.deliver, result)


def _runner(model: Model, slots: int, memory: int | None, length: int, exact: bool) -> CachedRunner:
    """With as many as fit of ``slots`` caches; a network that is told the share of masks can use none."""
    backbone = model.backbone
    if memory is None:
        memory = CACHE_MEMORY if backbone.device.type == "cpu" else default_memory(backbone.device)
    length = min(length, backbone.max_length or length)
    fit = 0 if backbone.config.conditioning else memory // backbone.config.kv_shape.bytes_of(length, backbone.dtype)
    try:
        return CachedRunner(backbone, slots=min(slots, fit), length=length, one_by_one=exact)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidInput(f"there is no memory for KV caches of {memory / 2**30:g} GiB: {error}") from None
