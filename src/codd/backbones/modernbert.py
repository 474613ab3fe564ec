"""ModernBERT: rotary positions, gated MLPs, and layers that see only their neighbourhood between those that see all."""

from codd.backbones import chat
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.transformer import LocalLayers, TransformerConfig
from codd.backbones.weights import Key, affine
from codd.errors import FormatError

NAME = "modernbert"
KINDS = ("modernbert", "ModernBertForMaskedLM")
GLOBAL, LOCAL = "full_attention", "sliding_attention"

_LAYER = "model.layers.{i}."
KEYS = (
    Key("model.embeddings.tok_embeddings.weight", "embedding.tokens.weight"),
    *affine("model.embeddings.norm", "embedding.norm"),
    *affine(_LAYER + "attn_norm", "blocks.{i}.attention_norm"),
    *affine(_LAYER + "attn.Wqkv", "blocks.{i}.attention.qkv"),
    *affine(_LAYER + "attn.Wo", "blocks.{i}.attention.out"),
    *affine(_LAYER + "mlp_norm", "blocks.{i}.mlp_norm"),
    *affine(_LAYER + "mlp.Wi", "blocks.{i}.mlp.up"),
    *affine(_LAYER + "mlp.Wo", "blocks.{i}.mlp.down"),
    *affine("model.final_norm", "final_norm"),
    *affine("head.dense", "head.dense"),
    *affine("head.norm", "head.norm"),
    *affine("decoder", "head"),
)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    heads, layers = config.count("num_attention_heads"), config.layers("num_hidden_layers")
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    transformer = TransformerConfig(
        vocab_size=config.count("vocab_size"),
        width=config.count("hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        mlp_width=config.count("intermediate_size"),
        rope_theta=_theta(config, GLOBAL, "global_rope_theta", 160_000.0),
        local=LocalLayers(
            every=_every(config, layers),
            reach=config.count("local_attention", 128) // 2,
            rope_theta=_theta(config, LOCAL, "local_rope_theta", 10_000.0),
        ),
        norm="layer",
        norm_eps=config.number("norm_eps", 1e-5),
        norm_bias=config.flag("norm_bias", False),
        first_norm=False,
        activation=config.activation("hidden_activation", "gelu"),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
        embedding_norm=True,
        head_transform=config.activation("classifier_activation", "gelu"),
        head_transform_bias=config.flag("classifier_bias", False),
        head_bias=config.flag("decoder_bias", True),
        tied=config.flag("tie_word_embeddings", True),
    )
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS,
        special=SpecialTokenIds.from_config(config),
        chat_template=chat.PLAIN,
        max_length=config.count("max_position_embeddings", 8192),
    )


def _every(config: Config, layers: int) -> int:
    """Every which layer is global; newer files list the kind of each layer instead."""
    if not (kinds := config.names("layer_types")):
        return config.count("global_attn_every_n_layers", 3)
    every = kinds.index(GLOBAL, 1) if GLOBAL in kinds[1:] else layers
    if kinds == [LOCAL if i % every else GLOBAL for i in range(layers)]:
        return every
    raise FormatError(
        f"{config.where}: layer_types must name {layers} layers of which every n-th, counted from the first, is "
        f"{GLOBAL!r} and the others are {LOCAL!r}; codd builds no other pattern."
    )


def _theta(config: Config, kind: str, name: str, default: float) -> float:
    """The rotary base of one kind of layers; newer files keep it in an object for each kind."""
    if config.get("rope_parameters") is None:
        return config.number(name, default)
    parameters = config.section("rope_parameters").section(kind)
    parameters.only("rope_type", ["default"])
    return parameters.number("rope_theta", default)
