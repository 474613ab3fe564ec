"""Dream: a bidirectional Qwen2 network whose output at a position predicts the token after it."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from codd.backbones import chat
from codd.backbones.backbone import Backbone, ModelSpec, SpecialTokenIds, leading_padding
from codd.backbones.config import Config
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key

NAME = "dream"

_LAYER = "model.layers.{i}."
KEYS = (
    Key("model.embed_tokens.weight", "embedding.tokens.weight"),
    Key(_LAYER + "input_layernorm.weight", "blocks.{i}.attention_norm.weight"),
    Key(_LAYER + "self_attn.q_proj.weight", "blocks.{i}.attention.qkv.weight", rows="q"),
    Key(_LAYER + "self_attn.k_proj.weight", "blocks.{i}.attention.qkv.weight", rows="k"),
    Key(_LAYER + "self_attn.v_proj.weight", "blocks.{i}.attention.qkv.weight", rows="v"),
    Key(_LAYER + "self_attn.q_proj.bias", "blocks.{i}.attention.qkv.bias", rows="q"),
    Key(_LAYER + "self_attn.k_proj.bias", "blocks.{i}.attention.qkv.bias", rows="k"),
    Key(_LAYER + "self_attn.v_proj.bias", "blocks.{i}.attention.qkv.bias", rows="v"),
    Key(_LAYER + "self_attn.o_proj.weight", "blocks.{i}.attention.out.weight"),
    Key(_LAYER + "post_attention_layernorm.weight", "blocks.{i}.mlp_norm.weight"),
    Key(_LAYER + "mlp.gate_proj.weight", "blocks.{i}.mlp.up.weight", rows="gate"),
    Key(_LAYER + "mlp.up_proj.weight", "blocks.{i}.mlp.up.weight", rows="up"),
    Key(_LAYER + "mlp.down_proj.weight", "blocks.{i}.mlp.down.weight"),
    Key("model.norm.weight", "final_norm.weight"),
)
HEAD = Key("lm_head.weight", "head.weight")


class Dream(Backbone):
    """The logits of a position are read one position before it."""

    def align(self, states: Float[Tensor, "B L d"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L d"]:
        """Move every state one position on. A sequence's first token has none before it and keeps its own."""
        moved = torch.cat((states[:, :1], states[:, :-1]), dim=1)
        if valid is None:
            return moved
        first = torch.arange(valid.shape[1], device=valid.device) == leading_padding(valid)[:, None]
        return torch.where(first[..., None], states, moved)


def recognises(config: Config) -> bool:
    """Whether a config.json is of this family, by its model_type."""
    return bool(config.get("model_type") == "Dream")


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.only("hidden_act", ["silu"])
    config.only("use_sliding_window", [False])
    config.only("use_mrope", [False])
    config.absent("rope_scaling")
    heads, tied = config.count("num_attention_heads"), config.flag("tie_word_embeddings", False)
    width = config.count("hidden_size")
    config.only("head_dim", [width // heads])
    transformer = TransformerConfig(
        vocab_size=config.count("vocab_size"),
        width=width,
        layers=config.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=config.count("num_key_value_heads", heads),
        mlp_width=config.count("intermediate_size"),
        rope_theta=config.number("rope_theta", 10_000.0),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=True,
        tied=tied,
    )
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS + (() if tied else (HEAD,)),
        special=SpecialTokenIds.from_config(config),
        chat_template=chat.CHATML,
        max_length=config.count("max_position_embeddings", 2048),
        ignored=lambda name: tied and name == HEAD.source,
        backbone=Dream,
    )
