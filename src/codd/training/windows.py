"""Windows as a circuit meets them: rows are masked, windows chosen in them, and the network is asked."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from codd.backbones import mini
from codd.backbones.backbone import Backbone, take_positions
from codd.circuits.evidence import Evidence, SparsePotentials
from codd.errors import InvalidInput
from codd.training.noise import add_noise, positions_in
from codd.training.objective import to_tensors
from codd.training.recipe import NoiseRecipe
from codd.training.rows import PADDING, Rows

CPU = torch.device("cpu")


@dataclass(frozen=True)
class WindowRecipe:
    """Which windows a circuit is trained on."""

    length: int = 32
    per_row: int = 2
    """At most so many of each row."""
    block_share: float = 0.5
    """Share of rows with one partly masked block a text, given what is left of it; the others are masked anywhere."""
    minimum: float = 1e-3
    """The smallest masking probability."""


class Windows(NamedTuple):
    """Some windows as the circuit meets them."""

    tokens: Int[Tensor, "W S"]
    """The truth, masked or not."""
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
        """What is known: observed tokens, and the network's opinion of the masked ones."""
        return Evidence(
            tokens=torch.where(self.masked, 0, self.tokens),
            observed=~self.masked,
            logits=self.logits,
            sparse=self.sparse,
            latent_log_potentials=latent_log_potentials,
            step_log_gates=step_log_gates,
        )


class Shown(NamedTuple):
    """Rows, and what of them is hidden from the network."""

    tokens: Int[Tensor, "B L"]
    segments: Int[Tensor, "B L"]
    hidden: Bool[Tensor, "B L"]


class Places(NamedTuple):
    """Windows of rows."""

    starts: Int[Tensor, "B k"]
    useful: Bool[Tensor, "B k"]
    """A row with fewer windows than asked for is filled up."""


class Masked(NamedTuple):
    """Rows after noise."""

    hidden: Bool[Tensor, "B L"]
    may_begin: Bool[Tensor, "B n"]
    """Where windows may begin."""
    level: Float[Tensor, "B L"]
    """The masking probability of each hidden token that is asked; 0 elsewhere."""


def draw_windows(
    backbone: Backbone, mask_id: int, rows: Rows, recipe: WindowRecipe, generator: torch.Generator
) -> Windows:
    """Mask the rows, choose windows, ask the network. Nothing here waits for the device."""
    tokens, segments, scored = to_tensors(rows, CPU)
    if generator.device.type == "cuda":  # a copy from memory that is not pinned may wait
        tokens, segments, scored = (
            x.pin_memory().to(generator.device, non_blocking=True) for x in (tokens, segments, scored)
        )
    absolute = backbone.block_size is not None
    found = mask_rows(segments, scored, int(rows.segments.max()) + 1, recipe, generator, absolute=absolute)
    places = pick(found.may_begin, recipe.per_row, generator)
    windows = look(backbone, mask_id, Shown(tokens, segments, found.hidden), places, recipe.length)
    return windows._replace(level=cut(found.level, places, recipe.length).amax(-1))


def mask_rows(
    segments: Int[Tensor, "B L"],
    scored: Bool[Tensor, "B L"],
    texts: int,
    recipe: WindowRecipe,
    generator: torch.Generator,
    *,
    absolute: bool = False,
) -> Masked:
    """What is hidden, and where windows may begin: in some rows on a grid, in others at the noised block of a text.

    ``absolute``: where those of a block-causal network begin, counted from a text's first token.
    """
    size = recipe.length
    _check_length(segments.shape[1], size)
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
    blocks = _block_ends(segments, hidden & ~asked)[:, size - 1 :]
    grid = _grid(segments, scored, size, generator, absolute)
    if absolute:  # the last block of a text may be cut, and its window begin left of it
        blocks = blocks & grid
    may_begin = torch.where(blockwise, blocks, grid) & _inside(segments, scored, asked, size)
    return Masked(hidden, may_begin, torch.where(asked, 1 / weights, 0))


def _check_length(length: int, size: int) -> None:
    if length < size:
        raise InvalidInput(f"rows of {length} tokens hold no window of {size}. Use longer rows.")


def _inside(
    segments: Int[Tensor, "B L"], scored: Bool[Tensor, "B L"], asked: Bool[Tensor, "B L"], size: int
) -> Bool[Tensor, "B n"]:
    """Where a window may begin so that it lies inside the scored tokens of one text and something in it is asked."""
    length = segments.shape[1]
    _check_length(length, size)
    one_text = segments[:, : length - size + 1] == segments[:, size - 1 :]
    whole = (scored & (segments != PADDING)).unfold(1, size, 1).all(-1)
    return one_text & whole & asked.unfold(1, size, 1).any(-1)


