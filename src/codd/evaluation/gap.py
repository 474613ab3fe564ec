"""`codd.evaluation.misspecification`: the share of the gap between one step and many that a model's circuit closes."""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from codd.circuits import ProbabilisticCircuit
from codd.coupling.gap import BLOCK_LENGTH, RATIOS, Progress, block_scores, summary
from codd.decoding.model import Model


def misspecification(
    model: Model,
    ids: Int[Tensor, "B T"],
    starts: Int[Tensor, " B"],
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    *,
    block_length: int | None = None,
    progress: Progress | None = None,
) -> dict[float, dict[str, float]]:
    """Log-likelihoods per masked token, and the share of the gap that the circuit closes, at several mask ratios.

    Everything left of a block is given, the ratio says which share of the block is masked, and everything right of it
    is masked, so that padding there has no effect. The seed fixes masks and orders whatever the model, and the masks of
    a higher ratio contain those of a lower one. Without a circuit, coupled is factorized.

    Args:
        model: A model whose mask is known.
        ids: Texts as token ids.
        starts: The first position of a block in each text. Blocks of a block-causal network must begin at multiples of
            its block size, counted from the text's first token.
        ratios: Shares of a block that are masked (rounded, at least one token).
        seed: Of the order in which tokens are revealed.
        block_length: By default the circuit's length, else that of a block-causal network's blocks, else 32.
        progress: Called with the evaluations done and the number of all.

    Returns:
        For each ratio: ``factorized``, ``coupled`` and ``sequential`` in nats per masked token; ``gap_closed``,
        (coupled - factorized) / (sequential - factorized), NaN if the gap is below 0.005 nats; its standard error over
        blocks, ``gap_closed_error``; and ``tokens``, how many were masked in all.

    Raises:
        InvalidInput: The texts hold no such blocks, or the network gives no numbers.
    """
    scores = block_scores(
        model.backbone,
        {} if model.circuit is None else {"": model.circuit},
        ids,
        starts,
        mask_id=model.known_mask,
        block_length=block_length or circuit_length(model.circuit, model.backbone.block_size),
        ratios=ratios,
        seed=seed,
        progress=progress,
    )
    return {ratio: summary(at, at.coupled.get("", at.factorized)) for ratio, at in scores.items()}


def circuit_length(circuit: ProbabilisticCircuit | None, block_size: int | None = None) -> int:
    """The length of the blocks that a circuit is for; where it says nothing, that of the network's blocks, or 32."""
    return (None if circuit is None else circuit.window) or block_size or BLOCK_LENGTH
