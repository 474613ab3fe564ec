"""LLaDA: a LLaMA-like network without a causal mask, a noise level or a cache."""

from codd.backbones import chat
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key, affine

NAME = "llada"
KINDS = ("llada", "LLaDAModelLM")
MASK_ID = 126336
"""The mask token of the published checkpoints; their config.json states it, older copies do not."""

_BLOCK, _OURS = "model.transformer.blocks.{i}.", "blocks.{i}."
KEYS = (
    Key("model.transformer.wte.weight", "embedding.tokens.weight"),
    Key(_BLOCK + "attn_norm.weight", _OURS + "attention_norm.weight"),
    *(key for x in "qkv" for key in affine(_BLOCK + f"{x}_proj", _OURS + "attention.qkv", rows=x)),
    Key(_BLOCK + "attn_out.weight", _OURS + "attention.out.weight"),
    Key(_BLOCK + "ff_norm.weight", _OURS + "mlp_norm.weight"),
    Key(_BLOCK + "ff_proj.weight", _OURS + "mlp.up.weight", rows="gate"),
    Key(_BLOCK + "up_proj.weight", _OURS + "mlp.up.weight", rows="up"),
    Key(_BLOCK + "ff_out.weight", _OURS + "mlp.down.weight"),
    Key("model.transformer.ln_f.weight", "final_norm.weight"),
    Key("model.transformer.ff_out.weight", "head.weight"),
)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.only("block_type", ["llama"])
    config.only("layer_norm_type", ["rms"])
    config.only("activation_type", ["silu"])
    config.only("block_group_size", [1])
    config.absent("alibi", "attention_layer_norm", "include_bias", "input_emb_norm", "scale_logits")
    config.only("rope", [True])
    config.only("layer_norm_with_affine", [True])
    heads, width = config.count("n_heads"), config.count("d_model")
    single = 1 if config.flag("multi_query_attention", False) else heads
    transformer = TransformerConfig(
        vocab_size=config.count("embedding_size", config.count("vocab_size")),
        width=width,
        layers=config.layers("n_layers"),
        heads=heads,
        kv_heads=config.count("n_kv_heads", single),
        mlp_width=config.count("mlp_hidden_size", config.count("mlp_ratio", 4) * width),
        rope_theta=config.number("rope_theta", 10_000.0),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=config.flag("include_qkv_bias", False),
        tied=config.flag("weight_tying", False),
    )
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS,
        special=SpecialTokenIds.from_config(config, mask=MASK_ID),
        chat_template=chat.LLADA,
        max_length=config.count("max_sequence_length", 4096),
    )
