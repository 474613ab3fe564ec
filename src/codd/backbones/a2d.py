"""A2D: Qwen3, Qwen2.5 and Llama networks made to denoise, without their causal mask."""

from codd.backbones import chat, layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config, of_model_type

NAME = "a2d"
QWEN3, QWEN2, LLAMA = "a2d-qwen3", "a2d-qwen2", "a2d-llama"
recognises = of_model_type(QWEN3, QWEN2, LLAMA)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build.

    No file says whether it was trained with block-causal attention (BD3LM, in the model's name) or without (MDLM).
    """
    for unsupported in ("attention_bias", "mlp_bias"):
        config.only(unsupported, [False])
    kind = config.get("model_type")
    transformer = layouts.read_transformer(
        config,
        **layouts.read_rope(config),
        qk_norm=kind == QWEN3,
        qkv_bias=kind == QWEN2,
        block_size=None if config.get("block_size") is None else config.count("block_size"),
    )
    template = None if kind == LLAMA else chat.CHATML
    # The mask is a token that the tokenizer adds.
    return layouts.model_spec(
        config, NAME, transformer, mask=None, length=32768, any_blocks=True, chat_template=template
    )