def _grid(
    segments: Int[Tensor, "B L"], scored: Bool[Tensor, "B L"], size: int, generator: torch.Generator, absolute: bool
) -> Bool[Tensor, "B n"]:
    """Beginnings side by side: an answer's from where it begins, those of a prose from anywhere; or all absolute."""
    rank = positions_in(2 * segments + scored)  # of a scored token among those of its text
    prose = rank == positions_in(segments)
    phase = torch.randint(size, (len(segments), 1), generator=generator, device=segments.device)
    at = positions_in(segments) if absolute else rank + phase * prose
    return (at % size == 0)[:, : segments.shape[1] - size + 1]


def _block_ends(segments: Int[Tensor, "B L"], beyond: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """The last token of the noised block: what follows is hidden without being asked, or another text.

    The first block of a prose, cut by the row's beginning, is so without a window.
    """
    ends = ~beyond
    ends[:, :-1] &= beyond[:, 1:] | (segments[:, 1:] != segments[:, :-1])
    return ends


def pick(may_begin: Bool[Tensor, "B n"], most: int, generator: torch.Generator) -> Places:
    """Windows of each row by chance."""
    keys = torch.rand(may_begin.shape, generator=generator, device=may_begin.device)
    best = torch.where(may_begin, keys, -1.0).topk(min(most, may_begin.shape[1]), dim=1)
    return Places(best.indices, best.values >= 0)


def positions_of(places: Places, size: int) -> Int[Tensor, "B m"]:
    """The positions of some windows, one after the other."""
    steps = torch.arange(size, device=places.starts.device)
    return (places.starts[..., None] + steps).flatten(1)


def cut(x: Shaped[Tensor, "B L"], places: Places, size: int) -> Shaped[Tensor, "W S"]:
    """What rows hold in some windows."""
    return x.gather(1, positions_of(places, size)).reshape(-1, size)


def keeps_texts_apart(backbone: Backbone) -> bool:
    """Whether rows may hold several texts: mini is told which positions belong together, other families are not."""
    return backbone.family == mini.NAME


def see(backbone: Backbone, mask_id: int, rows: Shown, places: Places, size: int) -> Float[Tensor, "B m d"]:
    """The network's last states in some windows. On a GPU its layers compute in bfloat16.

    To mini the numbers of texts go as they are, and nothing waits for the device. Other families see one text a row,
    and what they make of it (a shift, a noise level) is their own affair.
    """
    tokens, segments, hidden = rows
    shown, device = torch.where(hidden, mask_id, tokens), tokens.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        if keeps_texts_apart(backbone):
            states = backbone.network.states(shown, positions_in(segments), segments=segments)
        else:
            states = backbone.states(shown, segments != PADDING, fill_padding=False)
    return take_positions(states, positions_of(places, size)).to(backbone.dtype)


def look(backbone: Backbone, mask_id: int, rows: Shown, places: Places, size: int) -> Windows:
    """What the network says in some windows. Its head, in these places alone, keeps the weights' own precision."""
    tokens, _, hidden = rows
    states = see(backbone, mask_id, rows, places, size)
    at = positions_of(places, size)
    shown = torch.where(hidden, mask_id, tokens).gather(1, at)
    logits = backbone.masked_logits_from_states(states, shown, mask_id=mask_id)
    masked = hidden.gather(1, at) & places.useful.repeat_interleave(size, dim=1)
    truth, masked, logits, features = (
        x.reshape(-1, size, *x.shape[2:]) for x in (tokens.gather(1, at), masked, logits, states)
    )
    return Windows(truth, masked, logits=logits, features=features)


def held_out_blocks(
    rows: Rows, size: int, generator: torch.Generator, *, absolute: bool = False
) -> tuple[tuple[Tensor, Tensor, Tensor], Places, Int[Tensor, "B S"]]:
    """Tokens, segments and scored of some rows, one block of each, and the order in which its tokens are masked.

    ``absolute`` as for `mask_rows`.
    """
    tokens, segments, scored = to_tensors(rows, CPU)
    blocks = _grid(segments, scored, size, generator, absolute) & _inside(segments, scored, scored, size)
    places = pick(blocks, 1, generator)
    return (tokens, segments, scored), places, torch.rand(len(tokens), size, generator=generator).argsort(dim=1)


def mask_block(
    segments: Int[Tensor, "B L"], scored: Bool[Tensor, "B L"], starts: Int[Tensor, "B 1"], chosen: Bool[Tensor, "B S"]
) -> Bool[Tensor, "B L"]:
    """Hide the chosen tokens of a block and all of its text to its right."""
    places = torch.arange(segments.shape[1])
    right = (places >= starts + chosen.shape[1]) & (segments == segments.gather(1, starts)) & scored
    return right.scatter(1, starts + torch.arange(chosen.shape[1]), chosen)
