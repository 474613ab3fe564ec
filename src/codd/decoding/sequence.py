"""One sequence while it is denoised: how it begins, what its steps are for, and when it has ended."""

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import HMM
from codd.circuits.protocol import ProbabilisticCircuit
from codd.constraints import Automaton
from codd.decoding.constraint import SequenceConstraint, Window, constrain
from codd.decoding.options import HEAD_START, Options
from codd.errors import InvalidInput

if TYPE_CHECKING:
    from codd.decoding.speculative import Speculation


@dataclass(frozen=True)
class StepPlan:
    """What one network evaluation is for."""

    begin: int
    end: int
    """Tokens may be committed at positions begin..end-1: a block, or everything."""
    count: int
    """How many to commit, or at least, where more may pass a threshold or an entropy budget; 0: only edit."""
    last: bool
    """Whether this is the schedule's last step here, so that no token may be deferred."""
    causal: bool = False
    """Whether its positions are predicted by causal rows before them, of a network that reads its context causally."""
    settled: int | None = None
    """How many positions from the first one on neither it nor a later step changes; None: all before the first mask."""
    due_end: int | None = None
    """One beyond the block of which ``count`` are due, where the step also sees positions after it; None: ``end``."""
    time: tuple[float, float] = (1.0, 0.0)
    """The published implementation's diffusion time in full mode, before and after the step."""

    @property
    def block(self) -> Window:
        """The positions begin..end-1."""
        return self.begin, self.end

    @property
    def block_end(self) -> int:
        """One beyond the last position of the block that is being written."""
        return self.end if self.due_end is None else self.due_end


class Writes(NamedTuple):
    """Tokens that a step wrote: where, which, and the probability of each under what it was taken from; on the host."""

    positions: Int[Tensor, " k"]
    tokens: Int[Tensor, " k"]
    scores: Float[Tensor, " k"]

    @classmethod
    def none(cls) -> "Writes":
        """No writes: three empty tensors."""
        return cls(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0))


class Alternatives(NamedTuple):
    """The most probable tokens of the positions that a step wrote, descending; on the host."""

    tokens: Int[Tensor, "k K"]
    log_probabilities: Float[Tensor, "k K"]


@dataclass(frozen=True, eq=False)
class Step:
    """One network evaluation for one sequence, and what it committed. Tensors are on the host."""

    sequence: int
    """Index among the prompts."""
    number: int
    """Network evaluations that this sequence had before."""
    positions: Int[Tensor, " k"]
    """The committed positions in the order of commitment, counted from the beginning of the prompt."""
    tokens: Int[Tensor, " k"]
    scores: Float[Tensor, " k"]
    """The probability of each token under the distribution that it was taken from."""
    mask_ratio: float
    """The share of masks in the window, before the step."""
    circuit: bool
    """Whether the circuit acted."""
    window: tuple[int, int]
    """First position, and one beyond the last, of what the circuit covers, or would."""
    ids: Int[Tensor, " L"]
    """The sequence after the step, prompt included."""
    finished: bool
    """Whether this was the sequence's last step."""
    settled: int
    """How many positions from the first one on will not change any more."""
    edits: Writes = field(default_factory=Writes.none)
    """Tokens written by earlier steps that this one replaced."""
    alternatives: Alternatives | None = None
    """The most probable tokens of the committed positions, if the sequence asks for them."""
    drafted: int = 0
    """Tokens that it checked in ``mode="speculative"``, where drafts and checks are steps in turn."""
    accepted: int = 0
    """How many of these it wrote as they were."""
    computed: int = 0
    """Positions that the network computed for it."""
    cached: int = 0
    """Positions whose keys and values were found in a cache."""


