"""A sequence under way, with all that it needs to go on: courses with different settings can share a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import Modulated
from codd.coupling.coupled import Prior
from codd.decoding.draft import Draft, Turn, check_reference, turns
from codd.decoding.options import Options
from codd.errors import InvalidInput


@dataclass(eq=False)
class Course:
    """A draft, how it is to be written, and what it asks of the network next."""

    draft: Draft
    options: Options
    circuit: Prior | Modulated | None
    banned: Int[Tensor, " n"]
    """The tokens that are never written: on the host at first, so that a course can be made while a device works."""
    stop_ids: frozenset[int]
    plan: Iterator[Turn]
    turn: Turn | None
    """What the next evaluation is for; None: there is nothing left to do."""

    @property
    def finished(self) -> bool:
        """Whether it takes no further steps."""
        return self.turn is None

    def ended(self) -> int | None:
        """Go on to the next turn, or to none if the text has ended; where it did."""
        end = self.draft.end(self.stop_ids) if self.stop_ids else None
        self.turn = next(self.plan, None) if end is None else None
        return end


def begin(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    mask_id: int,
    circuit: Prior | Modulated | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> list[Course]:
    """All sequences before the first step, after checking that this can be done."""
    seeds = list(options.seed) if isinstance(options.seed, Sequence) else [options.seed] * len(prompts)
    if len(seeds) != len(prompts):
        raise InvalidInput(f"{len(seeds)} seeds for {len(prompts)} prompts: give one, or one for each.")
    _check_circuit(backbone, options, circuit)
    for number, prompt in enumerate(prompts):
        _check_prompt(backbone, options, number, prompt)
    banned = banned_ids(backbone, options, mask_id)
    stops = stop_ids if options.stop and not options.reference else frozenset()
    courses = []
    for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        draft = Draft.begin(prompt, number, mask_id, options, seed)
        plan = turns(draft, options)
        courses.append(Course(draft, options, circuit, banned, stops, plan, next(plan, None)))
    return courses


def _check_circuit(backbone: Backbone, options: Options, circuit: Prior | Modulated | None) -> None:
    if options.reference:
        check_reference(options, backbone.family)
    fixed = None if circuit is None else circuit.length
    if fixed is not None and options.mode == "block" and options.block_length > fixed:
        raise InvalidInput(f"block_length is {options.block_length}, but the circuit has only {fixed} positions.")
    if fixed is not None and options.reference and options.mode == "block" and options.block_length < fixed:
        raise InvalidInput(f"the reference needs block_length to be the circuit's {fixed}, not {options.block_length}.")


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


def banned_ids(backbone: Backbone, options: Options, mask_id: int) -> Int[Tensor, " n"]:
    """The mask is never written; the reference forbids nothing."""
    ids = sorted(set(options.ban) | (set() if options.reference else {mask_id}))
    if ids and not 0 <= ids[0] <= ids[-1] < backbone.vocab_size:
        raise InvalidInput(f"ban holds {ids[0] if ids[0] < 0 else ids[-1]}, which is none of the model's tokens.")
    if len(ids) >= backbone.vocab_size:
        raise InvalidInput("every token is banned: nothing is left to write.")
    return torch.tensor(ids, dtype=torch.long)
