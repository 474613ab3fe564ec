"""The CoDD step as an algorithm of SGLang for diffusion models: ``--dllm-algorithm CoDD``.

`register` is the entry point ``codd`` of the group ``sglang.srt.plugins``, so that installing codd beside SGLang is
enough. Settings come from the YAML file of ``--dllm-algorithm-config``:

    circuit: il18/some-static-circuit    # a folder or hub id; left out: the network alone
    threshold: 0.97                      # and other options of codd.Options: sampler, steps (a block), remasking, ...

SGLang hands its algorithms logits, not hidden states: circuits must be static. `block_size` is SGLang's own setting.
"""

import logging
from typing import Any

import torch

from codd.decoding.sequence import SequenceState
from codd.errors import CoddError, MissingDependency
from codd.integrations.blocks import BlockDecoder

_log = logging.getLogger("codd.integrations.sglang")


class BlockSteps:
    """What SGLang's ``DllmAlgorithm`` leaves to its subclasses, by codd's denoising loop."""

    block_size: int
    mask_id: int

    def __init__(self, config: Any) -> None:
        """``config``: SGLang's DllmConfig. InvalidInput for settings that codd does not know."""
        super().__init__(config)  # type: ignore[call-arg] # DllmAlgorithm comes after this class
        settings = {name: value for name, value in config.algorithm_config.items() if name != "block_size"}
        self.decoder = BlockDecoder.from_settings(settings, mask_id=self.mask_id, block_size=self.block_size)

    def max_steps(self, block_size: int) -> int:
        """Network evaluations of a block at most: a token each, those that only edit, and one that finds it done."""
        options = self.decoder.options
        return block_size + 1 + (0 if options.editing_threshold is None else options.max_post_steps)

    def init_step_state(self, forward_batch: Any) -> list[SequenceState]:
        """A state for each block of the batch; it stays with its request until the block is done."""
        ids = forward_batch.input_ids.view(forward_batch.batch_size, self.block_size)
        prompt = forward_batch.dllm_prompt_mask
        given = ids != self.mask_id if prompt is None else prompt
        host = torch.stack((ids, given.to(ids.dtype))).cpu()  # one transfer, when a block begins
        return [self.decoder.start(*each) for each in zip(host[0], host[1].bool(), strict=True)]

    def step(self, forward_batch: Any, full_logits: torch.Tensor, states: list[SequenceState]) -> list[bool]:
        """Commit tokens of all blocks in place; gives which blocks were complete when it began.

        A block that fails, as by NaN logits, is filled by its network alone and logged: the others go on.
        """
        done = [state.finished for state in states]
        going = [number for number, finished in enumerate(done) if not finished]
        if going:
            logits = full_logits.view(len(states), self.block_size, -1)
            outcomes = self.decoder.step(
                [states[number] for number in going], logits[going] if len(going) < len(states) else logits
            )
            for number, outcome in zip(going, outcomes, strict=True):
                if isinstance(outcome, CoddError):
                    # SGLang has no way to fail one request from here, and an exception ends the server with all others.
                    _log.error("block %d of %d: %s Each place takes its likeliest token.", number, len(states), outcome)
                    self.decoder.give_up(states[number], logits[number])
            ids = torch.stack([self.decoder.ids(state) for state in states]).to(forward_batch.input_ids.dtype)
            forward_batch.input_ids.copy_(ids.view(-1))  # in place: a captured graph reads this very tensor
        return done


def algorithm() -> type:
    """The algorithm's class, on SGLang's own base; MissingDependency where SGLang is not installed."""
    try:
        from sglang.srt.dllm.algorithm.base import DllmAlgorithm
    except ImportError as error:
        raise MissingDependency(f"the plug-in needs SGLang with diffusion models (0.5.9 or later): {error}") from error
    return type("CoDD", (BlockSteps, DllmAlgorithm), {"__doc__": BlockSteps.__doc__, "__module__": __name__})


def register() -> None:
    """Make ``CoDD`` known to SGLang; SGLang calls this in each of its processes."""
    from sglang.srt.dllm import algorithm as algorithms

    algorithms.algo_name_to_cls["CoDD"] = algorithm()


def __getattr__(name: str) -> Any:
    """``Algorithm``, as modules of SGLang's algorithms export it."""
    if name == "Algorithm":
        return algorithm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
