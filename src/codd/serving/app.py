"""The HTTP surface: OpenAI's routes, our own, and the page that uses them."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from codd.decoding import Model
from codd.decoding.inspect import inspect
from codd.decoding.prompts import can_chat
from codd.serving import answering, connection, page, prompts
from codd.serving.answering import Writing
from codd.serving.answers import Envelope, Json, Pieces, dump, event
from codd.serving.connection import EventStream, Gone
from codd.serving.engine import Engine
from codd.serving.guards import Guards, guarded
from codd.serving.metrics import CONTENT_TYPE, Counted
from codd.serving.problems import RESPONSES, Problem, install
from codd.serving.prompts import Limits, Plan
from codd.serving.schemas import ChatRequest, CompletionRequest, DenoiseRequest, InspectRequest
from codd.serving.tickets import Question

_log = logging.getLogger("codd.serving")
STREAMED: dict[int | str, dict[str, Any]] = {
    **RESPONSES,
    200: {"description": "The answer, in one piece or as events.", "content": {"text/event-stream": {}}},
}
"""For the OpenAPI document of routes that can stream."""


@dataclass(frozen=True)
class Settings:
    """What a server is told beside its engine."""

    name: str = "codd"
    """What clients call the model."""
    limits: Limits = field(default_factory=Limits)
    guards: Guards = field(default_factory=Guards)
    timeout: float = 600.0
    """Seconds after which a request is given up; clients may ask for less."""
    log_text: bool = False
    """Whether prompts and answers may be logged."""


def create_app(engine: Engine, settings: Settings) -> ASGIApp:
    """The application, behind its guards; it starts the engine and stops it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()

    app = FastAPI(
        title="codd",
        description="A diffusion language model with a joint output distribution. Errors are objects of one kind.",
        version="1",
        lifespan=lifespan,
        docs_url=None,  # its page wants assets of other hosts
        redoc_url=None,
    )
    install(app)
    Routes(engine, settings).add_to(app)
    return Counted(guarded(app, settings.guards), engine.metrics, {route.path for route in app.routes})  # type: ignore[attr-defined]


