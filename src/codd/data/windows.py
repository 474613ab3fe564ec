"""Windows for circuits: rows are masked, windows chosen in them, and the network evaluated there."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from pydantic.dataclasses import dataclass
from torch import Tensor

from codd.backbones import mini
from codd.backbones.backbone import Backbone, take_positions
from codd.circuits.evidence import Evidence, SparsePotentials
from codd.data.noise import NoiseRecipe, add_noise, positions_in
from codd.data.packing import PADDING, PackedSequences, SequenceDataset
from codd.errors import InvalidInput
from codd.validation import BetweenZeroAndOne, Count, Section, Share

CPU = torch.device("cpu")
ROWS_AT_ONCE = 1024
"""Rows that are looked through at a time for one that holds a window."""


@dataclass(frozen=True)
class WindowRecipe(Section):
    """Which windows a circuit is trained on."""

    length: Count = 32
    per_row: Count = 2
    """An upper bound on the windows per row."""
    block_share: Share = 0.5
    """Share of rows with one partly masked block a text, given what is left of it; the others are masked anywhere."""
    minimum: BetweenZeroAndOne = 1e-3
    """The smallest masking probability."""


class WindowBatch(NamedTuple):
    """W windows of S positions with what the network says about them: what a circuit is trained and scored on."""

    tokens: Int[Tensor, "W S"]
    """The true tokens, also where they are masked."""
    masked: Bool[Tensor, "W S"]
    """A window that is there only to fill the batch has none."""
    logits: Float[Tensor, "W S V"] | None = None
    """The network's, with the mask excluded; None if they come as ``sparse``."""
    sparse: SparsePotentials | None = None
    """The largest of its probabilities: what a cache keeps."""
    features: Float[Tensor, "W S d"] | None = None
    """The network's last states, for circuits that are modulated."""
    level: Float[Tensor, " W"] | None = None
    """t, the probability with which the tokens were masked."""

    def evidence(
        self,
        latent_log_potentials: Float[Tensor, "W S N"] | None = None,
        step_log_gates: Float[Tensor, "W T R"] | None = None,
    ) -> Evidence:
        """The observed tokens, and the network's distribution of each masked one."""
        return Evidence(
            tokens=torch.where(self.masked, 0, self.tokens),
            observed=~self.masked,
            logits=self.logits,
            sparse=self.sparse,
            latent_log_potentials=latent_log_potentials,
            step_log_gates=step_log_gates,
        )

    def factorized_log_prob(self) -> Float[Tensor, " W"]:
        """The log-probability of the masked tokens of each window under the network alone, each token for itself."""
        if self.sparse is not None:
            hit = self.sparse.ids == self.tokens[..., None]  # the truth is always listed
            truth = torch.where(hit, self.sparse.log_weights, -torch.inf).amax(-1)
        else:
            assert self.logits is not None
            truth = self.logits.log_softmax(-1).gather(-1, self.tokens[..., None])[..., 0]
        return torch.where(self.masked, truth, 0).sum(-1)


class MaskedRows(NamedTuple):
    """B rows of L tokens with masks, and k windows chosen in each."""

    tokens: Int[Tensor, "B L"]
    segments: Int[Tensor, "B L"]
    hidden: Bool[Tensor, "B L"]
    """Which tokens the network sees as masks."""
    first: Int[Tensor, "B k"]
    """The first positions of the windows."""
    valid: Bool[Tensor, "B k"]
    """False for the fillers of a row with fewer than k windows."""
    level: Float[Tensor, "B k"]
    """The masking probability in each window, fillers included."""

    def each(self, function: Callable[[Tensor], Tensor]) -> "MaskedRows":
        """Apply a function to every tensor."""
        return MaskedRows(*map(function, self))


def choose_windows(
    rows: PackedSequences, recipe: WindowRecipe, generator: torch.Generator, *, absolute: bool
) -> MaskedRows:
    """Mask rows and choose windows in them, on the generator's device; ``absolute`` as for `mask_rows`."""
    tokens, segments, scored = rows.tensors(generator.device)
    texts = int(rows.segments.max()) + 1
    hidden, candidates, level = mask_rows(segments, scored, texts, recipe, generator, absolute=absolute)
    first, valid = sample_starts(candidates, recipe.per_row, generator)
    levels = gather_windows(level, first, recipe.length).amax(-1).view_as(first)
    return MaskedRows(tokens, segments, hidden, first, valid, levels)


