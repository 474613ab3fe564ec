"""From denoising steps to responses, as the steps come from the engine: text, OpenAI's chunks, events of a stream.

Work stops when the client disconnects, and streams are kept alive.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Hashable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from codd.decoding import Model, Step
from codd.serving.detokenizer import Detokenizer, TokenLogprob, TokenLogprobs, chat_logprobs, completion_logprobs
from codd.serving.encoding import DONE, SSE_HEADERS, Json, sse_event
from codd.serving.engine import Engine
from codd.serving.errors import APIError, log, to_api_error
from codd.serving.prompts import GenerationRequest
from codd.serving.requests import ModelFailure, QueuedRequest, ResultQueue, SequenceRequest, merged_steps
from codd.serving.responses import OpenAIFormat, TokenPieces, step_event
from codd.serving.responses_api import ResponseEvents

Result = TypeVar("Result")


class GeneratedSequence:
    """One sequence of a response: its request to the engine, its text so far, and its usage."""

    def __init__(
        self,
        generation: GenerationRequest,
        model: Model,
        client: Hashable,
        deadline: float | None,
        results: ResultQueue,
        pieces: TokenPieces,
    ):
        """The sequences of a response share ``results``. Nothing is submitted yet."""
        self.generation = generation
        self.request = SequenceRequest(generation.state, client, deadline, results)
        self.detokenizer = Detokenizer(generation, model)
        self.steps = self.circuit_steps = self.computed = self.cached = 0
        self.prompt_tokens = generation.prompt_tokens(model.mask_id)
        self._logprobs = None if generation.logprobs is None else TokenLogprobs(generation, pieces)
        self.new_logprobs: list[TokenLogprob] = []
        """One for each token whose text the latest step added."""
        self._ids: list[int] = []

    def add(self, step: Step) -> str:
        """Count a step; returns the text that it adds."""
        self.steps += 1
        self.circuit_steps += step.circuit
        self.computed += step.computed
        self.cached += step.cached
        self._ids = step.ids.tolist()
        text = self.detokenizer.add(step.ids, step.finished, step.settled)
        if self._logprobs is not None:
            self._logprobs.add(step)
            whole = self.detokenizer.finished and not self.generation.stops
            length = None if whole else len(self.detokenizer.text)
            self.new_logprobs = self._logprobs.take(self._ids, self.detokenizer.settled, length)
        return text

    def provisional(self, pieces: TokenPieces) -> list[str | None]:
        """What follows the text so far, token by token, None for a mask: later steps fill and may change it."""
        held = [self.detokenizer.held] if self.detokenizer.held else []
        return [*held, *pieces.provisional(self._ids[self.detokenizer.settled : self.generation.end_text])]


def usage_of(*sequences: GeneratedSequence) -> Json:
    """OpenAI's usage object of a response so far, with our own figures under "codd".

    A prompt counts once, however many choices it has. Of the seconds (in the queue, and from the first step on) those
    of the longest sequence are told; ``steps`` are network evaluations, ``computed`` and ``cached`` positions in them.
    """
    prompt = sum(each.prompt_tokens for each in sequences if not each.generation.choice)
    written = sum(each.detokenizer.tokens for each in sequences)
    counted = ("steps", "circuit_steps", "computed", "cached")
    own = {name: sum(getattr(each, name) for each in sequences) for name in counted}
    own |= {name: max(getattr(each.request, name) for each in sequences) for name in ("seconds", "queued_seconds")}
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written, "codd": own}


async def deltas(engine: Engine, sequences: Sequence[GeneratedSequence]) -> AsyncIterator[tuple[int, str]]:
    """The number of a sequence and the text that a step adds to it; a sequence whose text has ended is cancelled."""
    numbers = {sequence.request: number for number, sequence in enumerate(sequences)}
    async for request, step in merged_steps([sequence.request for sequence in sequences]):
        number = numbers[request]
        text = sequences[number].add(step)
        if sequences[number].detokenizer.finished:
            engine.cancel([request])
        yield number, text


async def full_response(
    engine: Engine, sequences: Sequence[GeneratedSequence], form: OpenAIFormat, pieces: TokenPieces
) -> Json:
    """OpenAI's response in one piece."""
    found: list[list[TokenLogprob]] = [[] for _ in sequences]
    async for number, _ in deltas(engine, sequences):
        found[number] += sequences[number].new_logprobs
    texts = [
        (sequence.detokenizer.text, sequence.detokenizer.reason, _logprobs(sequence, each, form, pieces))
        for sequence, each in zip(sequences, found, strict=True)
    ]
    return form.full(texts, usage_of(*sequences))


def _logprobs(
    sequence: GeneratedSequence, found: Sequence[TokenLogprob], form: OpenAIFormat, pieces: TokenPieces
) -> Json | None:
    """As the route has them; None if they were not asked for."""
    if sequence.generation.logprobs is None:
        return None
    return (chat_logprobs if form.chat else completion_logprobs)(found, pieces)


