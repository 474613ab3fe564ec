"""What ``codd info`` says of a backbone or an adapter: from its JSON files and the headers of its weights."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from codd import files
from codd.backbones import adapters, loading, weights
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config
from codd.backbones.experts import ExpertsConfig
from codd.backbones.progress import lasting_bar
from codd.backbones.quantized import int8_parameters
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import TransformerConfig
from codd.cli import console
from codd.cli.info_circuit import AGAIN, Report, circuit
from codd.decoding.model import CIRCUIT_FOLDERS

CIRCUITS = {"circuit": CIRCUIT_FOLDERS["trained"], "static circuit": CIRCUIT_FOLDERS["static"]}
"""The labels of a checkpoint's circuits, and their folders."""
ASSUMED = ("llada", "llada_moe", "llada2", "illada", "sdar", "fast_dllm")
"""Families whose published mask id is taken where config.json does not state one."""
TEMPLATES = {"own": "its own chat template", "family": "the family's chat template", None: "no chat template"}


def model(source: str | None) -> Report:
    """Describe the model in a folder or on the hub (None: the bundled one); FormatError if it cannot be loaded."""
    folder = loading.BUNDLED if source is None else files.local_folder(source, loading.CHECKPOINT_FILES)
    spec, config, report = loading.read_spec(folder), Config.read(folder), Report()
    found = loading.match(folder, spec)
    bundled = folder.resolve() == loading.BUNDLED.resolve()
    report.add("kind", "causal language model" if spec.transformer.causal else "denoiser", kind="backbone")
    family = spec.family + (", the model that comes with codd" if bundled else "")
    report.add("family", family, family=spec.family, bundled=bundled)
    report.add("parameters", parameters=sum(p.numel() for p in found.network.parameters()))
    _add_network(report, spec, config)
    tokenizer = Tokenizer.from_folder(folder, vocab_size=spec.transformer.vocab_size)
    _add_special_ids(report, spec, config, tokenizer)
    _add_tokenizer(report, spec, tokenizer)
    _add_files(report, found)
    stated, intact = loading.stated_sha256(folder)
    report.numbers |= {"folder": str(folder), "sha256": stated, "sha256_matches": intact}
    if intact is not None:
        report.add_sha256(stated, intact)
    if source is not None and str(folder) != str(Path(source)):
        report.add("folder", folder)
    circuits = _add_circuits(report, folder, spec.transformer)

    def check() -> str:
        said = [f"of the {name} {each.check()}" for name, each in circuits.items() if each.check is not None]
        return "; ".join([check_values(found.headers), *said])

    report.check = check
    return report


def _add_network(report: Report, spec: ModelSpec, config: Config) -> None:
    network, experts = spec.transformer, spec.transformer.experts
    sizes = {name: getattr(network, name) for name in ("layers", "width", "heads", "kv_heads", "mlp_width")}
    shared = "" if network.kv_heads == network.heads else f", sharing {network.kv_heads} of keys and values"
    report.add("layers", f"{network.layers}, {network.width:,} wide, {network.heads} heads{shared}", **sizes)
    attention = "causal" if network.causal else "to all positions"
    if network.block_size is not None:
        stated = any(config.get(name) is not None for name in ("block_size", "bd_size"))
        whence = "" if stated else _published(spec)
        attention = f"block-causal, blocks of {network.block_size} positions{whence}"
    report.add("attention", attention, causal=network.causal, block_size=network.block_size)
    report.numbers["experts"] = None
    if experts is not None:
        report.add("experts", _experts(experts), experts=experts.count)
    tied = "tied" if network.tied else "untied"
    report.add("vocabulary", f"{network.vocab_size:,} tokens, {tied}", vocab_size=network.vocab_size, tied=network.tied)
    longest = spec.max_length
    report.add("max length", "not stated" if longest is None else f"{longest:,} positions", max_length=longest)


def _experts(experts: ExpertsConfig) -> str:
    shared = "" if not experts.shared_width else f", and one of {experts.shared_width:,} that all share"
    each = f"{experts.count}, {experts.width:,} wide, {experts.chosen} for each token"
    return f"{each}{shared}; in {_several(sum(experts.layers), 'layer')}"


def _add_special_ids(report: Report, spec: ModelSpec, config: Config, tokenizer: Tokenizer | None) -> None:
    """The ids that config.json states, else the tokenizer's."""
    for name in ("mask", "eos", "pad", "bos"):
        stated = getattr(spec.special, name)
        other = None if tokenizer is None else getattr(tokenizer, f"{name}_id")
        found, text = other if stated is None else stated, "not stated"
        if found is not None:
            token = None if tokenizer is None else tokenizer.id_to_token(found)
            differs = "" if other in (None, found) else f", but the tokenizer says {other}"
            text = f"{found}{'' if token is None else ' ' + token}{differs}"
        elif name == "mask" and not spec.transformer.causal:
            text = "not stated: give mask_id to codd.load"
        if name == "mask" and stated is not None and spec.family in ASSUMED and config.get("mask_token_id") is None:
            text += _published(spec)
        report.numbers[f"{name}_id"] = found
        report.add(f"{name} id", text)


def _published(spec: ModelSpec) -> str:
    return f" (not stated; the published one of {spec.family})"


