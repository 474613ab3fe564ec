"""The checkpoints that the tests load: the fixtures of other people's models, and random ones of ours."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from codd.backbones import mini
from codd.backbones.backbone import Backbone
from codd.backbones.config import Config
from codd.backbones.loading import load_checkpoint
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import initialise
from tests.support import FIXTURES

PUBLISHED = tuple(
    """
    llada_mha llada_gqa_sharded dream_tied dream_untied_sharded bert modernbert mdlm mdlm_timecond sedd sdar
    sdar_sharded fastdllm_v2 fastdllm_v2_tied_sharded llada_moe llada_moe_sharded llada2_moe llada2_moe_sharded
    illada illada_sharded a2d_qwen3 a2d_qwen3_bd3lm_sharded a2d_qwen2 a2d_llama sdar_moe_sharded
    stable_diffcoder_sharded nemotron_diffusion nemotron_diffusion_sharded esm2 esm1b roberta
""".split()  # noqa: SIM905 a list of literals would take thirty lines
)
MINI: dict[str, Any] = {
    "vocab_size": 60,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "mlp_width": 48,
    "max_length": 64,
    "mask_token_id": 59,
    "eos_token_id": 57,
    "pad_token_id": 58,
}


@functools.cache
def backbone(name: str) -> Backbone:
    """Of a fixture, in float32 on the CPU; "mini" is a random one of ours."""
    if name == "mini":
        return random_mini()
    return load_checkpoint(FIXTURES / name, device="cpu", block_size=stated(name).get("block_size")).backbone


def stated(name: str) -> dict[str, Any]:
    """What a fixture's config.json does not say: block size, mask id, where a cached pass begins."""
    path = FIXTURES / name / "case.json"
    return json.loads(path.read_text()) if path.exists() else {}


def random_network(*, seed: int = 3, std: float = 0.5, **fields: Any) -> Backbone:
    """A small network of ours with random weights, large enough that what is given matters and argmaxes vary."""
    built = mini.build(Config({"width": 16, "layers": 1, "heads": 2, "mlp_width": 16, **fields}, "a test"))
    initialise(built.network, generator=torch.Generator().manual_seed(seed), std=std)
    return built.eval().requires_grad_(False)


def random_mini(seed: int = 0, **changes: Any) -> Backbone:
    """One of two layers with fewer heads of keys than of queries."""
    return random_network(seed=seed, std=0.3, **{**MINI, **changes})


def save_network(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """A random network of one layer with its tokenizer."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("mask", "eos", "pad")}
    mini.save(random_network(std=0.3, vocab_size=tokenizer.vocab_size, **special, **changes), folder)
    tokenizer.save(folder)
    return folder


def cases(name: str) -> dict[str, dict[str, Tensor]]:
    """The inputs and outputs of a fixture: {"b1": {"input_ids": ..., "logits": ...}, ...}."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(FIXTURES / name / "case.safetensors").items():
        case, field = key.split(".", 1)
        found.setdefault(case, {})[field] = tensor
    return found


def copy_of(name: str, folder: Path) -> Path:
    """A fixture that a test may damage."""
    return Path(shutil.copytree(FIXTURES / name, folder / name))


def edit_config(folder: Path, **changes: Any) -> None:
    """Set fields of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All that the files of a checkpoint hold."""
    return {name: x for path in sorted(folder.glob("model*.safetensors")) for name, x in load_file(path).items()}


def edit_weights(folder: Path, *, drop: tuple[str, ...] = (), **changes: Tensor) -> None:
    """Drop or set tensors of a checkpoint in one file."""
    kept = {name: tensor for name, tensor in tensors_of(folder).items() if name not in drop}
    save_file({**kept, **changes}, folder / "model.safetensors")
