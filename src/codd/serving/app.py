"""The HTTP application: OpenAI's routes, our own, and the playground."""

import asyncio
import logging
import mimetypes
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from codd.decoding import Model
from codd.decoding.decisions import decision
from codd.decoding.prompts import can_chat
from codd.errors import InvalidInput
from codd.serving import prompts, streaming
from codd.serving.compiler import Compiler
from codd.serving.encoding import Json, json_response, sse_event
from codd.serving.engine import Engine
from codd.serving.errors import RESPONSES, APIError, install_handlers, refusing
from codd.serving.metrics import CONTENT_TYPE
from codd.serving.middleware import METRICS, PROBES, Security, with_middleware
from codd.serving.prompts import Compiled, GenerationRequest, Limits
from codd.serving.requests import ModelCall, QueuedRequest, ResultQueue, ShuttingDown, before
from codd.serving.responses import OpenAIFormat, TokenPieces, constraint_body, decision_body, inspect_body
from codd.serving.responses_api import ResponseEvents, ResponsesRequest
from codd.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    ConstraintFields,
    ConstraintRequest,
    DecisionRequest,
    DenoiseRequest,
    InspectRequest,
    OpenAIRequest,
)
from codd.serving.streaming import ClientDisconnected, EventStream, GeneratedSequence

_log = logging.getLogger("codd.serving")
Body = TypeVar("Body", bound=ConstraintFields)
OpenAIBody = TypeVar("OpenAIBody", bound=OpenAIRequest)
PLAYGROUND = Path(__file__).parent / "playground"
ENCODERS = 2
"""How many prompts are encoded at once."""
STREAMED: dict[int | str, dict[str, Any]] = {
    **RESPONSES,
    200: {"description": "The response, in one piece or as events.", "content": {"text/event-stream": {}}},
}
"""Responses of routes that can stream, for the OpenAPI document."""


@dataclass(frozen=True)
class Settings:
    """The configuration of a server beside its engine."""

    name: str = "codd"
    """The name of the model in the API."""
    about: str | None = None
    """What to expect of the model, for people."""
    limits: Limits = field(default_factory=Limits)
    security: Security = field(default_factory=Security)
    timeout: float = 600.0
    """The longest time that a request may take, in seconds; clients may ask for less."""
    log_text: bool = False
    """Whether prompts are logged."""
    connections: int = 256
    """How many connections are held, and requests answered at once."""
    io_timeout: float = 30.0
    """Seconds in which a client must send the headers of a request, then its body, and read what it is sent."""


