"""A backbone, its circuit and its tokenizer under one name."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from codd.backbones import Backbone, Tokenizer, load_checkpoint
from codd.circuits import HMM
from codd.errors import InvalidInput

CIRCUIT_FOLDER = "circuit"
"""Where a checkpoint keeps the circuit that belongs to it."""


@dataclass(frozen=True)
class Model:
    """What `load` gives."""

    backbone: Backbone
    circuit: HMM | None
    tokenizer: Tokenizer | None
    """None where the checkpoint has none: give ids then."""
    mask_id: int | None


def load(
    source: str | os.PathLike[str] | None = None,
    circuit: str | os.PathLike[str] | HMM | Literal["auto", "null"] | None = "auto",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    mask_id: int | None = None,
    check: bool = False,
) -> Model:
    """Load a checkpoint of any known family with its circuit; without ``source``, the bundled model.

    ``source``: a folder or a hub id. ``circuit``: a folder, a hub id or a circuit; "null" for the circuit that changes
    nothing, None for none, "auto" for the one in the checkpoint's own folder, if any. ``device`` and ``dtype``: by
    default a GPU if there is one, and float32 on the CPU. ``mask_id``: for masked language models whose files do not
    say. ``check`` refuses weights with NaN.
    """
    backbone, tokenizer, folder = load_checkpoint(source, device=device, dtype=dtype, revision=revision, check=check)
    if mask_id is None:
        mask_id = backbone.special.mask
    if mask_id is None and tokenizer is not None:
        mask_id = tokenizer.mask_id
    if mask_id is not None and not 0 <= mask_id < backbone.vocab_size:
        raise InvalidInput(f"mask_id {mask_id} is not one of the {backbone.vocab_size} tokens of the model.")
    return Model(backbone, _circuit(circuit, backbone, folder), tokenizer, mask_id)


def _circuit(wanted: str | os.PathLike[str] | HMM | None, backbone: Backbone, folder: Path) -> HMM | None:
    if wanted is None or (wanted == "auto" and not (folder / CIRCUIT_FOLDER).is_dir()):
        return None
    if isinstance(wanted, HMM):
        found = wanted
    elif wanted == "null":
        found = HMM.neutral(num_states=1, vocab_size=backbone.vocab_size)
    else:
        found = HMM.load(folder / CIRCUIT_FOLDER if wanted == "auto" else wanted)
    if found.vocab_size != backbone.vocab_size:
        raise InvalidInput(
            f"the circuit is over {found.vocab_size} tokens, the model over {backbone.vocab_size}: they do not belong "
            "together."
        )
    return found.to(device=backbone.device)
