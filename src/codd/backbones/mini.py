"""mini: the network that codd trains and bundles. LLaMA-like, with normalised queries and keys and a tied head.

Its files may keep matrices as 8-bit integers with one scale a row (`quantise`); they are widened when they are read.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from codd import files
from codd.backbones import chat
from codd.backbones.backbone import Backbone, ModelSpec, SpecialTokenIds
from codd.backbones.config import CONFIG, Config
from codd.backbones.quantized import round_rows
from codd.backbones.transformer import Transformer, TransformerConfig
from codd.backbones.weights import SCALE, SINGLE, Key

NAME = "mini"
MODEL_TYPE = "codd-mini"
KINDS = (MODEL_TYPE,)

_LAYER = "attention_norm attention.qkv attention.q_norm attention.k_norm attention.out mlp_norm mlp.up mlp.down"
_MODULES = ("embedding.tokens", *(f"blocks.{{i}}.{part}" for part in _LAYER.split()), "final_norm")
KEYS = tuple(Key(f"{name}.weight", f"{name}.weight") for name in _MODULES)


def read_spec(config: Config) -> ModelSpec:
    """The model that a config.json of this family describes; FormatError for one that codd cannot build."""
    heads = config.count("heads")
    transformer = TransformerConfig(
        vocab_size=config.count("vocab_size"),
        width=config.count("width"),
        layers=config.layers("layers"),
        heads=heads,
        kv_heads=config.count("kv_heads", heads),
        mlp_width=config.count("mlp_width"),
        rope_theta=config.number("rope_theta", 10_000.0),
        causal=config.flag("causal", False),
        block_size=None if config.get("block_size") is None else config.count("block_size"),
        qk_norm=True,
        tied=True,
    )
    return ModelSpec(
        family=NAME,
        transformer=transformer,
        keys=KEYS,
        special=SpecialTokenIds.from_config(config),
        chat_template=chat.MINI,
        max_length=config.count("max_length", 1024),
        ignored=lambda name: name.endswith(SCALE),
    )


def save(
    backbone: Backbone, folder: str | os.PathLike[str], *, int8: bool = False, notes: Mapping[str, Any] | None = None
) -> Path:
    """Write config.json and model.safetensors; each takes its place only when it is whole."""
    folder = Path(folder)
    tensors = {name: parameter.detach() for name, parameter in backbone.network.named_parameters()}
    if int8:
        tensors = quantise(tensors)
    with files.replacing(folder, SINGLE, CONFIG) as (weights, config):
        files.write_weights(weights, files.standalone(tensors), {"format": "pt"})
        fields = {**describe(backbone), **(notes or {}), "sha256": files.sha256(weights)}
        files.write_text(config, json.dumps(fields, indent=2) + "\n")
    return folder


def describe(backbone: Backbone) -> dict[str, Any]:
    """The fields of a backbone's config.json; `read_spec` reads them back."""
    sizes = ("vocab_size", "width", "layers", "heads", "kv_heads", "mlp_width", "rope_theta", "causal")
    config, special = backbone.config, backbone.special
    return {
        "model_type": MODEL_TYPE,
        **{name: getattr(config, name) for name in sizes},
        **({} if config.block_size is None else {"block_size": config.block_size}),
        "max_length": backbone.max_length,
        **{f"{name}_token_id": getattr(special, name) for name in ("mask", "eos", "pad", "bos")},
    }


def build(config: Config) -> Backbone:
    """A backbone with uninitialised weights, for training."""
    spec = read_spec(config)
    return Backbone(spec, Transformer(spec.transformer))


def quantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as 8-bit integers with one scale a row; everything else in float32."""
    out = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            out[name] = tensor.float()
            continue
        out[name], out[name + SCALE] = round_rows(tensor)
    return out
