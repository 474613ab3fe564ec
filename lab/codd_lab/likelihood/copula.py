"""Discrete Copula Diffusion (DCD, Liu et al. 2025): a causal model lends the network the dependence that it lacks.

From left to right, for each masked position i of a block,

    p(x_i | x_<i, observed)  proportional to  p_AR(x_i | x_<i) * p(x_i | all observed) / p(x_i | observed left of i)

where the causal model p_AR knows how tokens follow each other, and the ratio of the network's marginals tells what the
tokens right of i change. Here the denominator masks every observed token right of i: the network's own marginal, for an
evaluation for each run of masked tokens with something observed behind it. Where nothing is observed right of a block
and all of it is masked, numerator and denominator are the same: at mask ratio 1, and for continuations, **DCD is the
causal model alone** and the diffusion network has no say.

The authors' code (github.com/liuanji/Copula-Diffusion) gets the denominator in one evaluation, by running the network
with a causal attention mask. That network was never trained so, and it then misses the masks on the right too, so that
the ratio does not vanish when nothing is observed there. They clip probabilities at 1e-16 before taking logarithms;
an exponent on the ratio is there but is 1; nothing is tempered. The first token of a text, of which a causal model says
nothing, they take from the network alone, and so is it here.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.backbones.causal import CausalModel, check_causal, check_same_tokens, on_shared_tokens
from codd.coupling.gap import (
    BLOCK_LENGTH,
    RATIOS,
    Blocks,
    Progress,
    batches,
    check_blocks,
    check_grid,
    check_numbers,
    counted,
    masked_counts,
    reveal_order,
    rows_at_once,
)
from codd_lab.causal import logits_at


@torch.no_grad()
def dcd_scores(
    backbone: Backbone,
    causal: CausalModel,
    ids: Int[Tensor, "B T"],
    starts: Int[Tensor, " B"],
    *,
    mask_id: int,
    block_length: int = BLOCK_LENGTH,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[float, Float[Tensor, " B"]]:
    """Log-likelihoods by ratio, of each block the sum over its masked tokens: `block_scores` with DCD as the model.

    One seed gives the blocks the same masks as there. ``causal`` is a causal model of the same tokens, which may lack
    the mask, and whose logits at a position are about the next one. On the host, in float64.
    """
    check_blocks(ids, starts, ratios, block_length, mask_id, backbone.vocab_size)
    check_grid(backbone.block_size, starts, block_length)
    if isinstance(causal.network, Backbone):
        check_causal(causal.network, "DCD")
    check_same_tokens(causal.vocab_size, None, backbone.vocab_size, mask_id, None)
    counts = masked_counts(ratios, block_length)
    order = reveal_order(len(ids), block_length, seed)
    stops = set(counts.values())
    advance = counted(progress, _evaluations(Blocks(ids, starts, order), stops))
    parts = [
        _scores(backbone, causal, blocks, stops, mask_id, advance)
        for blocks in batches(backbone, Blocks(ids, starts, order))
    ]
    by_ratio = {ratio: torch.cat([part[count] for part in parts]).cpu() for ratio, count in counts.items()}
    check_numbers(by_ratio.values())
    return by_ratio


def _scores(
    backbone: Backbone,
    causal: CausalModel,
    blocks: Blocks,
    counts: set[int],
    mask_id: int,
    advance: Callable[[int], None],
) -> dict[int, Tensor]:
    """The scores of some blocks, by the number of masked tokens."""
    window = blocks.window()
    truth = blocks.ids.gather(1, window)
    following = on_shared_tokens(_following(causal, blocks, window), backbone.vocab_size)
    advance(len(truth))
    by_count = {}
    for masked in counts:
        hidden, shown = blocks.hidden(masked), blocks.shown(masked, mask_id)
        by_all = backbone.masked_logits(shown, window, mask_id=mask_id).logits.log_softmax(-1)
        advance(len(truth))
        by_left = by_all.clone()  # right where nothing is observed behind
        for rows, places, log_probs in _views(backbone, shown, window, hidden, mask_id, advance):
            by_left[rows, places] = log_probs
        first = (window == 0)[..., None]
        joint = torch.where(first, by_all, following + (by_all - by_left))
        joint = joint.masked_fill(by_all == -torch.inf, -torch.inf)  # the mask, which both exclude
        log_probs = joint.log_softmax(-1).gather(-1, truth[..., None])[..., 0]
        by_count[masked] = torch.where(hidden, log_probs.double(), 0).sum(1)
    return by_count


def _following(causal: CausalModel, blocks: Blocks, window: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
    """What the causal model says of each position of the block, given all before it. Of position 0 it says nothing."""
    later = torch.arange(blocks.ids.shape[1], device=window.device) > window[:, -1:]
    given = torch.where(later, 0, blocks.ids)  # seen by nobody; a mask need not be in its vocabulary
    return logits_at(causal, given, (window - 1).clamp(min=0))


def _views(
    backbone: Backbone,
    shown: Int[Tensor, "B T"],
    window: Int[Tensor, "B S"],
    hidden: Bool[Tensor, "B S"],
    mask_id: int,
    advance: Callable[[int], None],
) -> Iterator[tuple[Int[Tensor, " n"], Int[Tensor, " n"], Float[Tensor, "n V"]]]:
    """Log-probabilities given what is observed on the left alone: of which texts, and which places of the block.

    Masked tokens in a row have the same tokens on their left, and share an evaluation.
    """
    runs = _run_begins(hidden).cumsum(1)
    texts, begins = _seen_behind(hidden).nonzero(as_tuple=True)
    positions = torch.arange(shown.shape[1], device=shown.device)
    size = rows_at_once(backbone, window.shape[1])
    for some in range(0, len(texts), size):
        text, begin = texts[some : some + size], begins[some : some + size]
        view = torch.where(positions >= window[text, begin][:, None], mask_id, shown[text])
        log_probs = backbone.masked_logits(view, window[text], mask_id=mask_id).logits.log_softmax(-1)
        which, place = (hidden[text] & (runs[text] == runs[text, begin][:, None])).nonzero(as_tuple=True)
        advance(len(text))
        yield text[which], place, log_probs[which, place]


def _run_begins(hidden: Bool[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
    """Where a run of masked tokens begins."""
    before = torch.nn.functional.pad(hidden, (1, 0))[:, :-1]
    return hidden & ~before


def _seen_behind(hidden: Bool[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
    """Where a run begins that has an observed token of the block behind it."""
    seen = (~hidden).flip(1).cumsum(1).flip(1)
    return _run_begins(hidden) & (seen > 0)


def _evaluations(blocks: Blocks, counts: set[int]) -> int:
    """How many sequences the two models evaluate."""
    once = len(blocks.ids)
    return once + sum(once + int(_seen_behind(blocks.hidden(masked)).sum()) for masked in counts)
