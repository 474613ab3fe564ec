"""What tests/backbones/test_tensor_parallel.py runs in two processes: networks that are divided between them.

Usage: python -m tests.support.tensor_parallel_run OUT_DIR. The main process writes what it found into
OUT_DIR/found.safetensors. At last both run ``codd generate --tensor-parallel``.
"""

import atexit
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import codd
from codd.backbones.backbone import Backbone
from codd.backbones.kv_cache import CachedPass
from codd.backbones.loading import load_checkpoint
from codd.backbones.tensor_parallel import ShardedTransformer
from codd.cli import main
from codd.decoding import Model
from codd.errors import CoddError, InvalidInput
from tests.support.checkpoints import FIXTURES, cases, stated

LAYOUTS = (
    "llada_mha",
    "llada_gqa_sharded",
    "dream_tied",  # the head's rows are the embedding's
    "dream_untied_sharded",  # biases of queries, keys and values
    "llada2_moe",  # one fused qkv; experts, a shared one, a dense layer
    "llada2_moe_sharded",  # one key head: both processes have it
    "llada_moe",
    "sdar",
    "fastdllm_v2",
    "bert",  # biases everywhere, norms after the sums, a head with a transform
    "modernbert",
    "mdlm_timecond",  # conditioned on a noise level
    "sedd",  # an odd number of tokens
)
DECODED = {
    "decode_llada": ({"circuit": "null"}, {"steps": 6, "block_length": 8}),
    "decode_dream": ({}, {"steps": 8, "block_length": 8, "cache": "dual", "temperature": 0.7, "seed": 3}),
    "decode_sdar": ({}, {"threshold": 0.2, "block_length": 4}),
    "decode_llada2": ({}, {"steps": 8, "temperature": 0.7, "seed": 5}),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 9, 7]]


def logits(name: str, **how: object) -> dict[str, Tensor]:
    """The logits of all cases of a fixture."""
    backbone = load_checkpoint(FIXTURES / name, device="cpu", block_size=stated(name).get("block_size"), **how).backbone
    found = {}
    for case, fields in cases(name).items():
        if "input_ids" in fields:
            extra = {key: fields[key] for key in ("sigma", "token_type_ids") if key in fields}
            found[f"{name}.{case}"] = backbone(fields["input_ids"], fields.get("attention_mask"), **extra).contiguous()
    if backbone.block_size is not None:
        found[f"{name}.cached"] = cached_logits(backbone, cases(name)["b2"]["input_ids"])
    found[f"{name}.held"] = torch.tensor(sum(parameter.numel() for parameter in backbone.parameters()))
    close(backbone.network)
    return found


def cached_logits(backbone: Backbone, ids: Tensor) -> Tensor:
    """Of the last half of two sequences, batched as on a GPU, with the first half in a cache that was used before."""
    half, slots = ids.shape[1] // 2 // backbone.block_size * backbone.block_size, torch.tensor([2, 0])
    cache = backbone.network.kv_cache(3, ids.shape[1] + 3)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    for part in (slice(3, half + 3), slice(0, half), slice(half, None)):
        if part.start == 0:
            cache.clear(0)
            cache.clear(2)
        ends = positions[:, part][:, -1].contiguous() + 1
        past = CachedPass(cache, slots, positions[:, part].contiguous(), cache.length, ends)
        states = backbone.cached_states(ids[:, part], past)
    return backbone.network.logits(states)


def sequences(name: str, **how: object) -> dict[str, Tensor]:
    """What a model makes of two prompts, in float64: no choice hangs on the order of a sum."""
    loading, options = DECODED[name]
    model: Model = codd.load(FIXTURES / name, device="cpu", dtype=torch.float64, **loading, **how)
    if how:
        with pytest.raises(InvalidInput, match="already hold the parts of another"):
            codd.load(FIXTURES / name, device="cpu", **how)
    out = model.generate(PROMPTS, gen_length=16, stop=False, **options)
    close(model.backbone.network)
    return {f"{name}.{i}": ids for i, ids in enumerate(out.sequences)}


def close(network: torch.nn.Module) -> None:
    """Let the other process go on to the next network; this one cannot be called any more."""
    if isinstance(network, ShardedTransformer):
        network.close()
        with pytest.raises(CoddError, match="out of step"):
            network.logits(torch.zeros(1, network.config.width))


def divided(function: Callable[..., dict[str, Tensor]], name: str) -> dict[str, Tensor]:
    """What the main process finds; in the other one loading ends by an exit, which is for this script to outlive."""
    try:
        return function(name, tensor_parallel=True)
    except SystemExit as end:
        if end.code != 0:
            raise
        return {}


def name_threads() -> None:
    """Print the threads that are left, those of PyTorch included: at exit there are to be no more that hold tensors."""
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):  # none but on Linux
        with suppress(OSError):  # a thread that has just ended
            names.append(file.read_text().strip())
    print("left:", *names, file=sys.stderr)


if __name__ == "__main__":
    atexit.register(name_threads)  # runs after what is registered later
    out = Path(sys.argv[1])
    found: dict[str, Tensor] = {}
    for name in LAYOUTS:
        found |= divided(logits, name)
    for name in DECODED:
        found |= divided(sequences, name)
    if os.environ["RANK"] == "0":
        save_file(found, out / "found.safetensors")
        (out / "prompt.jsonl").write_text(json.dumps({"ids": PROMPTS[0]}))
    arguments = ["--file", str(out / "prompt.jsonl"), "--gen-length", "8", "--dtype", "float64", "--device", "cpu"]
    sys.exit(main(["generate", *arguments, "--model", str(FIXTURES / "decode_sdar"), "--json", "--tensor-parallel"]))
