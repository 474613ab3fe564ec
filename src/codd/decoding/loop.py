"""The denoising loop: there is one, and it is a generator of steps.

The network sees all sequences that are not finished at once. All else is done for each sequence by itself, so that
what becomes of it does not depend on its neighbours.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import Modulated
from codd.coupling.coupled import Prior
from codd.decoding import decide, graphs, reference, together
from codd.decoding.course import Course, begin
from codd.decoding.decide import Asked, Decision
from codd.decoding.draft import Draft, Turn
from codd.decoding.options import Options
from codd.decoding.samplers import Ranking
from codd.errors import CircuitSteppedAside, CoddError, InvalidInput

SHAPES = 32
"""Of how many positions the length of a ragged batch is a multiple on a GPU."""


@dataclass(frozen=True, eq=False)
class Step:
    """One evaluation of the network for one sequence, and what came of it. Tensors are on the host."""

    sequence: int
    """Which of the prompts."""
    number: int
    """How many evaluations this sequence had before."""
    positions: Int[Tensor, " k"]
    """What was committed, in the order of commitment; counted from the beginning of the prompt."""
    tokens: Int[Tensor, " k"]
    scores: Float[Tensor, " k"]
    """The probability of each token under the distribution that it was taken from."""
    mask_ratio: float
    """The share of masks in the window, before the step."""
    circuit: bool
    """Whether the circuit acted."""
    window: tuple[int, int]
    """Begin and end of what the circuit covers, or would."""
    ids: Int[Tensor, " L"]
    """The sequence after the step, prompt included."""
    finished: bool
    """Whether this was the sequence's last step."""


def pad_left(
    sequences: Sequence[Sequence[int] | Tensor], pad_id: int, device: torch.device, at_least: int = 0
) -> tuple[Tensor, Tensor]:
    """One batch of sequences of any lengths: ids, and which of them are real."""
    longest = max(at_least, max(map(len, sequences), default=0))
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    valid = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        start = longest - len(sequence)
        ids[row, start:] = torch.as_tensor(sequence, dtype=torch.long)
        valid[row, start:] = True
    return ids.to(device), valid.to(device)


