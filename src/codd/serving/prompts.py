"""From a request to sequences of ids with their options, or to a problem that names the field.

Nothing is computed by a network here; but texts are encoded, so that it is better not done on the event loop.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from codd.decoding import Model, Options
from codd.decoding.course import Course
from codd.decoding.prompts import Prompt
from codd.errors import CoddError, InvalidInput
from codd.serving.options import Sampling
from codd.serving.problems import Problem, refused
from codd.serving.schemas import ChatRequest, CompletionRequest, DenoiseRequest, InspectRequest, OpenAIRequest


@dataclass(frozen=True)
class Limits:
    """What the server chooses for its clients, and how much of it they may ask for."""

    defaults: Options = field(default_factory=Options)
    length: int = 4096
    """The tokens of a sequence, if the model itself allows as many."""
    sequences: int = 16
    """Sequences of one request: its prompts times n."""

    def room(self, model: Model) -> int:
        """How long a sequence may be."""
        own = model.backbone.max_length
        return self.length if own is None else min(self.length, own)


@dataclass(frozen=True)
class Plan:
    """One sequence of a request: what the loop is given, and what of it is the answer."""

    ids: tuple[int, ...]
    """The prompt; ``options.gen_length`` masks are put after it."""
    options: Options
    """With the seed of this sequence."""
    begin: int
    """Where the text of the answer begins: after the prompt, or at 0 if the prompt has masks, as `Model.text` does."""
    end: int | None = None
    """Where it ends, if a suffix follows; None: where the sequence does."""
    stops: tuple[str, ...] = ()
    """Texts before which the answer ends."""
    prompt: int = 0
    """Which of the prompts of the request."""
    choice: int = 0
    """Which of the n answers to it."""
    echo: str = ""
    """What is put before the answer."""

    def given(self, mask_id: int | None) -> int:
        """How many tokens the client gave, masks left out."""
        return sum(token != mask_id for token in self.ids)

    def course(self, model: Model) -> Course:
        """The sequence before its first step."""
        [found] = model.begin([self.ids], self.options)
        return found


class Inspection(NamedTuple):
    """A request to look at the masks of a window, checked."""

    ids: list[int]
    window: tuple[int, int]
    options: Options
    candidates: int
    written: list[int]


class _Asked(NamedTuple):
    """What a kind of request calls things."""

    request: Sampling
    prompt: str
    length: str
    wanted: int | None
    """The length that the client asked for."""


def denoise_plan(request: DenoiseRequest, model: Model, limits: Limits) -> Plan:
    """The one sequence of /v1/denoise."""
    if (request.prompt is None) == (request.messages is None):
        raise Problem(400, "prompt or messages: give one of them.", "prompt")
    name = "prompt" if request.messages is None else "messages"
    asked = _Asked(request, name, "gen_length", request.gen_length)
    prompt: Any = request.prompt if request.messages is None else [message.plain() for message in request.messages]
    ids = _encode(model, prompt, asked, limits, request.chat)
    return _continued(model, ids, asked, limits)


def chat_plans(request: ChatRequest, model: Model, limits: Limits) -> list[Plan]:
    """The sequences of /v1/chat/completions, choice after choice."""
    asked = _asked(request, "messages", model, limits, 1)
    ids = _encode(model, [message.plain() for message in request.messages], asked, limits, None)
    return list(_choices(_continued(model, ids, asked, limits), request, 0, ""))


def completion_plans(request: CompletionRequest, model: Model, limits: Limits) -> list[Plan]:
    """The sequences of /v1/completions, prompt after prompt, and of each prompt choice after choice."""
    prompts = _listed(request.prompt)
    asked = _asked(request, "prompt", model, limits, len(prompts))
    if request.suffix and request.chat:
        raise Problem(400, "chat and suffix exclude each other: an answer has nothing behind it.", "chat")
    found: list[Plan] = []
    for number, prompt in enumerate(prompts):
        ids = _encode(model, prompt, asked, limits, False if request.suffix else request.chat)
        plan = (_infilled if request.suffix else _continued)(model, ids, asked, limits)
        whole = plan.begin == 0 and plan.end is None and len(ids) > 0  # then the text has the prompt in it
        echo = _echo(model, prompt) if request.echo and not whole else ""
        found += _choices(plan, request, number, echo)
    return found


def inspection(request: InspectRequest, model: Model, limits: Limits) -> Inspection:
    """What /v1/inspect is asked."""
    room, (first, last) = limits.room(model), request.window
    if len(request.ids) > room:
        raise Problem(400, f"there are {len(request.ids)} ids; a sequence has at most {room}.", "ids")
    _check_ids(request.ids, "ids", model)
    if not first < last <= len(request.ids):
        raise Problem(400, f"window is [{first}, {last}], not a part of {len(request.ids)} ids.", "window")
    if model.mask_id not in request.ids[first:last]:
        raise Problem(400, f"window has no mask (id {model.mask_id}) in it: there is nothing to say.", "window")
    options = request.options(limits.defaults)
    _check_bans(options, model)
    return Inspection(request.ids, (first, last), options, request.candidates, request.written)


def _asked(request: OpenAIRequest, prompt: str, model: Model, limits: Limits, prompts: int) -> _Asked:
    """Refuse what this server cannot do at all."""
    request.check_supported()
    if model.tokenizer is None:
        raise Problem(400, "this model has no tokenizer, so it writes no text: use /v1/denoise with ids.", prompt)
    if prompts * request.choices > limits.sequences:
        message = f"{prompts} prompts with {request.choices} choices each: at most {limits.sequences} in all."
        raise Problem(400, message, "n" if request.choices > 1 else prompt)
    return _Asked(request, prompt, *request.length())


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    ids = [token for token in prompt if isinstance(token, int)]
    return [ids] if ids else [part for part in prompt if not isinstance(part, int)]


def _encode(model: Model, prompt: Prompt, asked: _Asked, limits: Limits, chat: bool | None) -> list[int]:
    """Ids, as `Model.generate` makes them."""
    wanted = limits.defaults.gen_length if asked.wanted is None else asked.wanted
    try:
        [ids] = model.encode([prompt], gen_length=wanted, chat=chat)
    except CoddError as error:
        raise refused(error, asked.prompt) from None
    return ids


def _echo(model: Model, prompt: str | list[int]) -> str:
    assert model.tokenizer is not None
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_unknown=True)


def _continued(model: Model, ids: list[int], asked: _Asked, limits: Limits) -> Plan:
    """A prompt with masks after it."""
    masks = ids.count(_mask(model))
    length = _length(len(ids), masks, asked, limits, model)
    options = _options(model, ids, length, asked, limits)
    return Plan(tuple(ids), options, 0 if masks else len(ids))


def _infilled(model: Model, ids: list[int], asked: _Asked, limits: Limits) -> Plan:
    """A prompt, masks, and what follows them: to the loop, all of it is a prompt."""
    assert isinstance(asked.request, CompletionRequest)
    assert model.tokenizer is not None
    try:
        suffix = model.tokenizer.encode(asked.request.suffix or "")
    except CoddError as error:
        raise refused(error, "suffix") from None
    length = _length(len(ids) + len(suffix), 0, asked, limits, model)
    whole = [*ids, *[_mask(model)] * length, *suffix]
    return Plan(tuple(whole), _options(model, whole, 0, asked, limits), len(ids), len(ids) + length)


def _length(given: int, masks: int, asked: _Asked, limits: Limits, model: Model) -> int:
    """How many masks to add: as many as are wanted, or as are usual and have room."""
    room = limits.room(model)
    rest = room - given
    usual = asked.wanted is None
    wanted = limits.defaults.gen_length if asked.wanted is None else asked.wanted
    length = min(wanted, rest) if usual and wanted and rest > 0 else wanted
    if length > rest:
        long = f"{asked.prompt} has {given} tokens; a sequence has at most {room}"
        if usual or rest < 0 or (rest == 0 and not masks):
            hint = f", or give {asked.length} 0 to fill its masks only" if masks and not rest else ""
            raise Problem(400, f"{long}, answer included: shorten it{hint}.", asked.prompt, "context_length_exceeded")
        raise Problem(
            400, f"{long}, so that {asked.length} can be {rest}, not {wanted}.", asked.length, "context_length_exceeded"
        )
    if not length and not masks:
        raise Problem(
            400, f"{asked.length} is 0 and {asked.prompt} has no masks: nothing is to be written.", asked.length
        )
    return length


def _options(model: Model, ids: list[int], length: int, asked: _Asked, limits: Limits) -> Options:
    """The options of a sequence, checked against the model as the loop itself would."""
    _check_ids(ids, asked.prompt, model)
    options = asked.request.options(limits.defaults, gen_length=length)
    masks = [place - len(ids) for place, token in enumerate([*ids, *[_mask(model)] * length]) if token == _mask(model)]
    if "steps" not in asked.request.given():
        options = options.changed(steps=_steps(options, limits.defaults, masks))
    if options.reference and (options.steps or 0) > len(masks):
        # The reference evaluates the network even if nothing is left to do: nobody should be able to ask for that.
        raise Problem(400, f"steps is {options.steps}, but there are only {len(masks)} masks to fill.", "steps")
    _check_bans(options, model)
    try:
        model.begin([ids], options)
    except InvalidInput as error:
        problem = refused(error)
        if problem.param in ("gen_length", "prompt"):
            problem.param = asked.length if problem.param == "gen_length" else asked.prompt
        raise problem from None
    return options


def _steps(options: Options, defaults: Options, masks: Sequence[int]) -> int | None:
    """The usual steps; if they do not reach every block of a long text, as many tokens a step as usual."""
    blocks = 1 if options.mode == "full" else len({place // options.block_length for place in masks})
    if options.steps is None or options.steps >= blocks or not options.counted:
        return options.steps
    pace = (defaults.steps or defaults.gen_length) / max(1, defaults.gen_length)
    return max(blocks, math.ceil(len(masks) * pace))


def _choices(plan: Plan, request: OpenAIRequest, prompt: int, echo: str) -> Iterator[Plan]:
    """The plan with one seed after the other."""
    assert isinstance(plan.options.seed, int)
    for choice in range(request.choices):
        options = plan.options.changed(seed=plan.options.seed + choice)
        yield Plan(plan.ids, options, plan.begin, plan.end, request.stops, prompt, choice, echo)


def _mask(model: Model) -> int:
    assert model.mask_id is not None, "a model without a mask is not served"
    return model.mask_id


def _check_ids(ids: Sequence[int], name: str, model: Model) -> None:
    size = model.backbone.vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise Problem(400, f"{name} has the id {wrong}; the model has {size} tokens, from 0 on.", name)


def _check_bans(options: Options, model: Model) -> None:
    size = model.backbone.vocab_size
    _check_ids(list(options.ban), "ban", model)
    if len({*options.ban, _mask(model)}) >= size:
        raise Problem(400, "ban holds every token: nothing is left to write.", "ban")
