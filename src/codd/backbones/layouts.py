"""The names and fields of checkpoints in the layout that Llama and Qwen have on the hub, which many families share."""

from typing import Any

from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key

_LAYER = "model.layers.{i}."
LAYERS = (
    Key("model.embed_tokens.weight", "embedding.tokens.weight"),
    Key(_LAYER + "input_layernorm.weight", "blocks.{i}.attention_norm.weight"),
    Key(_LAYER + "self_attn.q_proj.weight", "blocks.{i}.attention.qkv.weight", rows="q"),
    Key(_LAYER + "self_attn.k_proj.weight", "blocks.{i}.attention.qkv.weight", rows="k"),
    Key(_LAYER + "self_attn.v_proj.weight", "blocks.{i}.attention.qkv.weight", rows="v"),
    Key(_LAYER + "self_attn.o_proj.weight", "blocks.{i}.attention.out.weight"),
    Key(_LAYER + "post_attention_layernorm.weight", "blocks.{i}.mlp_norm.weight"),
    Key("model.norm.weight", "final_norm.weight"),
)
"""The keys of embedding, norms and attention: all weights but those of MLPs, experts and head."""
QKV_BIASES = tuple(
    Key(_LAYER + f"self_attn.{part}_proj.bias", "blocks.{i}.attention.qkv.bias", rows=part) for part in ("q", "k", "v")
)
QK_NORMS = tuple(
    Key(_LAYER + f"self_attn.{part}_norm.weight", f"blocks.{{i}}.attention.{part}_norm.weight") for part in ("q", "k")
)
MLPS = (
    Key(_LAYER + "mlp.gate_proj.weight", "blocks.{i}.mlp.up.weight", rows="gate", layers="dense"),
    Key(_LAYER + "mlp.up_proj.weight", "blocks.{i}.mlp.up.weight", rows="up", layers="dense"),
    Key(_LAYER + "mlp.down_proj.weight", "blocks.{i}.mlp.down.weight", layers="dense"),
)
HEAD = Key("lm_head.weight", "head.weight")


def expert_keys(*, shared: str | None = None, bias: str | None = None) -> tuple[Key, ...]:
    """A layer's experts and their router; ``shared`` and ``bias``: the names of the shared one and the bias."""
    mlp, ours = _LAYER + "mlp.", "blocks.{i}.mlp."
    keys = [
        Key(mlp + "gate.weight", ours + "experts.router.weight", layers="experts"),
        Key(mlp + "experts.{e}.gate_proj.weight", ours + "experts.up", rows="expert_gate", layers="experts"),
        Key(mlp + "experts.{e}.up_proj.weight", ours + "experts.up", rows="expert_up", layers="experts"),
        Key(mlp + "experts.{e}.down_proj.weight", ours + "experts.down", layers="experts"),
    ]
    if bias is not None:
        keys.append(Key(_LAYER + bias, ours + "experts.router.bias", layers="experts"))
    if shared is not None:
        keys += [
            Key(f"{_LAYER}{shared}.gate_proj.weight", ours + "shared.up.weight", rows="shared_gate", layers="experts"),
            Key(f"{_LAYER}{shared}.up_proj.weight", ours + "shared.up.weight", rows="shared_up", layers="experts"),
            Key(f"{_LAYER}{shared}.down_proj.weight", ours + "shared.down.weight", layers="experts"),
        ]
    return tuple(keys)


def read_transformer(config: Config, **own: Any) -> TransformerConfig:
    """The network that the fields of a Llama-like config.json describe; ``own``: what a family says otherwise.

    Raises FormatError for a kind of network that codd does not build.
    """
    config.only("hidden_act", ["silu"])
    config.only("use_sliding_window", [False])
    config.absent("rope_scaling")
    heads, width = config.count("num_attention_heads"), config.count("hidden_size")
    return TransformerConfig(
        **{
            "vocab_size": config.count("vocab_size"),
            "width": width,
            "layers": config.layers("num_hidden_layers"),
            "heads": heads,
            "kv_heads": config.count("num_key_value_heads", heads),
            "head_width": config.count("head_dim", width // heads),
            "mlp_width": own["mlp_width"] if "mlp_width" in own else config.count("intermediate_size"),
            "rope_theta": config.number("rope_theta", 10_000.0),
            "norm_eps": config.number("rms_norm_eps", 1e-6),
            "tied": config.flag("tie_word_embeddings", False),
            **own,
        }
    )


def model_spec(
    config: Config, family: str, transformer: TransformerConfig, *more: Key, mask: int | None, length: int, **own: Any
) -> ModelSpec:
    """A model in this layout; ``more``: keys of its own; ``mask`` and ``length``: the published ones of its family."""
    biases, norms = QKV_BIASES if transformer.qkv_bias else (), QK_NORMS if transformer.qk_norm else ()
    head = () if transformer.tied else (HEAD,)
    return ModelSpec(
        family=family,
        transformer=transformer,
        special=SpecialTokenIds.from_config(config, mask=mask),
        max_length=config.count("max_position_embeddings", length),
        ignored=lambda name: transformer.tied and name == HEAD.source,
        **{"keys": (*LAYERS, *MLPS, *biases, *norms, *more, *head), **own},
    )
