"""Tensor names and config fields of the Llama and Qwen layout, which many families share."""

import math
from typing import Any

from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.rotary import Llama3Scaling, RopeScaling, YarnScaling
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key, affine
from codd.errors import FormatError

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


def expert_keys(*, shared: str = "mlp.shared_experts", bias: str = "mlp.gate.expert_bias") -> tuple[Key, ...]:
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
    """The network that the fields of a Llama-like config.json describe; ``own``: what a family overrides.

    Raises FormatError for a kind of network that codd does not build.
    """
    config.only("hidden_act", ["silu"])
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
            **_read_rope(config),
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


def _read_rope(config: Config) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of a network, from the fields of Llama-like files, older and newer ones.

    Raises FormatError for a kind of scaling that codd does not build.
    """
    name = next((each for each in ("rope_parameters", "rope_scaling") if config.get(each) is not None), None)
    if name is None:
        return {"rope_theta": config.number("rope_theta", 10_000.0), "rope_scaling": None}
    fields = config.section(name)
    kind = fields.get("rope_type", fields.get("type"))
    theta = fields.number("rope_theta", config.number("rope_theta", 10_000.0))
    scaling: RopeScaling | None = None
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if low >= high:
            raise FormatError(
                f"{fields.where}: low_freq_factor must be below high_freq_factor. Download the file again."
            )
        scaling = Llama3Scaling(fields.number("factor"), low, high, fields.count("original_max_position_embeddings"))
    elif kind == "yarn":
        fields.absent("attention_factor")
        scaling = YarnScaling(
            fields.number("factor"),
            fields.number("beta_fast", 32.0),
            fields.number("beta_slow", 1.0),
            fields.count(
                "original_max_position_embeddings", config.count("max_position_embeddings", 0, least=0) or None
            ),
            _amplitude(fields.number("factor"), fields),
            0.0 if fields.get("llama_4_scaling_beta") is None else fields.number("llama_4_scaling_beta"),
        )
        if theta <= 1:
            raise FormatError(f"{fields.where}: rope_theta must be above 1 with YaRN, found {theta}.")
    elif kind not in (None, "default"):
        raise FormatError(f"{fields.where}: rope_type must be default, llama3 or yarn; codd builds no other kind.")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _amplitude(factor: float, fields: Config) -> float:
    def grown(by: float) -> float:
        return 1 + 0.1 * by * math.log(factor) if factor > 1 else 1.0

    if fields.get("mscale") is None or fields.get("mscale_all_dim") is None:
        return grown(1.0)
    return grown(fields.number("mscale")) / grown(fields.number("mscale_all_dim"))
