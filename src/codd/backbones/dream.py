"""Dream: a bidirectional Qwen2 network whose output at a position predicts the token after it."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from codd.backbones import chat, layouts
from codd.backbones.backbone import Backbone, ModelSpec, leading_padding
from codd.backbones.config import Config

NAME = "dream"
KINDS = ("Dream", "DreamModel")


class Dream(Backbone):
    """The logits of a position are read one position before it."""

    shift = 1

    def align(self, states: Float[Tensor, "B L d"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L d"]:
        """Move every state one position on. A sequence's first token has none before it and keeps its own."""
        moved = torch.cat((states[:, :1], states[:, :-1]), dim=1)
        if valid is None:
            return moved
        first = torch.arange(valid.shape[1], device=valid.device) == leading_padding(valid)[:, None]
        return torch.where(first[..., None], states, moved)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("use_mrope", "use_sliding_window")
    transformer = layouts.read_transformer(config, head_width=None, qkv_bias=True)
    config.only("head_dim", [transformer.head_dim])
    return layouts.model_spec(
        config, NAME, transformer, mask=None, length=2048, chat_template=chat.CHATML, backbone=Dream
    )
