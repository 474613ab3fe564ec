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
from codd.decoding import decide, graphs, reference
from codd.decoding.decide import Asked, Decision
from codd.decoding.draft import Draft, Turn, check_reference, turns
from codd.decoding.options import Options
from codd.decoding.samplers import Ranking
from codd.errors import CircuitSteppedAside, InvalidInput


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


def pad_left(sequences: Sequence[Sequence[int] | Tensor], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One batch of sequences of any lengths: ids, and which of them are real."""
    longest = max(map(len, sequences), default=0)
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
    drafts = begin(backbone, prompts, options, mask_id, circuit)
    banned = _banned(backbone, options, mask_id)
    stop_ids = stop_ids if options.stop and not options.reference else frozenset()
    plans = [turns(draft, options) for draft in drafts]
    asked = [(draft, plan, next(plan, None)) for draft, plan in zip(drafts, plans, strict=True)]
    while now := [(draft, plan, turn) for draft, plan, turn in asked if turn is not None]:
        states = evaluate(backbone, [draft for draft, _, _ in now], options.cfg_scale)
        decided = []
        for (draft, _, turn), given in zip(now, states, strict=True):
            rows = rows_of(draft, turn, options)
            logits = logits_at(backbone, draft, rows, given, options, banned)
            features = given[0] if isinstance(circuit, Modulated) else None  # with guidance, the ones with the prompt
            case = Asked(draft, turn, rows, logits, circuit, options, features)
            decided.append((case, _decide(backbone, case)))
        asked = []
        for (draft, plan, _), (case, decision) in zip(now, decided, strict=True):
            found = decision.fetched()
            if decision.circuit and not bool(found.sure):
                _warn(draft)
                decision = _decide(backbone, case._replace(circuit=None))
                found = decision.fetched()
            kept = found.chosen()
            _check_numbers(draft, kept)
            end = _commit(draft, kept, stop_ids)
            following = next(plan, None) if end is None else None
            asked.append((draft, plan, following))
            yield _step(draft, decision, kept, end, finished=following is None)


def begin(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    options: Options,
    mask_id: int,
    circuit: Prior | Modulated | None,
) -> list[Draft]:
    """All sequences before the first step, after checking that this can be done."""
    if options.reference:
        check_reference(options, backbone.family)
    seeds = list(options.seed) if isinstance(options.seed, Sequence) else [options.seed] * len(prompts)
    if len(seeds) != len(prompts):
        raise InvalidInput(f"{len(seeds)} seeds for {len(prompts)} prompts: give one, or one for each.")
    limit, fixed = backbone.plan.max_length, None if circuit is None else circuit.length
    if fixed is not None and options.mode == "block" and options.block_length > fixed:
        raise InvalidInput(f"block_length is {options.block_length}, but the circuit has only {fixed} positions.")
    if fixed is not None and options.reference and options.mode == "block" and options.block_length < fixed:
        raise InvalidInput(f"the reference needs block_length to be the circuit's {fixed}, not {options.block_length}.")
    for number, prompt in enumerate(prompts):
        total = len(prompt) + options.gen_length
        if limit is not None and total > limit:
            raise InvalidInput(
                f"prompt {number} has {len(prompt)} tokens; with gen_length {options.gen_length} that makes {total}, "
                f"but this model was made for {limit}. Shorten the prompt or gen_length."
            )
        wrong = [token for token in prompt if not 0 <= int(token) < backbone.vocab_size]
        if wrong:
            raise InvalidInput(
                f"prompt {number} has the id {wrong[0]}, but the model has {backbone.vocab_size} tokens."
            )
    return [Draft.begin(p, i, mask_id, options, seed) for i, (p, seed) in enumerate(zip(prompts, seeds, strict=True))]


def evaluate(backbone: Backbone, drafts: Sequence[Draft], cfg_scale: float) -> list[list[Float[Tensor, "L d"]]]:
    """The network's last states: of every sequence, and with guidance also of it without what was given."""
    seen = [draft.ids for draft in drafts]
    if cfg_scale > 0:
        seen += [torch.where(draft.given, draft.mask_id, draft.ids) for draft in drafts]
    pad = backbone.special.pad if backbone.special.pad is not None else 0
    ids, valid = pad_left(seen, pad, backbone.device)
    equal = len({len(x) for x in seen}) == 1
    states = graphs.network_states(backbone, ids, None if equal else valid)
    own = [state[ids.shape[1] - len(x) :] for state, x in zip(states, seen, strict=True)]
    return [own[i :: len(drafts)] for i in range(len(drafts))]


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


def _decide(backbone: Backbone, asked: Asked) -> Decision:
    if not asked.options.reference:
        return decide.block(asked) if asked.options.mode == "block" else decide.full(asked)
    if asked.options.mode == "block":
        return reference.block(asked, dream=backbone.family == "dream")
    return reference.full(asked)


def _check_numbers(draft: Draft, found: Ranking) -> None:
    """A row of logits that holds NaN, or nothing but -inf, has no probabilities."""
    wrong = found.rows[found.scores.isnan()].tolist()
    if wrong:
        raise InvalidInput(
            f"sequence {draft.number}, position {wrong[0]}: the logits are NaN, or every token is excluded by bans and "
            "hooks. Check the checkpoint (codd.load(..., check=True)), the precision, and the hooks."
        )


def _commit(draft: Draft, found: Ranking, stop_ids: frozenset[int]) -> int | None:
    """Write the tokens; where the text ends, if it does."""
    draft.commit(found.rows, found.tokens)
    draft.evaluations += 1
    return draft.end(stop_ids) if stop_ids else None


def _step(draft: Draft, decision: Decision, found: Ranking, end: int | None, finished: bool) -> Step:
    if end is not None:
        draft.ids = draft.ids[:end]
    return Step(
        sequence=draft.number,
        number=draft.evaluations - 1,
        positions=found.rows,
        tokens=found.tokens,
        scores=found.scores,
        mask_ratio=decision.mask_ratio,
        circuit=decision.circuit,
        window=decision.window,
        ids=draft.ids,
        finished=finished,
    )


def _banned(backbone: Backbone, options: Options, mask_id: int) -> Int[Tensor, " n"]:
    """The mask is never written; the reference forbids nothing."""
    ids = sorted(set(options.ban) | (set() if options.reference else {mask_id}))
    if ids and not 0 <= ids[0] <= ids[-1] < backbone.vocab_size:
        raise InvalidInput(f"ban holds {ids[0] if ids[0] < 0 else ids[-1]}, which is none of the model's tokens.")
    if len(ids) >= backbone.vocab_size:
        raise InvalidInput("every token is banned: nothing is left to write.")
    return torch.tensor(ids, dtype=torch.long, device=backbone.device)


def _warn(draft: Draft) -> None:
    if not draft.warned:
        warnings.warn(
            f"sequence {draft.number}: what is written has probability zero under the circuit (or excludes all that "
            "it allows), so the circuit steps aside for this step. Further steps of this sequence are not reported.",
            CircuitSteppedAside,
            stacklevel=2,
        )
    draft.warned = True
