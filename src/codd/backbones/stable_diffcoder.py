"""Stable-DiffCoder: a block-causal Llama network, whose output at a position predicts that position."""

from codd.backbones import layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config

NAME = "stable_diffcoder"
KINDS = ("StableDiffcoderForCausalLM",)
"""Its model_type is Llama's."""
MASK_ID = 5
BLOCK_SIZE = 4
"""Mask and block of the published checkpoints, which their files do not state."""


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("attention_bias", "mlp_bias")
    transformer = layouts.read_transformer(config, block_size=config.count("block_size", BLOCK_SIZE))
    return layouts.model_spec(config, NAME, transformer, mask=MASK_ID, length=8192)
