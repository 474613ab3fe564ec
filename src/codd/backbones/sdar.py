"""SDAR and TraDo: a block-causal Qwen3 network, whose output at a position predicts that position."""

from codd.backbones import chat, layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config, of_model_type

NAME = "sdar"
recognises = of_model_type("sdar")
MASK_ID = 151669
"""The mask token of the published checkpoints, whose config.json does not state it."""
BLOCK_SIZE = 4
"""Positions of a block in the published checkpoints; larger blocks are in the models' names (-b8 to -b64)."""


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.only("attention_bias", [False])
    block_size = config.count("block_size", BLOCK_SIZE)
    # Where a file is silent, a head has 128 columns, however wide the network is.
    head_width = config.count("head_dim", 128)
    transformer = layouts.read_transformer(config, head_width=head_width, qk_norm=True, block_size=block_size)
    return layouts.model_spec(config, NAME, transformer, mask=MASK_ID, length=32768, chat_template=chat.CHATML)
