"""Nemotron-Labs-Diffusion: a Ministral network that denoises a block without a mask, and reads its context causally."""

from codd.backbones import layouts
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config

NAME = "nemotron"
KINDS = ("nemotron_labs_diffusion", "NemotronLabsDiffusionModel")
MASK_ID = 100
BLOCK_SIZE = 32
KEYS = tuple(
    key._replace(source=key.source.replace("model.", "encoder.", 1).replace("lm_head.", "diffusion_head."))
    for key in layouts.KEYS
)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("attention_bias", "mlp_bias", "sliding_window")
    config.only("dlm_paradigm", ["bidirectional", "block_diff"])
    transformer = layouts.read_transformer(config, norm_eps=config.number("rms_norm_eps", 1e-5))
    return layouts.model_spec(
        config,
        NAME,
        transformer,
        mask=MASK_ID,
        length=262144,
        keys=KEYS,
        block_length=config.count("block_size", BLOCK_SIZE),
        causal_context=True,
    )
