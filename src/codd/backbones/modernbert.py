"""ModernBERT: rotary positions, gated MLPs, and layers that see only their neighbourhood between those that see all."""

from codd.backbones import chat
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config, of_model_type
from codd.backbones.transformer import LocalLayers, TransformerConfig
from codd.backbones.weights import Key
from codd.errors import FormatError

NAME = "modernbert"
recognises = of_model_type("modernbert")
GLOBAL, LOCAL = "full_attention", "sliding_attention"

_LAYER = "model.layers.{i}."
KEYS = (
    Key("model.embeddings.tok_embeddings.weight", "embedding.tokens.weight"),
    Key("model.embeddings.norm.weight", "embedding.norm.weight"),
    Key(_LAYER + "attn.Wqkv.weight", "blocks.{i}.attention.qkv.weight"),
    Key(_LAYER + "attn.Wo.weight", "blocks.{i}.attention.out.weight"),
    Key(_LAYER + "mlp_norm.weight", "blocks.{i}.mlp_norm.weight"),
    Key(_LAYER + "mlp.Wi.weight", "blocks.{i}.mlp.up.weight"),
    Key(_LAYER + "mlp.Wo.weight", "blocks.{i}.mlp.down.weight"),
    Key("model.final_norm.weight", "final_norm.weight"),
    Key("head.dense.weight", "head.dense.weight"),
    Key("head.norm.weight", "head.norm.weight"),
)
DECODER = Key("decoder.weight", "head.weight")
DECODER_BIAS = Key("decoder.bias", "head.bias")


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    heads, layers = config.count("num_attention_heads"), config.layers("num_hidden_layers")
    tied = config.flag("tie_word_embeddings", True)
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
        tied=tied,
    )
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=_keys(transformer),
        special=SpecialTokenIds.from_config(config),
        chat_template=chat.PLAIN,
        max_length=config.count("max_position_embeddings", 8192),
        ignored=lambda name: tied and name == DECODER.source,
    )


def _keys(network: TransformerConfig) -> tuple[Key, ...]:
    # The first layer reads what the embedding's norm gave, so that it has no norm of its own.
    keys = KEYS + tuple(
        Key(f"model.layers.{i}.attn_norm.weight", f"blocks.{i}.attention_norm.weight") for i in range(1, network.layers)
    )
    biased = {
        "norm.weight": network.norm_bias,
        "attn.Wqkv.weight": network.qkv_bias,
        "attn.Wo.weight": network.out_bias,
        "mlp.Wi.weight": network.mlp_bias,
        "mlp.Wo.weight": network.mlp_bias,
        "head.dense.weight": network.head_transform_bias,
    }
    endings = tuple(ending for ending, wanted in biased.items() if wanted)
    biases = tuple(
        Key(key.source.removesuffix("weight") + "bias", key.target.removesuffix("weight") + "bias")
        for key in keys
        if key.source.endswith(endings)
    )
    head = (() if network.tied else (DECODER,)) + ((DECODER_BIAS,) if network.head_bias else ())
    return keys + biases + head


def _every(config: Config, layers: int) -> int:
    """Every which layer is global; newer files list the kind of each layer instead."""
    kinds = config.get("layer_types")
    if kinds is None:
        return config.count("global_attn_every_n_layers", 3)
    for every in range(1, layers + 1):
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
