"""A text in the making: what it knows of itself, and what it asks of the network next."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.decoding import schedule
from codd.decoding.options import REFERENCE_ORDERS, Options
from codd.errors import InvalidInput

Draw = Callable[[int], Float[Tensor, " n"]]
"""Gives so many uniform numbers."""


@dataclass(frozen=True)
class Turn:
    """What one evaluation of the network is for."""

    begin: int
    end: int
    """Where tokens may be committed: a block, or everything."""
    count: int | None
    """How many are to be committed; None: as many as the options let pass."""
    last: bool
    """Whether nothing may be left over."""
    time: tuple[float, float] = (1.0, 0.0)
    """The reference's clock in full mode, before and after."""


@dataclass(eq=False)
class Draft:
    """The state of one sequence. Ids live on the host: what is decided from them alone waits for no device."""

    ids: Int[Tensor, " L"]
    given: Bool[Tensor, " L"]
    """What was not masked at the start."""
    prompt_length: int
    mask_id: int
    generator: torch.Generator
    number: int = 0
    """Its place in the batch."""
    evaluations: int = 0
    warned: bool = False

    @classmethod
    def begin(cls, prompt: Sequence[int], number: int, mask_id: int, options: Options, seed: int) -> "Draft":
        """A prompt with masks after it."""
        ids = torch.tensor([*prompt, *([mask_id] * options.gen_length)], dtype=torch.long)
        return cls(ids, ids != mask_id, len(prompt), mask_id, generator_for(seed, prompt), number)

    @property
    def masked(self) -> Bool[Tensor, " L"]:
        """What is still to be written."""
        return self.ids == self.mask_id

    def drawer(self, device: torch.device) -> Draw:
        """Gives numbers in [0, 1) from the sequence's own generator, which is on the host whatever the device."""

        def draw(size: int) -> Float[Tensor, " n"]:
            return torch.rand(size, generator=self.generator).to(device, non_blocking=True)

        return draw

    def commit(self, positions: Int[Tensor, " k"], tokens: Int[Tensor, " k"]) -> None:
        """Write tokens where masks were."""
        self.ids = self.ids.clone()
        self.ids[positions] = tokens

    def end(self, stop_ids: frozenset[int]) -> int | None:
        """One beyond the first end-of-text that was generated, if all before it is written."""
        for place, token in enumerate(self.ids.tolist()):
            if token == self.mask_id:
                return None
            if place >= self.prompt_length and token in stop_ids:
                return place + 1
        return None


def generator_for(seed: int, prompt: Sequence[int]) -> torch.Generator:
    """A sequence's own stream (torch's CPU generator, a Mersenne twister), fixed by the seed and the prompt.

    The prompt takes part so that different prompts do not share their noise; neighbours do not.
    """
    digest = hashlib.sha256(repr((seed, [int(token) for token in prompt])).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def turns(draft: Draft, options: Options) -> Iterator[Turn]:
    """What is asked of the network, in turn; each is decided after the one before has been committed."""
    if options.reference:
        return _reference_blocks(draft, options) if options.mode == "block" else _reference_full(draft, options)
    return _blocks(draft, options) if options.mode == "block" else _full(draft, options)


def _blocks(draft: Draft, options: Options) -> Iterator[Turn]:
    """Block after block. Blocks are counted from the end of the prompt, backwards too: its masks come first."""
    masked, size = draft.masked, options.block_length
    places = masked.nonzero()[:, 0].tolist()
    numbers = sorted({(place - draft.prompt_length) // size for place in places})
    spans = [
        (max(0, draft.prompt_length + n * size), min(len(masked), draft.prompt_length + (n + 1) * size))
        for n in numbers
    ]
    if not options.counted:
        for begin, end in spans:
            while bool(draft.masked[begin:end].any()):
                yield Turn(begin, end, None, last=False)
        return
    sizes = [int(masked[begin:end].sum()) for begin, end in spans]
    for (begin, end), masks, steps in zip(spans, sizes, schedule.share(_steps(options, sizes), sizes), strict=True):
        for i, count in enumerate(schedule.spread(masks, steps)):
            yield Turn(begin, end, count, last=i == steps - 1)


def _full(draft: Draft, options: Options) -> Iterator[Turn]:
    """Everything at once. Tokens that a step leaves for later are divided among the steps that are left."""
    length, masks = len(draft.ids), int(draft.masked.sum())
    if not options.counted:
        while bool(draft.masked.any()):
            yield Turn(0, length, None, last=False)
        return
    steps = min(_steps(options, [masks]), masks)
    for i in range(steps):
        left = int(draft.masked.sum())
        yield Turn(0, length, -(-left // (steps - i)), last=i == steps - 1)


def _steps(options: Options, masks: Sequence[int]) -> int:
    return sum(masks) if options.steps is None else options.steps


def _reference_blocks(draft: Draft, options: Options) -> Iterator[Turn]:
    """The appended blocks only; an evaluation that has nothing to commit is made all the same."""
    blocks, steps = options.gen_length // options.block_length, options.steps or options.gen_length
    for block in range(blocks):
        begin = draft.prompt_length + block * options.block_length
        end = begin + options.block_length
        masks = int(draft.masked[begin:end].sum())
        for count in schedule.spread(masks, steps // blocks):
            yield Turn(begin, end, count, last=False)


def _reference_full(draft: Draft, options: Options) -> Iterator[Turn]:
    steps = options.steps or options.gen_length
    times = schedule.times(steps, options.eps)
    for i in range(steps):
        now, then, last = times[i], times[i + 1], i == steps - 1
        count = schedule.revealed(int(draft.masked.sum()), now, then, last)
        yield Turn(0, len(draft.ids), count, last=last, time=(now, then))


def check_reference(options: Options, family: str) -> None:
    """LLaDA's loop divides without remainder or not at all, and has fewer orders than Dream's."""
    if options.mode == "full":
        return
    dream = family == "dream"
    if not dream and options.remasking in REFERENCE_ORDERS:
        raise InvalidInput(f"the reference knows no remasking={options.remasking!r} for {family} in block mode.")
    blocks, rest = divmod(options.gen_length, options.block_length)
    steps = options.steps or options.gen_length
    if rest or not blocks or (steps % blocks and not dream) or steps < blocks:
        raise InvalidInput(
            f"the reference needs gen_length ({options.gen_length}) to be a multiple of block_length "
            f"({options.block_length}), and steps ({steps}) of the number of blocks. Without the preset any will do."
        )
