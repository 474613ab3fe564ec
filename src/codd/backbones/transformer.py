"""One transformer for every family: a stack composed of parts that a configuration chooses.

Projections that read the same input are one matrix: ``qkv`` (queries, then keys, then values) and, in a gated MLP,
``up`` (gate, then multiplier). `TransformerConfig.row_ranges` says which rows belong to which.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from codd.backbones.experts import Experts, ExpertsConfig
from codd.backbones.kernels import kernels_for
from codd.backbones.kv_cache import CachedPass, KVCache, KVShape
from codd.backbones.quantized import Int8Linear
from codd.backbones.rotary import RopeScaling
from codd.errors import InvalidInput

Activation = Literal["silu", "gelu", "gelu_tanh"]
RESIDUAL = ("attention.out.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down")
"""The ends of the names of weights that add to the residual stream."""
TRAINED_GAPS = 0.15 * 0.8
"""The share of gaps in the texts that networks with token dropout were trained on."""


@dataclass(frozen=True)
class LocalLayers:
    """Sliding-window attention: in all layers but every ``every``-th one, counted from the first."""

    every: int
    reach: int
    """A position attends to those at most this many positions away."""
    rope_theta: float


@dataclass(frozen=True)
class TransformerConfig:
    """The parts and sizes of the stack. The defaults are those of a LLaMA-like network without biases."""

    vocab_size: int
    """Rows of the embedding, columns of the logits."""
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    rope_theta: float | None = 10_000.0
    """None: no rotary positions."""
    rope_scaling: RopeScaling | None = None
    rotary_width: int | None = None
    """How many of a head's columns are rotated, the first ones; None: all."""
    head_width: int | None = None
    """The width of one attention head; None: the network's width over the number of heads."""
    local: LocalLayers | None = None
    causal: bool = False
    block_size: int | None = None
    """Positions per block of block-causal attention, each seeing itself and those before it; None: all is seen."""
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    norm_after: bool = False
    """Post-norm, as in the first transformers: the norms follow the residual sums. False: pre-norm."""
    first_norm: bool = True
    """Whether the first layer normalises what its attention reads."""
    qk_norm: bool = False
    """RMS norms of queries and keys, head by head, before the rotary positions."""
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to this size, after those norms; None: they are not."""
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    """A mixture of experts in place of the MLP, in some layers or all; None: in none."""
    positions: int = 0
    """Rows of a table of learned absolute positions; 0: none."""
    first_position: int = 0
    """The row of that table that a sequence's first token has."""
    token_dropout: int | None = None
    """The mask token, of a network to which it is no token but a gap: zeros, and all else scaled for their share."""
    token_types: int = 0
    embedding_norm: bool = False
    conditioning: int = 0
    """Width of a conditioning vector that shifts, scales and gates every layer (adaLN); 0: none."""
    head_transform: Activation | None = None
    """A dense layer, this activation and a norm between the stack and the vocabulary."""
    head_transform_bias: bool = False
    head_bias: bool = False
    tied: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.width // self.heads

    @property
    def kv_shape(self) -> KVShape:
        """What a KV cache keeps of one position."""
        return KVShape(self.layers, self.kv_heads, self.head_dim)

    def row_ranges(self) -> dict[str, tuple[int, int]]:
        """The rows (from, to) of each projection in the joined matrices ``qkv`` and ``up``."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {"": self.mlp_width}
        if self.experts is not None:
            widths |= {"expert_": self.experts.width, "shared_": self.experts.shared_width}
        gated = {
            f"{of}{part}": (i * n, (i + 1) * n) for of, n in widths.items() for i, part in enumerate(("gate", "up"))
        }
        return {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv), **gated}


class AttentionContext(NamedTuple):
    """What the attention of a layer depends on besides its input: rotary angles and the attention mask."""

    rotary: tuple[Float[Tensor, "B 1 L half"], Float[Tensor, "B 1 L half"]] | None
    """Cosines and sines; None: no rotary positions."""
    mask: Bool[Tensor, "*b q k"] | None
    """True where a query attends to a key; None: everywhere (or causally, as the configuration says)."""
    past: CachedPass | None = None
    """Where keys and values of positions that are not computed are found, and those of others stored."""
    causal: bool = False
    """Whether a query attends to no later key; without a mask, that is."""
    query_scale: Float[Tensor, "B L 1"] | None = None
    """What queries are multiplied with; None: they stay as they are."""


def gpu_kernels(x: Tensor, weight: Tensor | None = None) -> ModuleType | None:
    """What `kernels_for` says about tensors on a GPU; None on a CPU, where no operation need ask it."""
    return kernels_for(x, weight) if x.is_cuda else None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, width: int, eps: float):
        """``width``: size of the last axis; ``eps`` is added to the mean square."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """x scaled to root mean square 1, times the weight; in the dtype of x."""
        if (kernels := gpu_kernels(x, self.weight)) is not None:
            normed: Tensor = kernels.rms_norm(x, self.weight, self.eps)
            return normed
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


class LayerNorm(nn.Module):
    """Layer norm over the last axis, computed in float32, with an optional bias."""

    def __init__(self, width: int, eps: float, bias: bool):
        """``width``: size of the last axis; ``eps`` is added to the variance."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """x with mean 0 and variance 1, times the weight, plus the bias; in the dtype of x."""
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), bias, self.eps).to(x.dtype)


def make_norm(config: TransformerConfig) -> RMSNorm | LayerNorm:
    """A norm of the configured kind over the network's width."""
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps)
    return LayerNorm(config.width, config.norm_eps, config.norm_bias)


