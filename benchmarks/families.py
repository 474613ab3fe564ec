"""What a forward of published shapes costs on a GPU beside what it needs, and what loading a large mixture takes.

    python benchmarks/families.py --out FILE.json                      # all parts
    python benchmarks/families.py --parts experts load --out FILE.json
    python benchmarks/families.py --tiny                               # the same at toy sizes, on a CPU

dense, block, experts: milliseconds of the network up to its last hidden states (batch of one, random weights,
bfloat16), by CUDA graphs as decoding does it and eagerly, beside the bytes of weights that it reads (of the experts
those that were chosen in this run) and the operations, at the bandwidth and speed that NVIDIA states for an H200.
load: a checkpoint in the published layout is written in 20 files and loaded, from a warm page cache.
"""

import argparse
import gc
import importlib
import json
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from codd.backbones.backbone import Backbone, ModelSpec
from codd.backbones.config import Config
from codd.backbones.transformer import Transformer
from codd.decoding import cuda_graphs
from codd.decoding.cuda_graphs import network_states
from timing import clock, head, milliseconds, save

BANDWIDTH, SPEED = 4.8e12, 989e12
"""Bytes and dense bfloat16 operations a second of an H200."""
LENGTHS = (32, 256, 2048)
HEAD_POSITIONS = 32
"""As many as a block has: the head is evaluated where something is masked."""
LLADA2_MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rms_norm_eps": 1e-6,
    "vocab_size": 157184,
    "use_bias": False,
    "use_qkv_bias": False,
    "pad_token_id": 156892,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada",
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 32,
        "mlp_hidden_size": 12288,
        "vocab_size": 126464,
        "embedding_size": 126464,
        "max_sequence_length": 4096,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "dream": {
        "model_type": "Dream",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
    },
    "sdar": {
        "model_type": "sdar",
        "architectures": ["SDARForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
    },
    "llada2": LLADA2_MINI,
}
"""By family: LLaDA-8B, Dream-7B, SDAR-8B, LLaDA2-mini."""
_HUB = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_HUB |= {"intermediate_size": 96, "vocab_size": 50}
_EXPERTS = {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2, "n_group": 4}
SMALL: dict[str, dict[str, Any]] = {
    "llada": SHAPES["llada"]
    | {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 96}
    | {"vocab_size": 50, "embedding_size": 50},
    "dream": SHAPES["dream"] | _HUB,
    "sdar": SHAPES["sdar"] | _HUB | {"head_dim": 16},
    "llada2": LLADA2_MINI | _HUB | _EXPERTS | {"topk_group": 2, "pad_token_id": 1},
}
DENSE, BLOCK, EXPERTS = ("llada", "dream"), ("sdar",), ("llada2",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on a CPU if there is no GPU")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a forward")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shards", type=int, default=20, help="files of the checkpoint that is loaded")
    parser.add_argument(
        "--folder", type=Path, help="where that is written and removed again (default: a temporary one)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="all figures as JSON, after every part")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        parser.exit(2, f"{parser.prog}: needs a CUDA device, and PyTorch finds none; for a tiny run: --tiny\n")
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    args.lengths = args.lengths or ((4, 40) if args.tiny else LENGTHS)
    parser.exit(0 if run_parts(args, args.parts, PARTS) else 1)


def run_parts(
    args: argparse.Namespace, parts: Sequence[str], functions: Mapping[str, Callable[[argparse.Namespace], Any]]
) -> bool:
    """Run, print and keep each part; whether all came to their end: one that fails does not lose the others."""
    report = head(args, args.device)
    failed = False
    for part in parts:
        torch.manual_seed(args.seed)
        begun = time.perf_counter()
        try:
            with torch.no_grad():
                report[part] = functions[part](args)
        except Exception as error:  # the other parts are worth their while
            report[part] = {"failed": f"{type(error).__name__}: {error}"}
            failed = True
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{part}, {time.perf_counter() - begun:.0f} s: {json.dumps(report[part], indent=1)}", flush=True)
        save(report, args.out)
    return not failed


def spec_of(family: str, fields: Mapping[str, Any]) -> ModelSpec:
    found: ModelSpec = importlib.import_module(f"codd.backbones.{family}").read_spec(Config(fields))
    return found


def random_backbone(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Backbone:
    """Random weights, made on the device."""
    with torch.device("meta"):
        network = Transformer(spec.transformer).to(dtype)
    for router in routers(network):
        router.keep_precise()
    network = network.to_empty(device=device).requires_grad_(False)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.02)
        else:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return (spec.backbone or Backbone)(spec, network).eval()


def routers(network: torch.nn.Module) -> list[Any]:
    """The routers of its mixtures."""
    return [module for module in network.modules() if hasattr(module, "keep_precise")]


def forwards(families: tuple[str, ...]) -> Callable[[argparse.Namespace], dict[str, Any]]:
    def run(args: argparse.Namespace) -> dict[str, Any]:
        return {family: measure(family, args) for family in families}

    return run


def measure(family: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of forwards of some lengths, and what they need."""
    backbone = random_backbone(spec_of(family, (SMALL if args.tiny else SHAPES)[family]), args.device, args.dtype)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in backbone.parameters())}
    for length in args.lengths:
        ids = torch.randint(0, backbone.vocab_size, (1, length), device=args.device)
        with counted_experts(backbone) as touched:
            states = backbone.states(ids)
        assert bool(states.isfinite().all())
        row = needs(backbone, length, sum(touched))
        row["eager_ms"] = milliseconds(partial(backbone.states, ids), args.rounds, args.device)
        if args.device.type == "cuda":
            row["graph_ms"] = milliseconds(partial(network_states, backbone, ids, None), args.rounds, args.device)
            assert len(cuda_graphs._NETWORKS[backbone].graphs) == len(found), "the network could not be captured"
            row["of_needed"] = row["graph_ms"] / row["needed_ms"]
            difference = (network_states(backbone, ids, None) - states).abs().max() / states.abs().max()
            row["graph_against_eager"] = float(difference)
        if touched:
            row["experts_a_layer"] = sum(touched) / len(touched)
        some = states[:, -HEAD_POSITIONS:].clone()
        row["head_ms"] = milliseconds(partial(backbone.network.logits, some), args.rounds, args.device)
        found[str(length)] = row
    return found


@contextmanager
def counted_experts(backbone: Backbone) -> Iterator[list[int]]:
    """How many experts of each layer a forward chooses."""
    touched: list[int] = []
    hooks = [
        router.register_forward_hook(lambda _, __, routed: touched.append(routed[1].unique().numel()))
        for router in routers(backbone)
    ]
    yield touched
    for hook in hooks:
        hook.remove()


def needs(backbone: Backbone, length: int, touched: int) -> dict[str, float]:
    """Weights that must be read, operations, and the longer of the times for the two."""
    config = backbone.config
    experts = getattr(config, "experts", None)
    own = {name: p for name, p in backbone.network.named_parameters() if not name.startswith(("embedding.", "head."))}
    dense = sum(p.numel() for name, p in own.items() if not name.endswith(("experts.up", "experts.down")))
    read, used = dense, dense
    if experts is not None:
        one = 3 * experts.width * config.width
        read += touched * one
        used += sum(experts.layers) * experts.chosen * one
    attention = 4 * length * length * config.heads * config.head_dim * config.layers
    size, operations = read * backbone.dtype.itemsize, 2 * used * length + attention
    return {
        "gigabytes": size / 1e9,
        "teraoperations": operations / 1e12,
        "needed_ms": 1e3 * max(size / BANDWIDTH, operations / SPEED),
    }


def write_checkpoint(
    folder: Path,
    fields: Mapping[str, Any],
    *,
    shards: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    family: str = "llada2",
) -> int:
    """Write random weights in the published layout, in so many files of about one size; gives their bytes."""
    from codd.backbones import weights

    spec = spec_of(family, fields)
    with torch.device("meta"):
        parameters = dict(Transformer(spec.transformer).named_parameters())
    slots = weights.expand_keys(spec.keys, spec.transformer)
    shapes = {name: slots[name].part(parameters[slots[name].target]).shape for name in sorted(slots)}
    total, done = sum(shape.numel() for shape in shapes.values()), 0
    of_shard: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        number = min(shards, 1 + done * shards // total)
        of_shard.setdefault(f"model-{number:05}-of-{shards:05}.safetensors", []).append(name)
        done += shape.numel()
    for file, names in of_shard.items():
        tensors = {name: torch.empty(shapes[name], dtype=dtype, device=device).normal_(0, 0.02) for name in names}
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / file)
    index = {"weight_map": {name: file for file, names in of_shard.items() for name in names}}
    (folder / weights.INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(fields))
    return total * dtype.itemsize


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory of loading a checkpoint, and whether some of its tensors are where they belong."""
    import codd
    from codd.backbones import loading

    folder = Path(tempfile.mkdtemp(prefix="families-", dir=args.folder))
    try:
        begun = time.perf_counter()
        fields = (SMALL if args.tiny else SHAPES)["llada2"]
        size = write_checkpoint(folder, fields, shards=args.shards, dtype=args.dtype, device=args.device)
        found: dict[str, Any] = {"gigabytes": size / 1e9, "files": len(list(folder.glob("*.safetensors")))}
        found |= {"largest_file_gigabytes": max(p.stat().st_size for p in folder.glob("*.safetensors")) / 1e9}
        found["writing_seconds"] = time.perf_counter() - begun
        gc.collect()
        torch.cuda.empty_cache()
        for name, checked in (("load", True), ("load_unchecked", False)):
            if args.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with memory() as peaks:
                begun = clock(args.device)
                model = codd.load(folder, None, device=args.device, check=checked)
                seconds = clock(args.device) - begun
            found[name] = {"seconds": seconds, "gigabytes_a_second": size / 1e9 / seconds, **peaks}
            if args.device.type == "cuda":
                found[name]["peak_device_gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
            matched = loading.match(folder, model.backbone.spec)
            parameters = dict(model.backbone.network.named_parameters())
            for key in sorted(matched.slots)[:: max(1, len(matched.slots) // 50)]:
                slot = matched.slots[key]
                with safe_open(matched.headers[key].file, framework="pt") as file:
                    stored = file.get_tensor(key).to(args.device)
                assert torch.equal(slot.part(parameters[slot.target]), stored.to(parameters[slot.target].dtype)), key
            ids = torch.randint(0, model.backbone.vocab_size, (1, 32), device=args.device)
            assert bool(model.backbone.states(ids).isfinite().all())
            del model, parameters
            gc.collect()
        return found
    finally:
        shutil.rmtree(folder)


@contextmanager
def memory() -> Iterator[dict[str, float]]:
    """The most host memory that was taken meanwhile, beyond what was taken before, by kind; sampled."""
    before, peaks, done = resident(), dict[str, float](), threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            note()

    def note() -> None:
        for kind, value in resident().items():
            name = f"{kind}_gigabytes"
            peaks[name] = max(peaks.get(name, 0.0), (value - before[kind]) / 1e9)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()
        note()


def resident() -> dict[str, int]:
    """Bytes of this process in memory: its own, and pages of files."""
    page = resource.getpagesize()
    _, total, files, *_ = (int(word) * page for word in Path("/proc/self/statm").read_text().split())
    return {"anonymous": total - files, "of_files": files, "resident": total}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "dense": forwards(DENSE),
    "block": forwards(BLOCK),
    "experts": forwards(EXPERTS),
    "load": load,
}

if __name__ == "__main__":
    main()
