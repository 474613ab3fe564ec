"""The denoising loop: block after block, the surest tokens first."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.errors import InvalidInput


class Step(NamedTuple):
    """One evaluation of the network, and what came of it."""

    sequences: Int[Tensor, "B L"]
    """After the step; prompts are padded on the left."""
    committed: Bool[Tensor, "B L"]
    """The positions that this step filled."""
    confidence: Float[Tensor, "B L"]
    """The probability of the best token at each masked position; 0 elsewhere."""


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One batch of prompts of any lengths: ids, and which of them are real."""
    longest = max(map(len, prompts), default=0)
    ids = torch.full((len(prompts), longest), pad_id, dtype=torch.long)
    valid = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt)
        ids[row, start:] = torch.as_tensor(list(prompt), dtype=torch.long)
        valid[row, start:] = True
    return ids.to(device), valid.to(device)


@torch.no_grad()
def denoise(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    *,
    mask_id: int,
    gen_length: int = 128,
    block_length: int = 32,
    steps: int | None = None,
) -> Iterator[Step]:
    """Fill ``gen_length`` masks after every prompt with ``steps`` evaluations of the network, by default one a token.

    In a block of m masks and S steps, a step fills m / S tokens, the first m mod S steps one more: those whose best
    token is most probable, the leftmost of equals.
    """
    blocks, rest = divmod(gen_length, block_length) if block_length > 0 else (0, 0)
    steps = gen_length if steps is None else steps
    if rest or blocks < 1 or steps % blocks or steps < blocks:
        raise InvalidInput(
            f"gen_length {gen_length} must be a multiple of block_length {block_length}, and steps {steps} of the "
            "number of blocks; none of them 0."
        )
    pad_id = backbone.special.pad if backbone.special.pad is not None else 0
    ids, valid = pad_left(prompts, pad_id, backbone.device)
    ids = torch.cat((ids, torch.full((len(ids), gen_length), mask_id, device=ids.device)), dim=1)
    valid = torch.cat((valid, valid.new_ones(len(ids), gen_length)), dim=1)
    for block in range(blocks):
        begin = ids.shape[1] - gen_length + block * block_length
        each, more = divmod(block_length, steps // blocks)
        for step in range(steps // blocks):
            count = each + (step < more)
            logits = backbone(ids, valid, fill_padding=False).float()
            logits[..., mask_id] = -torch.inf
            best, tokens = logits.softmax(-1).max(-1)
            confidence = torch.where(ids == mask_id, best, 0.0)
            inside = confidence[:, begin : begin + block_length]
            order = inside.argsort(dim=1, descending=True, stable=True)[:, :count] + begin
            committed = torch.zeros_like(valid).scatter_(1, order, True) & (ids == mask_id)
            ids = torch.where(committed, tokens, ids)
            yield Step(ids, committed, confidence)
