"""From a folder or a hub id to a backbone on its device."""

import functools
import os
import reprlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from codd import files
from codd.backbones import (
    a2d,
    adapters,
    bert,
    dream,
    esm,
    fast_dllm,
    illada,
    llada,
    llada2,
    llada_moe,
    mdlm,
    mini,
    modernbert,
    nemotron,
    quantized,
    roberta,
    sdar,
    sedd,
    stable_diffcoder,
    weights,
)
from codd.backbones.backbone import Backbone, ModelSpec
from codd.backbones.config import Config
from codd.backbones.experts import Router
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import Transformer
from codd.distributed import choose_device
from codd.errors import FormatError, InvalidInput, shown

FAMILIES = (
    *(llada, llada_moe, llada2, illada, dream, a2d, sdar, fast_dllm, stable_diffcoder, nemotron, mdlm, sedd),
    *(bert, modernbert, roberta, esm, mini),
)
"""Each has a NAME, KINDS (classes and model_types of its files) and ``read_spec`` (the model that a file describes)."""
GENERATION = "generation_config.json"
MODEL_FILES = (
    "config.json",
    GENERATION,
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What is downloaded of a checkpoint in the hub's layout: no pickled weights, no code."""
CHECKPOINT_FILES = (
    *MODEL_FILES,
    *("chat_template.jinja", "circuit/*", "circuit-static/*"),
    *(f"*_lora/{name}" for name in adapters.FILES),
)
"""What is downloaded of a checkpoint for `codd.load`: also its chat template, circuits and adapters in its folder."""
BUNDLED = Path(__file__).parent / "bundled"
DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Names of types to compute in."""


class Checkpoint(NamedTuple):
    """A loaded checkpoint; ``tokenizer`` is None if its folder has no tokenizer files."""

    backbone: Backbone
    tokenizer: Tokenizer | None
    folder: Path


def load_checkpoint(
    source: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    block_size: int | None = None,
    check: bool = True,
    adapter: str | os.PathLike[str] | None = None,
    merge: bool = True,
    quantize: quantized.Quantization | None = None,
) -> Checkpoint:
    """Read a checkpoint of any known family.

    Args:
        source: A folder or a hub id; None: the bundled model.
        device: By default a CUDA device if there is one, else the CPU.
        dtype: A type or its name; by default float32 on a CPU and the checkpoint's own elsewhere.
        revision: A branch, tag or commit of a hub repository.
        block_size: Of a block-causal network, where its files do not say the right one.
        check: Refuse weights that are NaN or infinite, and a file whose sha256 is not the one in config.json.
        adapter: A PEFT LoRA checkpoint (a folder, one within the checkpoint's, or a hub id) to add to the weights.
        merge: False: keep the adapter apart, to be switched on and off (`Backbone.switch_adapter`).
        quantize: "int8" rounds the weights of the layers and of the head (`codd.backbones.quantized`).

    Raises:
        FormatError: Files are damaged or of an unknown family.
        InvalidInput: This machine has no such device or dtype, or the network cannot be quantized.
    """
    quantized.check(quantize, merge=merge)
    floating = None if dtype is None else as_dtype(dtype)
    folder = BUNDLED if source is None else files.local_folder(source, CHECKPOINT_FILES, revision)
    spec = read_spec(folder, block_size)
    backbone = _read(folder, spec, choose_device(device), floating, check)
    if adapter is not None:
        inside = folder / adapter
        own = inside if (inside / adapters.CONFIG).is_file() else adapter
        adapters.attach(backbone, own, merge=merge, check=check)
    if quantize is not None:
        quantized.quantize(backbone.network)
    vocab_size = spec.transformer.vocab_size
    tokenizer = Tokenizer.from_folder(folder, chat_template=spec.chat_template, vocab_size=vocab_size)
    return Checkpoint(backbone, tokenizer, folder)


def read_spec(folder: Path, block_size: int | None = None) -> ModelSpec:
    """The model that a folder's config.json describes; FormatError if it is damaged or of no known family.

    ``block_size`` takes the place of a block-causal network's; InvalidInput for any other network.
    """
    config = Config.read(folder)
    family = family_of(config)
    if family is None:
        known = ", ".join(family.NAME for family in FAMILIES)
        kind = reprlib.repr(config.get("model_type"))
        raise FormatError(f"{config.where}: model_type {kind} is of no family that codd knows; use one of {known}.")
    spec: ModelSpec = family.read_spec(config)
    spec = replace(spec, assumed=_assumed(config, family, spec))
    if (folder / GENERATION).is_file():
        stated = Config(files.read_json_object(folder / GENERATION), str(folder / GENERATION))
        spec = replace(spec, stop_ids=frozenset(stated.tokens("eos_token_id")))
    _check_geometry(config.where, spec)
    return spec if block_size is None else _with_block_size(spec, block_size)


def family_of(config: Config) -> ModuleType | None:
    """The family that a config.json is of: by its class, if that is known, else by its model_type."""
    return next((family for kind in config.kinds() for family in FAMILIES if kind in family.KINDS), None)


def _assumed(config: Config, family: ModuleType, spec: ModelSpec) -> dict[str, int]:
    """The published mask and block that a family takes where the file has no field for them."""
    published = {"mask_token_id": getattr(family, "MASK_ID", None), "block_size": getattr(family, "BLOCK_SIZE", None)}
    used = {"mask_token_id": spec.special.mask, "block_size": spec.transformer.block_size or spec.block_length}
    stated = {
        "mask_token_id": config.get("mask_token_id"),
        "block_size": config.get("block_size") or config.get("bd_size"),
    }
    return {
        name: value
        for name, value in published.items()
        if value is not None and value == used[name] and stated[name] is None
    }


def _with_block_size(spec: ModelSpec, block_size: int) -> ModelSpec:
    if spec.transformer.block_size is None and spec.block_length is None and not spec.any_blocks:
        raise InvalidInput(
            f"block_size is for block-causal networks, but {spec.family} attends to all positions: leave it out; "
            "block_length is an option of generate."
        )
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise InvalidInput(f"block_size must be a whole number of at least 1, found {block_size!r}.")
    assumed = {name: value for name, value in spec.assumed.items() if name != "block_size"}
    if spec.block_length is not None:
        return replace(spec, block_length=block_size, assumed=assumed)
    return replace(spec, transformer=replace(spec.transformer, block_size=block_size), assumed=assumed)


def _check_geometry(where: str, spec: ModelSpec) -> None:
    """Raise a FormatError for sizes that no network can have, before one is built."""
    config, mask = spec.transformer, spec.special.mask
    again = "Download the file again."
    if (config.head_width is None and config.width % config.heads) or config.heads % config.kv_heads:
        raise FormatError(
            f"{where}: {config.heads} attention heads with {config.kv_heads} key heads do not divide a width of "
            f"{config.width}. {again}"
        )
    turned = config.head_dim if config.rotary_width is None else config.rotary_width
    if config.rope_theta is not None and (turned % 2 or not 0 < turned <= config.head_dim):
        columns = "" if config.rotary_width is None else f" of which {config.rotary_width} turn"
        raise FormatError(
            f"{where}: rotary positions need heads of even width, found {config.head_dim}{columns}. {again}"
        )
    if (experts := config.experts) is not None:
        size, rest = divmod(experts.count, experts.groups)
        if rest or experts.kept_groups > experts.groups or (experts.groups > 1 and size < 2):
            raise FormatError(
                f"{where}: {experts.kept_groups} of {experts.groups} groups cannot be chosen among {experts.count} "
                f"experts. {again}"
            )
        if experts.chosen > size * experts.kept_groups:
            raise FormatError(
                f"{where}: {experts.chosen} experts a token, but its groups hold {size * experts.kept_groups}. {again}"
            )
    if mask is not None and mask >= config.vocab_size:
        raise FormatError(f"{where}: the mask id {mask} is not in the vocabulary of {config.vocab_size}. {again}")


class MatchedFiles(NamedTuple):
    """A checkpoint's files, compared with the network that its config.json describes; nothing is loaded yet."""

    headers: dict[str, weights.TensorHeader]
    slots: dict[str, weights.Slot]
    network: Transformer
    """On the meta device: shapes without memory."""


def match(folder: Path, spec: ModelSpec) -> MatchedFiles:
    """Match tensors with parameters from the headers alone; FormatError if the checkpoint cannot be loaded."""
    headers, config = weights.checkpoint_headers(folder), spec.transformer
    experts = 0 if config.experts is None else config.experts.count * sum(config.experts.layers)
    for what, count in (("layers", config.layers), ("experts", experts)):
        if count > len(headers):
            raise FormatError(
                f"{folder}: config.json states {count:,} {what}, but there are only {len(headers):,} tensors. "
                "Download both again."
            )
    try:
        with torch.device("meta"):
            network = Transformer(config)
    except RuntimeError as error:  # a product of sizes that overflows
        raise FormatError(f"{folder}: no network has the sizes in config.json ({files.brief(error)}).") from error
    table = weights.expand_keys(spec.keys, config)
    heads = {key.source for key in spec.keys if key.target == "head.weight"}  # copies of the embedding, if it is tied
    slots = weights.assign_slots(
        folder, headers, table, rename=spec.rename, ignored=lambda name: name in heads or spec.ignored(name)
    )
    weights.check_headers(network, headers, slots)
    return MatchedFiles(headers, slots, network)


def stated_sha256(folder: Path) -> tuple[str | None, bool | None]:
    """The digest in config.json, and whether it is that of the weights; None where there is nothing to compare."""
    stated = Config.read(folder).get("sha256")
    if stated is None or (folder / weights.INDEX).is_file():
        return None, None
    return str(stated), stated == files.sha256(folder / weights.SINGLE)


def _read(folder: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype | None, check: bool) -> Backbone:
    matched = match(folder, spec)
    if check and stated_sha256(folder)[1] is False:
        raise FormatError(
            f"{folder / weights.SINGLE}: is damaged: its sha256 is not the one that config.json states. Download or "
            "save both files again, or load them with check=False."
        )
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else weights.stored_dtype(matched.headers, matched.slots)
    check_dtype(dtype, device)
    network = matched.network.to(dtype)
    for module in network.modules():
        if isinstance(module, Router):
            module.keep_precise()
    network = network.to_empty(device=device).requires_grad_(False)
    weights.load(network, matched.headers, matched.slots, check=check)
    return (spec.backbone or Backbone)(spec, network).eval()


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating-point type, which may be given by its name; InvalidInput for anything else."""
    named = getattr(torch, dtype, None) if dtype in DTYPES else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        found = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise InvalidInput(f"dtype must be a floating-point type ({', '.join(DTYPES)}), found {found}.")
    return named


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise InvalidInput for a dtype that the device cannot compute in.

    On some CPUs a bfloat16 product kills the process unless oneDNN's instruction set is limited, which is done here.
    """
    if device.type != "cpu" or dtype != torch.bfloat16 or _bfloat16_survives():
        return
    limit = "AVX512_CORE_BF16"
    if os.environ.get("ONEDNN_MAX_CPU_ISA") != limit:
        # oneDNN reads this at its first product, so that it still counts if nothing was multiplied in bfloat16 before.
        os.environ["ONEDNN_MAX_CPU_ISA"] = limit
        _bfloat16_survives.cache_clear()
        if _bfloat16_survives():
            return
    raise InvalidInput("bfloat16 matrix products crash on this CPU; load the model with dtype=torch.float32.")


@functools.cache
def _bfloat16_survives() -> bool:
    """Whether a bfloat16 product works, tried in another process: some CPUs announce AMX instructions they lack."""
    trial = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    return subprocess.run([sys.executable, "-c", trial], capture_output=True).returncode == 0
