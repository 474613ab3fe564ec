"""Likelihood studies: how probable true text is by one step, with each circuit, by many steps, and by DCD.

Each reads texts that no model here was trained on, measures, and gives a plain dictionary for a file or a report.

A continuation is longer than the blocks that circuits are for. It is scored **block by block, as it would be written**:
the true tokens left of a block are given, all tokens of the block are masked together, and what stands right of it, up
to the end of the continuation, is masked. Within a block the masked tokens are scored as in `codd.coupling.gap`, at
mask ratio 1; the log-likelihoods of the blocks add up. So factorized and coupled need one network evaluation a block,
and the dependence between blocks is the network's own under all labels. Every continuation is scored with all context
lengths: the shorter contexts are the ends of the longest. DCD is here the causal model alone (see
`codd_lab.likelihood.copula`).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from codd.backbones import Backbone, Tokenizer
from codd.backbones.causal import CausalModel, check_same_tokens
from codd.circuits import ProbabilisticCircuit
from codd.coupling.gap import (
    BLOCK_LENGTH,
    RATIOS,
    BlockScores,
    Progress,
    block_scores,
    check_grid,
    joined,
    summary,
)
from codd.data.sources import source_place
from codd.decoding.model import Model
from codd.errors import InvalidInput
from codd.evaluation.statistics import bootstrap_interval
from codd_lab.likelihood.copula import dcd_scores
from codd_lab.likelihood.corpora import (
    PROSE,
    ROW_LENGTH,
    SOURCES,
    BlockSpec,
    draw_blocks,
    draw_continuations,
    source_of,
)

Circuits = Mapping[str, ProbabilisticCircuit]
PartProgress = Callable[[str, int, int], None]
"""Called with the part that is measured, the evaluations of it that are done, and the number of all."""

CONTEXTS = (20, 32, 64, 96, 128, 192, 256)
CONTINUATION = 64
SCORING = (
    "block by block: true tokens left of a block are given, its tokens are masked together, the rest of the "
    "continuation is masked; sequential reveals a block in a random order, left_to_right in that of reading; dcd is "
    "the causal model alone, since nothing is observed right of a masked token"
)
"""The method in words, written beside the numbers."""
Figures = dict[str, float | None]
"""mean, low and high: a mean over texts with the middle 95% of a bootstrap over them. None where it is no number."""


def mask_ratio_study(
    model: Model,
    circuits: Circuits,
    causal: CausalModel | None,
    data: Path | None,
    *,
    corpora: Sequence[str] = tuple(SOURCES),
    blocks: int = 200,
    ratios: Sequence[float] = RATIOS,
    row_length: int = ROW_LENGTH,
    sequential: bool = True,
    seed: int = 0,
    progress: PartProgress | None = None,
) -> dict[str, Any]:
    """Log-likelihood per masked token of a block against how much of it is masked; all labels on the same masks.

    Gives ``{"settings": {..}, "data": {corpus: {"blocks": n, "ratios": [{"ratio": r, "tokens": n, "scores":
    {"factorized": {"mean", "low", "high"}, "circuit:NAME": .., "sequential": .., "dcd": ..}, "gap_closed": {NAME:
    {"mean", "low", "high"}}}]}}}``. Intervals are of 95%, by bootstrap over blocks. Without ``sequential`` (a network
    evaluation for each token of a block) there is no such score and no gap; without a causal model no DCD. ``corpora``
    are names of `corpora.SOURCES` (files under ``data``) or paths of files. Blocks of a block-causal network stand on
    its grid.
    """
    tokenizer, mask_id = _parts(model, causal, corpora, data, blocks)
    length = shared_length(circuits, model.backbone.block_size)
    spec = BlockSpec(length, blocks, row_length, seed, on_grid=model.backbone.block_size is not None)
    out: dict[str, Any] = {}
    for name in corpora:
        scores, copulas, drawn = [], [], draw_blocks(name, data, tokenizer, spec)
        for texts in drawn:
            shared: dict[str, Any] = {
                "mask_id": mask_id,
                "block_length": length,
                "ratios": ratios,
                "seed": seed + 7919 * texts.ids.shape[1],  # groups of one text each must not all get the same masks
            }
            report = part(progress, f"{name}: circuits, sequential" if sequential else f"{name}: circuits")
            scores.append(
                block_scores(model.backbone, circuits, *texts, sequential=sequential, progress=report, **shared)
            )
            if causal is not None:
                report = part(progress, f"{name}: dcd")
                copulas.append(dcd_scores(model.backbone, causal, *texts, progress=report, **shared))
        entries = []
        for ratio in ratios:
            copula = torch.cat([group[ratio] for group in copulas]) if copulas else None
            entries.append(_entry(ratio, joined([group[ratio] for group in scores]), copula, sequential, seed))
        out[name] = {"blocks": sum(len(texts.ids) for texts in drawn), "ratios": entries}
    settings = _settings(circuits, causal, length, corpora, seed, sequential)
    settings |= {"blocks": blocks, "ratios": list(ratios), "row_length": row_length}
    return {"settings": settings, "data": out}


def continuation_study(
    model: Model,
    circuits: Circuits,
    causal: CausalModel | None,
    data: Path | None,
    *,
    corpora: Sequence[str] = PROSE,
    texts: int = 100,
    contexts: Sequence[int] | None = None,
    continuation: int = CONTINUATION,
    sequential: bool = True,
    seed: int = 0,
    progress: PartProgress | None = None,
) -> dict[str, Any]:
    """Log-likelihood per token of true continuations against how much stands before them.

    How a continuation is scored block by block is said above and in the settings. Gives
    ``{"settings": {..}, "data": {corpus: {"texts": n, "continuation": n, "contexts": [{"context": c, "scores":
    {"factorized": {"mean", "low", "high"}, "circuit:NAME": .., "sequential": .., "left_to_right": .., "dcd":
    ..}}]}}}``. Intervals are of 95%, by bootstrap over texts, which are the same at all contexts. ``corpora`` are names
    of prose, or paths of files. ``contexts``: by default `CONTEXTS`, of a block-causal network those on its grid.
    """
    tokenizer, mask_id = _parts(model, causal, corpora, data, texts, prose=True)
    length, grid = shared_length(circuits, model.backbone.block_size), model.backbone.block_size
    if contexts is None:
        contexts = [context for context in CONTEXTS if grid is None or context % length == 0]
    if not contexts or min(contexts) < 1:
        raise InvalidInput(f"contexts must be one token or more, found {list(contexts)}.")
    check_grid(grid, torch.tensor(contexts), length)
    if continuation < 1 or continuation % length:
        raise InvalidInput(
            f"a continuation of {continuation} tokens is no whole number of blocks of {length}; give a multiple."
        )
    out: dict[str, Any] = {}
    for name in corpora:
        ids = draw_continuations(name, data, tokenizer, length=max(contexts) + continuation, texts=texts, seed=seed)
        entries = []
        for context in contexts:
            scores = continuation_scores(
                model.backbone,
                circuits,
                causal,
                ids[:, max(contexts) - context :],
                context=context,
                mask_id=mask_id,
                block_length=length,
                sequential=sequential,
                seed=seed,
                progress=_named(progress, f"{name}, {context} tokens before"),
            )
            figures = {label: mean_interval(values, continuation, seed) for label, values in scores.items()}
            entries.append({"context": context, "scores": figures})
        out[name] = {"texts": len(ids), "continuation": continuation, "contexts": entries}
    settings = _settings(circuits, causal, length, corpora, seed, sequential)
    settings |= {"texts": texts, "contexts": list(contexts), "continuation": continuation}
    return {"settings": {**settings, "scoring": SCORING}, "data": out}


def continuation_scores(
    backbone: Backbone,
    circuits: Circuits,
    causal: CausalModel | None,
    ids: Int[Tensor, "B T"],
    *,
    context: int,
    mask_id: int,
    block_length: int = BLOCK_LENGTH,
    sequential: bool = True,
    seed: int = 0,
    progress: PartProgress | None = None,
) -> dict[str, Float[Tensor, " B"]]:
    """Log-likelihoods of what follows the first ``context`` tokens of each text, summed over its tokens.

    Keys: ``factorized``; ``circuit:NAME`` of each circuit; ``dcd`` if there is a causal model; with ``sequential`` also
    that, for which blocks are revealed one token at a time in a random order drawn from the seed, and
    ``left_to_right``, the same in the order of reading.
    """
    count = (ids.shape[1] - context) // block_length
    rows = ids.repeat_interleave(count, 0)
    starts = (context + block_length * torch.arange(count)).repeat(len(ids))
    shared: dict[str, Any] = {"mask_id": mask_id, "block_length": block_length, "ratios": (1.0,)}
    report = part(progress, "circuits, sequential" if sequential else "circuits")
    scores = block_scores(backbone, circuits, rows, starts, seed=seed, sequential=sequential, progress=report, **shared)
    once = scores[1.0]
    by_label = {"factorized": once.factorized}
    by_label |= {f"circuit:{name}": values for name, values in once.coupled.items()}
    if sequential:
        by_label["sequential"] = once.sequential
        order = torch.arange(block_length).repeat(len(rows), 1)
        report = part(progress, "left to right")
        again = block_scores(backbone, {}, rows, starts, order=order, progress=report, **shared)
        by_label["left_to_right"] = again[1.0].sequential
    if causal is not None:
        report = part(progress, "dcd")
        by_label["dcd"] = dcd_scores(backbone, causal, rows, starts, seed=seed, progress=report, **shared)[1.0]
    return {name: values.view(-1, count).sum(1) for name, values in by_label.items()}


def part(progress: PartProgress | None, what: str) -> Progress | None:
    """A progress callback for one part of the work; None if the caller wants none."""
    return None if progress is None else functools.partial(progress, what)


def shared_length(circuits: Circuits, block_size: int | None = None) -> int:
    """The block length that all circuits were trained for; InvalidInput if they differ.

    If the circuits fit any length, it is that of a block-causal network's blocks, or 32.
    """
    lengths = {name: circuit.window for name, circuit in circuits.items() if circuit.window is not None}
    if len(set(lengths.values())) > 1:
        raise InvalidInput(f"the circuits are for blocks of different lengths: {lengths}; measure them one by one.")
    return next(iter(lengths.values()), block_size or BLOCK_LENGTH)


def mean_interval(values: Float[Tensor, " B"], tokens: int, seed: int) -> Figures:
    """The mean per token, with its interval, of texts that have ``tokens`` tokens each."""
    each = values.numpy() / tokens
    if not np.isfinite(each).all():
        return {"mean": None, "low": None, "high": None}
    low, high = bootstrap_interval(lambda drawn: each[drawn].mean(-1), len(each), seed)
    return {"mean": float(each.mean()), "low": low, "high": high}


def closed_interval(scores: BlockScores, coupled: Float[Tensor, " B"], seed: int) -> Figures:
    """The share of the gap that a circuit closes; None where there is no gap to close."""
    gains, gaps = (coupled - scores.factorized).numpy(), (scores.sequential - scores.factorized).numpy()
    mean = summary(scores, coupled)["gap_closed"]
    if not math.isfinite(mean):
        return {"mean": None, "low": None, "high": None}

    def closed(drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        some = gaps[drawn].sum(-1)
        return np.where(some == 0, np.nan, gains[drawn].sum(-1) / np.where(some == 0, 1, some))

    low, high = (x if math.isfinite(x) else None for x in bootstrap_interval(closed, len(gains), seed))
    return {"mean": mean, "low": low, "high": high}


def _entry(
    ratio: float, scores: BlockScores, copula: Float[Tensor, " B"] | None, sequential: bool, seed: int
) -> dict[str, Any]:
    """The scores and gaps at one mask ratio, as the study stores them."""
    by_label = {"factorized": scores.factorized}
    by_label |= {f"circuit:{name}": values for name, values in scores.coupled.items()}
    by_label |= {"sequential": scores.sequential} if sequential else {}
    by_label |= {"dcd": copula} if copula is not None else {}
    return {
        "ratio": ratio,
        "tokens": scores.masked * len(scores.factorized),
        "scores": {label: mean_interval(values, scores.masked, seed) for label, values in by_label.items()},
        "gap_closed": {name: closed_interval(scores, values, seed) for name, values in scores.coupled.items()}
        if sequential
        else {},
    }


def _parts(
    model: Model,
    causal: CausalModel | None,
    corpora: Sequence[str],
    data: Path | None,
    count: int,
    *,
    prose: bool = False,
) -> tuple[Tokenizer, int]:
    """What a study needs of a model; refuses what it cannot measure before it takes time.

    A denoiser without tokenizer files, as SEDD is published, has its texts read by the causal model's tokenizer.
    """
    mask_id = model.known_mask
    tokenizer = model.tokenizer or (None if causal is None else causal.tokenizer)
    if tokenizer is None:
        raise InvalidInput("this checkpoint has no tokenizer files, so that texts cannot be read.")
    if causal is not None:
        check_same_tokens(causal.vocab_size, causal.tokenizer, model.backbone.vocab_size, mask_id, tokenizer)
    if count < 1:
        raise InvalidInput(f"a study needs at least one text of each corpus, found {count}.")
    for name in corpora:
        source = source_of(name, data)
        if prose and (source is None or source.kind != "text"):
            raise InvalidInput(
                f"{name!r} is not a corpus of this study; there are {', '.join(PROSE)}, and files of prose."
            )
        if source is not None:
            source_place(source, data or Path())
    return tokenizer, mask_id


def _settings(
    circuits: Circuits,
    causal: CausalModel | None,
    length: int,
    corpora: Sequence[str],
    seed: int,
    sequential: bool,
) -> dict[str, Any]:
    return {
        "corpora": list(corpora),
        "circuits": {name: repr(circuit) for name, circuit in circuits.items()},
        "block_length": length,
        "sequential": sequential,
        "dcd": causal is not None,
        "seed": seed,
    }


def _named(progress: PartProgress | None, where: str) -> PartProgress | None:
    """Progress with the corpus named before every part."""
    return None if progress is None else lambda what, done, total: progress(f"{where}: {what}", done, total)
