"""From request bodies to sequences before their first step: prompts are encoded, everything is checked.

What cannot be used is an `APIError` that names the field. No network runs here; but texts are encoded, so that these
functions are better not called on the event loop.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from codd.constraints import Automaton, Choice
from codd.constraints.forms import Form
from codd.decoding import Model, Options
from codd.decoding.decisions import Decider
from codd.decoding.inspect import Inspection, inspect
from codd.decoding.prompts import Prompt
from codd.decoding.sequence import SequenceState, options_for
from codd.errors import CoddError, InvalidConstraint
from codd.serving.errors import APIError, bad_request, refusing
from codd.serving.options import SamplingOptions
from codd.serving.responses_api import ResponsesRequest
from codd.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    DecisionRequest,
    DenoiseRequest,
    InspectRequest,
    OpenAIFields,
)

BYTES_A_TOKEN = 16
"""Upper bound on bytes of text per token: four times what prose has."""


@dataclass(frozen=True)
class Limits:
    """The server's default options, and how much a client may ask for."""

    defaults: Options = field(default_factory=Options)
    """The options of a request that does not set them."""
    length: int = 4096
    """The most tokens of a sequence, if the model itself allows as many."""
    sequences: int = 16
    """The most sequences of one request: its prompts times n."""
    text: int | None = None
    """The most bytes of a text, or of all messages of a conversation; None: 16 for each token that may be."""
    constraint: int = 1 << 15
    """The most bytes of a pattern, a schema or a list of choices, as JSON."""
    states: int = 512
    """The most states of a compiled constraint: the work of a step grows with them."""
    compile_seconds: float = 5.0
    """The most seconds of processor time for compiling one."""
    compile_memory: int = 1 << 30
    """The most bytes of memory for that, beside what the process has at its start; macOS does not enforce it."""

    def max_length(self, model: Model) -> int:
        """The most tokens of a sequence with this model."""
        own = model.backbone.max_length
        return self.length if own is None else min(self.length, own)

    def max_text(self, model: Model) -> int:
        """The most bytes of a text with this model: no more than could fit if every token were the longest one."""
        tokens = self.max_length(model)
        most = BYTES_A_TOKEN * tokens if self.text is None else self.text
        return most if model.tokenizer is None else min(most, tokens * model.tokenizer.longest_token)

    def check_text(self, texts: Iterable[str], name: str, model: Model) -> None:
        """Refuse texts that are too long together before they cost the time and memory of encoding them."""
        size, most = sum(len(text.encode(errors="replace")) for text in texts), self.max_text(model)
        if size > most:
            message = f"{name} has {size} bytes; with this model texts have at most {most}: shorten it."
            raise APIError(400, message, name, "context_length_exceeded")


class Compiled(NamedTuple):
    """A constraint over the model's tokens, and the field of the request that states it."""

    field: str
    automaton: Automaton


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate, before its first step, and which part of it is the response."""

    state: SequenceState = field(compare=False)
    ids: tuple[int, ...]
    """The prompt; ``options.gen_length`` masks are put after it."""
    options: Options
    """The options, with the seed of this sequence."""
    begin_text: int
    """The position where the response's text begins: after the prompt, or 0 if the prompt has masks (`Model.text`)."""
    end_text: int | None = None
    """The position where it ends, if a suffix follows; None: at the end of the sequence."""
    stops: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    choice: int = 0
    """The number of the choice for its prompt."""
    echo: str = ""
    """Text that is put before the generated one."""
    logprobs: int | None = None
    """How many alternatives are reported with the log-probability of each token; None: not even that is."""

    def prompt_tokens(self, mask_id: int | None) -> int:
        """How many tokens the client gave, masks not counted."""
        return sum(token != mask_id for token in self.ids)


def denoise_generations(
    body: DenoiseRequest, model: Model, limits: Limits, constraint: Compiled | None = None
) -> list[GenerationRequest]:
    """The one sequence of /v1/denoise."""
    name, prompt = body.asked()
    planner = _Planner(body, model, limits, constraint, name)
    return [planner.continuation(planner.encode(prompt, body.chat))]


def chat_generations(
    body: ChatRequest | ResponsesRequest, model: Model, limits: Limits, constraint: Compiled | None = None
) -> list[GenerationRequest]:
    """The sequences of /v1/chat/completions, one for each choice, or the one of /v1/responses."""
    planner = _openai_planner(body, model, limits, constraint, body.conversation_field)
    ids = planner.encode_chat(body.said(), body.told())
    return planner.choices(planner.continuation(ids), body)


def completion_generations(
    body: CompletionRequest, model: Model, limits: Limits, constraint: Compiled | None = None
) -> list[GenerationRequest]:
    """The sequences of /v1/completions, ordered by prompt and then by choice."""
    prompts = _prompts(body.prompt)
    planner = _openai_planner(body, model, limits, constraint, "prompt", len(prompts))
    if body.suffix and body.chat:
        raise APIError(400, "chat and suffix exclude each other: an answer has nothing behind it.", "chat")
    generations: list[GenerationRequest] = []
    for prompt in prompts:
        ids = planner.encode(prompt, False if body.suffix else body.chat)
        generation = planner.infilling(ids, body.suffix) if body.suffix else planner.continuation(ids)
        has_prompt = generation.begin_text == 0 and generation.end_text is None and len(ids) > 0
        echo = model.tokenizer.decode(ids) if isinstance(prompt, list) and model.tokenizer else str(prompt)
        generations += planner.choices(replace(generation, echo=echo if body.echo and not has_prompt else ""), body)
    return generations


