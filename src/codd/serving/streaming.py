"""From denoising steps to responses: text, OpenAI chunks and denoise events, as the steps come from the engine."""

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence

from codd.decoding import Model, Step
from codd.serving.detokenizer import Detokenizer
from codd.serving.engine import Engine
from codd.serving.prompts import GenerationRequest
from codd.serving.requests import ResultQueue, SequenceRequest, merged_steps
from codd.serving.responses import (
    DONE,
    Json,
    OpenAIFormat,
    TokenPieces,
    Usage,
    done_event,
    sse_event,
    start_event,
    step_event,
)


class GeneratedSequence:
    """One sequence of a response: its request to the engine, its text so far, and its usage."""

    def __init__(
        self,
        generation: GenerationRequest,
        model: Model,
        client: Hashable,
        deadline: float | None,
        results: ResultQueue | None = None,
    ):
        """Nothing is submitted yet."""
        self.generation = generation
        self.request = SequenceRequest(generation.start(model), client, deadline, results)
        self.detokenizer = Detokenizer(generation, model)
        self.steps = self.circuit_steps = self.computed = self.cached = 0
        self._prompt_tokens = generation.prompt_tokens(model.mask_id)

    def add(self, step: Step) -> str:
        """Count a step; returns the text that it adds."""
        self.steps += 1
        self.circuit_steps += step.circuit
        self.computed += step.computed
        self.cached += step.cached
        return self.detokenizer.add(step.ids, step.finished, step.settled)

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return Usage(
            self._prompt_tokens,
            self.detokenizer.tokens,
            self.steps,
            self.circuit_steps,
            self.computed,
            self.cached,
            self.request.seconds,
            self.request.queued_seconds,
        )


def generated_sequences(
    generations: Sequence[GenerationRequest], model: Model, client: Hashable, deadline: float | None
) -> list[GeneratedSequence]:
    """The sequences of one response, which share a result queue."""
    results: ResultQueue = asyncio.Queue()
    return [GeneratedSequence(generation, model, client, deadline, results) for generation in generations]


def total_usage(sequences: Sequence[GeneratedSequence]) -> Usage:
    """The usage of a whole response; a prompt counts once, however many choices it has."""
    usages = [sequence.usage for sequence in sequences]
    return Usage(
        sum(u.prompt_tokens for u, sequence in zip(usages, sequences, strict=True) if not sequence.generation.choice),
        sum(u.completion_tokens for u in usages),
        sum(u.steps for u in usages),
        sum(u.circuit_steps for u in usages),
        sum(u.computed for u in usages),
        sum(u.cached for u in usages),
        max(u.seconds for u in usages),
        max(u.queued_seconds for u in usages),
    )


async def deltas(engine: Engine, sequences: Sequence[GeneratedSequence]) -> AsyncIterator[tuple[int, str]]:
    """The number of a sequence and the text that a step adds to it; a sequence whose text has ended is cancelled."""
    numbers = {sequence.request: number for number, sequence in enumerate(sequences)}
    async for request, step in merged_steps([sequence.request for sequence in sequences]):
        number = numbers[request]
        text = sequences[number].add(step)
        if sequences[number].detokenizer.finished:
            engine.cancel([request])
        yield number, text


async def full_response(engine: Engine, sequences: Sequence[GeneratedSequence], form: OpenAIFormat) -> Json:
    """OpenAI's response in one piece."""
    async for _ in deltas(engine, sequences):
        pass
    texts = [(sequence.detokenizer.text, sequence.detokenizer.reason) for sequence in sequences]
    return form.full(texts, total_usage(sequences))


async def stream_chunks(
    engine: Engine, sequences: Sequence[GeneratedSequence], form: OpenAIFormat
) -> AsyncIterator[bytes]:
    """OpenAI's response as server-sent events: the settled prefix of each choice as it grows."""
    for number in range(len(sequences)):
        if (first := form.first_chunk(number)) is not None:
            yield sse_event(first)
    async for number, text in deltas(engine, sequences):
        if text:
            yield sse_event(form.text_chunk(number, text))
        if sequences[number].detokenizer.finished:
            yield sse_event(form.last_chunk(number, sequences[number].detokenizer.reason))
    if (usage := form.usage_chunk(total_usage(sequences))) is not None:
        yield sse_event(usage)
    yield DONE


async def denoise_events(
    sequence: GeneratedSequence, model: Model, id: str, model_name: str, pieces: TokenPieces
) -> AsyncIterator[tuple[str, Json]]:
    """The events of /v1/denoise, as names and bodies: start, every step, done."""
    generation = sequence.generation
    yield (
        "start",
        start_event(
            id=id,
            model=model_name,
            ids=sequence.request.state.ids.tolist(),
            prompt_length=len(generation.ids),
            options=generation.options.as_json(),
            ahead=sequence.request.ahead,
            pieces=pieces,
        ),
    )
    async for step in sequence.request.steps():
        sequence.add(step)
        yield "step", step_event(step, pieces)
    text = None if model.tokenizer is None else sequence.detokenizer.text
    yield "done", done_event(text, sequence.detokenizer.reason, sequence.usage)
