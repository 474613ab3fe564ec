"""The CoDD step as a scheduler of diffusers, for pipelines that refine blocks of masks, such as ``LLaDA2Pipeline``.

    scheduler = CoDDScheduler(circuit="a folder or hub id", block_length=32)
    pipe = LLaDA2Pipeline(model=model, scheduler=scheduler, tokenizer=tokenizer)
    pipe(prompt="...", threshold=0.97, editing_threshold=None)

Pipelines hand their schedulers logits, not hidden states: circuits must be static.
"""

from typing import Any

import torch
from torch import Tensor

from codd.decoding.options import Options
from codd.decoding.sequence import Step, StepPlan, Writes
from codd.errors import CoddError, InvalidInput, MissingDependency
from codd.integrations.blocks import BlockDecoder

try:
    from diffusers import BlockRefinementScheduler
    from diffusers.configuration_utils import register_to_config
    from diffusers.schedulers.scheduling_block_refinement import BlockRefinementSchedulerOutput
except ImportError as error:
    raise MissingDependency(
        f"the scheduler needs diffusers 0.38 or later: pip install codd-lm[diffusers] ({error})"
    ) from error


class CoDDScheduler(BlockRefinementScheduler):  # type: ignore[misc] # diffusers has no types
    """Commits the tokens of a block by network x circuit, jointly, instead of each by itself.

    As in the scheduler that it takes the place of, a step commits every token that reaches ``threshold``, at least as
    many as the schedule of ``num_inference_steps`` asks for; here the probability of a token is that given the tokens
    picked before it in the same step. ``threshold`` above 1 goes by the schedule alone.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        circuit: str | None = None,
        sampler: str = "any_order",
        remasking: str = "low_confidence",
        circuit_temperature: float = 1.0,
        block_length: int = 32,
        num_inference_steps: int = 32,
        threshold: float = 0.97,
        editing_threshold: float | None = None,
        minimal_topk: int = 1,
    ):
        """``circuit``: a folder or hub id; None: the network alone. The others as in codd.Options and in diffusers."""
        super().__init__(block_length, num_inference_steps, threshold, editing_threshold, minimal_topk)
        self._decoder: BlockDecoder | None = None

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        *,
        mask_token_id: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        sampling_method: str = "auto",
        threshold: float | None = None,
        editing_threshold: float | None = None,
        minimal_topk: int | None = None,
        prompt_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One refinement step of all blocks; arguments and result are those of ``BlockRefinementScheduler.step``."""
        if mask_token_id is None:
            raise InvalidInput("CoDDScheduler needs mask_token_id: a network without masks has no masked positions.")
        greedy = sampling_method == "greedy" or (sampling_method == "auto" and temperature == 0)
        threshold = float(self.config.threshold) if threshold is None else threshold
        editing = self.config.editing_threshold if editing_threshold is None else editing_threshold
        decoder = self._decoder_of(mask_token_id, sample.shape[1])
        options = decoder.options.changed(
            temperature=0.0 if greedy else temperature,
            top_p=None if greedy else top_p,
            top_k=None if greedy or not top_k else top_k,
            editing_threshold=editing if editing is not None and editing > 0 else None,
        )
        due = self._due(int(timestep), self.config.minimal_topk if minimal_topk is None else minimal_topk)
        host = sample.cpu()
        fixed = torch.tensor(False) if prompt_mask is None else prompt_mask.cpu()
        steps = []
        for ids, logits in zip(host, model_output, strict=True):
            seed = int(torch.randint(2**31, (), generator=generator, device=generator.device if generator else None))
            given = fixed & (ids != decoder.mask_id)
            steps.append(self._row(decoder, options.changed(seed=seed), ids, given, logits, due, threshold))
        return self._output(model_output, sample, steps, return_dict)

    def _due(self, step_index: int, minimal: int) -> int:
        """How many tokens the schedule asks of a step, at least ``minimal``."""
        if self._transfer_schedule is None:
            return minimal
        return max(minimal, int(self._transfer_schedule[min(step_index, len(self._transfer_schedule) - 1)]))

    def _decoder_of(self, mask_id: int, block_size: int) -> BlockDecoder:
        """The decoder of the configured circuit, read once."""
        known = self._decoder
        if known is None or known.mask_id != mask_id or known.options.block_length != block_size:
            names = ("circuit", "sampler", "remasking", "circuit_temperature")
            settings = {name: self.config[name] for name in names}
            self._decoder = known = BlockDecoder.from_settings(settings, mask_id=mask_id, block_size=block_size)
        return known

    def _row(
        self,
        decoder: BlockDecoder,
        options: Options,
        ids: Tensor,
        given: Tensor,
        logits: Tensor,
        due: int,
        threshold: float,
    ) -> tuple[Writes, Writes]:
        """What is written into one block, and what is edited."""
        masks = int((ids == decoder.mask_id).sum())
        step = None
        if threshold <= 1 and options.sampler == "any_order" and masks:
            step = self._advance(decoder, options.changed(threshold=threshold), ids, given, logits)
        if step is None or len(step.positions) < min(due, masks):
            steps = max(1, -(-masks // max(due, 1)))
            step = self._advance(decoder, options.changed(steps=steps), ids, given, logits)
        if step is None:
            return Writes.none(), Writes.none()
        return Writes(step.positions, step.tokens, step.scores), step.edits

    def _advance(
        self, decoder: BlockDecoder, options: Options, ids: Tensor, given: Tensor, logits: Tensor
    ) -> Step | None:
        """One step of one block by these options; None if there is nothing to do."""
        state = decoder.start(ids, given, options)
        if state.finished and options.editing_threshold is None:
            return None
        if state.finished:
            state.plan = StepPlan(0, len(ids), 0, last=True)  # nothing is masked: only edit
        [step] = decoder.step([state], logits[None])
        if isinstance(step, CoddError):
            raise step
        return step

    def _output(
        self, model_output: Tensor, sample: Tensor, steps: list[tuple[Writes, Writes]], return_dict: bool
    ) -> Any:
        """The step as diffusers hands it on, on the sample's device."""
        tokens, probs = sample.cpu().clone(), torch.ones(sample.shape)
        transfer, edited = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
        for row, parts in enumerate(steps):
            for writes, where in zip(parts, (transfer, edited), strict=True):
                tokens[row, writes.positions] = writes.tokens
                probs[row, writes.positions] = writes.scores
                where[row, writes.positions] = True
        tokens, probs, transfer, edited = (part.to(sample.device) for part in (tokens, probs, transfer, edited))
        if not return_dict:
            return tokens, transfer, edited, tokens, probs, model_output
        return BlockRefinementSchedulerOutput(tokens, transfer, edited, tokens, probs, model_output)
