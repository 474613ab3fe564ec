"""A2D: Qwen3, Qwen2.5 and Llama networks made to denoise, without their causal mask."""

from codd.backbones import chat, layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config

NAME = "a2d"
QWEN3, QWEN2 = ("a2d-qwen3", "A2DQwen3LMHeadModel"), ("a2d-qwen2", "A2DQwen2LMHeadModel")
KINDS = (*QWEN3, *QWEN2, "a2d-llama", "A2DLlamaLMHeadModel")


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build.

    No file says whether it was trained with block-causal attention (BD3LM, in the model's name) or without (MDLM).
    """
    config.absent("attention_bias", "mlp_bias")
    kind = config.kind(KINDS)
    transformer = layouts.read_transformer(
        config,
        qk_norm=kind in QWEN3,
        qkv_bias=kind in QWEN2,
        block_size=None if config.get("block_size") is None else config.count("block_size"),
    )
    template = chat.CHATML if kind in QWEN3 + QWEN2 else None
    # The mask is a token that the tokenizer adds.
    return layouts.model_spec(
        config, NAME, transformer, mask=None, length=32768, any_blocks=True, chat_template=template
    )