async def stream_chunks(
    engine: Engine, sequences: Sequence[GeneratedSequence], form: OpenAIFormat, pieces: TokenPieces
) -> AsyncIterator[bytes]:
    """OpenAI's response as server-sent events: the settled prefix of each choice as it grows; calls in one piece."""
    texts, found = [""] * len(sequences), [list[TokenLogprob]() for _ in sequences]
    calls = form.calls
    waiting = [calls is not None] * len(sequences)  # the text so far may be calls
    for number in range(len(sequences) if form.chat else 0):
        content = None if calls and calls.required else ""
        yield sse_event(form.chunk(number, {"delta": {"role": "assistant", "content": content}}))
    async for number, text in deltas(engine, sequences):
        sequence, ended = sequences[number], sequences[number].detokenizer.finished
        texts[number] += text
        found[number] += sequence.new_logprobs
        reason, logprobs = sequence.detokenizer.reason, _logprobs(sequence, found[number], form, pieces)
        if waiting[number] and ended and (made := form.calls_in(number, texts[number])):
            delta = {"tool_calls": [{"index": place, **call} for place, call in enumerate(made)]}
            yield sse_event(form.chunk(number, {"delta": delta}, None, logprobs))
            texts[number], reason = "", "tool_calls"
        waiting[number] = waiting[number] and calls is not None and calls.may_begin(texts[number])
        if texts[number] and (ended or not waiting[number]):
            yield sse_event(form.chunk(number, form.text(texts[number]), None, logprobs))
            texts[number], found[number] = "", []
        if form.provisional and not ended:
            yield sse_event(form.chunk(number, {**form.text(), "codd_provisional": sequence.provisional(pieces)}))
        if ended:
            yield sse_event(form.chunk(number, form.text(), reason))
    if form.include_usage:
        yield sse_event(form.usage_chunk(usage_of(*sequences)))
    yield DONE


async def response_events(
    engine: Engine, sequence: GeneratedSequence, form: ResponseEvents, pieces: TokenPieces
) -> AsyncIterator[tuple[str, Json]]:
    """The events of /v1/responses, as names and bodies; the last one has the whole response."""
    all_logprobs: list[Json] = []
    for event in form.begin():
        yield event
    async for _, text in deltas(engine, [sequence]):
        logprobs = chat_logprobs(sequence.new_logprobs, pieces)["content"]
        all_logprobs += logprobs
        if text:
            yield form.delta(text, logprobs)
        if form.body.codd_provisional and not sequence.detokenizer.finished:
            yield form.provisional(sequence.provisional(pieces))
    found = sequence.detokenizer
    for event in form.end(found.text, all_logprobs, found.reason, usage_of(sequence)):
        yield event


async def denoise_events(
    sequence: GeneratedSequence, model: Model, id: str, model_name: str, pieces: TokenPieces
) -> AsyncIterator[tuple[str, Json]]:
    """The events of /v1/denoise, as names and bodies: start, every step, done."""
    generation, ids = sequence.generation, sequence.request.state.ids.tolist()
    start = {"id": id, "model": model_name, "prompt_length": len(generation.ids), "ids": ids, "pieces": pieces(ids)}
    yield "start", {**start, "options": generation.options.as_json(), "ahead": sequence.request.ahead}
    async for step in sequence.request.steps():
        sequence.add(step)
        yield "step", step_event(step, pieces)
    text = None if model.tokenizer is None else sequence.detokenizer.text
    usage = usage_of(sequence)
    done = {"text": text, "finish_reason": sequence.detokenizer.reason, "tokens": usage["completion_tokens"]}
    yield "done", {**done, **usage["codd"]}


class ClientDisconnected(Exception):
    """The client has closed the connection."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work; if the client disconnects first, cancel it and raise `ClientDisconnected`."""
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        await _cancelled(task, watch)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*futures: "asyncio.Future[Any]") -> None:
    """Cancel futures and wait until they have released everything; errors that nobody read are dropped."""
    for future in futures:
        future.cancel()
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()  # marks it as read, so that asyncio does not log it


class EventStream(StreamingResponse):
    """A stream of server-sent events; its requests are queued only while the client is connected.

    What goes wrong before the first event is an ordinary error response; later it is the last event of the stream.
    """

    keep_alive = 15.0
    """Seconds without an event after which a comment is sent instead."""

    def __init__(
        self,
        engine: Engine,
        requests: list[QueuedRequest],
        events: AsyncIterator[bytes],
        failed: Callable[[APIError], bytes],
    ):
        """``failed``: makes an event of an error."""
        self.engine, self.requests, self.events, self.failed = engine, requests, events, failed
        self.sent = with_keep_alive(self._with_error_event(), self.keep_alive)
        super().__init__(self.sent, headers=SSE_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the requests and send their events, until they are finished or the client disconnects."""
        with self.engine.submit(self.requests), suppress(ClientDisconnected):
            async with aclosing(self.sent):
                await until_disconnect(receive, self.stream_response(send))

    async def _with_error_event(self) -> AsyncGenerator[bytes]:
        """The events; an exception becomes the last of them, and is logged if nobody expected it."""
        try:
            async for data in self.events:
                yield data
        except Exception as error:
            reported = to_api_error(error)
            if reported.status == 500 and not isinstance(error, ModelFailure):  # which the engine has logged
                log.error("a stream failed", exc_info=error)
            yield self.failed(reported)


async def with_keep_alive(events: AsyncGenerator[bytes], seconds: float) -> AsyncGenerator[bytes]:
    """The events, and a comment after each period of seconds without one: proxies cut connections that are silent."""
    following: asyncio.Future[bytes] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({following}, timeout=seconds))[0]:
                yield b": waiting\n\n"
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        if following is not None:
            await _cancelled(following)
        await events.aclose()
