"""What MDLM and SEDD share: a transformer that a noise level modulates, and the denoiser read from its output.

A denoiser's row is a distribution over the real tokens where a position is masked, and certainty where it is not. What
is impossible has the log-probability `LOG_ZERO`, not minus infinity, so that differences of two outputs stay finite.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.backbones.transformer import TransformerConfig
from codd.backbones.weights import Key, affine
from codd.errors import InvalidInput

LOG_ZERO = -1e6
MIN_KEPT = 1e-3
"""The noise at time t masks a token with probability (1 - MIN_KEPT) t."""
MIN_MASKED = 1e-5

KEYS = (
    Key("vocab_embed.embedding", "embedding.tokens.weight"),
    *affine("sigma_map.mlp.0", "noise_level.up"),
    *affine("sigma_map.mlp.2", "noise_level.down"),
    Key("blocks.{i}.norm1.weight", "blocks.{i}.attention_norm.weight"),
    Key("blocks.{i}.attn_qkv.weight", "blocks.{i}.attention.qkv.weight"),
    Key("blocks.{i}.attn_out.weight", "blocks.{i}.attention.out.weight"),
    Key("blocks.{i}.norm2.weight", "blocks.{i}.mlp_norm.weight"),
    *affine("blocks.{i}.mlp.0", "blocks.{i}.mlp.up"),
    *affine("blocks.{i}.mlp.2", "blocks.{i}.mlp.down"),
    *affine("blocks.{i}.adaLN_modulation", "blocks.{i}.modulation"),
    Key("output_layer.norm_final.weight", "final_norm.weight"),
    *affine("output_layer.adaLN_modulation", "final_modulation"),
    *affine("output_layer.linear", "head"),
)
ROTARY_BUFFER = "rotary_emb.inv_freq"
"""A buffer in the files that is computed here."""


def transformer(vocab_size: int, width: int, layers: int, heads: int, conditioning: int) -> TransformerConfig:
    """The configuration that both families share."""
    return TransformerConfig(
        vocab_size=vocab_size,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        mlp_width=4 * width,
        norm="layer",
        activation="gelu_tanh",
        gated=False,
        mlp_bias=True,
        conditioning=conditioning,
        head_bias=True,
    )


class NoiseConditioned(Backbone):
    """Takes a noise level ``sigma`` (B,) or a time ``t`` (B,); without them it follows from each sequence's masks."""

    def extra_inputs(
        self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None, extra: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The noise level of each sequence; InvalidInput if both inputs are given or one is not of shape (B,)."""
        super().extra_inputs(ids, valid, {name: x for name, x in extra.items() if name not in ("sigma", "t")})
        if len(extra) > 1:
            raise InvalidInput("sigma and t say the same thing; give one of them.")
        for name, value in extra.items():
            if value.shape != ids.shape[:1]:
                wanted = tuple(ids.shape[:1])
                raise InvalidInput(f"{name} must have one value a sequence, {wanted}; found {tuple(value.shape)}.")
        if "sigma" in extra:
            return {"sigma": extra["sigma"].float()}
        if "t" in extra:
            return {"sigma": sigma_at_time(extra["t"].float())}
        return {"sigma": sigma_from_masks(ids == self.mask, valid)}

    def logits(self, states: Float[Tensor, "B L d"], ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Log-probabilities of the denoiser, in float32; ``network.logits`` gives the raw output."""
        return substitute(self.network.logits(states), ids, self.mask)

    @property
    def mask(self) -> int:
        """The id of the mask token, the absorbing state of the noise."""
        assert self.special.mask is not None, "both families have one"
        return self.special.mask


def sigma_at_time(t: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """The noise level at a time between 0 and 1 (log-linear noise)."""
    return -torch.log1p((MIN_KEPT - 1) * t)


def sigma_from_masks(masked: Bool[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, " B"]:
    """The noise level at which the share of masks among each sequence's tokens is the expected one."""
    if valid is None:
        valid = torch.ones_like(masked)
    share = (masked & valid).sum(dim=1) / valid.sum(dim=1).clamp(min=1)
    return -torch.log1p(-share.clamp(MIN_MASKED, 1 - MIN_KEPT))


def substitute(logits: Float[Tensor, "B L V"], ids: Int[Tensor, "B L"], mask: int) -> Float[Tensor, "B L V"]:
    """SUBS: nothing turns into a mask, and what is not masked stays what it is."""
    excluded = torch.zeros(logits.shape[-1], device=logits.device)
    excluded[mask] = LOG_ZERO
    denoised = F.log_softmax(logits.float() + excluded, dim=-1)
    certain = torch.full_like(denoised, LOG_ZERO).scatter(-1, ids[..., None], 0.0)
    return torch.where((ids == mask)[..., None], denoised, certain)
