"""Schemas of request bodies: OpenAI's and our own. `codd.serving.prompts` checks their values against the model."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from codd.serving.errors import APIError
from codd.serving.options import Count, Ids, InspectOptions, SamplingOptions, Strict
from codd.serving.tools import Calls, Tool, ToolCall, ToolChoice, calls_of, schema_of

MAX_CHOICES = 16
Alternatives = Annotated[int, Field(ge=0, le=20)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=4)]
Timeout = Annotated[float, Field(gt=0, le=86_400)]
Length = Annotated[int, Field(ge=0, le=2**31 - 1)]
NotEmptyIds = Annotated[Ids, Field(min_length=1)]
Roles = Literal["system", "developer", "user", "assistant"]


class TextPart(Strict):
    """A part of a message; text is the only kind that a language model reads."""

    type: Literal["text"]
    text: str


class Said(Strict):
    """What the messages of all routes have."""

    role: str
    content: Any

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it: developer becomes system, text parts are joined by newlines."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Message(Said):
    """One message of a conversation. Fields of an earlier response that clients send back are accepted if empty."""

    role: Roles | Literal["tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    name: str | None = Field(None, description="Ignored: chat templates know roles only.")
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="Calls that an earlier answer made."
    )
    tool_call_id: str | None = Field(None, description="Ignored: chat templates know the order only.")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_text(cls, data: Any) -> Any:
        """A message of calls may have null for its content, or none at all."""
        if isinstance(data, dict) and data.get("tool_calls") and data.get("content") is None:
            return {**data, "content": ""}
        return data

    def plain(self) -> dict[str, str]:
        """The same; calls are put behind the text, as models write them."""
        said = super().plain()
        written = [said["content"], *(call.as_text() for call in self.tool_calls or [])]
        return {**said, "content": "\n".join(filter(None, written))}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class Constraint(NamedTuple):
    """What the text must be, as a request says it."""

    field: str
    """The field of the request."""
    kind: Literal["regex", "json", "choice"]
    value: Any


class ConstraintFields(Strict):
    """The deadline, and the fields by which vLLM's clients say what the text must be: at most one of them."""

    timeout: Timeout | None = Field(None, description="Seconds until the server gives up.")
    guided_regex: str | None = Field(None, description="A regular expression that the whole text matches.")
    guided_json: dict[str, Any] | bool | str | None = Field(
        None, description="A JSON schema, or its text: the answer is JSON that is valid under it."
    )
    guided_choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Texts, of which the answer is one."
    )

    def constraint(self) -> Constraint | None:
        """The constraint, if there is one; a 400 for two."""
        found = self._constraints()
        if len(found) > 1:
            one, other = found[0].field, found[1].field
            raise APIError(400, f"{one} and {other} both say what the text must be: give one of them.", other)
        return found[0] if found else None

    def _constraints(self) -> list[Constraint]:
        given = (
            Constraint("guided_regex", "regex", self.guided_regex),
            Constraint("guided_json", "json", self.guided_json),
            Constraint("guided_choice", "choice", self.guided_choice),
        )
        return [each for each in given if each.value is not None]


class PlainFormat(Strict):
    """A format that needs no schema: any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Strict):
    """A JSON schema, as OpenAI's clients send it."""

    name: str = Field(description="Ignored, as are description and strict: the schema is always followed.")
    description: str | None = None
    strict: bool | None = None
    content: dict[str, Any] = Field(alias="schema")


class SchemaFormat(Strict):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def format_constraint(field: str, asked: PlainFormat | NamedSchema | SchemaFormat | None) -> list[Constraint]:
    """The constraint of a format, if it is one."""
    if asked is None or (isinstance(asked, PlainFormat) and asked.type == "text"):
        return []
    schema = asked.json_schema if isinstance(asked, SchemaFormat) else asked
    return [Constraint(field, "json", schema.content if isinstance(schema, NamedSchema) else {"type": "object"})]


class ConstraintRequest(ConstraintFields):
    """The body of /v1/constraint, which compiles one and says how large it is."""


class PromptFields(Strict):
    """A prompt or a conversation."""

    prompt: str | NotEmptyIds | None = Field(None, description="A text, which may hold the mask token, or ids.")
    messages: Messages | None = Field(None, description="A conversation, instead of a prompt.")
    chat: bool | None = Field(None, description="Whether the prompt is put into the chat template.")

    def asked(self) -> tuple[str, Any]:
        """The name of the field that is given, and what `Model.encode` takes; a 400 for both, or none."""
        if (self.prompt is None) == (self.messages is None):
            raise APIError(400, "prompt or messages: give one of them.", "prompt")
        if self.messages is None:
            return "prompt", self.prompt
        return "messages", [message.plain() for message in self.messages]


