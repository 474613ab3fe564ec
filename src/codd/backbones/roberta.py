"""RoBERTa: BERT with another head, whose table of positions begins after that of the padding."""

from codd.backbones import bert, chat
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config

NAME = "roberta"
KINDS = ("roberta", "RobertaForMaskedLM")
KEYS = (*bert.embedding_keys("roberta"), *bert.layer_keys("roberta"), *bert.LM_HEAD)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    transformer, length = bert.read_transformer(config)
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS,
        special=SpecialTokenIds.from_config(config),
        chat_template=chat.PLAIN,
        max_length=length,
        ignored=lambda name: not name.startswith(("roberta.emb", "roberta.enc", "lm_head.")) or "position_ids" in name,
        backbone=bert.BERT,
    )
