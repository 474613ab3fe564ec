"""BERT: the first masked language model. Norms after each part, learned positions, token types."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from codd.backbones import chat
from codd.backbones.backbone import Backbone, ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key, affine
from codd.errors import InvalidInput

NAME = "bert"
KINDS = ("bert", "BertForMaskedLM")

_HEAD = "cls.predictions."


def embedding_keys(prefix: str, norm: str = "LayerNorm") -> tuple[Key, ...]:
    """The tables of a network whose tensors begin with ``prefix``, and the norm after them."""
    tables = {"word": "tokens", "position": "positions", "token_type": "types"}
    return (
        *(Key(f"{prefix}.embeddings.{x}_embeddings.weight", f"embedding.{y}.weight") for x, y in tables.items()),
        *affine(f"{prefix}.embeddings.{norm}", "embedding.norm"),
    )


def layer_keys(
    prefix: str, before_attention: str = "attention.output.LayerNorm", before_mlp: str = "output.LayerNorm"
) -> tuple[Key, ...]:
    """The layers of such a network; ``before_attention``, ``before_mlp``: its names of our two norms."""
    layer, ours = f"{prefix}.encoder.layer.{{i}}.", "blocks.{i}."
    return (
        *affine(layer + "attention.self.query", ours + "attention.qkv", rows="q"),
        *affine(layer + "attention.self.key", ours + "attention.qkv", rows="k"),
        *affine(layer + "attention.self.value", ours + "attention.qkv", rows="v"),
        *affine(layer + "attention.output.dense", ours + "attention.out"),
        *affine(layer + before_attention, ours + "attention_norm"),
        *affine(layer + "intermediate.dense", ours + "mlp.up"),
        *affine(layer + "output.dense", ours + "mlp.down"),
        *affine(layer + before_mlp, ours + "mlp_norm"),
    )


KEYS = (
    *embedding_keys("bert"),
    *layer_keys("bert"),
    *affine(_HEAD + "transform.dense", "head.dense"),
    *affine(_HEAD + "transform.LayerNorm", "head.norm"),
    Key(_HEAD + "bias", "head.bias"),
    Key(_HEAD + "decoder.weight", "head.weight"),
)
LM_HEAD = (
    *affine("lm_head.dense", "head.dense"),
    *affine("lm_head.layer_norm", "head.norm"),
    Key("lm_head.bias", "head.bias"),
    Key("lm_head.decoder.weight", "head.weight"),
)
"""The head of RoBERTa and ESM."""


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


def read_transformer(config: Config, *, first: int | None = None, **own: Any) -> tuple[TransformerConfig, int]:
    """The network that the fields of a config.json like BERT's describe, and how many positions it has learned.

    Args:
        config: The file.
        first: The row of the position table that a sequence's first token has; None: the one after the padding's id.
        own: What a family says otherwise.

    Raises:
        FormatError: A kind of network that codd does not build.
    """
    config.absent("is_decoder")
    heads, activation = config.count("num_attention_heads"), config.activation("hidden_act", "gelu")
    rows = config.count("max_position_embeddings", 512)
    first = config.count("pad_token_id", 1, least=0) + 1 if first is None else first
    transformer = TransformerConfig(
        **{
            "vocab_size": config.count("vocab_size"),
            "width": config.count("hidden_size"),
            "layers": config.layers("num_hidden_layers"),
            "heads": heads,
            "kv_heads": heads,
            "mlp_width": config.count("intermediate_size"),
            "rope_theta": None,
            "norm": "layer",
            "norm_eps": config.number("layer_norm_eps", 1e-12),
            "norm_bias": True,
            "norm_after": True,
            "activation": activation,
            "gated": False,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "positions": rows,
            "first_position": first,
            "token_types": config.count("type_vocab_size", 2),
            "embedding_norm": True,
            "head_transform": activation,
            "head_transform_bias": True,
            "head_bias": True,
            "tied": config.flag("tie_word_embeddings", True),
            **own,
        }
    )
    return transformer, max(1, rows - first)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.only("position_embedding_type", ["absolute"])
    transformer, length = read_transformer(config, first=0)
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS,
        special=SpecialTokenIds.from_config(config),
        chat_template=chat.PLAIN,
        max_length=length,
        ignored=_of_another_task,
        rename=_modern_name,
        backbone=BERT,
    )


def _of_another_task(name: str) -> bool:
    """Heads beside that of the masked tokens, whatever their names; a buffer; a copy of the head's bias."""
    used = name.startswith(("bert.embeddings.", "bert.encoder.", _HEAD))
    return not used or name in ("bert.embeddings.position_ids", _HEAD + "decoder.bias")


def _modern_name(name: str) -> str:
    """The oldest files call the weight and bias of a norm gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