@dataclass(frozen=True)
class StopCondition:
    """When a sequence has ended although masks are left: at an end-of-text token, or at a text that was not wanted."""

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    """From ids to text; needed for ``strings``."""

    def end_of(self, ids: Sequence[int], prompt_length: int, mask_id: int) -> int | None:
        """One beyond the last id that belongs to an ended sequence; None while it has not ended.

        Only what is settled counts: a stop token or text with a mask before it may still move.
        """
        if not self.token_ids and self.decode is None:
            return None
        settled = ids.index(mask_id) if mask_id in ids else len(ids)
        ends = [place + 1 for place in range(prompt_length, settled) if ids[place] in self.token_ids][:1]
        if self.decode is not None and self._contains_stop(ids[prompt_length:settled]):
            sizes = range(prompt_length + 1, settled + 1)
            ends.append(next(size for size in sizes if self._contains_stop(ids[prompt_length:size])))
        return min(ends, default=None)

    def _contains_stop(self, ids: Sequence[int]) -> bool:
        return self.decode is not None and first_stop(self.decode(ids), self.strings) is not None


def first_stop(text: str, stops: Sequence[str], begin: int = 0) -> int | None:
    """Where a text must be cut because of the stop string that is complete first; None if there is none.

    The first to be complete, not the first to begin, so that it does not matter in which portions the text came.
    """
    places = [(place + len(stop), place) for stop in stops if (place := text.find(stop, begin)) >= 0]
    return min(places)[1] if places else None


@dataclass(eq=False)
class SequenceState:
    """A sequence under way: its ids, how it is to be decoded, and the plan of its next step.

    Ids live on the host, so that what is decided from them alone waits for no device. Sequences with different lengths
    and options can share a step.
    """

    ids: Int[Tensor, " L"]
    given: Bool[Tensor, " L"]
    """Which positions were not masked at the start."""
    prompt_length: int
    mask_id: int
    options: Options
    generator: torch.Generator
    """The sequence's own random numbers, on the host whatever the network's device."""
    number: int = 0
    """Its index in the list of prompts."""
    circuit: ProbabilisticCircuit | None = None
    constraint: SequenceConstraint | None = None
    """The language that its text must be in; None: any text."""
    banned: Int[Tensor, " n"] | None = None
    """Tokens that are never written: on the host at first, so that a sequence can be made while a device captures."""
    block_size: int | None = None
    """Positions per block of a network with block-causal attention, where none sees beyond the end of its block."""
    family: str = ""
    """That of the network, whose published loop the preset follows."""
    unseen: int = 0
    """Leading positions that the network is not shown."""
    causal_context: bool = False
    """Whether what precedes a block is read causally: the network sees nothing after it, and no earlier block."""
    phase: int = 0
    """How many positions before the first one the blocks of a block-causal network are counted from."""
    stop: StopCondition = StopCondition()
    schedule: Iterator[StepPlan] = field(default_factory=lambda: iter(()))
    plan: StepPlan | None = None
    """What the next evaluation is for; None: the sequence is finished."""
    evaluations: int = 0
    """Network evaluations so far."""
    edits: int = 0
    """Tokens that the latest of them replaced."""
    computed: int = 0
    """Positions that the latest of them computed."""
    cached: int = 0
    """Positions whose keys and values it found in a cache."""
    circuit_warned: bool = False
    speculation: "Speculation | None" = None
    """How it is drafted and checked, in ``mode="speculative"``."""
    alternatives: int = 0
    """The number of most probable tokens that a step reports per written position."""

    @property
    def masked(self) -> Bool[Tensor, " L"]:
        """Which positions are still to be written."""
        return self.ids == self.mask_id

    @property
    def finished(self) -> bool:
        """Whether it takes no further steps."""
        return self.plan is None

    @property
    def stopped(self) -> bool:
        """Whether it ended otherwise than by its last mask: at a stop token or text, or with a constraint."""
        end = self.stop.end_of(self.ids.tolist(), self.prompt_length, self.mask_id)
        return self.constraint is not None or end is not None or len(self.ids) < len(self.given)

    @property
    def settled(self) -> int:
        """How many positions from the first one on will not change any more."""
        if self.plan is None:
            return self.first_mask
        begun = self.plan.begin if self.options.editing_threshold is not None else self.plan.settled
        return self.first_mask if begun is None else min(self.first_mask, begun)

    @property
    def first_mask(self) -> int:
        """The first position that is still to be written; beyond the end if there is none."""
        masks = self.masked.nonzero()
        return int(masks[0]) if len(masks) else len(self.ids)

    def mask_ratio(self, window: Window) -> float:
        """The share of a window's positions that are masked."""
        begin, end = window
        return int(self.masked[begin:end].sum()) / (end - begin)

    def masked_in(self, window: Window) -> Int[Tensor, " R"]:
        """The masked positions of a window, ascending."""
        begin, end = window
        return self.masked[begin:end].nonzero()[:, 0] + begin

    def begin(self, schedule: Iterator[StepPlan]) -> None:
        """Plan the first step."""
        self.schedule = schedule
        self.plan = next(schedule, None)

    def commit(self, positions: Int[Tensor, " k"], tokens: Int[Tensor, " k"], edits: int = 0) -> None:
        """Write tokens, count the evaluation, and plan the next step; a sequence that has ended is cut and finished.

        ``edits``: how many of the tokens replace others.
        """
        self.ids = self.ids.clone()
        self.ids[positions] = tokens
        self.edits = edits
        self.evaluations += 1
        self.plan = next(self.schedule, None)
        end = self.stop.end_of(self.ids[: self.settled].tolist(), self.prompt_length, self.mask_id)
        if end is not None:
            self.ids, self.plan = self.ids[:end], None


