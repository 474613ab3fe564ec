"""OpenAI's /v1/responses: the body of a request, and the objects and events of its answer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from codd.serving.encoding import Json
from codd.serving.errors import APIError
from codd.serving.options import Strict
from codd.serving.responses import FinishReason
from codd.serving.schemas import (
    Alternatives,
    Constraint,
    ConversationFields,
    Length,
    NamedSchema,
    OpenAIFields,
    PlainFormat,
    Roles,
    Said,
    format_constraint,
    ignored,
    unsupported,
)

LOGPROBS = "message.output_text.logprobs"


class InputText(Strict):
    """A part of an item: text that is given, or that an earlier answer had."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Any = ignored("they belong to an earlier answer")


class InputMessage(Said):
    """One item of a conversation; an item of an earlier answer's output can be sent back as it is."""

    type: Literal["message"] = "message"
    role: Roles
    content: str | Annotated[list[InputText], Field(min_length=1, fail_fast=True)]
    id: str | None = ignored("nothing is stored")
    status: str | None = ignored("nothing is stored")
    phase: str | None = ignored("chat templates know roles only")


class SchemaText(NamedSchema):
    """JSON that is valid under a schema; in this route its fields are beside the type."""

    type: Literal["json_schema"]


class TextSettings(Strict):
    """What the text is to be."""

    format: Annotated[PlainFormat | SchemaText, Field(discriminator="type")] | None = None
    verbosity: str | None = ignored("the length is max_output_tokens")


class ObfuscationOptions(Strict):
    """Options of a stream; its usage is always in the last event."""

    include_obfuscation: bool | None = ignored("nothing is padded")


class ResponsesRequest(OpenAIFields, ConversationFields):
    """The body of /v1/responses."""

    length_fields: ClassVar[tuple[str, ...]] = ("max_output_tokens", "gen_length")
    conversation_field: ClassVar[str] = "input"
    stored: ClassVar[tuple[str, ...]] = ("store", "background", "previous_response_id", "conversation")
    """Fields that need a server which keeps responses."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)] = Field(
        description="A text of the user, or the messages of a conversation."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Length | None = Field(None, description="The same as gen_length.")
    text: TextSettings | None = Field(None, description="Text, a JSON object, or JSON under a schema.")
    include: list[Literal["message.output_text.logprobs"]] | None = Field(None, description="Log-probabilities.")
    top_logprobs: Alternatives | None = Field(None, description="With them, those of so many other tokens.")
    stream_options: ObfuscationOptions | None = None
    metadata: dict[str, str] | None = Field(None, description="Sent back with the answer, and not kept.")
    store: bool | None = unsupported("false or null", False)
    background: bool | None = unsupported("false or null", False)
    previous_response_id: str | None = unsupported("null")
    conversation: Any = unsupported("null")
    tools: Any = unsupported("[] or null; see /v1/chat/completions", [])
    tool_choice: Any = unsupported('"none", "auto" or null', "none", "auto")
    max_tool_calls: Any = unsupported("null")
    truncation: str | None = unsupported('"disabled" or null', "disabled")
    context_management: Any = unsupported("[] or null", [])
    parallel_tool_calls: bool | None = ignored("no tools are called")
    reasoning: dict[str, Any] | None = ignored("nothing is written but the answer; see steps")

    def told(self) -> list[dict[str, Any]]:
        """No functions."""
        return []

    def said(self) -> list[dict[str, str]]:
        """The conversation, as chat templates take it."""
        given = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return [*system, *(item.plain() for item in given)]

    def reported(self) -> tuple[str, int | None]:
        """As ``include`` and ``top_logprobs`` say together."""
        wanted = LOGPROBS in (self.include or ())
        if self.top_logprobs and not wanted:
            message = f'top_logprobs is for those who ask for log-probabilities: include ["{LOGPROBS}"].'
            raise APIError(400, message, "top_logprobs")
        return "top_logprobs", (self.top_logprobs or 0) if wanted else None

    def check_supported(self) -> None:
        """Refuse what needs stored responses, and other fields by their names."""
        for name in self.stored:
            if getattr(self, name) not in (None, False):
                message = f"{name} is not supported: no response is kept here. Send the whole conversation as input."
                raise APIError(400, message, name, "unsupported")
        super().check_supported()

    def _constraints(self) -> list[Constraint]:
        asked = None if self.text is None else self.text.format
        return [*format_constraint("text", asked), *super()._constraints()]


@dataclass
class ResponseEvents:
    """Builds the events of one answer, which are numbered; the last one has the whole response."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    body: ResponsesRequest
    options: Json
    """The decoding options that were used."""
    number: int = field(default=0, init=False)

    def begin(self) -> list[tuple[str, Json]]:
        """The events before the first text."""
        response, item = self._response("in_progress", []), self._item("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=_part("", [])),
        ]

    def delta(self, text: str, logprobs: list[Json]) -> tuple[str, Json]:
        """More text, which does not change any more."""
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def provisional(self, pieces: list[str | None]) -> tuple[str, Json]:
        """Our own event: what follows that text for now."""
        return self._event("response.codd_provisional", **self._place, codd_provisional=pieces)

    def end(self, text: str, logprobs: list[Json], reason: FinishReason, usage: Json) -> list[tuple[str, Json]]:
        """The events after the last text."""
        status, part = "completed" if reason == "stop" else "incomplete", _part(text, logprobs)
        item = self._item(status, [part])
        response = {**self._response(status, [item]), "usage": _usage(usage)}
        return [
            self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=response),
        ]

    def failed(self, error: APIError) -> Json:
        """The last event of a stream that fails: OpenAI's fields, and the error object that all routes use."""
        _, event = self._event("error", code=error.code, message=error.message, param=error.param, **error.as_json())
        return event

    @property
    def _place(self) -> Json:
        return {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **content: Any) -> tuple[str, Json]:
        self.number += 1
        return kind, {"type": kind, "sequence_number": self.number - 1, **content}

    def _item(self, status: str, content: list[Json]) -> Json:
        return {"id": f"msg_{self.id}", "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[Json]) -> Json:
        text = None if self.body.text is None else self.body.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.length()[1],
            "metadata": self.body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.options["temperature"],
            "text": {"format": {"type": "text"} if text is None else text.model_dump(by_alias=True)},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": self.body.top_logprobs or 0,
            "top_p": self.options["top_p"],
            "truncation": "disabled",
            "usage": None,
        }


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Json) -> Json:
    """The usage object of this route, with our own figures under "codd"."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "codd": usage["codd"],
    }