def draw_windows(
    backbone: Backbone, mask_id: int, rows: PackedSequences, recipe: WindowRecipe, generator: torch.Generator
) -> WindowBatch:
    """Mask the rows, choose windows, evaluate the network. Nothing here waits for the device."""
    drawn = choose_windows(rows, recipe, generator, absolute=backbone.block_size is not None)
    return predict_windows(backbone, mask_id, drawn, recipe.length)


def mask_rows(
    segments: Int[Tensor, "B L"],
    scored: Bool[Tensor, "B L"],
    texts: int,
    recipe: WindowRecipe,
    generator: torch.Generator,
    *,
    absolute: bool = False,
) -> tuple[Bool[Tensor, "B L"], Bool[Tensor, "B n"], Float[Tensor, "B L"]]:
    """What is hidden, where windows may begin (in some rows on a grid, in others at the noised block of a text), and
    the masking probability of each masked token that is to be predicted, 0 elsewhere.

    ``absolute``: windows begin where the blocks of a block-causal network do, counted from a text's first token.
    """
    size = recipe.length
    anywhere, in_block = (
        add_noise(
            segments,
            scored,
            texts,
            NoiseRecipe(minimum=recipe.minimum, block_share=share, block_length=size, block_weight=1.0),
            generator,
            absolute=absolute,
        )
        for share in (0.0, 1.0)
    )
    blockwise = torch.rand(len(segments), 1, generator=generator, device=segments.device) < recipe.block_share
    hidden = torch.where(blockwise, in_block.hidden, anywhere.hidden)
    weights = torch.where(blockwise, in_block.weights, anywhere.weights)
    asked = weights > 0
    inside = _inside(segments, scored, asked, size)
    blocks = _block_ends(segments, hidden & ~asked)[:, size - 1 :]
    grid = _grid(segments, scored, size, generator, absolute)
    if absolute:  # the last block of a text may be cut, and its window begin left of it
        blocks = blocks & grid
    candidates = torch.where(blockwise, blocks, grid) & inside
    return hidden, candidates, torch.where(asked, 1 / weights, 0)


def _inside(
    segments: Int[Tensor, "B L"], scored: Bool[Tensor, "B L"], asked: Bool[Tensor, "B L"], size: int
) -> Bool[Tensor, "B n"]:
    """Where a window may begin so that it lies inside the scored tokens of one text and has one that is predicted."""
    length = segments.shape[1]
    if length < size:
        raise InvalidInput(f"rows of {length} tokens hold no window of {size}. Use longer rows.")
    one_text = segments[:, : length - size + 1] == segments[:, size - 1 :]
    whole = (scored & (segments != PADDING)).unfold(1, size, 1).all(-1)
    return one_text & whole & asked.unfold(1, size, 1).any(-1)


def _grid(
    segments: Int[Tensor, "B L"], scored: Bool[Tensor, "B L"], size: int, generator: torch.Generator, absolute: bool
) -> Bool[Tensor, "B n"]:
    """Non-overlapping window starts: aligned to the answer, randomly offset for prose; or all to the text."""
    rank = positions_in(2 * segments + scored)  # of a scored token among those of its text
    prose = rank == positions_in(segments)
    phase = torch.randint(size, (len(segments), 1), generator=generator, device=segments.device)
    at = positions_in(segments) if absolute else rank + phase * prose
    return (at % size == 0)[:, : segments.shape[1] - size + 1]