def decision_call(body: DecisionRequest, model: Model, limits: Limits) -> tuple[Form, Callable[[], Decider]]:
    """The form of /v1/decisions, and its one call of the network."""
    name, prompt = body.asked()
    limits.check_text(_texts(prompt), name, model)
    size = len(json.dumps([body.fields, body.template]).encode())
    if size > limits.constraint:
        raise APIError(400, f"fields and template have {size} bytes; at most {limits.constraint} here.", "fields")
    try:
        [ids] = model.encode([prompt], chat=body.chat)
        if len(ids) > limits.max_length(model):
            message = f"{name} has {len(ids)} tokens; a sequence has at most {limits.max_length(model)}."
            raise APIError(400, message, name, "context_length_exceeded")
        form = Form({field: Choice(values) for field, values in body.fields.items()}, body.template)
        return form, model.decider(ids, form, max_states=limits.states)
    except CoddError as error:
        raise bad_request(error, "fields" if isinstance(error, InvalidConstraint) else name) from None


def inspection(
    body: InspectRequest, model: Model, limits: Limits, constraint: Compiled | None = None
) -> Callable[[], Inspection]:
    """What /v1/inspect is to compute; `inspect` itself checks the rest."""
    longest = limits.max_length(model)
    if len(body.ids) > longest:
        raise APIError(400, f"there are {len(body.ids)} ids; a sequence has at most {longest}.", "ids")
    # The circuit acts whatever a run would do: the page asks what the joint says.
    asked = None if constraint is None else constraint.automaton
    options = body.options(limits.defaults, sampler="any_order", activation=None, preset=None, constraint=asked)
    return partial(
        inspect, model, body.ids, body.window, options=options, candidates=body.candidates, written=body.written
    )


