"""SEDD: a network that scores how much more probable other tokens are than the present one, read as a denoiser."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones import chat, dit
from codd.backbones.backbone import ModelSpec, NetworkInputs, SpecialTokenIds
from codd.backbones.config import Config

NAME = "sedd"
KEYS = dit.KEYS


class SEDD(dit.NoiseConditioned):
    """At a masked position the score, normalised over the real tokens, is the denoiser: the noise level cancels."""

    def log_score(
        self,
        ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | Bool[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "B L V"]:
        """log p(v) - log p(present token) at each position, at the noise level ``sigma`` (above 0) or time ``t``."""
        inputs = self._prepare_inputs(ids, attention_mask, position_ids, extra)
        return self._per_sequence(self._log_score, inputs, fill_padding=True)

    def _log_score(self, inputs: NetworkInputs) -> Float[Tensor, "B L V"]:
        raw = self.network.logits(self._states(inputs)).float()
        if self.spec.options["scale_by_sigma"]:
            sigma = self.extra_inputs(inputs.ids, inputs.valid, inputs.extra)["sigma"]
            raw = raw - torch.expm1(sigma).log()[:, None, None] - math.log(self.vocab_size - 1)
        return raw.scatter(-1, inputs.ids[..., None], 0.0)


def recognises(config: Config) -> bool:
    """Whether a config.json is of this family, by the sections of its training configuration: it has no model_type."""
    return all(isinstance(config.get(name), dict) for name in ("model", "graph")) and "tokens" in config.fields


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.section("graph").only("type", ["absorb"])
    if config.get("noise") is not None:
        config.section("noise").only("type", ["loglinear"])
    model, tokens = config.section("model"), config.count("tokens")
    model.only("type", ["ddit"])
    return ModelSpec(
        family=NAME,
        transformer=dit.transformer(
            vocab_size=tokens + 1,
            width=model.count("hidden_size"),
            layers=model.layers("n_blocks"),
            heads=model.count("n_heads"),
            conditioning=model.count("cond_dim"),
        ),
        keys=KEYS,
        special=SpecialTokenIds.from_config(config, mask=tokens),
        chat_template=chat.PLAIN,
        max_length=model.count("length", 1024),
        ignored=lambda name: name == dit.ROTARY_BUFFER,
        backbone=SEDD,
        options={"scale_by_sigma": model.flag("scale_by_sigma", True)},
    )
