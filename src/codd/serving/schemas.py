"""What requests look like. What their values mean for a certain model is checked in `codd.serving.prompts`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from codd.decoding.options import Tempering
from codd.serving.options import Chosen, Count, Ids, NotNegative, Sampling, Strict
from codd.serving.problems import Problem

MAX_CHOICES = 16
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=4)]
Timeout = Annotated[float, Field(gt=0, le=86_400)]
Length = Annotated[int, Field(ge=0, le=2**31 - 1)]
NotEmptyIds = Annotated[Ids, Field(min_length=1)]
Roles = Literal["system", "developer", "user", "assistant"]


class TextPart(Strict):
    """A part of a message; text is the only kind that a language model reads."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation. What else clients send back of an earlier answer is read over if it is empty."""

    role: Roles
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    name: str | None = Field(None, description="Ignored: chat templates know roles only.")
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it: developers are the system, parts stand on lines of their own."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class DenoiseRequest(Sampling):
    """/v1/denoise: every step of a run."""

    prompt: str | NotEmptyIds | None = Field(None, description="A text, which may hold the mask token, or ids.")
    messages: Messages | None = Field(None, description="A conversation, instead of a prompt.")
    chat: bool | None = Field(None, description="Whether the prompt is put into the chat template.")
    stop: bool | None = Field(None, description="End at the end-of-text token.")
    timeout: Timeout | None = Field(None, description="Seconds until the server gives up.")
    stream: bool | None = Field(True, description="Events as they happen, or one object.")


class InspectRequest(Chosen):
    """/v1/inspect: what network and joint say of the masks in a window."""

    ids: NotEmptyIds = Field(description="The sequence, masks included.")
    window: Annotated[list[Length], Field(min_length=2, max_length=2)] = Field(description="Begin and end.")
    circuit_temperature: NotNegative | None = None
    tempering: Tempering | None = None
    cfg_scale: NotNegative | None = None
    ban: Ids | None = None
    candidates: Annotated[int, Field(ge=1, le=32)] = 8
    written: Ids = Field([], description="Positions that a run has filled: guidance (cfg_scale) does not hide them.")
    timeout: Timeout | None = None


class StreamOptions(Strict):
    """OpenAI's options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Ignored: nothing is padded.")


def _neutral(values: str) -> Any:
    return Field(None, description=f"Not supported: {values} only.")


def _ignored(why: str) -> Any:
    return Field(None, description=f"Ignored: {why}.")


class OpenAIRequest(Sampling):
    """What both of OpenAI's requests have, with the options of the loop beside it."""

    model: str = Field(description="One of /v1/models.")
    max_tokens: Length | None = Field(None, description="The same as gen_length.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="Choices; the default is 1.")
    stream: bool | None = Field(None, description="The settled prefix as it grows, or one object.")
    stream_options: StreamOptions | None = None
    stop: bool | Annotated[str, Field(min_length=1, max_length=1000)] | Stops | None = Field(
        None, description="Texts before which the answer ends; or whether it ends at the end-of-text token."
    )
    timeout: Timeout | None = Field(None, description="Seconds until the server gives up.")
    user: str | None = _ignored("the server keeps no accounts")
    frequency_penalty: float | None = _neutral("0 or null")
    presence_penalty: float | None = _neutral("0 or null")
    logit_bias: dict[str, float] | None = _neutral("{} or null; see ban")

    @property
    def choices(self) -> int:
        """How many answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which an answer ends."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop) if isinstance(self.stop, list) else ()

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with what it cost."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def given(self) -> dict[str, Any]:
        """Without stop where it is texts, and with the length under whatever name it has."""
        found = super().given()
        if not isinstance(self.stop, bool):
            found.pop("stop", None)
        _, length = self.length()
        return found if length is None else {**found, "gen_length": length}

    def length(self) -> tuple[str, int | None]:
        """How many tokens are wanted, if that is said, and the name under which."""
        names = ("max_tokens", "max_completion_tokens", "gen_length")
        said = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        if len(set(said.values())) > 1:
            *others, last = said
            raise Problem(400, f"{' and '.join([*others, last])} are the same and differ: give one of them.", last)
        return next(iter(said.items()), ("max_tokens", None))

    def check_supported(self) -> None:
        """Refuse what OpenAI's servers can do and this one cannot."""
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and not any(type(value) is type(fits) and value == fits for fits in neutral):
                raise Problem(400, f"{name} is not supported here: leave it out.", name, "unsupported")


class CompletionRequest(OpenAIRequest):
    """/v1/completions."""

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
    suffix: str | None = Field(None, description="What follows: max_tokens masks are put before it.")
    echo: bool | None = Field(None, description="Put the prompt before the answer.")
    best_of: Count | None = _neutral("n or null")
    logprobs: int | None = _neutral("null")

    def check_supported(self) -> None:
        """``best_of`` means something only if it is more than ``n``."""
        super().check_supported()
        if self.best_of not in (None, self.choices):
            raise Problem(400, "best_of is not supported here: leave it out.", "best_of", "unsupported")


class ChatRequest(OpenAIRequest):
    """/v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Length | None = Field(None, description="The same as gen_length.")
    logprobs: bool | None = _neutral("false or null")
    top_logprobs: int | None = _neutral("0 or null")
    tools: Any = _neutral("[] or null")
    tool_choice: Any = _neutral('"none", "auto" or null')
    functions: Any = _neutral("[] or null")
    function_call: Any = _neutral('"none", "auto" or null')
    response_format: Any = _neutral('{"type": "text"} or null')
    modalities: Any = _neutral('["text"] or null')
    audio: Any = _neutral("null")
    prediction: Any = _neutral("null")
    web_search_options: Any = _neutral("null")
    moderation: Any = _neutral("null")
    store: bool | None = _neutral("false or null")
    metadata: dict[str, Any] | None = _ignored("nothing is stored that it could be attached to")
    service_tier: str | None = _ignored("there is one queue for all")
    parallel_tool_calls: bool | None = _ignored("there are no tools")
    reasoning_effort: str | None = _ignored("nothing is written but the answer; see steps")
    verbosity: str | None = _ignored("the length is max_tokens")
    safety_identifier: str | None = _ignored("the server keeps no accounts")
    prompt_cache_key: str | None = _ignored("no prompt is cached")
    prompt_cache_retention: str | None = _ignored("no prompt is cached")
    prompt_cache_options: dict[str, Any] | None = _ignored("no prompt is cached")


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
}
"""What a field of OpenAI's that means nothing here may hold beside null: what it does on a server that has it not."""
