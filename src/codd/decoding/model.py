"""A backbone, its circuit and its tokenizer under one name."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from codd.backbones import Backbone, Tokenizer, load_checkpoint
from codd.circuits import HMM, Circuit, Modulated, load_circuit
from codd.decoding.course import Course, begin
from codd.decoding.loop import Step, denoise
from codd.decoding.options import Keywords, Options
from codd.decoding.prompts import Prompts, encode_prompts
from codd.errors import InvalidInput

CIRCUIT_FOLDERS = {"auto": "circuit", "static": "circuit-static"}
"""Where a checkpoint keeps the circuits that belong to it: its best one, and the best that no network modulates."""
TURN_ENDS = ("<|eot_id|>", "<|im_end|>")
"""What instructed models write at the end of an answer, beside their end-of-text."""


AnyCircuit = HMM | Circuit | Modulated
Wanted = str | os.PathLike[str] | AnyCircuit | Literal["auto", "static", "null"] | None
"""How a circuit is named: see `load`."""


class _Told(TypedDict):
    mask_id: int
    circuit: AnyCircuit | None
    stop_ids: frozenset[int]


@dataclass(frozen=True, eq=False)
class Generation:
    """What `Model.generate` gives, an entry for each prompt."""

    texts: list[str] | None
    """The continuation; where the prompt had masks, the whole text. None if the model has no tokenizer."""
    sequences: list[Int[Tensor, "..."]]
    """Prompt and continuation, up to and including the end-of-text."""
    prompt_lengths: list[int]
    steps: list[int]
    """Evaluations of the network."""

    @property
    def completions(self) -> list[Int[Tensor, "..."]]:
        """The sequences without their prompts."""
        return [ids[length:] for ids, length in zip(self.sequences, self.prompt_lengths, strict=True)]


@dataclass(frozen=True)
class Model:
    """What `load` gives."""

    backbone: Backbone
    circuit: AnyCircuit | None
    tokenizer: Tokenizer | None
    """None where the checkpoint has none: give ids then."""
    mask_id: int | None
    folder: Path | None = None
    """Where it was loaded from."""

    def with_circuit(self, circuit: Wanted) -> "Model":
        """The same network with another circuit, named as for `load`; the weights are shared."""
        return replace(self, circuit=_circuit(circuit, self.backbone, self.folder))

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        found = {self.backbone.special.eos}
        if self.tokenizer is not None:
            found |= {self.tokenizer.eos_id, *map(self.tokenizer.token_to_id, TURN_ENDS)}
        return frozenset(token for token in found if token is not None)

    def encode(self, prompts: Prompts, *, gen_length: int = 128, chat: bool | None = None) -> list[list[int]]:
        """The ids that `generate` makes of its prompts."""
        return encode_prompts(prompts, self.tokenizer, chat=chat, whole=gen_length == 0)

    def denoise(self, prompts: Prompts, *, chat: bool | None = None, **options: Unpack[Keywords]) -> Iterator[Step]:
        """The run of `generate` as a stream of steps: each is one evaluation of the network for one prompt."""
        chosen = Options.of(**options)
        ids = self.encode(prompts, gen_length=chosen.gen_length, chat=chat)
        return denoise(self.backbone, ids, chosen, **self._told())

    def begin(self, ids: Sequence[Sequence[int]], options: Options) -> list[Course]:
        """The sequences of a run before their first step, checked: for those who take the steps themselves."""
        return begin(self.backbone, ids, options, **self._told())

    def _told(self) -> _Told:
        """What the loop must know of a model beside its network."""
        if self.mask_id is None:
            raise InvalidInput("this checkpoint does not say which token is the mask: codd.load(..., mask_id=...).")
        return {"mask_id": self.mask_id, "circuit": self.circuit, "stop_ids": self.stop_ids}

    def generate(self, prompts: Prompts, *, chat: bool | None = None, **options: Unpack[Keywords]) -> Generation:
        """Answer prompts: a text, a list of texts, of id lists, or of conversations; `Options` says what may be given.

        ``chat``: whether a text is put into the model's chat template; by default if it has one, unless the text has
        masks to be filled. ``gen_length`` (128) masks follow every prompt; masks in the prompt are filled first.
        """
        chosen = Options.of(**options)
        ids = self.encode(prompts, gen_length=chosen.gen_length, chat=chat)
        sequences = [torch.tensor(prompt, dtype=torch.long) for prompt in ids]
        steps = [0] * len(ids)
        for step in self.denoise(ids, **options):
            sequences[step.sequence] = step.ids
            steps[step.sequence] += 1
        texts = None
        if self.tokenizer is not None:
            texts = [self.text(found, prompt) for found, prompt in zip(sequences, ids, strict=True)]
        return Generation(texts, sequences, list(map(len, ids)), steps)

    def text(self, sequence: Int[Tensor, " L"], prompt: Sequence[int]) -> str:
        """What a reader wants to see of a sequence: the continuation, or all of it if the prompt had masks."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(sequence if self.mask_id in prompt else sequence[len(prompt) :])


