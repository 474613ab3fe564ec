"""One sequence while it is denoised, and what passes between it, the network and the samplers in one step."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import Options
from codd.decoding.ranking import Ranking

if TYPE_CHECKING:
    from codd.coupling import Coupled
    from codd.decoding.constraint import SequenceConstraint

Window = tuple[int, int]
"""First position, and one beyond the last."""


@dataclass(frozen=True)
class StepPlan:
    """What one network evaluation is for."""

    begin: int
    end: int
    """Tokens may be committed at positions begin..end-1: a block, or everything."""
    count: int | None
    """How many to commit; None: as many as the threshold or the entropy budget lets pass; 0: only edit."""
    last: bool
    """Whether this is the schedule's last step here, so that no token may be deferred."""
    time: tuple[float, float] = (1.0, 0.0)
    """The published implementation's diffusion time in full mode, before and after the step."""


@dataclass(frozen=True)
class StopCondition:
    """When a sequence has ended although masks are left: at an end-of-text token, or at a text that was not wanted."""

    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    """From ids to text; needed for ``strings``."""

    def end_of(self, ids: Sequence[int], prompt_length: int, mask_id: int) -> int | None:
        """One beyond the last id that belongs to an ended sequence; None while it has not ended.

        Only what is settled counts: a stop token or text with a mask before it may still come to stand elsewhere.
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
    constraint: "SequenceConstraint | None" = None
    """The language that its text must be in; None: any text."""
    banned: Int[Tensor, " n"] | None = None
    """Tokens that are never written: on the host at first, so that a sequence can be made while a device captures."""
    block_size: int | None = None
    """Of a network with block-causal attention: no position sees beyond the end of its block, counted from 0."""
    family: str = ""
    """That of the network, whose published loop the preset follows."""
    unseen: int = 0
    """Leading positions that the network is not shown."""
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
    alternatives: int = 0
    """How many of the most probable tokens a step is to report for each position that it writes."""

    @property
    def masked(self) -> Bool[Tensor, " L"]:
        """Which positions are still to be written."""
        return self.ids == self.mask_id

    @property
    def finished(self) -> bool:
        """Whether it takes no further steps."""
        return self.plan is None

    @property
    def settled(self) -> int:
        """How many positions from the first one on will not change any more."""
        masks = self.masked.nonzero()
        first = int(masks[0]) if len(masks) else len(self.ids)
        if self.plan is None or self.options.editing_threshold is None:
            return first
        return min(first, self.plan.begin)

    def mask_ratio(self, window: Window) -> float:
        """The share of a window's positions that are masked."""
        begin, end = window
        return int(self.masked[begin:end].sum()) / (end - begin)

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

    def draw(self, size: int, device: torch.device) -> Float[Tensor, " n"]:
        """Uniform numbers in [0, 1) from the sequence's own generator."""
        return torch.rand(size, generator=self.generator).to(device, non_blocking=True)


def generator_for(seed: int, prompt: Sequence[int]) -> torch.Generator:
    """A CPU generator (Mersenne twister) fixed by seed and prompt, so that different prompts have different noise."""
    digest = hashlib.sha256(repr((seed, [int(token) for token in prompt])).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Writes(NamedTuple):
    """Tokens that a step wrote: where, which, and the probability of each under what it was taken from; on the host."""

    positions: Int[Tensor, " k"]
    tokens: Int[Tensor, " k"]
    scores: Float[Tensor, " k"]

    @classmethod
    def of(cls, ranking: Ranking) -> "Writes":
        """The rows that a ranking keeps; its scores are probabilities up to rounding, and are clamped to 1."""
        chosen = ranking.chosen()
        return cls(chosen.rows, chosen.tokens, chosen.scores.clamp(max=1))

    @classmethod
    def none(cls) -> "Writes":
        """No writes: three empty tensors."""
        return cls(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0))


class Alternatives(NamedTuple):
    """The most probable tokens of the positions that a step wrote, descending; on the host."""

    tokens: Int[Tensor, "k K"]
    log_probabilities: Float[Tensor, "k K"]


class HiddenStates(NamedTuple):
    """The network's last hidden states at positions begin, begin + 1, ... of a sequence, on the network's device."""

    begin: int
    values: Float[Tensor, "P d"]

    def at(self, window: Window) -> Float[Tensor, "w d"]:
        """The states of a window, which must lie within the positions held."""
        return self.values[window[0] - self.begin : window[1] - self.begin]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """All that one step of one sequence is computed from."""

    state: SequenceState
    plan: StepPlan
    positions: Int[Tensor, " R"]
    """The masked positions that the step is about, ascending, on the host."""
    logits: Float[Tensor, "R V"]
    """The network's logits there, after guidance, hooks and bans, on its device."""
    features: HiddenStates | None = None
    """The network's hidden states, for a circuit that is conditioned on them."""
    circuit: ProbabilisticCircuit | None = None
    revision: "Revision | None" = None
    """What the network says of the block's tokens that may be edited; None: nothing may."""

    @property
    def options(self) -> Options:
        """The options of the sequence."""
        return self.state.options


class Revision(NamedTuple):
    """Positions that the loop has written, on the host, and the network's logits there, on its device."""

    positions: Int[Tensor, " E"]
    logits: Float[Tensor, "E V"]


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step commits, still on the device."""

    packed: Float[Tensor, "4 more"]
    """A packed `Ranking` whose rows are positions, counted from ``origin``."""
    origin: int
    window: Window
    mask_ratio: float
    """The share of masks in the window before the step."""
    circuit: bool
    """Whether the circuit acted."""
    again: Callable[[], Float[Tensor, "4 more"]] | None = None
    """Computes ``packed`` again from all tokens, for a ranking that is void because candidates did not suffice."""
    edits: Float[Tensor, "4 others"] | None = None
    """A packed `Ranking` of positions of the sequence whose tokens are replaced."""
    joint: "Callable[[], Coupled] | None" = None
    """What tokens of the window were taken from; None: the network alone."""

    def ranking(self) -> Ranking:
        """On the host, with positions of the sequence as rows; waits for the device once."""
        ranking = Ranking.unpacked(self.packed.cpu())
        if self.again is not None and not bool(ranking.valid):
            ranking = Ranking.unpacked(self.again().cpu())
        return ranking._replace(rows=ranking.rows + self.origin)

    def edited(self) -> Writes:
        """The tokens that the step replaces, on the host; waits for the device."""
        return Writes.none() if self.edits is None else Writes.of(Ranking.unpacked(self.edits.cpu()))


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
    computed: int = 0
    """Positions that the network computed for it."""
    cached: int = 0
    """Positions whose keys and values were found in a cache."""
