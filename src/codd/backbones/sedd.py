"""SEDD: a network that scores how much more probable other tokens are than the present one, read as a denoiser.

At a masked position the score, normalised over the real tokens, is the denoiser: the noise level cancels.
"""

from codd.backbones import chat, dit
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config

NAME = "sedd"
KINDS = ("sedd",)
"""Its config.json is a training configuration, which `Config.kinds` tells by its sections."""


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.section("graph").only("type", ["absorb"])
    if config.get("noise") is not None:
        config.section("noise").only("type", ["loglinear"])
    model, tokens = config.section("model"), config.count("tokens")
    model.only("type", ["ddit"])
    return ModelSpec(
        family=NAME,
        transformer=dit.transformer(
            vocab_size=tokens + 1,
            width=model.count("hidden_size"),
            layers=model.layers("n_blocks"),
            heads=model.count("n_heads"),
            conditioning=model.count("cond_dim"),
        ),
        keys=dit.KEYS,
        special=SpecialTokenIds.from_config(config, mask=tokens),
        chat_template=chat.PLAIN,
        max_length=model.count("length", 1024),
        ignored=lambda name: name == dit.ROTARY_BUFFER,
        backbone=dit.NoiseConditioned,
    )
