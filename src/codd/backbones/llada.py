"""LLaDA: a LLaMA-like network without a causal mask, a noise level or a cache."""

from codd.backbones import chat, llada_moe
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key

NAME = "llada"
MASK_ID = 126336
"""The mask token of the published checkpoints; their config.json states it, older copies do not."""

_BLOCK = "model.transformer.blocks.{i}."
KEYS = (
    Key("model.transformer.wte.weight", "embedding.tokens.weight"),
    Key(_BLOCK + "attn_norm.weight", "blocks.{i}.attention_norm.weight"),
    Key(_BLOCK + "q_proj.weight", "blocks.{i}.attention.qkv.weight", rows="q"),
    Key(_BLOCK + "k_proj.weight", "blocks.{i}.attention.qkv.weight", rows="k"),
    Key(_BLOCK + "v_proj.weight", "blocks.{i}.attention.qkv.weight", rows="v"),
    Key(_BLOCK + "attn_out.weight", "blocks.{i}.attention.out.weight"),
    Key(_BLOCK + "ff_norm.weight", "blocks.{i}.mlp_norm.weight"),
    Key(_BLOCK + "ff_proj.weight", "blocks.{i}.mlp.up.weight", rows="gate"),
    Key(_BLOCK + "up_proj.weight", "blocks.{i}.mlp.up.weight", rows="up"),
    Key(_BLOCK + "ff_out.weight", "blocks.{i}.mlp.down.weight"),
    Key("model.transformer.ln_f.weight", "final_norm.weight"),
)
QKV_BIASES = tuple(
    Key(_BLOCK + f"{part}_proj.bias", "blocks.{i}.attention.qkv.bias", rows=part) for part in ("q", "k", "v")
)
HEAD = Key("model.transformer.ff_out.weight", "head.weight")


def recognises(config: Config) -> bool:
    """Whether a config.json is of this family, by its model_type; LLaDA-MoE's is the same."""
    return bool(config.get("model_type") == "llada" and not llada_moe.recognises(config))


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.only("block_type", ["llama"])
    config.only("layer_norm_type", ["rms"])
    config.only("activation_type", ["silu"])
    config.only("block_group_size", [1])
    for unsupported in ("alibi", "attention_layer_norm", "include_bias", "input_emb_norm", "scale_logits"):
        config.only(unsupported, [False])
    config.only("rope", [True])
    config.only("layer_norm_with_affine", [True])
    heads, tied, vocab = config.count("n_heads"), config.flag("weight_tying", False), config.count("vocab_size")
    biased = config.flag("include_qkv_bias", False)
    single = 1 if config.flag("multi_query_attention", False) else heads
    width = config.count("d_model")
    transformer = TransformerConfig(
        vocab_size=config.count("embedding_size", vocab),
        width=width,
        layers=config.layers("n_layers"),
        heads=heads,
        kv_heads=config.count("n_kv_heads", single),
        mlp_width=config.count("mlp_hidden_size", config.count("mlp_ratio", 4) * width),
        rope_theta=config.number("rope_theta", 10_000.0),
        norm_eps=config.number("rms_norm_eps", 1e-5),
        qkv_bias=biased,
        tied=tied,
    )
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS + (QKV_BIASES if biased else ()) + (() if tied else (HEAD,)),
        special=SpecialTokenIds.from_config(config, mask=MASK_ID),
        chat_template=chat.LLADA,
        max_length=config.count("max_sequence_length", 4096),
        ignored=lambda name: tied and name == HEAD.source,
    )