@torch.no_grad()
def denoise(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    mask_id: int,
    circuit: Prior | Modulated | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[Step]:
    """Fill the masks of every prompt and those put after it; a step of each unfinished sequence in turn."""
    courses = begin(backbone, prompts, options, mask_id=mask_id, circuit=circuit, stop_ids=stop_ids)
    while now := [course for course in courses if not course.finished]:
        for outcome in advance(backbone, now):
            if isinstance(outcome, CoddError):
                raise outcome
            yield outcome


@torch.no_grad()
def advance(backbone: Backbone, courses: Sequence[Course], *, exact: bool = False) -> list[Step | CoddError]:
    """One step of each, whatever their lengths and settings; where one cannot go on, the reason, and it is finished.

    On a GPU the network sees all of them in one batch, whose shape changes how it rounds; ``exact``: one by one, so
    that each is what it is alone, to the bit. On a CPU that is always so.
    """
    cases = [
        _asked(backbone, course, states)
        for course, states in zip(courses, evaluate(backbone, courses, exact), strict=True)
    ]
    decided = together.each(lambda case: _tried(backbone, case), cases)
    return [_settled(backbone, *each) for each in zip(courses, cases, decided, strict=True)]


def evaluate(backbone: Backbone, courses: Sequence[Course], exact: bool = False) -> list[list[Float[Tensor, "L d"]]]:
    """The network's last states: of every sequence, and with guidance also of it without what was given."""
    drafts = [course.draft for course in courses]
    guided = [i for i, course in enumerate(courses) if course.options.cfg_scale > 0]
    seen = [draft.ids for draft in drafts]
    seen += [torch.where(drafts[i].given, drafts[i].mask_id, drafts[i].ids) for i in guided]
    if exact:  # the next call would overwrite what a graph gave
        own = [graphs.network_states(backbone, x[None].to(backbone.device), None)[0].clone() for x in seen]
    else:
        own = _in_one_batch(backbone, seen)
    found = [[state] for state in own[: len(drafts)]]
    for i, state in zip(guided, own[len(drafts) :], strict=True):
        found[i].append(state)
    return found


def _in_one_batch(backbone: Backbone, seen: Sequence[Int[Tensor, " _"]]) -> list[Float[Tensor, "_ d"]]:
    pad = backbone.special.pad if backbone.special.pad is not None else 0
    equal = len({len(x) for x in seen}) == 1
    ids, valid = pad_left(seen, pad, backbone.device, 0 if equal else _rounded(backbone, max(map(len, seen))))
    states = graphs.network_states(backbone, ids, None if equal else valid)
    return [state[ids.shape[1] - len(x) :] for state, x in zip(states, seen, strict=True)]


def _rounded(backbone: Backbone, longest: int) -> int:
    """On a GPU batches of unequal lengths have one of few shapes, so that there is a graph for most of them."""
    if backbone.device.type != "cuda":
        return longest
    up = -(-longest // SHAPES) * SHAPES
    return up if backbone.max_length is None else max(longest, min(up, backbone.max_length))


def rows_of(draft: Draft, turn: Turn, options: Options) -> Int[Tensor, " R"]:
    """The masked positions that a turn is about; the reference's blocks also take masks before them."""
    first = 0 if options.reference else turn.begin
    return draft.masked[first : turn.end].nonzero()[:, 0] + first


def logits_at(
    backbone: Backbone,
    draft: Draft,
    rows: Int[Tensor, " R"],
    states: Sequence[Float[Tensor, "L d"]],
    options: Options,
    banned: Int[Tensor, " n"],
) -> Float[Tensor, "R V"]:
    """The logits of some masked positions, after guidance, hooks and bans."""
    at = rows.to(backbone.device)
    masks = torch.full((1, len(rows)), draft.mask_id, device=backbone.device)
    found = [backbone.logits(state[None, at], masks)[0] for state in states]
    logits = found[0] if len(found) == 1 else found[1] + (options.cfg_scale + 1) * (found[0] - found[1])
    for hook in options.hooks:
        logits = hook(logits, rows, draft.ids.clone())
        if logits.shape != (len(rows), backbone.vocab_size):
            wanted = (len(rows), backbone.vocab_size)
            raise InvalidInput(f"a hook returned logits of shape {tuple(logits.shape)}, expected {wanted}.")
    if not len(banned):
        return logits
    return logits.index_fill(1, banned, -torch.inf) if options.hooks else logits.index_fill_(1, banned, -torch.inf)


def _asked(backbone: Backbone, course: Course, states: Sequence[Float[Tensor, "L d"]]) -> Asked | CoddError:
    """What a course is to decide; a hook may be at fault that it cannot."""
    assert course.turn is not None
    rows = rows_of(course.draft, course.turn, course.options)
    course.banned = course.banned.to(backbone.device)
    try:
        logits = logits_at(backbone, course.draft, rows, states, course.options, course.banned)
    except CoddError as error:
        return error
    features = states[0] if isinstance(course.circuit, Modulated) else None  # with guidance, the ones with the prompt
    return Asked(course.draft, course.turn, rows, logits, course.circuit, course.options, features)


def _tried(backbone: Backbone, asked: Asked | CoddError) -> Decision | CoddError:
    try:
        return asked if isinstance(asked, CoddError) else _decide(backbone, asked)
    except CoddError as error:
        return error


def _decide(backbone: Backbone, asked: Asked) -> Decision:
    if not asked.options.reference:
        return decide.block(asked) if asked.options.mode == "block" else decide.full(asked)
    if asked.options.mode == "block":
        return reference.block(asked, dream=backbone.family == "dream")
    return reference.full(asked)


def _settled(
    backbone: Backbone, course: Course, asked: Asked | CoddError, decision: Decision | CoddError
) -> Step | CoddError:
    """Write what was decided. The host waits for the device here, after all decisions are on their way."""
    try:
        if isinstance(decision, CoddError):
            raise decision
        assert isinstance(asked, Asked)
        found = decision.fetched()
        if decision.circuit and not bool(found.sure):
            _warn(course.draft)
            decision = _decide(backbone, asked._replace(circuit=None))
            found = decision.fetched()
        kept = found.chosen()
        _check_numbers(course.draft, kept)
    except CoddError as error:
        course.turn = None
        return error
    course.draft.commit(kept.rows, kept.tokens)
    course.draft.evaluations += 1
    end = course.ended()
    if end is not None:
        course.draft.ids = course.draft.ids[:end]
    return _step(course, decision, kept)


def _check_numbers(draft: Draft, found: Ranking) -> None:
    """A row of logits that holds NaN, or nothing but -inf, has no probabilities."""
    wrong = found.rows[found.scores.isnan()].tolist()
    if wrong:
        raise InvalidInput(
            f"sequence {draft.number}, position {wrong[0]}: the logits are NaN, or every token is excluded by bans and "
            "hooks. Check the checkpoint (codd.load(..., check=True)), the precision, and the hooks."
        )


def _step(course: Course, decision: Decision, found: Ranking) -> Step:
    return Step(
        sequence=course.draft.number,
        number=course.draft.evaluations - 1,
        positions=found.rows,
        tokens=found.tokens,
        scores=found.scores,
        mask_ratio=decision.mask_ratio,
        circuit=decision.circuit,
        window=decision.window,
        ids=course.draft.ids,
        finished=course.finished,
    )


def _warn(draft: Draft) -> None:
    if not draft.warned:
        warnings.warn(
            f"sequence {draft.number}: what is written has probability zero under the circuit (or excludes all that "
            "it allows), so the circuit steps aside for this step. Further steps of this sequence are not reported.",
            CircuitSteppedAside,
            stacklevel=2,
        )
    draft.warned = True