def activate(x: Float[Tensor, "*b d"], kind: Activation) -> Float[Tensor, "*b d"]:
    """Apply an activation function elementwise."""
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


class Attention(nn.Module):
    """Grouped-query attention by torch's fused kernel."""

    def __init__(self, config: TransformerConfig, layer: int = 0):
        """Each key head serves ``heads / kv_heads`` consecutive query heads; ``layer``: its place in a cache."""
        super().__init__()
        self.config, self.layer = config, layer
        joined = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.width, joined, bias=config.qkv_bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: Float[Tensor, "B L d"], context: AttentionContext, onto: Float[Tensor, "B L d"] | None = None
    ) -> Float[Tensor, "B L d"]:
        """Attend from every position to those that the mask allows; ``onto``: what the result is added to."""
        joined = self.qkv(x)
        if context.query_scale is not None:
            joined[..., : self.config.heads * self.config.head_dim] *= context.query_scale.to(joined.dtype)
        return project(self._mixed(joined, context), self.out, onto)

    def _mixed(self, joined: Float[Tensor, "B L qkv"], context: AttentionContext) -> Float[Tensor, "B L h"]:
        """The values that every position attends to, from the joined projections."""
        config, rotary = self.config, context.rotary
        plain = not config.qk_norm and config.clip_qkv is None and config.rotary_width is None
        if rotary is not None and plain and context.mask is None and context.past is None and not context.causal:
            kernels = gpu_kernels(joined)
            if kernels is not None and kernels.attends(joined, config.head_dim):
                whole: Tensor = kernels.attend(joined, config.heads, config.kv_heads, *rotary)
                return whole
        turned = rotary is not None and self._turn(joined, *rotary)
        if turned and (seen := self._attend_cached(joined, context)) is not None:
            return seen
        by_head = joined.view(*joined.shape[:2], -1, config.head_dim)
        parts = torch.split(by_head, [config.heads, config.kv_heads, config.kv_heads], dim=-2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        if self.q_norm is not None and self.k_norm is not None and not turned:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.clip_qkv is not None:
            q, k, v = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (q, k, v))
        if rotary is not None and not turned:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if context.past is not None:
            k, v = context.past.update(self.layer, k, v)
        if context.mask is not None and config.kv_heads < config.heads and q.device.type == "cuda":
            # Of PyTorch's kernels for a GPU, those that take a mask know no groups: all scores would go through memory.
            k, v = (part.repeat_interleave(config.heads // config.kv_heads, dim=1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=context.mask,
            is_causal=context.causal and context.mask is None,
            enable_gqa=k.shape[1] < q.shape[1],
        )
        return mixed.transpose(1, 2).flatten(2)

    def _turn(self, joined: Float[Tensor, "B L qkv"], cos: Tensor, sin: Tensor) -> bool:
        """Norms and rotary positions of queries and keys, in place, if a kernel of ours serves; whether it did."""
        config, heads = self.config, self.config.heads
        weight = None if self.q_norm is None else self.q_norm.weight
        kernels = None if config.clip_qkv is not None else gpu_kernels(joined, weight)
        if kernels is not None and self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
            kernels.norm_rotate_(joined, norms, config.norm_eps, heads, config.kv_heads, cos, sin)
        elif kernels is not None and config.rotary_width is None:
            kernels.rotate_(joined, heads + config.kv_heads, cos, sin)
        else:
            return False
        return True

    def _attend_cached(
        self, joined: Float[Tensor, "B R qkv"], context: AttentionContext
    ) -> Float[Tensor, "B R h"] | None:
        """Store keys and values, and attend to all that are seen, if kernels of ours serve; None: they do not."""
        config, past, kernels = self.config, context.past, gpu_kernels(joined)
        if past is None or past.ends is None or context.causal or config.local is not None or kernels is None:
            return None
        memory = past.cache.memory[self.layer]
        if not kernels.attends_cached(joined, memory):
            return None
        kernels.store_kv(joined, memory, past.slots, past.positions, config.heads)
        where = past.slots, past.positions, past.ends
        mixed: Tensor = kernels.attend_cached(joined, memory, *where, config.heads, config.block_size)
        return mixed


def project(x: Float[Tensor, "B L h"], layer: nn.Module, onto: Float[Tensor, "B L d"] | None) -> Float[Tensor, "B L d"]:
    """A linear layer, added to something: where our kernels serve, in place, by the product itself."""
    if isinstance(layer, Int8Linear):
        return cast(Tensor, layer(x, onto))
    if onto is None:
        return cast(Tensor, layer(x))
    weight = layer.weight if isinstance(layer, nn.Linear) else None
    plain = getattr(layer, "bias", None) is None and onto.is_contiguous()
    if weight is None or not plain or onto.dtype != x.dtype or gpu_kernels(x, weight) is None:
        return onto + cast(Tensor, layer(x))
    onto.flatten(0, 1).addmm_(x.flatten(0, 1), weight.T)
    return onto


def rotary_angles(
    positions: Int[Tensor, "B L"], head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[Tensor, "B 1 L half"], Float[Tensor, "B 1 L half"]]:
    """Cosines and sines of the rotary position embedding (RoPE) with base ``theta``, in float32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = scaling.frequencies(frequencies, theta)
    angles = positions[:, None, :, None].float() * frequencies
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return (angles.cos(), angles.sin()) if amplitude == 1 else (angles.cos() * amplitude, angles.sin() * amplitude)


def apply_rotary(
    x: Float[Tensor, "B H L D"], cos: Float[Tensor, "b 1 L half"], sin: Float[Tensor, "b 1 L half"]
) -> Float[Tensor, "B H L D"]:
    """Rotate the pair (i, i + half) of each head by its angle, in float32; columns beyond the pairs stay."""
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class MLP(nn.Module):
    """The feed-forward part of a layer, plain or gated."""

    def __init__(self, config: TransformerConfig, width: int | None = None):
        """A gated MLP activates the first half of ``up`` and multiplies it with the second; ``width``: in between."""
        super().__init__()
        inner = config.mlp_width if width is None else width
        self.gated, self.activation = config.gated, config.activation
        self.up = nn.Linear(config.width, inner * (2 if config.gated else 1), bias=config.mlp_bias)
        self.down = nn.Linear(inner, config.width, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "B L d"], onto: Float[Tensor, "B L d"] | None = None) -> Float[Tensor, "B L d"]:
        """Transform each position by itself; ``onto``: what the result is added to."""
        inner = self.up(x)
        if self.gated and self.activation == "silu" and (kernels := gpu_kernels(inner)) is not None:
            inner = kernels.gated_silu(inner)
        elif self.gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = activate(gate, self.activation) * inner
        else:
            inner = activate(inner, self.activation)
        return project(inner, self.down, onto)


class Mixture(nn.Module):
    """A mixture of experts where a layer else has its MLP: those that the router chooses, and one that all share."""

    def __init__(self, config: TransformerConfig, experts: ExpertsConfig):
        """The shared expert is an MLP; there may be none."""
        super().__init__()
        self.experts = Experts(config.width, experts)
        self.shared = MLP(config, experts.shared_width) if experts.shared_width else None

    def forward(self, x: Float[Tensor, "B L d"], onto: Float[Tensor, "B L d"] | None = None) -> Float[Tensor, "B L d"]:
        """Transform each position by itself; ``onto``: what the result is added to."""
        mixed: Tensor = self.experts(x)
        if self.shared is not None:
            mixed = self.shared(x, onto=mixed)
        return mixed if onto is None else onto + mixed


class Block(nn.Module):
    """Attention and MLP (or experts) around a residual stream; norms before, after, or modulated ones (adaLN)."""

    def __init__(self, config: TransformerConfig, layer: int):
        """``layer`` counts from 0; the first may lack a norm before its attention."""
        super().__init__()
        self.norm_after = config.norm_after
        self.attention_norm = None if layer == 0 and not config.first_norm else make_norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config)
        experts = config.experts
        self.mlp = Mixture(config, experts) if experts is not None and experts.layers[layer] else MLP(config)
        self.modulation = nn.Linear(config.conditioning, 6 * config.width) if config.conditioning else None

    def forward(
        self, x: Float[Tensor, "B L d"], context: AttentionContext, condition: Float[Tensor, "B c"] | None
    ) -> Float[Tensor, "B L d"]:
        """The residual stream after this layer, which may stand where x stood; ``condition`` embeds the noise level."""
        norm = self.attention_norm or nn.Identity()
        if self.modulation is not None:
            shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)[:, None].chunk(6, dim=-1)
            x = x + gate * self.attention(modulate(norm(x), shift, scale), context)
            x = x + mlp_gate * self.mlp(modulate(self.mlp_norm(x), mlp_shift, mlp_scale))
            return x
        if self.norm_after:
            x = norm(x + self.attention(x, context))
            x = self.mlp_norm(x + self.mlp(x))
            return x
        x = self.attention(norm(x), context, onto=x)
        x = self.mlp(self.mlp_norm(x), onto=x)
        return x


def modulate(
    x: Float[Tensor, "B L d"], shift: Float[Tensor, "B 1 d"], scale: Float[Tensor, "B 1 d"]
) -> Float[Tensor, "B L d"]:
    """Shift and scale x by the conditioning (adaLN); zeros leave x as it is."""
    return x * (1 + scale) + shift


class NoiseLevel(nn.Module):
    """Embeds the noise level as a conditioning vector: sinusoidal features and a small MLP."""

    FEATURES = 256
    PERIOD = 10_000.0

    def __init__(self, width: int):
        """``width``: size of the conditioning vector."""
        super().__init__()
        self.up = nn.Linear(self.FEATURES, width)
        self.down = nn.Linear(width, width)

    def forward(self, sigma: Float[Tensor, " B"]) -> Float[Tensor, "B c"]:
        """The conditioning vector of each sequence."""
        half = self.FEATURES // 2
        rates = torch.exp(-math.log(self.PERIOD) / half * torch.arange(half, device=sigma.device, dtype=torch.float32))
        angles = sigma.float()[:, None] * rates
        features = torch.cat((angles.cos(), angles.sin()), dim=-1).to(next(self.parameters()).dtype)
        return F.silu(self.down(F.silu(self.up(features))))


class Embedding(nn.Module):
    """Embeds tokens and, where the configuration has them, learned positions and token types."""

    def __init__(self, config: TransformerConfig):
        """The tables that the configuration asks for."""
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.positions, config.width) if config.positions else None
        self.types = nn.Embedding(config.token_types, config.width) if config.token_types else None
        self.norm = make_norm(config) if config.embedding_norm else None
        self.first_position, self.gap = config.first_position, config.token_dropout

    def forward(
        self,
        ids: Int[Tensor, "B L"],
        positions: Int[Tensor, "B L"],
        types: Int[Tensor, "B L"] | None,
        valid: Bool[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L d"]:
        """The input of the first layer; ``types`` None: token type 0 everywhere; ``valid``: False at padding."""
        x: Tensor = self.tokens(ids)
        if self.gap is not None:
            gaps, real = ids == self.gap, torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
            kept = (real & ~gaps).sum(1).clamp(min=1)  # of nothing but gaps, all is zero
            scale = (1 - TRAINED_GAPS) * real.sum(1) / kept
            x = x.masked_fill(gaps[..., None], 0) * scale[:, None, None].to(x.dtype)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        if self.positions is not None:
            # Only padding has a negative position.
            x = x + self.positions((positions + self.first_position).clamp(min=0))
        return x if self.norm is None else self.norm(x)


class Head(nn.Module):
    """From the last hidden states to the vocabulary."""

    def __init__(self, config: TransformerConfig):
        """A tied head has no weight of its own: it uses the token embedding."""
        super().__init__()
        self.activation = config.head_transform
        dense, bias = config.head_transform is not None, config.head_transform_bias
        self.dense = nn.Linear(config.width, config.width, bias=bias) if dense else None
        self.norm = make_norm(config) if dense else None
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        self.int8: Int8Linear | None = None
        """Takes the place of weight and bias where they are rounded (`codd.backbones.quantized`)."""

    def forward(self, x: Float[Tensor, "*b d"], embedding: Float[Tensor, "V d"]) -> Float[Tensor, "*b V"]:
        """Logits; ``embedding`` is the token embedding, used if the head is tied to it."""
        if self.dense is not None and self.norm is not None and self.activation is not None:
            x = self.norm(activate(self.dense(x), self.activation))
        if self.int8 is not None:
            return cast(Tensor, self.int8(x))
        return F.linear(x, embedding if self.weight is None else self.weight, self.bias)


class Transformer(nn.Module):
    """Token ids to hidden states (`states`), hidden states to logits (`logits`)."""

    def __init__(self, config: TransformerConfig):
        """Parameters are not initialised: they are loaded, or `initialise` draws them."""
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.noise_level = NoiseLevel(config.conditioning) if config.conditioning else None
        self.final_modulation = nn.Linear(config.conditioning, 2 * config.width) if config.conditioning else None
        self.final_norm = None if config.norm_after else make_norm(config)
        self.head = Head(config)

    def states(
        self,
        ids: Int[Tensor, "B L"],
        positions: Int[Tensor, "B L"],
        *,
        valid: Bool[Tensor, "B L"] | None = None,
        segments: Int[Tensor, "B L"] | None = None,
        types: Int[Tensor, "B L"] | None = None,
        sigma: Float[Tensor, " B"] | None = None,
        past: CachedPass | None = None,
    ) -> Float[Tensor, "B L d"]:
        """The last hidden states, after the final norm: the head's input.

        ``valid`` is False at padding, to which nothing attends; ``segments`` number the texts that are packed into one
        row and do not attend to each other; ``sigma`` is the noise level of a network that is conditioned on one. With
        ``past`` the ids are a part of longer sequences, at its positions.
        """
        full, local = self._attention_contexts(positions if past is None else past.positions, valid, segments, past)
        condition = None if self.noise_level is None or sigma is None else self.noise_level(sigma)
        x: Tensor = self.embedding(ids, positions, types, valid)
        for i, block in enumerate(self.blocks):
            is_local = self.config.local is not None and i % self.config.local.every != 0
            x = block(x, local if is_local else full, condition)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.final_modulation is not None:
            x = modulate(x, *self.final_modulation(condition)[:, None].chunk(2, dim=-1))
        return x

    def logits(self, states: Float[Tensor, "*b d"]) -> Float[Tensor, "*b V"]:
        """Logits of some hidden states."""
        out: Tensor = self.head(states, self.embedding.tokens.weight)
        return out

    def kv_cache(self, slots: int, length: int) -> KVCache:
        """Memory for the keys and values of ``slots`` sequences of at most ``length`` positions."""
        weight = self.embedding.tokens.weight
        return KVCache(self.config.kv_shape, slots, length, device=weight.device, dtype=weight.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        """Move or convert; InvalidInput for int8 weights, which are laid out for their device."""
        if self.head.int8 is not None:
            raise InvalidInput("int8 weights stay as they were made: load the model with another device or dtype.")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _attention_contexts(
        self,
        positions: Int[Tensor, "B L"],
        valid: Bool[Tensor, "B L"] | None = None,
        segments: Int[Tensor, "B L"] | None = None,
        past: CachedPass | None = None,
    ) -> tuple[AttentionContext, AttentionContext]:
        """The contexts of global and of local layers.

        Without a cache, a position that would attend to nothing attends to itself: a softmax over nothing is NaN.
        """
        config, scaling, queries = self.config, self.config.rope_scaling, positions[..., None]
        query_scale = None if scaling is None else scaling.query_scale(positions)
        keys, known, masks = positions[:, None], None, []
        if past is not None:
            keys = torch.arange(past.seen, device=positions.device)
            known = None if past.ends is None else (keys < past.ends[:, None])[:, None, None, :]
        if valid is not None:
            known = (valid | ~valid.any(dim=1, keepdim=True))[:, None, None, :]
        if segments is not None:
            masks.append(segments[:, :, None] == segments[:, None, :])
        if config.causal and (known is not None or masks or past is not None or config.local is not None):
            masks.append(keys <= queries)
        if config.block_size is not None:
            masks.append(keys // config.block_size <= queries // config.block_size)

        def context(theta: float | None, *masks: Tensor) -> AttentionContext:
            turned = config.rotary_width or config.head_dim
            rotary = None if theta is None else rotary_angles(positions, turned, theta, scaling)
            mask = known
            for each in masks:
                mask = each[:, None] if mask is None else mask & each[:, None]
            if mask is not None and masks and past is None:
                mask = mask | torch.eye(positions.shape[1], dtype=torch.bool, device=positions.device)
            return AttentionContext(rotary, mask, past, config.causal, query_scale)

        full = context(config.rope_theta, *masks)
        if config.local is None:
            return full, full
        near = (queries - keys).abs() <= config.local.reach
        return full, context(config.local.rope_theta, *masks, near)


@torch.no_grad()
def initialise(network: Transformer, *, generator: torch.Generator, std: float = 0.02) -> None:
    """Normal weights, smaller where they add to the residual stream so that its size does not grow with depth."""
    small = std / math.sqrt(2 * network.config.layers)
    for name, parameter in network.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            scale = small if name.endswith(RESIDUAL) else std
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