class Routes:
    """What each address answers."""

    def __init__(self, engine: Engine, settings: Settings):
        """All of them ask one engine."""
        self.engine, self.settings, self.model = engine, settings, engine.model
        self.pieces = Pieces(engine.model)
        self.since = int(time.time())

    def add_to(self, app: FastAPI) -> None:
        """Make them known."""
        app.get("/", include_in_schema=False)(self.playground)
        app.get("/playground/{name}", include_in_schema=False)(self.playground_file)
        app.get("/health", responses={503: RESPONSES[503]})(self.health)
        app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})(self.metrics)
        app.get("/v1/models", responses={401: RESPONSES[401]})(self.models)
        app.get("/v1/models/{name:path}", responses={401: RESPONSES[401], 404: RESPONSES[404]})(self.one_model)
        app.post("/v1/completions", responses=STREAMED)(self.completions)
        app.post("/v1/chat/completions", responses=STREAMED)(self.chat)
        app.post("/v1/denoise", responses=STREAMED)(self.denoise)
        app.post("/v1/inspect", responses=RESPONSES)(self.inspect)

    async def playground(self) -> Response:
        """The page."""
        return await self.playground_file("index.html")

    async def playground_file(self, name: str) -> Response:
        """What the page is made of."""
        found = page.files().get(name)
        if found is None:
            raise Problem(404, "There is nothing at this address.", code="not_found")
        return Response(found.content, media_type=found.type)

    async def health(self) -> Response:
        """Whether the server takes requests, and how much it has to do."""
        closing = self.engine.closing
        body = {"status": "draining" if closing else "ok", **vars(self.engine.load)}
        return Response(dump(body), 503 if closing else 200, media_type="application/json")

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(self.engine.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self) -> Response:
        """The one model that there is, and what it does where a request is silent."""
        return _json({"object": "list", "data": [self._described()]})

    async def one_model(self, name: str) -> Response:
        """The same, by its name."""
        self._check_name(name)
        return _json(self._described())

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts, or fill what is between a prompt and a suffix."""
        self._check_name(body.model)
        plans = await asyncio.to_thread(prompts.completion_plans, body, self.model, self.settings.limits)
        return await self._openai(body, plans, request, chat=False)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        self._check_name(body.model)
        plans = await asyncio.to_thread(prompts.chat_plans, body, self.model, self.settings.limits)
        return await self._openai(body, plans, request, chat=True)

    async def denoise(self, body: DenoiseRequest, request: Request) -> Response:
        """Every step of a run, as it happens."""
        plan = await asyncio.to_thread(prompts.denoise_plan, body, self.model, self.settings.limits)
        writing = Writing(plan, self.model, _client(request), self._deadline(body.timeout))
        self._log_prompts([plan])
        events = answering.events(writing, self.model, _new_id("denoise"), self.settings.name, self.pieces)
        if body.stream is not False:
            return EventStream(self.engine, [writing.ticket], _encoded(events), named=True)
        with self.engine.submit([writing.ticket]):
            start, *steps, done = await self._unless_gone(request, _collected(events))
        return _json({"start": start[1], "steps": [step for _, step in steps], "done": done[1]})

    async def inspect(self, body: InspectRequest, request: Request) -> Response:
        """What the network and the joint say of the masks in a window."""
        asked = prompts.inspection(body, self.model, self.settings.limits)
        options = answering.joint(asked.options)
        question = Question(
            lambda: inspect(self.model, **asked._replace(options=options)._asdict()),
            _client(request),
            self._deadline(body.timeout),
        )
        with self.engine.submit([question]):
            found = await self._unless_gone(request, question.answer())
        return _json(answering.inspected(found, self.pieces))

    async def _openai(
        self, body: CompletionRequest | ChatRequest, plans: list[Plan], request: Request, chat: bool
    ) -> Response:
        writings = answering.all_of(plans, self.model, _client(request), self._deadline(body.timeout))
        kind = "chatcmpl" if chat else "cmpl"
        envelope = Envelope(_new_id(kind), int(time.time()), self.settings.name, chat, body.include_usage)
        self._log_prompts(plans)
        tickets = [writing.ticket for writing in writings]
        if body.stream:
            return EventStream(self.engine, [*tickets], answering.chunks(self.engine, writings, envelope), named=False)
        with self.engine.submit(tickets):
            found = await self._unless_gone(request, answering.whole(self.engine, writings, envelope))
        return _json(found)

    async def _unless_gone(self, request: Request, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await connection.unless_gone(request.receive, work)
        except Gone:
            raise Problem(499, "The client has closed the connection.") from None

    def _check_name(self, name: str) -> None:
        if name != self.settings.name:
            message = f"there is no such model here; there is {self.settings.name}."
            raise Problem(404, message, "model", "model_not_found")

    def _deadline(self, wanted: float | None) -> float:
        return time.monotonic() + min(self.settings.timeout, wanted or self.settings.timeout)

    def _log_prompts(self, plans: list[Plan]) -> None:
        if self.settings.log_text:
            for plan in plans:
                tokenizer = self.model.tokenizer
                _log.info("prompt: %r", list(plan.ids) if tokenizer is None else tokenizer.decode(list(plan.ids)))

    def _described(self) -> Json:
        model, tokenizer = self.model, self.model.tokenizer
        return {
            "id": self.settings.name,
            "object": "model",
            "created": self.since,
            "owned_by": "codd",
            "max_length": self.settings.limits.room(model),
            "mask_token": None if tokenizer is None else tokenizer.special_tokens.get("mask_token"),
            "mask_id": model.mask_id,
            "chat": tokenizer is not None and can_chat(tokenizer),
            "circuit": _circuit(model),
            "defaults": self.settings.limits.defaults.as_json(),
        }


def _circuit(model: Model) -> Json | None:
    circuit = model.circuit
    if circuit is None:
        return None
    modulated = circuit.feature_width is not None
    return {"states": circuit.num_latents, "window": circuit.window, "modulated": modulated}


async def _encoded(events: AsyncIterator[tuple[str, Json]]) -> AsyncIterator[bytes]:
    async for name, content in events:
        yield event(content, name)


async def _collected(events: AsyncIterator[tuple[str, Json]]) -> list[tuple[str, Json]]:
    return [each async for each in events]


def _json(value: Any) -> Response:
    return Response(dump(value), media_type="application/json")


def _client(request: Request) -> str:
    """Whose turn it is: the address, as far as it is known."""
    return "" if request.client is None else request.client.host


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
