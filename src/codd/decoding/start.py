"""The sequences of a run before their first step, checked."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import HMM
from codd.circuits.protocol import ProbabilisticCircuit
from codd.constraints import Automaton
from codd.decoding import published
from codd.decoding.constraint import constrain
from codd.decoding.options import Options
from codd.decoding.schedule import plan_steps
from codd.decoding.state import SequenceState, StopCondition, generator_for
from codd.errors import InvalidInput


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
        state.stop = stop if options.stops else StopCondition()
        state.schedule = published.plan_steps(state, stop) if options.published else plan_steps(state)
        state.plan = next(state.schedule, None)
    return sequences


def options_for(backbone: Backbone, options: Options) -> Options:
    """The options with what the network says where nobody else did: blocks, and the pace of its published loop.

    Raises InvalidInput for blocks that a block-causal network cannot have.
    """
    if options.published:
        options = published.options_for(backbone, options)
    if options.cache is not None and backbone.config.conditioning:
        raise InvalidInput(
            f"cache={options.cache!r}: {backbone.family} is told the share of masks, so that nothing it computes stays "
            "as it was: leave the cache out."
        )
    size = backbone.block_size
    if size is None:
        return options
    if options.mode == "full":
        raise InvalidInput(
            f'mode="full" writes anywhere at once, but this network reads block after block of {size} tokens, and no '
            'block sees a later one: mode="block" is for it.'
        )
    if "block_length" in options.defaulted:
        options = options.changed(block_length=size)
    if size % options.block_length:
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


def banned_ids(backbone: Backbone, options: Options, mask_id: int) -> Int[Tensor, " n"]:
    """The tokens that are never written: ``options.ban`` and the mask, which only the published loops may write."""
    ids = sorted(set(options.ban) | (set() if options.published else {mask_id}))
    if ids and not 0 <= ids[0] <= ids[-1] < backbone.vocab_size:
        raise InvalidInput(f"ban holds {ids[0] if ids[0] < 0 else ids[-1]}, which is none of the model's tokens.")
    if len(ids) >= backbone.vocab_size:
        raise InvalidInput("every token is banned: nothing is left to write.")
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
