"""LLaDA2.0 and 2.1: a block-causal network of experts in groups, with a fused attention projection."""

from dataclasses import replace

from codd.backbones import layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config
from codd.backbones.experts import ExpertsConfig
from codd.backbones.weights import Key

NAME = "llada2"
KINDS = ("llada2_moe", "LLaDA2MoeModelLM")
MASK_ID = 156895
"""The mask token of the published checkpoints: their config.json does not state it."""
BLOCK_SIZE = 32

_ATTENTION, _OURS = "model.layers.{i}.attention.", "blocks.{i}.attention."
KEYS = (
    Key("model.word_embeddings.weight", "embedding.tokens.weight"),
    Key("model.layers.{i}.input_layernorm.weight", "blocks.{i}.attention_norm.weight"),
    Key(_ATTENTION + "query_key_value.weight", _OURS + "qkv.weight"),
    Key(_ATTENTION + "query_layernorm.weight", _OURS + "q_norm.weight"),
    Key(_ATTENTION + "key_layernorm.weight", _OURS + "k_norm.weight"),
    Key(_ATTENTION + "dense.weight", _OURS + "out.weight"),
    Key("model.layers.{i}.post_attention_layernorm.weight", "blocks.{i}.mlp_norm.weight"),
    Key("model.norm.weight", "final_norm.weight"),
    *layouts.MLPS,
    *layouts.expert_keys(),
    layouts.HEAD,
)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("use_bias", "use_qkv_bias", "norm_head", "norm_softmax", "using_split_qkv_in_self_attention")
    config.only("use_qk_norm", [True])
    config.only("score_function", ["sigmoid"])
    layers, width = config.layers("num_hidden_layers"), config.count("moe_intermediate_size")
    dense, shared = config.count("first_k_dense_replace", 0, least=0), config.count("num_shared_experts", 0, least=0)
    groups = config.count("n_group", 1)
    experts = ExpertsConfig(
        count=config.count("num_experts"),
        chosen=config.count("num_experts_per_tok"),
        width=width,
        layers=tuple(i >= dense for i in range(layers)),
        score="sigmoid",
        bias=config.flag("moe_router_enable_expert_bias", True),
        groups=groups,
        kept_groups=config.count("topk_group", groups),
        scale=config.number("routed_scaling_factor", 1.0),
        shared_width=width * shared,
    )
    transformer = layouts.read_transformer(
        config,
        qk_norm=True,
        rotary_width=config.rotary_width(),
        block_size=config.count("block_size", BLOCK_SIZE),
        experts=experts,
    )
    spec = layouts.model_spec(config, NAME, transformer, mask=MASK_ID, length=16384, keys=KEYS)
    if spec.special.eos is None:  # the files have it as the padding
        spec = replace(spec, special=replace(spec.special, eos=spec.special.pad))
    return spec
