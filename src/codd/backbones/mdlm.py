"""MDLM: a network with a noise input that the published checkpoint does not use, read as a denoiser (SUBS)."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from codd.backbones import chat, dit
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config

NAME = "mdlm"
KINDS = ("mdlm",)
PREFIX = "backbone."
"""The prefix of every tensor's name in the files on the hub; those of a training run lack it."""


class MDLM(dit.NoiseConditioned):
    """Its rows are log-probabilities: of the real tokens where a position is masked, certainty where it is not."""

    def extra_inputs(
        self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None, extra: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The noise level; always 0 where the network was trained without one."""
        noise = super().extra_inputs(ids, valid, extra)
        return noise if self.spec.options["time_conditioning"] else {"sigma": torch.zeros_like(noise["sigma"])}


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    vocab = config.count("vocab_size")
    return ModelSpec(
        family=NAME,
        transformer=dit.transformer(
            vocab_size=vocab,
            width=config.count("hidden_dim"),
            layers=config.layers("n_blocks"),
            heads=config.count("n_heads"),
            conditioning=config.count("cond_dim"),
        ),
        keys=dit.KEYS,
        special=SpecialTokenIds.from_config(config, mask=vocab - 1),
        chat_template=chat.PLAIN,
        max_length=config.count("model_length", 1024),
        ignored=lambda name: name == dit.ROTARY_BUFFER,
        rename=lambda name: name.removeprefix(PREFIX),
        backbone=MDLM,
        options={"time_conditioning": config.flag("time_conditioning", False)},
    )
