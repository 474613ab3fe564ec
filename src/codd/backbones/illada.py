"""iLLaDA: a bidirectional Llama network with its head tied to the embedding."""

from codd.backbones import layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config

NAME = "illada"
KINDS = ("illada", "ILLaDAForCausalLM")
MASK_ID = 5
"""The mask token of the published checkpoint: none of its files states it."""


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("attention_bias", "mlp_bias", "rope_scaling")
    config.absent("layer_norm_eps")  # it would mean LayerNorm with biases
    tied = config.flag("tie_word_embeddings", True)
    transformer = layouts.read_transformer(config, norm_eps=config.number("rms_norm_eps", 1e-5), tied=tied)
    return layouts.model_spec(config, NAME, transformer, mask=MASK_ID, length=8192)
