"""From plans to answers: sequences go through the engine, and their steps become texts, chunks and events."""

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence

from codd.decoding import Model, Options, Step
from codd.decoding.inspect import Beliefs, Inspection
from codd.serving.answers import DONE, Cost, Envelope, Json, Pieces, done_event, event, start_event, step_event
from codd.serving.engine import Engine
from codd.serving.prefix import Prefix
from codd.serving.prompts import Plan
from codd.serving.tickets import Denoising, Inbox, steps_of


class Writing:
    """One sequence of an answer: its place in line, its text so far, and what it cost."""

    def __init__(self, plan: Plan, model: Model, client: Hashable, deadline: float | None, inbox: Inbox | None = None):
        """Nothing is in line yet."""
        self.plan = plan
        self.ticket = Denoising(plan.course(model), client, deadline, inbox)
        self.prefix = Prefix(plan, model)
        self.steps = self.circuit_steps = 0
        self._given = plan.given(model.mask_id)

    def take(self, step: Step) -> str:
        """A step has come; what it adds to the text."""
        self.steps += 1
        self.circuit_steps += step.circuit
        return self.prefix.feed(step.ids, step.finished)

    @property
    def cost(self) -> Cost:
        """So far."""
        times = (self.ticket.seconds, self.ticket.queued_seconds)
        return Cost(self._given, self.prefix.tokens, self.steps, self.circuit_steps, *times)


def all_of(plans: Sequence[Plan], model: Model, client: Hashable, deadline: float | None) -> list[Writing]:
    """The sequences of one request."""
    inbox: Inbox = asyncio.Queue()
    return [Writing(plan, model, client, deadline, inbox) for plan in plans]


def total(writings: Sequence[Writing]) -> Cost:
    """Of all of them; a prompt counts once, however many answers there are to it."""
    costs = [writing.cost for writing in writings]
    return Cost(
        sum(cost.prompt_tokens for cost, writing in zip(costs, writings, strict=True) if not writing.plan.choice),
        sum(cost.completion_tokens for cost in costs),
        sum(cost.steps for cost in costs),
        sum(cost.circuit_steps for cost in costs),
        max(cost.seconds for cost in costs),
        max(cost.queued_seconds for cost in costs),
    )


async def deltas(engine: Engine, writings: Sequence[Writing]) -> AsyncIterator[tuple[int, str]]:
    """Which sequence grows by what, as it comes; a sequence whose text has ended early is not written further."""
    index = {writing.ticket: number for number, writing in enumerate(writings)}
    async for ticket, step in steps_of([writing.ticket for writing in writings]):
        number = index[ticket]
        text = writings[number].take(step)
        if writings[number].prefix.finished:
            engine.cancel([ticket])
        yield number, text


async def whole(engine: Engine, writings: Sequence[Writing], envelope: Envelope) -> Json:
    """OpenAI's answer in one piece."""
    async for _ in deltas(engine, writings):
        pass
    return envelope.whole([(writing.prefix.text, writing.prefix.reason) for writing in writings], total(writings))


async def chunks(engine: Engine, writings: Sequence[Writing], envelope: Envelope) -> AsyncIterator[bytes]:
    """OpenAI's answer as a stream: the settled prefix of each choice as it grows."""
    for number in range(len(writings)):
        if (first := envelope.first(number)) is not None:
            yield event(first)
    async for number, text in deltas(engine, writings):
        if text:
            yield event(envelope.delta(number, text))
        if writings[number].prefix.finished:
            yield event(envelope.last(number, writings[number].prefix.reason))
    if (usage := envelope.usage(total(writings))) is not None:
        yield event(usage)
    yield DONE


async def events(writing: Writing, model: Model, id: str, name: str, pieces: Pieces) -> AsyncIterator[tuple[str, Json]]:
    """Every step of a run: the names and the contents of the events of /v1/denoise."""
    plan = writing.plan
    yield (
        "start",
        start_event(
            id=id,
            model=name,
            ids=writing.ticket.course.draft.ids.tolist(),
            prompt_length=len(plan.ids),
            options=plan.options.as_json(),
            ahead=writing.ticket.ahead,
            pieces=pieces,
        ),
    )
    async for step in writing.ticket.steps():
        writing.take(step)
        yield "step", step_event(step, pieces)
    text = None if model.tokenizer is None else writing.prefix.text
    yield "done", done_event(text, writing.prefix.reason, writing.cost)


def joint(options: Options) -> Options:
    """With the circuit at work, whatever a run would do: people who look want to know what it says."""
    return options.changed(sampler="any_order", activation=None, preset=None)


def inspected(found: Inspection, pieces: Pieces) -> Json:
    """The answer of /v1/inspect."""
    return {
        "window": list(found.window),
        "positions": found.positions.tolist(),
        "network": _candidates(found.network, pieces),
        "joint": _candidates(found.joint, pieces),
        "network_entropy": found.network.entropies.tolist(),
        "joint_entropy": found.joint.entropies.tolist(),
        "mutual_information": found.mutual_information.tolist(),
        "circuit": found.circuit,
        "aside": found.aside,
    }


def _candidates(beliefs: Beliefs, pieces: Pieces) -> list[list[Json]]:
    return [
        [
            {"token": token, "piece": pieces.of(token), "probability": probability}
            for token, probability in zip(tokens, probabilities, strict=True)
        ]
        for tokens, probabilities in zip(beliefs.tokens.tolist(), beliefs.probabilities.tolist(), strict=True)
    ]
