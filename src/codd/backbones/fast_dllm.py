"""Fast-dLLM v2: a block-causal Qwen2 network whose output at a position predicts the token after it."""

import torch
from jaxtyping import Float
from torch import Tensor

from codd.backbones import chat, layouts
from codd.backbones.backbone import ModelSpec, NetworkInputs
from codd.backbones.config import Config
from codd.backbones.dream import Dream

NAME = "fast_dllm"
KINDS = ("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM")
MASK_ID = 151665
"""The mask token of the published checkpoints: no field of theirs states it."""
BLOCK_SIZE = 32


class FastDLLM(Dream):
    """Shifted like Dream.

    A block's first position is predicted by the last one of the block before, once that is written. The published code
    writes it before the block is denoised and never reads the logits there, which in its own alignment are those of the
    block's first row; `forward` gives them so, `states` gives what predicts the position.
    """

    def _logits(self, inputs: NetworkInputs) -> Float[Tensor, "B L V"]:
        states = self._unaligned_states(inputs)
        moved = self.align(states, inputs.valid)
        assert self.block_size is not None
        first = inputs.positions % self.block_size == 0
        return self.logits(torch.where(first[..., None], states, moved), inputs.ids)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    config.absent("use_sliding_window")
    config.only("layer_types", [["full_attention"] * len(config.names("layer_types"))])
    block_size = config.count("bd_size", BLOCK_SIZE)
    transformer = layouts.read_transformer(config, qkv_bias=True, block_size=block_size)
    return layouts.model_spec(
        config, NAME, transformer, mask=MASK_ID, length=32768, chat_template=chat.CHATML, backbone=FastDLLM
    )