class DecisionRequest(PromptFields):
    """The body of /v1/decisions, which returns the joint distribution of several fields."""

    timeout: Timeout | None = Field(None, description="Seconds until the server gives up.")
    fields: dict[str, Annotated[list[str], Field(min_length=1, fail_fast=True)]] = Field(
        description="The values that each field may have.", min_length=1
    )
    template: str | None = Field(
        None, description="The text around the fields, whose names stand in braces; null: a line for each."
    )
    top: Annotated[int, Field(ge=1, le=20)] = Field(20, description="The most assignments that are listed.")


class DenoiseRequest(SamplingOptions, ConstraintFields, PromptFields):
    """The body of /v1/denoise, which returns every step of a run."""

    stop: bool | None = Field(None, description="End at the end-of-text token.")
    stream: bool | None = Field(True, description="Events as they happen, or one object.")


class InspectRequest(InspectOptions, ConstraintFields):
    """The body of /v1/inspect: what network and joint say about the masks in a window."""

    ids: NotEmptyIds = Field(description="The sequence, masks included.")
    window: Annotated[list[Length], Field(min_length=2, max_length=2)] = Field(description="Begin and end.")
    candidates: Annotated[int, Field(ge=1, le=32)] = 8
    written: Ids = Field([], description="Positions that a run has filled: guidance (cfg_scale) does not hide them.")


class StreamOptions(Strict):
    """OpenAI's stream options."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Ignored: nothing is padded.")


def unsupported(accepted: str, *values: Any) -> Any:
    """A field of OpenAI's, refused unless it is null or one of ``values`` (its examples), which change nothing."""
    return Field(None, description=f"Not supported: {accepted} only.", examples=list(values))


def ignored(why: str) -> Any:
    """A field of OpenAI's that may hold anything and has no effect."""
    return Field(None, description=f"Ignored: {why}.")