def create_app(engine: Engine, settings: Settings, metrics: Callable[[], Awaitable[bytes]] | None = None) -> ASGIApp:
    """The application with its middleware; it starts the engine and stops it.

    ``metrics``: what /metrics answers, where there is more than this engine.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()
        routes.close()

    app = FastAPI(
        title="codd",
        description="A diffusion language model with a joint output distribution. Errors are objects of one kind.",
        version="1",
        lifespan=lifespan,
        docs_url=None,  # its page wants assets of other hosts
        redoc_url=None,
    )
    install_handlers(app)
    routes = Routes(engine, settings, metrics)
    routes.register(app)
    paths = {route.path for route in app.routes}  # type: ignore[attr-defined]
    return with_middleware(app, settings.security, engine.metrics, paths, settings.connections)


class Routes:
    """The handlers of all routes."""

    def __init__(self, engine: Engine, settings: Settings, metrics: Callable[[], Awaitable[bytes]] | None = None):
        """All routes share one engine; ``metrics``: see `create_app`."""
        self._metrics = metrics
        self.engine, self.settings, self.model = engine, settings, engine.model
        self.pieces = TokenPieces(engine.model)
        self.created = int(time.time())
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="codd-text")
        self._choosers = ThreadPoolExecutor(1, "codd-choice")  # long searches wait for each other only
        self._compile = Compiler(engine.model, settings.limits)

    def close(self) -> None:
        """End the threads."""
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._choosers.shutdown(wait=False, cancel_futures=True)
        self._compile.close()

    def register(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        app.get("/", include_in_schema=False)(self.playground)
        mimetypes.add_type("text/javascript", ".js")  # whatever the system says: browsers refuse modules of other types
        app.mount("/playground", StaticFiles(directory=PLAYGROUND))
        app.get("/health", responses={503: RESPONSES[503]})(self.health)
        live, ready = PROBES
        app.get(live, responses={503: RESPONSES[503]})(self.live)
        app.get(ready, responses={503: RESPONSES[503]})(self.ready)
        app.get(METRICS, response_class=Response, responses={200: {"content": {"text/plain": {}}}})(self.metrics)
        app.get("/v1/models", responses={401: RESPONSES[401]})(self.models)
        app.get("/v1/models/{name:path}", responses={401: RESPONSES[401], 404: RESPONSES[404]})(self.one_model)
        app.post("/v1/completions", responses=STREAMED)(self.completions)
        app.post("/v1/chat/completions", responses=STREAMED)(self.chat)
        app.post("/v1/responses", responses=STREAMED)(self.responses)
        app.post("/v1/denoise", responses=STREAMED)(self.denoise)
        app.post("/v1/decisions", responses=RESPONSES)(self.decisions)
        app.post("/v1/inspect", responses=RESPONSES)(self.inspect)
        app.post("/v1/constraint", responses=RESPONSES)(self.constraint)

    async def playground(self) -> Response:
        """The playground page."""
        return FileResponse(PLAYGROUND / "index.html")

    async def health(self) -> Response:
        """Whether the server takes requests, and its load."""
        return _state("ok", self.engine.draining and "draining", **vars(self.engine.load))

    async def live(self) -> Response:
        """Whether the process can still do its work; else it should be started anew."""
        return _state("live", self.engine.failed and "failed")

    async def ready(self) -> Response:
        """Whether new requests should be sent here."""
        return _state("ready", self.engine.draining and "draining")

    async def metrics(self) -> Response:
        """Metrics in Prometheus' text format."""
        text = self.engine.metrics.text() if self._metrics is None else await self._metrics()
        return Response(text, media_type=CONTENT_TYPE)

    async def models(self) -> Response:
        """The list of models, which has one; with the options of requests that do not set them."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def one_model(self, name: str) -> Response:
        """The model, by its name."""
        self._check_name(name)
        return json_response(self._model_card())

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts, or fill in what is between a prompt and a suffix."""
        return await self._openai(prompts.completion_generations, body, request, chat=False)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Reply to a conversation."""
        return await self._openai(prompts.chat_generations, body, request, chat=True)

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """Reply to a text or a conversation, in the newer format."""
        self._check_name(body.model)
        [sequence] = await self._sequences(prompts.chat_generations, body, request)
        options = sequence.generation.options.as_json()
        form = ResponseEvents(_new_id("resp"), int(time.time()), self.settings.name, body, options)
        events = streaming.response_events(self.engine, sequence, form, self.pieces)
        if body.stream:
            return self._stream(sequence, events, lambda e: sse_event(form.failed(e), "error"))
        *_, (_, last) = await self._run([sequence.request], _collected(events), request)
        return json_response(last["response"])

    async def denoise(self, body: DenoiseRequest, request: Request) -> Response:
        """Every step of a run, as it is taken."""
        [sequence] = await self._sequences(prompts.denoise_generations, body, request)
        events = streaming.denoise_events(sequence, self.model, _new_id("denoise"), self.settings.name, self.pieces)
        if body.stream is not False:
            return self._stream(sequence, events, lambda e: sse_event(e.as_json(), "error"))
        start, *steps, done = await self._run([sequence.request], _collected(events), request)
        return json_response({"start": start[1], "steps": [step for _, step in steps], "done": done[1]})

    async def decisions(self, body: DecisionRequest, request: Request) -> Response:
        """The joint distribution of several fields: the network is called once, the rest is done beside its thread."""
        deadline, loop = self._deadline(body.timeout), asyncio.get_running_loop()
        prepare = partial(prompts.decision_call, body, self.model, self.settings.limits)
        form, ask = await before(deadline, loop.run_in_executor(self._encoders, prepare))
        call = ModelCall(ask, _client(request), deadline)
        decider = await self._run([call], call.result(), request)
        choose = partial(decision, decider, form.values, list(body.fields), body.top)
        with refusing("fields"):
            found = await before(deadline, loop.run_in_executor(self._choosers, choose))
        return json_response(decision_body(found))

    async def inspect(self, body: InspectRequest, request: Request) -> Response:
        """What the network and the joint say about the masks in a window."""
        deadline = self._deadline(body.timeout)
        constraint = await self._constraint(body, request, deadline)
        function = prompts.inspection(body, self.model, self.settings.limits, constraint)
        call = ModelCall(function, _client(request), deadline)
        try:
            found = await self._run([call], call.result(), request)
        except InvalidInput as error:
            raise prompts.refused(error, constraint) from None
        return json_response(inspect_body(found, self.pieces))

    async def constraint(self, body: ConstraintRequest, request: Request) -> Response:
        """Whether a constraint can be compiled, and how large it is."""
        found = await self._constraint(body, request, self._deadline(body.timeout))
        if found is None:
            raise APIError(400, "guided_regex, guided_json or guided_choice: give one of them.", "guided_regex")
        return json_response(constraint_body(found.automaton))

    async def _constraint(self, body: ConstraintFields, request: Request, deadline: float) -> Compiled | None:
        """The compiled constraint of a request; `ShuttingDown` where that work would be for nothing, or is cut off."""
        if self.engine.draining:
            raise ShuttingDown
        try:
            return await self._compile(body.constraint(), _client(request), deadline)
        except asyncio.CancelledError:
            if self.engine.draining:  # by uvicorn, which gives up who is still there at the end
                raise ShuttingDown from None
            raise

    async def _sequences(
        self,
        function: Callable[[Body, Model, Limits, Compiled | None], list[GenerationRequest]],
        body: Body,
        request: Request,
    ) -> list[GeneratedSequence]:
        """The sequences of a request before their first step, which share a queue of results.

        Its constraint is compiled by another process, its prompts are encoded in one of a few threads: neither keeps
        the event loop.
        """
        deadline = self._deadline(body.timeout)
        constraint = await self._constraint(body, request, deadline)

        def start() -> list[GenerationRequest]:
            found = function(body, self.model, self.settings.limits, constraint)
            if any(generation.logprobs is not None for generation in found):
                self.pieces.bytes_of(0)  # here: the first time it takes a while
            return found

        started = await before(deadline, asyncio.get_running_loop().run_in_executor(self._encoders, start))
        if self.settings.log_text:
            for generation in started:
                ids, tokenizer = list(generation.ids), self.model.tokenizer
                _log.info("prompt: %r", ids if tokenizer is None else tokenizer.decode(ids))
        results: ResultQueue = asyncio.Queue()
        common = (self.model, _client(request), deadline, results, self.pieces)
        return [GeneratedSequence(generation, *common) for generation in started]

    async def _openai(
        self,
        function: Callable[[OpenAIBody, Model, Limits, Compiled | None], list[GenerationRequest]],
        body: OpenAIBody,
        request: Request,
        chat: bool,
    ) -> Response:
        self._check_name(body.model)
        sequences = await self._sequences(function, body, request)
        id = _new_id("chatcmpl" if chat else "cmpl")
        calls = body.calls() if isinstance(body, ChatRequest) else None
        form = OpenAIFormat(
            id, int(time.time()), self.settings.name, chat, body.include_usage, calls, bool(body.codd_provisional)
        )
        requests: list[QueuedRequest] = [sequence.request for sequence in sequences]
        if body.stream:
            chunks = streaming.stream_chunks(self.engine, sequences, form, self.pieces)
            return EventStream(self.engine, requests, chunks, lambda e: sse_event(e.as_json()))
        whole = streaming.full_response(self.engine, sequences, form, self.pieces)
        return json_response(await self._run(requests, whole, request))

    def _stream(
        self,
        sequence: GeneratedSequence,
        events: AsyncIterator[tuple[str, Json]],
        failed: Callable[[APIError], bytes],
    ) -> EventStream:
        encoded = (sse_event(content, name) async for name, content in events)
        return EventStream(self.engine, [sequence.request], encoded, failed)

    async def _run(self, requests: list[QueuedRequest], work: Coroutine[Any, Any, Any], request: Request) -> Any:
        """Submit requests and await the work that reads their results; 499 if the client disconnects first."""
        with closing(work), self.engine.submit(requests):  # closed if it was never awaited: the queue may be full
            try:
                return await streaming.until_disconnect(request.receive, work)
            except ClientDisconnected:
                raise APIError(499, "The client has closed the connection.") from None

    def _check_name(self, name: str) -> None:
        if name != self.settings.name:
            message = f"there is no such model here; there is {self.settings.name}."
            raise APIError(404, message, "model", "model_not_found")

    def _deadline(self, requested: float | None) -> float:
        """When a request expires, in seconds of `time.monotonic`; ``requested``: the client's timeout in seconds."""
        return time.monotonic() + min(self.settings.timeout, requested or self.settings.timeout)

    def _model_card(self) -> Json:
        model, tokenizer, circuit, card = self.model, self.model.tokenizer, self.model.circuit, None
        if circuit is not None:
            modulated = circuit.feature_width is not None
            card = {"states": circuit.num_latents, "window": circuit.window, "modulated": modulated}
        return {
            "id": self.settings.name,
            "object": "model",
            "created": self.created,
            "owned_by": "codd",
            "about": self.settings.about,
            "max_length": self.settings.limits.max_length(model),
            "mask_token": None if tokenizer is None else tokenizer.special_tokens.get("mask_token"),
            "mask_id": model.mask_id,
            "chat": tokenizer is not None and can_chat(tokenizer),
            "circuit": card,
            "defaults": self.settings.limits.defaults.as_json(),
        }


def _state(well: str, ill: str | bool, **more: Any) -> Response:
    return json_response({"status": ill or well, **more}, 503 if ill else 200)


async def _collected(events: AsyncIterator[tuple[str, Json]]) -> list[tuple[str, Json]]:
    return [each async for each in events]


def _client(request: Request) -> str:
    """The client for the fair queue: its address, as far as it is known."""
    return "" if request.client is None else request.client.host


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
