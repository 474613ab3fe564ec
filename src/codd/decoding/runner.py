"""How steps get hidden states from the network: all positions anew in each step, or some of them with a KV cache.

Block-causal networks: keys and values of a finished block depend on nothing that comes later, so that the cache is
exact. The pass that begins a block also computes the one before it once more, now that its tokens are final, and what
it stores then stays. With sub-blocks ``cache="dual"`` computes the sub-block alone, once its first token is known:
Fast-dLLM v2's block cache, an approximation. Bidirectional networks: a full pass at the beginning of each block, whose
states count; until the next one all before the block ("prefix") or outside of it ("dual") is seen as it was then. A
draft of ``mode="speculative"`` computes what it drafts, and what the draft before it saw as masks. Networks that read
their context causally: one causal pass over each block once it is final stores what stays, and gives the next token;
what denoising passes store is written over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.backbones.kv_cache import CachedPass, default_memory
from codd.decoding import cuda_graphs
from codd.decoding.constraint import Window
from codd.decoding.sequence import SequenceState, StepPlan
from codd.errors import InvalidInput

LENGTH_MULTIPLE = 32
"""The length of a ragged batch is rounded up to a multiple of this on a GPU, so that few graphs serve most batches."""
GRANULARITY = 128
"""Positions in which the length of a cache is counted on a GPU."""


class HiddenStateRequest(NamedTuple):
    """The hidden states that a step needs: of some positions of a sequence, as it is or with its prompt hidden."""

    state: SequenceState
    """The sequence that the ids are of; a cache is keyed by it."""
    ids: Int[Tensor, " L"]
    """All that the network is to see, from position ``state.unseen`` on: of a block-causal network nothing beyond the
    blocks of the span."""
    span: Window
    """The positions whose states are needed."""


@runtime_checkable
class NetworkRunner(Protocol):
    """Evaluates the network for the sequences that share a step."""

    def __call__(self, requests: Sequence[HiddenStateRequest]) -> Sequence[Float[Tensor, "_ d"]]:
        """The last hidden states at the positions of each request's span, on the network's device."""

    def logits(self, rows: Sequence[Float[Tensor, "_ d"]], mask_id: int) -> Sequence[Float[Tensor, "_ V"]]:
        """What the head makes of hidden states, as those of masked positions."""

    def admit(self, state: SequenceState) -> bool:
        """Take what memory a sequence needs before its first request; False while there is none."""

    def release(self, state: SequenceState) -> None:
        """Give back what a sequence holds; nothing if it holds nothing."""


class FullRecompute:
    """The exact runner: every position of every sequence in every step, no cache.

    On a CPU the backbone evaluates sequences one by one, so that each is what it is alone, to the bit. On a GPU they
    are one batch, whose shape changes how it rounds; ``one_by_one``: there too, at the price of batching.
    """

    def __init__(self, backbone: Backbone, *, one_by_one: bool = False):
        """Run ``backbone`` on its own device."""
        self.backbone, self.one_by_one = backbone, one_by_one
        self.batched = backbone.device.type != "cpu"
        """Whether sequences are evaluated together."""

    def __call__(self, requests: Sequence[HiddenStateRequest]) -> list[Float[Tensor, "_ d"]]:
        """The last hidden states at the positions of each request's span."""
        sequences = [request.ids for request in requests]
        if any(request.state.phase for request in requests):
            hidden = [
                self._from_phase(ids, request.state.phase) for request, ids in zip(requests, sequences, strict=True)
            ]
        elif not self.one_by_one:
            hidden = self._batch(sequences)
        else:  # cloned: the next call overwrites what a graph gave
            hidden = [self._states(ids[None], None)[0].clone() for ids in sequences]
        for state in {request.state for request in requests}:
            state.computed = sum(len(request.ids) for request in requests if request.state is state)  # two if guided
            state.cached = 0
        return [_spanned(*each, 0) for each in zip(requests, hidden, strict=True)]

    def logits(self, rows: Sequence[Float[Tensor, "_ d"]], mask_id: int) -> list[Float[Tensor, "_ V"]]:
        """What the head makes of hidden states: of all sequences together where the network is evaluated so."""
        parts = [torch.cat(list(rows))] if self.batched and not self.one_by_one else rows
        head = self.backbone.masked_logits_from_states
        found = [head(part[None], mask_id=mask_id, exclude_mask=False)[0] for part in parts]
        return found if len(found) == len(rows) else list(torch.split(found[0], [len(each) for each in rows]))

    def admit(self, state: SequenceState) -> bool:
        """True: without a cache a sequence needs no memory between steps."""
        return True

    def release(self, state: SequenceState) -> None:
        """Do nothing: without a cache a sequence holds no memory."""

    def _batch(self, sequences: Sequence[Int[Tensor, " _"]]) -> list[Float[Tensor, "_ d"]]:
        pad = self.backbone.special.pad if self.backbone.special.pad is not None else 0
        lengths = {len(ids) for ids in sequences}
        length = self._padded_length(max(lengths))
        # A block-causal network is shown more with every block: unpadded, each length would be captured anew.
        if len(lengths) == 1 and (self.backbone.block_size is None or length in lengths):
            return list(self._states(torch.stack(list(sequences)), None))
        ids, valid = pad_left(sequences, pad, torch.device("cpu"), length)
        states = self._states(ids, valid)
        return [row[ids.shape[1] - len(own) :] for row, own in zip(states, sequences, strict=True)]

    def _states(self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L d"]:
        """The last hidden states. On a GPU the next call overwrites them."""
        if self.backbone.device.type == "cuda":
            return cuda_graphs.network_states(self.backbone, ids, valid)
        return self.backbone.states(ids, valid)

    def _from_phase(self, ids: Int[Tensor, " L"], phase: int) -> Float[Tensor, "L d"]:
        """One sequence whose blocks are counted from ``phase`` positions before it."""
        return self.backbone.states(ids[None], None, torch.arange(phase, phase + len(ids))[None])[0]

    def _padded_length(self, longest: int) -> int:
        if self.backbone.device.type != "cuda":
            return longest
        rounded, limit = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.backbone.max_length
        return rounded if limit is None else max(longest, min(rounded, limit))


def _spanned(request: HiddenStateRequest, states: Float[Tensor, "R d"], begin: int) -> Float[Tensor, "P d"]:
    """The states of a request's span, from those at positions ``begin`` and on of what the network sees."""
    skipped = request.state.unseen + begin
    return states[request.span[0] - skipped : request.span[1] - skipped]


def pad_left(
    sequences: Sequence[Sequence[int] | Tensor], pad_id: int, device: torch.device, at_least: int = 0
) -> tuple[Tensor, Tensor]:
    """One batch of sequences of any lengths: ids (B, L), and which of them are real (B, L)."""
    longest = max(at_least, max(map(len, sequences), default=0))
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    valid = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        start = longest - len(sequence)
        ids[row, start:] = torch.as_tensor(sequence, dtype=torch.long)
        valid[row, start:] = True
    return ids.to(device), valid.to(device)


@dataclass
class Slot:
    """One sequence in the cache, or what guidance makes of one."""

    number: int
    stored: int = 0
    """Positions from 0 on whose keys and values are final, or of drafts: are those of tokens, not of masks."""
    block_end: int = -1
    """The end of the block at whose beginning the latest full pass, or pass over the whole block, was made."""
    age: int = 0
    """How many passes there were since that one."""
    step: int = -1
    """The number of the latest step, which after an error of a neighbour is made once more, alike."""
    rows: Window = (0, 0)
    """What the latest step computed, counted from the first position that the network sees."""
    context: Window = (0, 0)
    """What it computed causally before that, if anything."""


class Pass(NamedTuple):
    """What is computed for one request, at positions counted from the first that the network sees."""

    request: HiddenStateRequest
    slot: int
    begin: int
    end: int
    causal: bool = False
    """Whether rows see what is before them only, and each is about the next position."""

    @property
    def ids(self) -> Int[Tensor, " R"]:
        """The tokens at positions ``begin`` to ``end``."""
        return self.request.ids[self.begin : self.end]


def cached(backbone: Backbone, state: SequenceState) -> bool:
    """Whether a sequence is decoded with a cache: if it asks for one, or if that cannot change its text.

    It is exact where blocks begin at 0 or the context is causal, and drafts are checked whatever they are.
    """
    told_ratio = backbone.config.conditioning or backbone.config.token_dropout is not None
    exact = backbone.block_size is not None or state.causal_context
    wanted = state.options.cache is not None or exact or (state.speculation is not None and not told_ratio)
    return wanted and not state.phase


def runner_for(backbone: Backbone, sequences: Sequence[SequenceState], memory: int | None = None) -> NetworkRunner:
    """The runner of a run: with a cache of at most ``memory`` bytes (by default `default_memory`) if one is wanted.

    Raises InvalidInput if not even one of them fits, unless nobody asked for a cache and it would be exact anyway.
    """
    wanted = [state for state in sequences if cached(backbone, state)]
    if not wanted:
        return FullRecompute(backbone)
    length = max(len(state.ids) for state in wanted)
    if backbone.device.type == "cuda":  # runs of about this length have caches, and graphs, of the same shape
        length = -(-length // GRANULARITY) * GRANULARITY
    memory = default_memory(backbone.device) if memory is None else memory
    each = backbone.config.kv_shape.bytes_of(length, backbone.dtype)
    if each > memory and not any(state.options.cache or state.causal_context for state in wanted):
        return FullRecompute(backbone)
    if each > memory:
        raise InvalidInput(
            f"the KV cache of one sequence of {length} positions takes {each / 1e9:.2f} GB, more than it may: "
            "shorten the sequence, or do without a cache."
        )
    return CachedRunner(backbone, slots=min(memory // each, sum(map(_slots, wanted))), length=length)


def _rounded(rows: int) -> int:
    """To a power of two, and beyond a block's usual length to its multiples."""
    return 1 << (rows - 1).bit_length() if rows <= LENGTH_MULTIPLE else -(-rows // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def _slots(state: SequenceState) -> int:
    return 2 if state.options.cfg_scale > 0 else 1


class CachedRunner(FullRecompute):
    """Evaluates the network on the positions that steps need, with a cache for the others; see the module.

    Sequences that want none are computed whole.
    """

    def __init__(self, backbone: Backbone, *, slots: int, length: int, one_by_one: bool = False):
        """Take memory for ``slots`` sequences of at most ``length`` positions; guidance takes two for each.

        ``one_by_one``: as `FullRecompute` has it.
        """
        super().__init__(backbone, one_by_one=one_by_one)
        self.memory = backbone.network.kv_cache(slots, length)
        self._free = list(range(slots))[::-1]
        self._held: dict[SequenceState, list[Slot]] = {}

    @property
    def free(self) -> int:
        """How many slots no sequence holds."""
        return len(self._free)

    def lacking(self, state: SequenceState) -> int:
        """How many slots a sequence has yet to take: none if it holds them, or is computed whole.

        Raises InvalidInput for one that asks for a cache and will never fit; an exact one is no loss but of time.
        """
        count = _slots(state)
        if state in self._held or not cached(self.backbone, state):
            return 0
        if count <= self.memory.slots and len(state.ids) <= self.memory.length:
            return count
        if state.options.cache is None and not state.causal_context:
            return 0
        raise InvalidInput(
            f"cache={state.options.cache!r}: a sequence of {len(state.ids)} positions that takes {count} slots does "
            f"not fit into a KV cache of {self.memory.slots} slots of {self.memory.length}."
        )

    def admit(self, state: SequenceState) -> bool:
        """Take the slots that a sequence lacks; False while too few are free."""
        count = self.lacking(state)
        if count > len(self._free):
            return False
        if count:
            self._held[state] = [Slot(self._free.pop()) for _ in range(count)]
            for slot in self._held[state] if self.batched else ():
                self.memory.clear(slot.number)
        return True

    def release(self, state: SequenceState) -> None:
        """Give back what a sequence holds; nothing if it holds nothing."""
        self._free += [slot.number for slot in self._held.pop(state, [])]

    def __call__(self, requests: Sequence[HiddenStateRequest]) -> list[Float[Tensor, "_ d"]]:
        """The last hidden states at the positions of each request's span."""
        turns: dict[SequenceState, int] = {}
        contexts, passes = [], []
        for request in requests:
            if request.state in self._held:
                turn = turns[request.state] = turns.get(request.state, -1) + 1
                slot = self._held[request.state][turn]
                passes.append(self._plan(request, slot, first=turn == 0))
                if slot.context[0] < slot.context[1]:
                    contexts.append(Pass(request, slot.number, *slot.context, causal=True))
        self._together(contexts)
        plain = [each for each in requests if each.state not in self._held]
        whole = iter(super().__call__(plain) if plain else [])
        cached = iter(self._together(passes))
        return [next(cached if request.state in self._held else whole) for request in requests]

    def _plan(self, request: HiddenStateRequest, slot: Slot, *, first: bool) -> Pass:
        state = request.state
        if slot.step != state.evaluations:
            slot.step, slot.rows = state.evaluations, self._rows(request, slot)
        begin, end = slot.rows
        causal = state.causal_context and state.plan is not None and state.plan.causal
        before = (0, 0) if first else (state.computed, state.cached)
        state.computed, state.cached = before[0] + end - begin, before[1] + len(request.ids) - (end - begin)
        return Pass(request, slot.number, begin, end, causal)

    def _together(self, passes: Sequence[Pass]) -> list[Float[Tensor, "_ d"]]:
        """All sequences, in a batch for each number of rows, which is rounded up so that there are few.

        On a CPU each by itself and without padding: to the bit what it is in any company.
        """
        batches: dict[tuple[int, bool, int], list[int]] = {}
        for number, each in enumerate(passes):
            rows = each.end - each.begin
            alone = self.one_by_one or not self.batched
            key = (_rounded(rows) if self.batched else rows, each.causal, number if alone else 0)
            batches.setdefault(key, []).append(number)
        states_of: dict[int, Tensor] = {}
        for (rows, *_), numbers in batches.items():
            states = self._pass([passes[number] for number in numbers], rows)
            for number, own_states in zip(numbers, states, strict=True):
                own = passes[number]
                states_of[number] = _spanned(own.request, own_states, own.begin + own.causal)
        return [states_of[number] for number in range(len(passes))]

    def _pass(self, passes: Sequence[Pass], rows: int) -> Float[Tensor, "B R d"]:
        ids = torch.zeros(len(passes), rows, dtype=torch.long)
        for row, each in enumerate(passes):
            ids[row, : each.end - each.begin] = each.ids
        backbone = self.backbone.causal if passes[0].causal else self.backbone
        assert backbone is not None
        slots, begins, ends, lengths = torch.tensor([(p.slot, p.begin, p.end, len(p.request.ids)) for p in passes]).T
        positions = begins[:, None] + torch.arange(rows)
        if not self.batched:
            return backbone.cached_states(ids, CachedPass(self.memory, slots, positions, seen=int(lengths)))
        if any(each.end - each.begin < rows for each in passes):
            positions[positions >= ends[:, None]] = -1
        past = CachedPass(self.memory, slots.contiguous(), positions, self.memory.length, lengths.contiguous())
        if backbone.device.type != "cuda":
            return backbone.cached_states(ids, past)
        return cuda_graphs.cached_states(backbone, ids, past).clone()  # the next batch overwrites them

    def _rows(self, request: HiddenStateRequest, slot: Slot) -> Window:
        plan, options, length = request.state.plan, request.state.options, len(request.ids)
        assert plan is not None
        begin, end = (place - request.state.unseen for place in request.span)
        if request.state.causal_context:
            return self._rows_after_context(slot, plan, begin, end)
        begin, size = max(0, begin - self.backbone.shift), self.backbone.block_size
        if size is not None:
            return self._rows_of_blocks(request, slot, begin, size)
        block_end = 0 if options.mode == "speculative" else plan.block_end  # drafts are of one text
        seen_as_masks, slot.stored = slot.stored, begin
        if slot.block_end != block_end or (options.refresh is not None and slot.age >= options.refresh):
            slot.block_end, slot.age = block_end, 0
            return 0, length
        slot.age += 1
        return min(seen_as_masks, begin), end if options.cache == "dual" else length

    def _rows_after_context(self, slot: Slot, plan: StepPlan, begin: int, end: int) -> Window:
        """A causal row is about the next position, and what it stores stays; of a denoising pass nothing does."""
        if plan.causal:
            slot.context, rows = (0, 0), (min(slot.stored, begin - 1), end - 1)
            slot.stored = end - 1
            return rows
        begin = min(begin, plan.begin)
        slot.context, slot.stored = (slot.stored, begin), begin
        return begin, max(end, plan.end)

    def _rows_of_blocks(self, request: HiddenStateRequest, slot: Slot, begin: int, size: int) -> Window:
        state, plan, length = request.state, request.state.plan, len(request.ids)
        assert plan is not None
        start = (plan.begin - request.state.unseen) // size * size
        if state.options.cache == "dual" and plan.end - plan.begin < size:
            known = int(state.ids[plan.begin]) != state.mask_id
            if known and slot.block_end == start + size:
                return plan.begin - request.state.unseen, plan.end - request.state.unseen
            slot.block_end = start + size
        stored, slot.stored = slot.stored, start
        return min(begin, stored), length
