"""SDAR and TraDo: a block-causal Qwen3 network, with experts or without, whose output is about its own position."""

from codd.backbones import chat, layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config
from codd.backbones.experts import ExpertsConfig

NAME = "sdar"
MIXTURES = ("sdar_moe", "SDARMoeForCausalLM")
KINDS = ("sdar", "SDARForCausalLM", *MIXTURES)
MASK_ID = 151669
"""The mask token of the published checkpoints, whose config.json does not state it."""
BLOCK_SIZE = 4
"""Positions of a block in the published checkpoints; larger blocks are in the models' names (-b8 to -b64)."""
KEYS = (*layouts.KEYS, *layouts.expert_keys())


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("attention_bias")
    block_size = config.count("block_size", BLOCK_SIZE)
    # Where a file is silent, a head has 128 columns, however wide the network is.
    head_width = config.count("head_dim", 128)
    experts = _experts(config) if config.kind(MIXTURES) else None
    transformer = layouts.read_transformer(
        config, head_width=head_width, qk_norm=True, block_size=block_size, experts=experts
    )
    return layouts.model_spec(
        config, NAME, transformer, mask=MASK_ID, length=32768, keys=KEYS, chat_template=chat.CHATML
    )


def _experts(config: Config) -> ExpertsConfig:
    """In every ``decoder_sparse_step``-th layer but those that are named."""
    config.only("norm_topk_prob", [True])
    every, plain = config.count("decoder_sparse_step", 1), config.numbers("mlp_only_layers")
    return ExpertsConfig(
        count=config.count("num_experts"),
        chosen=config.count("num_experts_per_tok"),
        width=config.count("moe_intermediate_size"),
        layers=tuple((i + 1) % every == 0 and i not in plain for i in range(config.layers("num_hidden_layers"))),
        normalised=True,
    )
