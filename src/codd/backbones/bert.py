"""BERT: the first masked language model. Norms after each part, learned positions, token types."""

from collections.abc import Mapping

from jaxtyping import Bool, Int
from torch import Tensor

from codd.backbones import chat
from codd.backbones.backbone import Backbone, ModelSpec, SpecialTokenIds
from codd.backbones.config import Config, of_model_type
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key, affine
from codd.errors import InvalidInput

NAME = "bert"
recognises = of_model_type("bert")

_LAYER = "bert.encoder.layer.{i}."
_HEAD = "cls.predictions."


KEYS = (
    Key("bert.embeddings.word_embeddings.weight", "embedding.tokens.weight"),
    Key("bert.embeddings.position_embeddings.weight", "embedding.positions.weight"),
    Key("bert.embeddings.token_type_embeddings.weight", "embedding.types.weight"),
    *affine("bert.embeddings.LayerNorm", "embedding.norm"),
    *affine(_LAYER + "attention.self.query", "blocks.{i}.attention.qkv", rows="q"),
    *affine(_LAYER + "attention.self.key", "blocks.{i}.attention.qkv", rows="k"),
    *affine(_LAYER + "attention.self.value", "blocks.{i}.attention.qkv", rows="v"),
    *affine(_LAYER + "attention.output.dense", "blocks.{i}.attention.out"),
    *affine(_LAYER + "attention.output.LayerNorm", "blocks.{i}.attention_norm"),
    *affine(_LAYER + "intermediate.dense", "blocks.{i}.mlp.up"),
    *affine(_LAYER + "output.dense", "blocks.{i}.mlp.down"),
    *affine(_LAYER + "output.LayerNorm", "blocks.{i}.mlp_norm"),
    *affine(_HEAD + "transform.dense", "head.dense"),
    *affine(_HEAD + "transform.LayerNorm", "head.norm"),
    Key(_HEAD + "bias", "head.bias"),
    Key(_HEAD + "decoder.weight", "head.weight"),
)
UNUSED = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids", _HEAD + "decoder.bias")
"""The other task that it was trained for, a buffer, and a copy of the head's bias."""


class BERT(Backbone):
    """Takes ``token_type_ids``, which say to which of two texts a token belongs; 0 where they are not given."""

    def extra_inputs(
        self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None, extra: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The token types, if they are given; InvalidInput if they do not fit the ids."""
        super().extra_inputs(ids, valid, {name: x for name, x in extra.items() if name != "token_type_ids"})
        types = extra.get("token_type_ids")
        if types is None:
            return {}
        if types.shape != ids.shape:
            raise InvalidInput(f"token_type_ids have shape {tuple(types.shape)}, but ids have {tuple(ids.shape)}.")
        last = self.config.token_types - 1
        # As for ids: on an accelerator a look at the values would wait for the device.
        if types.device.type == "cpu" and types.numel() and not 0 <= int(types.min()) <= int(types.max()) <= last:
            raise InvalidInput(f"token_type_ids must be from 0 to {last}.")
        return {"types": types}


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.only("position_embedding_type", ["absolute"])
    config.only("is_decoder", [False])
    heads = config.count("num_attention_heads")
    activation, positions = config.activation("hidden_act", "gelu"), config.count("max_position_embeddings", 512)
    transformer = TransformerConfig(
        vocab_size=config.count("vocab_size"),
        width=config.count("hidden_size"),
        layers=config.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        mlp_width=config.count("intermediate_size"),
        rope_theta=None,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-12),
        norm_bias=True,
        norm_after=True,
        activation=activation,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        positions=positions,
        token_types=config.count("type_vocab_size", 2),
        embedding_norm=True,
        head_transform=activation,
        head_transform_bias=True,
        head_bias=True,
        tied=config.flag("tie_word_embeddings", True),
    )
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS,
        special=SpecialTokenIds.from_config(config),
        chat_template=chat.PLAIN,
        max_length=positions,
        ignored=lambda name: name.startswith(UNUSED),
        rename=_modern_name,
        backbone=BERT,
    )


def _modern_name(name: str) -> str:
    """The oldest files call the weight and bias of a norm gamma and beta."""
    if name.endswith("LayerNorm.gamma"):
        return name.removesuffix("gamma") + "weight"
    return name.removesuffix("beta") + "bias" if name.endswith("LayerNorm.beta") else name