@dataclass(frozen=True)
class _Planner:
    """Makes the sequences of one request body."""

    body: SamplingOptions
    model: Model
    limits: Limits
    constraint: Compiled | None
    prompt: str
    """What the body calls the field with the prompt, which errors name."""

    def encode(self, prompt: Prompt, chat: bool | None = None) -> list[int]:
        """The prompt's ids, encoded as `Model.generate` does."""
        self.limits.check_text(_texts(prompt), self.prompt, self.model)
        _, length = self._length()
        with refusing(self.prompt):
            [ids] = self.model.encode([prompt], gen_length=length, chat=chat)
        return ids

    def encode_chat(self, messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> list[int]:
        """The ids of a conversation, in which the template tells of the functions that the answer may call."""
        tokenizer = self.model.tokenizer
        if not tools or tokenizer is None or not tokenizer.takes_tools:
            return self.encode(messages)
        self.limits.check_text([*_texts(messages), json.dumps(tools)], "tools", self.model)
        with refusing(self.prompt):
            return tokenizer.encode_chat(messages, tools=tools)

    def continuation(self, ids: list[int]) -> GenerationRequest:
        """A prompt with masks after it."""
        masks = ids.count(_mask(self.model))
        return self._started(ids, self._fitted(len(ids), masks), 0 if masks else len(ids))

    def infilling(self, ids: list[int], text: str) -> GenerationRequest:
        """A prompt, masks, and a suffix: to the loop, all of it is a prompt."""
        assert self.model.tokenizer is not None
        self.limits.check_text([text], "suffix", self.model)
        with refusing("suffix"):
            suffix = self.model.tokenizer.encode(text)
        length = self._fitted(len(ids) + len(suffix), 0)
        whole = [*ids, *[_mask(self.model)] * length, *suffix]
        return self._started(whole, 0, len(ids), len(ids) + length)

    def choices(self, first: GenerationRequest, body: OpenAIFields) -> list[GenerationRequest]:
        """The sequence of each choice, with consecutive seeds; the first one is there already."""
        options, (field, logprobs) = first.options, body.reported()
        if logprobs and (options.sampler == "latent" or options.published):
            message = f"{field}: only the samplers any_order and factorized know what else a token could have been."
            raise APIError(400, message, field)
        assert isinstance(options.seed, int)
        found = [replace(first, stops=body.stops, logprobs=logprobs)]
        for choice in range(1, body.choices):
            chosen = options.changed(seed=options.seed + choice)
            [state] = self.model.start([first.ids], chosen)
            found.append(replace(found[0], state=state, options=chosen, choice=choice))
        for each in found:
            each.state.alternatives = logprobs or 0
        return found

    def _length(self) -> tuple[str, int]:
        """The name of the field with the length, and the length: the requested or the usual one."""
        name, requested = self.body.length()
        return name, self.limits.defaults.gen_length if requested is None else requested

    def _fitted(self, given: int, masks: int) -> int:
        """How many masks to add: the requested length, or the default one cut to what fits.

        ``given``: tokens of the prompt (and suffix), of which ``masks`` are masks. Raises if the request does not fit,
        or if there is nothing to fill.
        """
        longest, (name, wanted) = self.limits.max_length(self.model), self._length()
        available, by_default = longest - given, self.body.length()[1] is None
        length = min(wanted, available) if by_default and wanted and available > 0 else wanted
        if length > available:
            long = f"{self.prompt} has {given} tokens; a sequence has at most {longest}"
            if by_default or available < 0 or (available == 0 and not masks):
                hint = f", or give {name} 0 to fill its masks only" if masks and not available else ""
                message, param = f"{long}, answer included: shorten it{hint}.", self.prompt
            else:
                message, param = f"{long}, so that {name} can be {available}, not {wanted}.", name
            raise APIError(400, message, param, "context_length_exceeded")
        if not length and not masks:
            raise APIError(400, f"{name} is 0 and {self.prompt} has no masks: nothing is to be written.", name)
        return length

    def _started(self, ids: list[int], length: int, begin_text: int, end_text: int | None = None) -> GenerationRequest:
        """A sequence before its first step, its options checked against the model as the loop itself does."""
        model, defaults = self.model, self.limits.defaults
        asked = None if self.constraint is None else self.constraint.automaton
        try:
            options = options_for(model.backbone, self.body.options(defaults, gen_length=length, constraint=asked))
            options = self._paced(options, ids, length)
            [state] = model.start([ids], options)
        except (CoddError, APIError) as error:
            raise self._refused(error) from None
        return GenerationRequest(state, tuple(ids), options, begin_text, end_text)

    def _paced(self, options: Options, ids: list[int], length: int) -> Options:
        """The options with the steps that the server's default gives a text of this length."""
        mask, block_causal = _mask(self.model), self.model.backbone.block_size is not None
        begin = 0 if block_causal else len(ids)
        masks = [place - begin for place, token in enumerate([*ids, *[mask] * length]) if token == mask]
        by_block = options.published and block_causal  # its steps are those of a block, and end with the block's masks
        if options.steps is not None and "steps" not in self.body.given() and not by_block:
            options = options.changed(
                steps=_default_steps(options, options.steps, self.limits.defaults.gen_length, masks)
            )
        if options.published and not by_block and (options.steps or 0) > len(masks):
            # The published loops evaluate the network even if nothing is left to do: nobody may ask for that.
            raise APIError(400, f"steps is {options.steps}, but there are only {len(masks)} masks to fill.", "steps")
        return options

    def _refused(self, error: CoddError | APIError) -> APIError:
        """The error response, with the field's name in this kind of request."""
        found = refused(error, self.constraint)
        names = {"gen_length": self._length()[0], "prompt": self.prompt}
        found.param = names.get(found.param or "", found.param)
        return found


def refused(error: CoddError | APIError, constraint: Compiled | None) -> APIError:
    """The error response; where it is about the constraint, by the field of the request that has it."""
    found = error if isinstance(error, APIError) else bad_request(error)
    if constraint is not None and (isinstance(error, InvalidConstraint) or "constraint" in found.message):
        found.param = constraint.field
    return found


def _openai_planner(
    body: OpenAIFields, model: Model, limits: Limits, constraint: Compiled | None, prompt: str, prompts: int = 1
) -> _Planner:
    """For a request to one of OpenAI's routes; refuses what this server cannot do at all."""
    body.check_supported()
    if model.tokenizer is None:
        raise APIError(400, "this model has no tokenizer, so it writes no text: use /v1/denoise with ids.", prompt)
    if prompts * body.choices > limits.sequences:
        message = f"{prompts} prompts with {body.choices} choices each: at most {limits.sequences} in all."
        raise APIError(400, message, "n" if body.choices > 1 else prompt)
    if constraint is not None and body.stops:
        message = f"stop and {constraint.field} exclude each other: a text that is cut is not what was asked for."
        raise APIError(400, message, "stop")
    return _Planner(body, model, limits, constraint, prompt)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of /v1/completions as a list, whichever of its four forms the client chose."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [token for token in prompt if isinstance(token, int)]
    return [ids] if ids else [part for part in prompt if not isinstance(part, int)]


def _texts(prompt: Any) -> list[str]:
    """What of a prompt is text: itself, or the messages of a conversation with their roles."""
    if isinstance(prompt, str):
        return [prompt]
    return [text for message in prompt if isinstance(message, dict) for text in message.values()]


def _default_steps(options: Options, steps: int, length: int, masks: Sequence[int]) -> int:
    """The default number of steps; where a long text has more blocks than that, the default number of tokens per step.

    ``steps`` and ``length`` are the server's; ``masks``: positions of the masks, counted as blocks are.
    """
    blocks = 1 if options.mode == "full" else len({place // options.block_length for place in masks})
    return steps if steps >= blocks else max(blocks, math.ceil(len(masks) * steps / max(1, length)))


def _mask(model: Model) -> int:
    assert model.mask_id is not None, "a model without a mask is not served"
    return model.mask_id
