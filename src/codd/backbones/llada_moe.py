"""LLaDA-MoE: a bidirectional network of experts whose router weighs them by biased probabilities."""

from codd.backbones import layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config
from codd.backbones.experts import ExpertsConfig

NAME = "llada_moe"
KINDS = ("LLaDAMoEModelLM", "lladamoe")
"""Its model_type is usually LLaDA's."""
MASK_ID = 156895
"""The mask token of the published checkpoints: their config.json does not state it."""
KEYS = (*layouts.KEYS, *layouts.expert_keys(shared="shared_expert", bias="mlp.expert_bias"))


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("attention_bias")
    layers = config.layers("num_hidden_layers")
    # The other router fields (renormalisation, scaling, groups) are in the files, but no published code heeds them.
    experts = ExpertsConfig(
        count=config.count("num_experts"),
        chosen=config.count("num_experts_per_tok"),
        width=config.count("expert_intermediate_size"),
        layers=config.layer_flags("moe_layer_freq", layers),
        bias=config.flag("moe_router_enable_expert_bias", False),
        shared_width=config.count("shared_expert_intermediate_size", 0, least=0),
    )
    transformer = layouts.read_transformer(
        config,
        mlp_width=config.count("dense_intermediate_size", 1),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qk_norm=config.flag("qk_layernorm", False),
        clip_qkv=None if config.get("clip_qkv") is None else config.number("clip_qkv"),
        rotary_width=config.rotary_width(),
        experts=experts,
    )
    return layouts.model_spec(config, NAME, transformer, mask=MASK_ID, length=8192, keys=KEYS)