def load(
    source: str | os.PathLike[str] | None = None,
    circuit: Wanted = "auto",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    mask_id: int | None = None,
    check: bool = False,
) -> Model:
    """Load a checkpoint of any known family with its circuit; without ``source``, the bundled model.

    ``source``: a folder or a hub id. ``circuit``: a folder, a hub id or a circuit; "null" for the circuit that changes
    nothing, None for none, "auto" for the one in the checkpoint's own folder (circuit/), if any, "static" for the one
    beside it that is not modulated by the network (circuit-static/). ``device`` and ``dtype``: by default a GPU if
    there is one, and float32 on the CPU. ``mask_id``: for masked language models whose files do not say. ``check``
    refuses weights with NaN.
    """
    backbone, tokenizer, folder = load_checkpoint(source, device=device, dtype=dtype, revision=revision, check=check)
    if mask_id is None:
        mask_id = backbone.special.mask
    if mask_id is None and tokenizer is not None:
        mask_id = tokenizer.mask_id
    if mask_id is not None and not 0 <= mask_id < backbone.vocab_size:
        raise InvalidInput(f"mask_id {mask_id} is not one of the {backbone.vocab_size} tokens of the model.")
    return Model(backbone, _circuit(circuit, backbone, folder), tokenizer, mask_id, folder)


def _circuit(wanted: Wanted, backbone: Backbone, folder: Path | None) -> AnyCircuit | None:
    if wanted is None or (wanted == "auto" and not (folder and (folder / CIRCUIT_FOLDERS["auto"]).is_dir())):
        return None
    found: AnyCircuit
    if isinstance(wanted, AnyCircuit):
        found = wanted
    elif wanted == "null":
        found = HMM.neutral(num_states=1, vocab_size=backbone.vocab_size)
    else:
        found = load_circuit(_beside(wanted, folder) if wanted in CIRCUIT_FOLDERS else wanted)
    _check_fits(found, backbone)
    return found if isinstance(found, Circuit) else found.to(device=backbone.device)


def _beside(name: object, folder: Path | None) -> Path:
    """Where one of a checkpoint's own circuits is."""
    if folder is None:
        raise InvalidInput(f"this model was not loaded from a folder, so that there is no circuit {name!r} beside it.")
    found = folder / CIRCUIT_FOLDERS[str(name)]
    if not found.is_dir():
        raise InvalidInput(
            f"{folder}: has no folder {found.name}/, so that there is no circuit {name!r}; give the folder of another, "
            '"auto", "null" or None.'
        )
    return found


def _check_fits(circuit: AnyCircuit, backbone: Backbone) -> None:
    if circuit.vocab_size != backbone.vocab_size:
        raise InvalidInput(
            f"the circuit is over {circuit.vocab_size} tokens, the model over {backbone.vocab_size}: they do not "
            "belong together."
        )
    width = backbone.config.width
    if isinstance(circuit, Modulated) and circuit.feature_width != width:
        raise InvalidInput(
            f"the circuit listens to hidden states of {circuit.feature_width} numbers, those of the model have "
            f"{width}: they do not belong together."
        )