def start_sequences(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    mask_id: int,
    circuit: ProbabilisticCircuit | None = None,
    stop: StopCondition | None = None,
    automaton: Automaton | None = None,
) -> list[SequenceState]:
    """A sequence for each prompt of ids, with its first step planned; ``automaton``: what must accept its text.

    Raises InvalidInput for what cannot be decoded: prompts that are too long or hold unknown ids, a block longer than
    the circuit, seeds that do not match the prompts, every token banned.
    """
    from codd.decoding import published  # which imports this module

    seeds = list(options.seed) if isinstance(options.seed, Sequence) else [options.seed] * len(prompts)
    if len(seeds) != len(prompts):
        raise InvalidInput(f"{len(seeds)} seeds for {len(prompts)} prompts: give one, or one for each.")
    options = options_for(backbone, options)
    fixed = None if circuit is None else circuit.length
    if fixed is not None and options.mode == "block" and options.block_length > fixed:
        raise InvalidInput(
            f"block_length is {options.block_length}, but the circuit has only {fixed} positions: give that, or a part."
        )
    stop = StopCondition() if stop is None else stop
    if options.published:
        published.check(backbone, options, circuit)
    for number, prompt in enumerate(prompts):
        _check_prompt(backbone, options, number, prompt)
        if backbone.causal is not None and options.mode != "full" and mask_id in prompt:
            raise InvalidInput(
                f"prompt {number} has masks, and {backbone.family} sees nothing after a block that it writes: "
                'mode="full" fills them.'
            )
    banned = banned_ids(backbone, options, mask_id)
    sequences = [
        new_sequence(prompt, options, mask_id=mask_id, seed=seed, number=number)
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    if automaton is not None:
        automaton = automaton.without(banned.tolist())
        alone = HMM.neutral(1, backbone.vocab_size).to(backbone.device)
        for state in sequences:
            state.constraint = constrain(automaton, state.ids, state.prompt_length, state.number, mask_id, alone)
    for state in sequences:
        state.circuit, state.banned = circuit, banned
        state.block_size, state.family = backbone.block_size, backbone.family
        state.causal_context = backbone.causal is not None and options.mode != "full"
        if options.published:
            ends = StopCondition() if options.stop is False else stop
            state.begin(published.loop_of(state).plan_steps(weakref.proxy(state), ends))
        else:
            state.stop = stop if options.stops else StopCondition()
            state.begin(plan_steps(weakref.proxy(state)))  # who gives a sequence up frees it: no cycle waits for Python
    return sequences


def options_for(backbone: Backbone, options: Options) -> Options:
    """The options with what the network decides where nobody else did: blocks, and the pace of its published loop.

    Raises InvalidInput for blocks and caches that the network cannot have.
    """
    size = backbone.block_size
    length = size or backbone.spec.block_length
    changes: dict[str, Any] = {}
    if options.published:
        from codd.decoding import published  # which imports this module

        changes |= published.defaults(backbone, options)
    if length is not None and "block_length" in options.unset:
        changes = {"block_length": length, **changes}
    own_blocks = size is not None or (backbone.causal is not None and options.mode != "full")
    if own_blocks and options.blocks == "sliding":
        if "blocks" not in options.unset:
            raise InvalidInput(
                f"blocks='sliding': {backbone.family} sees nothing after a block that it writes: leave it out."
            )
        changes["blocks"] = "fixed"
    options = options.changed(**changes) if changes else options
    if options.cache is not None and (backbone.config.conditioning or backbone.config.token_dropout is not None):
        raise InvalidInput(
            f"cache={options.cache!r}: {backbone.family} is told the share of masks, so that nothing it computes stays "
            "as it was: leave the cache out."
        )
    if options.mode == "speculative" and options.published and backbone.causal is None:
        raise InvalidInput(
            'preset="reference" with mode="speculative" is the published loop of networks with a causal mode '
            f"(Nemotron-Labs-Diffusion), which {backbone.family} has not: leave the preset out."
        )
    if size is not None and options.mode == "full":
        raise InvalidInput(
            f'mode="full" writes anywhere at once, but this network reads block after block of {size} tokens, and no '
            'block sees a later one: mode="block" is for it.'
        )
    if size is not None and size % options.block_length:
        raise InvalidInput(
            f"block_length is {options.block_length}, but this network's blocks have {size} tokens: give {size}, a "
            "divisor for sub-blocks, or load a checkpoint that was made for others with codd.load(block_size=...)."
        )
    return options


def new_sequence(
    prompt: Sequence[int],
    options: Options,
    *,
    mask_id: int,
    seed: int = 0,
    number: int = 0,
) -> SequenceState:
    """A prompt followed by ``options.gen_length`` masks, with nothing planned."""
    ids = torch.tensor([*prompt, *([mask_id] * options.gen_length)], dtype=torch.long)
    generator = generator_for(seed, prompt)
    return SequenceState(ids, ids != mask_id, len(prompt), mask_id, options, generator, number)


def generator_for(seed: int, prompt: Sequence[int]) -> torch.Generator:
    """A CPU generator (Mersenne twister) fixed by seed and prompt, so that different prompts have different noise."""
    digest = hashlib.sha256(repr((seed, [int(token) for token in prompt])).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def banned_ids(backbone: Backbone, options: Options, mask_id: int) -> Int[Tensor, " n"]:
    """The tokens that are never written: ``options.ban`` and the mask, which most of the published loops may write."""
    from codd.decoding import published  # which imports this module

    ids = sorted(set(options.ban) | (published.never_written(backbone) if options.published else {mask_id}))
    if ids and not 0 <= ids[0] <= ids[-1] < backbone.vocab_size:
        raise InvalidInput(f"ban holds {ids[0] if ids[0] < 0 else ids[-1]}, which is none of the model's tokens.")
    if len(ids) >= backbone.vocab_size:
        raise InvalidInput("ban holds every token: nothing is left to write.")
    return torch.tensor(ids, dtype=torch.long)


def _check_prompt(backbone: Backbone, options: Options, number: int, prompt: Sequence[int]) -> None:
    limit, total = backbone.max_length, len(prompt) + options.gen_length
    if limit is not None and total > limit:
        raise InvalidInput(
            f"prompt {number} has {len(prompt)} tokens; with gen_length {options.gen_length} that makes {total}, "
            f"but this model was made for {limit}. Shorten the prompt or gen_length."
        )
    wrong = [token for token in prompt if not 0 <= int(token) < backbone.vocab_size]
    if wrong:
        raise InvalidInput(f"prompt {number} has the id {wrong[0]}, but the model has {backbone.vocab_size} tokens.")


def plan_steps(state: SequenceState) -> Iterator[StepPlan]:
    """The steps of a sequence; each plan is made after the tokens of the step before are committed.

    Block after block, counted from the end of the prompt, backwards too: masks in the prompt come first. Those of a
    block-causal network, or parts of them, are counted from the beginning. In full mode everything is one block.
    Tokens that a step leaves over are divided among the steps of the block that are left.
    """
    options, masked, size = state.options, state.masked, state.options.block_length
    origin = state.prompt_length if state.block_size is None else 0
    if options.mode == "full":
        origin, size = 0, len(masked)
    blocks = sorted({(position - origin) // size for position in masked.nonzero()[:, 0].tolist()})
    starts = [origin + block * size for block in blocks]
    spans = [(max(0, start), min(len(masked), start + size)) for start in starts]
    if not options.fixed_count:
        most = int(masked.sum()) + HEAD_START * options.min_tokens  # masks that may be left after the step
        for begin, end in spans:
            yield from first_token(state, begin)
            while len(left := state.masked_in((begin, end))):
                most -= options.min_tokens
                count = min(max(1, int(state.masked.sum()) - most), options.min_tokens)
                if options.blocks == "sliding":
                    at = int(left[0])
                    yield StepPlan(at, min(at + size, len(state.ids)), count, last=False, due_end=end)
                else:
                    yield StepPlan(begin, end, count, last=False)
            yield from edit_steps(state, begin, end)
        return
    sizes = [int(masked[begin:end].sum()) for begin, end in spans]
    steps = sum(sizes) if options.steps is None else options.steps
    if "steps" in options.unset:
        steps = max(steps, len(sizes))
    for (begin, end), share in zip(spans, divide_steps(steps, sizes), strict=True):
        first = list(first_token(state, begin)) if share > 1 or end - begin == 1 else []
        yield from first  # a block that has one step is written at once
        for i in range(len(first), share):
            if open_ := int(state.masked[begin:end].sum()):  # a constraint may have written more than was due
                yield StepPlan(begin, end, -(-open_ // (share - i)), last=i == share - 1)
        yield from edit_steps(state, begin, end)


def first_token(state: SequenceState, begin: int) -> Iterator[StepPlan]:
    """Where the context is read causally: the step for the block's first token, which comes from the row before it."""
    if state.causal_context and begin and bool(state.masked[begin]):
        yield StepPlan(begin, begin + 1, 1, last=True, causal=True)


def edit_steps(state: SequenceState, begin: int, end: int) -> Iterator[StepPlan]:
    """The steps that only edit a block without masks, until one of them changes nothing; none where nothing may be."""
    if bool(state.given[begin:end].all()):
        return
    for _ in range(state.options.max_post_steps if state.options.editing_threshold is not None else 0):
        yield StepPlan(begin, end, 0, last=True)
        if not state.edits:
            return


def spread(total: int, parts: int) -> list[int]:
    """Whole numbers that sum to ``total``, as equal as possible, the larger ones first."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]


def divide_steps(steps: int, masks: Sequence[int]) -> list[int]:
    """Divide evaluations among blocks in proportion to their masks: at least one each, never more than masks.

    What whole numbers leave over goes to the blocks that are owed most, the earliest of equals. Raises InvalidInput if
    there are fewer steps than blocks.
    """
    total = sum(masks)
    if steps < len(masks):
        raise InvalidInput(
            f"{steps} steps are not enough for {len(masks)} blocks, each of which needs at least one: "
            "raise steps or block_length."
        )
    steps = min(steps, total)
    owed = [Fraction(steps * mask, total) for mask in masks]
    shares = [max(1, int(part)) for part in owed]
    while sum(shares) != steps:
        up = sum(shares) < steps
        blocks = [b for b in range(len(masks)) if (shares[b] < masks[b] if up else shares[b] > 1)]
        needs = [(owed[b] - shares[b], -b) for b in blocks]
        if up:
            shares[-max(needs)[1]] += 1
        else:
            shares[-min(needs)[1]] -= 1
    return shares
