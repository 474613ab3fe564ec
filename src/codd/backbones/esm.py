"""ESM-2, ESM-1b and DPLM: masked language models of proteins, with norms before each part."""

from dataclasses import replace

from codd.backbones import bert, chat
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.weights import affine

NAME = "esm"
KINDS = ("esm", "EsmForMaskedLM", "EsmForDPLM")

_LAYER = "esm.encoder.layer.{i}."
KEYS = (
    *bert.embedding_keys("esm", norm="layer_norm"),
    *bert.layer_keys("esm", before_attention="attention.LayerNorm", before_mlp="LayerNorm"),
    *affine("esm.encoder.emb_layer_norm_after", "final_norm"),
    *bert.LM_HEAD,
)
UNUSED = ("esm.contact_head.", "esm.pooler.", "esm.embeddings.position_")
"""Another task, and what files of rotary networks may carry of absolute positions."""


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("is_folding_model")
    config.only("position_embedding_type", ["absolute", "rotary"])
    rotary = config.get("position_embedding_type") == "rotary"
    special = replace(SpecialTokenIds.from_config(config), bos=config.token("cls_token_id"))
    dropout = config.flag("token_dropout", False)
    transformer, length = bert.read_transformer(
        config,
        rope_theta=10_000.0 if rotary else None,
        norm_after=False,
        embedding_norm=config.flag("emb_layer_norm_before", False),
        token_types=0,
        token_dropout=config.count("mask_token_id", least=0) if dropout else None,
        **({"positions": 0} if rotary else {}),
    )
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS,
        special=special,
        chat_template=chat.PLAIN,
        max_length=length,
        ignored=lambda name: name.startswith(UNUSED) or name.endswith("rotary_embeddings.inv_freq"),
    )
