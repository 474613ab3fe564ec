"""The names and fields of checkpoints in the layout that Llama and Qwen have on the hub, which many families share."""

from typing import Any

from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key, affine

_LAYER, _OURS = "model.layers.{i}.", "blocks.{i}."
MLPS = (
    Key(_LAYER + "mlp.gate_proj.weight", _OURS + "mlp.up.weight", rows="gate"),
    Key(_LAYER + "mlp.up_proj.weight", _OURS + "mlp.up.weight", rows="up"),
    Key(_LAYER + "mlp.down_proj.weight", _OURS + "mlp.down.weight"),
)
HEAD = Key("lm_head.weight", "head.weight")
KEYS = (
    Key("model.embed_tokens.weight", "embedding.tokens.weight"),
    Key(_LAYER + "input_layernorm.weight", _OURS + "attention_norm.weight"),
    *(key for x in "qkv" for key in affine(_LAYER + f"self_attn.{x}_proj", _OURS + "attention.qkv", rows=x)),
    *(Key(_LAYER + f"self_attn.{x}_norm.weight", _OURS + f"attention.{x}_norm.weight") for x in "qk"),
    Key(_LAYER + "self_attn.o_proj.weight", _OURS + "attention.out.weight"),
    Key(_LAYER + "post_attention_layernorm.weight", _OURS + "mlp_norm.weight"),
    *MLPS,
    Key("model.norm.weight", "final_norm.weight"),
    HEAD,
)


def expert_keys(*, shared: str, bias: str) -> tuple[Key, ...]:
    """A layer's experts and their router; ``shared`` and ``bias``: the names of the shared expert and the bias."""
    mlp, ours = _LAYER + "mlp.", _OURS + "mlp."
    return (
        Key(mlp + "gate.weight", ours + "experts.router.weight"),
        Key(_LAYER + bias, ours + "experts.router.bias"),
        Key(mlp + "experts.{e}.gate_proj.weight", ours + "experts.up", rows="expert_gate"),
        Key(mlp + "experts.{e}.up_proj.weight", ours + "experts.up", rows="expert_up"),
        Key(mlp + "experts.{e}.down_proj.weight", ours + "experts.down"),
        Key(f"{_LAYER}{shared}.gate_proj.weight", ours + "shared.up.weight", rows="shared_gate"),
        Key(f"{_LAYER}{shared}.up_proj.weight", ours + "shared.up.weight", rows="shared_up"),
        Key(f"{_LAYER}{shared}.down_proj.weight", ours + "shared.down.weight"),
    )


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
    config: Config, family: str, transformer: TransformerConfig, *, mask: int | None, length: int, **own: Any
) -> ModelSpec:
    """A model in this layout; ``mask`` and ``length``: the published ones; ``own``: what a family says otherwise."""
    return ModelSpec(
        family=family,
        transformer=transformer,
        special=SpecialTokenIds.from_config(config, mask=mask),
        max_length=config.count("max_position_embeddings", length),
        **{"keys": KEYS, **own},
    )