def _add_tokenizer(report: Report, spec: ModelSpec, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        report.add("tokenizer", "none: give ids", tokenizer=None)
        return
    template = "own" if tokenizer.chat_template else "family" if spec.chat_template else None
    kind, size = type(tokenizer.backend.model).__name__, tokenizer.vocab_size
    beyond = size - spec.transformer.vocab_size
    rest = f"; {beyond:,} of its ids are beyond the network's vocabulary" if beyond > 0 else ""
    numbers = {"kind": kind, "vocab_size": size, "chat_template": template}
    report.add("tokenizer", f"{kind}, {size:,} tokens, {TEMPLATES[template]}{rest}", tokenizer=numbers)


def _add_files(report: Report, found: loading.MatchedFiles) -> None:
    """Stored types, bytes, and tensors that no parameter is made of: buffers, heads of other tasks."""
    counts: Counter[str] = Counter()
    for name in found.slots:
        counts[weights.DTYPES[found.headers[name].dtype]] += math.prod(found.headers[name].shape)
    dtypes = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    report.add("dtype", ", ".join(f"{dtype} ({count:,})" for dtype, count in dtypes.items()), dtypes=dtypes)
    int8 = int8_parameters(found.network)
    quantized = f"int8, {int8:,} parameters" if int8 else "none: a mixture of experts"
    report.add("quantize", quantized, int8_parameters=int8)
    shards = {header.file for header in found.headers.values()}
    size = sum(shard.stat().st_size for shard in shards)
    report.add("size", f"{console.size(size)} in {_several(len(shards), 'file')}", bytes=size, shards=len(shards))
    unused = sorted(found.headers.keys() - found.slots.keys() - {name + weights.SCALE for name in found.slots})
    report.numbers |= {"tensors": len(found.slots), "unused_tensors": len(unused)}
    if unused:
        others = " and others" if len(unused) > 1 else ""
        report.add("unused", f"{_several(len(unused), 'tensor')} in the files: {unused[0]}{others}")


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _add_circuits(report: Report, folder: Path, network: TransformerConfig) -> dict[str, Report]:
    report.add("circuit", "none", circuit=None, static_circuit=None)
    circuits = {name: circuit(str(folder / kept)) for name, kept in CIRCUITS.items() if (folder / kept).is_dir()}
    for name, each in circuits.items():
        numbers, line = each.numbers, str(each.lines["kind"])
        if "num_states" in numbers:
            window = "" if numbers["window"] is None else f", window of {numbers['window']} positions"
            line += f", {numbers['num_states']:,} states, {numbers['vocab_size']:,} tokens{window}"
        line += f", {each.lines['size']}"
        if each.bad:
            line += f"; its sha256 DOES NOT MATCH: {AGAIN.replace('both', 'both of its')}"
        alien = _alien(numbers, network)
        line += f"; {alien}: remove the folder {CIRCUITS[name]}/" if alien else ""
        report.add(name, line, bad=bool(each.bad or alien), **{name.replace(" ", "_"): numbers})
    return circuits


def _alien(circuit: Mapping[str, Any], network: TransformerConfig) -> str:
    """Why a circuit cannot be used with this network; empty if it can."""
    features = circuit.get("head", {"features": network.width})["features"]
    if circuit.get("vocab_size", network.vocab_size) != network.vocab_size:
        return f"it DOES NOT BELONG to a model of {network.vocab_size:,} tokens"
    if features != network.width:
        return f"with {features:,} features it DOES NOT BELONG to a model that is {network.width:,} wide"
    return ""


def adapter(source: str) -> Report:
    """Describe a LoRA adapter in a folder or on the hub; FormatError if codd cannot read it."""
    folder = files.local_folder(source, adapters.FILES)
    config, path = adapters.read_config(folder), folder / adapters.WEIGHTS
    with weights.open_safetensors(path) as file:
        headers = weights.read_headers(dict.fromkeys(file.keys(), path))
    report = Report({"folder": str(folder)}, check=lambda: check_values(headers))
    dora, base = config.flag("use_dora", False), config.get("base_model_name_or_path")
    report.add("kind", f"adapter, {'DoRA' if dora else 'LoRA'}", kind="adapter", dora=dora)
    report.add("base", "not stated" if base is None else base, base=base)
    rank, alpha, stable = config.count("r", 8), config.number("lora_alpha", 8.0), config.flag("use_rslora", False)
    varied = " (and others by pattern)" if config.get("rank_pattern") or config.get("alpha_pattern") else ""
    text = f"{rank}, alpha {alpha:g}{', rank-stabilised' if stable else ''}{varied}"
    report.add("rank", text, rank=rank, alpha=alpha, rank_stabilised=stable)
    targets, shown = config.get("target_modules"), 8
    names = sorted(map(str, targets)) if isinstance(targets, list) else [targets] if isinstance(targets, str) else []
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    report.add("modules", ", ".join(names[:shown]) + more or "not stated", target_modules=targets)
    count = sum(math.prod(header.shape) for header in headers.values())
    report.add("parameters", f"{count:,} in {len(headers):,} tensors", parameters=count, tensors=len(headers))
    report.add("size", console.size(path.stat().st_size), bytes=path.stat().st_size)
    report.add("use", f"codd.load(base, adapter={str(Path(source))!r})")
    return report


def check_values(headers: Mapping[str, weights.TensorHeader]) -> str:
    """Read every tensor, one at a time; FormatError if one has NaN or infinite values."""
    total = sum(math.prod(header.shape) for header in headers.values())
    with lasting_bar("reading the weights", total) as advance:
        for shard in sorted({header.file for header in headers.values()}):
            with safe_open(shard, framework="pt") as file:
                for name in sorted(name for name, header in headers.items() if header.file == shard):
                    weights.check_finite(f"{shard}: {name}", file.get_tensor(name), advance)
    return f"{len(headers):,} tensors read, every value is finite"