def _block_ends(segments: Int[Tensor, "B L"], beyond: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """The last token of each noised block: what follows is masked without being predicted, or another text.

    The first block of a prose may be cut by the beginning of the row, and then has no window.
    """
    ends = ~beyond
    ends[:, :-1] &= beyond[:, 1:] | (segments[:, 1:] != segments[:, :-1])
    return ends


def sample_starts(
    candidates: Bool[Tensor, "B n"], most: int, generator: torch.Generator
) -> tuple[Int[Tensor, "B k"], Bool[Tensor, "B k"]]:
    """Up to ``most`` random windows of each row, without replacement: where they begin, and which are no fillers."""
    keys = torch.rand(candidates.shape, generator=generator, device=candidates.device)
    best = torch.where(candidates, keys, -1.0).topk(min(most, candidates.shape[1]), dim=1)
    return best.indices, best.values >= 0


def window_positions(first: Int[Tensor, "B k"], size: int) -> Int[Tensor, "B m"]:
    """The positions of windows of ``size`` tokens, one window after the other."""
    return (first[..., None] + torch.arange(size, device=first.device)).flatten(1)


def gather_windows(x: Shaped[Tensor, "B L"], first: Int[Tensor, "B k"], size: int) -> Shaped[Tensor, "W S"]:
    """The values of rows in windows of ``size`` tokens."""
    return x.gather(1, window_positions(first, size)).reshape(-1, size)


def supports_packing(backbone: Backbone) -> bool:
    """Whether rows may hold several texts: mini takes segment numbers, other families do not."""
    return backbone.family == mini.NAME


def window_states(backbone: Backbone, mask_id: int, rows: MaskedRows, size: int) -> Float[Tensor, "B m d"]:
    """The network's last hidden states in the windows. On a GPU its layers compute in bfloat16.

    Mini takes the segment numbers as they are, and nothing waits for the device. Other families get one text a row.
    """
    shown, device = torch.where(rows.hidden, mask_id, rows.tokens), rows.tokens.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        if supports_packing(backbone):
            states = backbone.network.states(shown, positions_in(rows.segments), segments=rows.segments)
        else:
            used = int((rows.segments != PADDING).sum(-1).max())  # what is padding in all rows is not evaluated
            states = backbone.states(shown[:, :used], rows.segments[:, :used] != PADDING)
    places = window_positions(rows.first, size).clamp(max=states.shape[1] - 1)  # of fillers: a window is no padding
    return take_positions(states, places).to(backbone.dtype)


def predict_windows(backbone: Backbone, mask_id: int, rows: MaskedRows, size: int) -> WindowBatch:
    """Logits and states in the windows. The head, evaluated there alone, keeps the weights' own precision."""
    states = window_states(backbone, mask_id, rows, size)
    tokens, hidden = (gather_windows(x, rows.first, size) for x in (rows.tokens, rows.hidden))
    shown = torch.where(hidden, mask_id, tokens).view(states.shape[:2])
    logits = backbone.masked_logits_from_states(states, shown, mask_id=mask_id)
    logits, features = (x.reshape(-1, size, x.shape[-1]) for x in (logits, states))
    return WindowBatch(
        tokens, hidden & rows.valid.view(-1, 1), logits=logits, features=features, level=rows.level.flatten()
    )


def check_lengths(name: str, rows: SequenceDataset, size: int, *, absolute: bool = False) -> None:
    """Refuse a source whose texts are all shorter than a window: nothing of it would be trained on.

    ``absolute`` as for `mask_rows`.
    """
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        _, segments, scored = rows.take(begin, min(ROWS_AT_ONCE, len(rows) - begin)).tensors(CPU)
        inside = _inside(segments, scored, scored, size)
        if absolute:
            inside &= positions_in(segments)[:, : inside.shape[1]] % size == 0
        if bool(inside.any()):
            return
    raise InvalidInput(
        f"source {name}: none of the texts in its {len(rows)} rows has the {size} tokens of a window, so that nothing "
        "of it would be trained on: choose shorter windows, or give longer texts."
    )


def sample_blocks(
    rows: PackedSequences, size: int, generator: torch.Generator, *, absolute: bool = False
) -> tuple[Int[Tensor, "B 1"], Bool[Tensor, "B 1"], Int[Tensor, "B S"]]:
    """Where a block of each row begins, whether it has one, and the order in which its tokens are masked.

    ``absolute`` as for `mask_rows`.
    """
    tokens, segments, scored = rows.tensors(CPU)
    blocks = _grid(segments, scored, size, generator, absolute) & _inside(segments, scored, scored, size)
    first, valid = sample_starts(blocks, 1, generator)
    return first, valid, torch.rand(len(tokens), size, generator=generator).argsort(dim=1)