class OpenAIFields(SamplingOptions, ConstraintFields):
    """The fields that all of OpenAI's requests have, and the decoding options beside them."""

    length_fields: ClassVar[tuple[str, ...]] = ("max_tokens", "max_completion_tokens", "gen_length")
    """What the length is called, by the usual name first."""

    model: str = Field(description="One of /v1/models.")
    stream: bool | None = Field(None, description="The settled prefix as it grows, or one object.")
    codd_provisional: bool | None = Field(
        None, description="In a stream: also what stands behind that prefix for now, token by token."
    )
    user: str | None = ignored("the server keeps no accounts")

    @property
    def choices(self) -> int:
        """How many choices each prompt has."""
        return getattr(self, "n", None) or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        stop = getattr(self, "stop", None)
        return (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()

    def reported(self) -> tuple[str, int | None]:
        """The field that asks for log-probabilities, and how many alternatives to each token; None: nothing is."""
        return "logprobs", None

    def given(self) -> dict[str, Any]:
        """The decoding options that the client set, the length under any name; ``stop`` only if it is a switch."""
        _, length = self.length()
        options = {**super().given(), **({} if length is None else {"gen_length": length})}
        return {name: value for name, value in options.items() if name != "stop" or isinstance(value, bool)}

    def length(self) -> tuple[str, int | None]:
        """The name of the field with the requested length, and the length in tokens; None if there is none.

        Raises if fields that mean the same differ.
        """
        lengths = {name: value for name in self.length_fields if (value := getattr(self, name, None)) is not None}
        if len(set(lengths.values())) > 1:
            *others, last = lengths
            raise APIError(400, f"{' and '.join([*others, last])} are the same and differ: give one of them.", last)
        return next(iter(lengths.items()), (self.length_fields[0], None))

    def check_supported(self) -> None:
        """Refuse what OpenAI's servers can do and this one cannot, by the name of the field."""
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if info.examples is None or value is None:
                continue
            if not any(type(value) is type(no_op) and value == no_op for no_op in info.examples):
                raise APIError(400, f"{name} is not supported here: leave it out.", name, "unsupported")
        if self.codd_provisional and not self.stream:
            raise APIError(400, "codd_provisional is for streams: give stream true, too.", "codd_provisional")


class OpenAIRequest(OpenAIFields):
    """The fields that the requests of both completion routes have."""

    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = Field(
        None, description="Text, a JSON object, or JSON under a schema."
    )
    max_tokens: Length | None = Field(None, description="The same as gen_length.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="Choices; the default is 1.")
    stream_options: StreamOptions | None = None
    stop: bool | Annotated[str, Field(min_length=1, max_length=1000)] | Stops | None = Field(
        None, description="Stop strings, before which the text ends; or whether it ends at the end-of-text token."
    )
    frequency_penalty: float | None = unsupported("0 or null", 0.0)
    presence_penalty: float | None = unsupported("0 or null", 0.0)
    logit_bias: dict[str, Any] | None = unsupported("{} or null; see ban", {})

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _constraints(self) -> list[Constraint]:
        return [*format_constraint("response_format", self.response_format), *super()._constraints()]


class CompletionRequest(OpenAIRequest):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | NotEmptyIds
        | Annotated[list[NotEmptyIds], Field(min_length=1, fail_fast=True)]
    ) = Field(description="A text, which may hold the mask token, or ids; or several.")
    chat: bool | None = Field(
        None,
        description="Whether texts are put into the chat template, as in Python: if the model has one, unless the text "
        "has masks or there is a suffix.",
    )
    suffix: str | None = Field(None, description="Text that follows: max_tokens masks are put before it.")
    echo: bool | None = Field(None, description="Put the prompt before the generated text.")
    best_of: Count | None = Field(None, description="Not supported: n or null only.")
    logprobs: Alternatives | None = Field(
        None, description="Log-probabilities of the tokens, and of so many others in the place of each."
    )

    def reported(self) -> tuple[str, int | None]:
        """As the one field says."""
        return "logprobs", self.logprobs

    def check_supported(self) -> None:
        """The same; ``best_of`` has an effect only if it is more than ``n``."""
        super().check_supported()
        if self.best_of not in (None, self.choices):
            raise APIError(400, "best_of is not supported here: leave it out.", "best_of", "unsupported")


class ConversationFields(Strict):
    """What both kinds of conversations have, of which most is without effect."""

    conversation_field: ClassVar[str] = "messages"
    """The name of the field with the conversation."""

    moderation: Any = unsupported("null")
    service_tier: str | None = ignored("there is one queue for all")
    safety_identifier: str | None = ignored("the server keeps no accounts")
    prompt_cache_key: str | None = ignored("no prompt is cached")
    prompt_cache_retention: str | None = ignored("no prompt is cached")
    prompt_cache_options: dict[str, Any] | None = ignored("no prompt is cached")


class ChatRequest(OpenAIRequest, ConversationFields):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Length | None = Field(None, description="The same as gen_length.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the tokens.")
    top_logprobs: Alternatives | None = Field(None, description="Of so many others in the place of each, too.")
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="Functions that the answer may call. The chat template tells the model of them, if it can."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description='A function, "required" for one of them, "none", or "auto", the default: the model decides, if its '
        "template tells it of them; else the answer is a text.",
    )
    functions: Any = unsupported("[] or null; see tools", [])
    function_call: Any = unsupported('"none", "auto" or null', "none", "auto")
    modalities: Any = unsupported('["text"] or null', ["text"])
    audio: Any = unsupported("null")
    prediction: Any = unsupported("null")
    web_search_options: Any = unsupported("null")
    store: bool | None = unsupported("false or null", False)
    metadata: dict[str, Any] | None = ignored("nothing is stored that it could be attached to")
    parallel_tool_calls: bool | None = ignored("an answer is one call")
    reasoning_effort: str | None = ignored("nothing is written but the answer; see steps")
    verbosity: str | None = ignored("the length is max_tokens")

    def reported(self) -> tuple[str, int | None]:
        """As the two fields say together."""
        if self.top_logprobs and not self.logprobs:
            raise APIError(400, "top_logprobs is for those who ask for logprobs: give logprobs true.", "top_logprobs")
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None

    def said(self) -> list[dict[str, str]]:
        """The messages, as chat templates take them."""
        return [message.plain() for message in self.messages]

    def told(self) -> list[dict[str, Any]]:
        """The functions, as chat templates take them."""
        return [] if self.calls() is None else [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    def calls(self) -> Calls | None:
        """How the answer calls functions; None if it is a text."""
        return calls_of(self.tools, self.tool_choice)

    def _constraints(self) -> list[Constraint]:
        calls = self.calls()
        required = [] if calls is None or not calls.required else [calls.functions]
        return [*(Constraint("tools", "json", schema_of(each)) for each in required), *super()._constraints()]
