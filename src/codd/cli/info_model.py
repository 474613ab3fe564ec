"""What ``codd info`` says of a backbone: from config.json and the headers of its files, without loading the weights."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from codd import files
from codd.backbones import loading, weights
from codd.backbones.backbone import ModelSpec
from codd.backbones.config import Config
from codd.backbones.experts import ExpertsConfig
from codd.backbones.progress import lasting_bar
from codd.backbones.quantized import int8_parameters
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import TransformerConfig
from codd.cli import console
from codd.cli.info_circuit import Report, circuit, sha256_line
from codd.decoding.model import CIRCUIT_FOLDERS

CIRCUITS = {"circuit": CIRCUIT_FOLDERS["trained"], "static circuit": CIRCUIT_FOLDERS["static"]}
"""What the circuits of a checkpoint are called here, and their folders."""
PUBLISHED = "not stated; the published one"
"""What is said of a number that the files are silent about."""
ASSUMED = ("llada", "llada_moe", "llada2", "illada", "sdar", "fast_dllm")
"""Families whose mask is known where config.json does not state it."""


@dataclass(frozen=True)
class Stored:
    """The tensors of a checkpoint: all of them, and the ones that make the network."""

    headers: dict[str, weights.TensorHeader]
    used: frozenset[str]
    parameters: int
    int8: int
    """Parameters that ``quantize="int8"`` would round."""

    @property
    def shards(self) -> list[Path]:
        """The files."""
        return sorted({header.file for header in self.headers.values()})

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(shard.stat().st_size for shard in self.shards)

    @property
    def dtypes(self) -> dict[str, int]:
        """How many parameters are kept in which type, the most frequent first."""
        found: Counter[str] = Counter()
        for name in self.used:
            header = self.headers[name]
            found[weights.DTYPES[header.dtype]] += math.prod(header.shape)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @property
    def unused(self) -> list[str]:
        """What nothing is made of: copies of tied weights, buffers, the heads of other tasks."""
        scales = {name + weights.SCALE for name in self.used}
        return sorted(self.headers.keys() - self.used - scales)


def model(source: str | None) -> Report:
    """Of a folder or a hub id; None is the bundled model."""
    folder = loading.BUNDLED if source is None else files.local_folder(source, loading.CHECKPOINT_FILES)
    spec = loading.read_spec(folder)
    found = loading.match(folder, spec)
    parameters = sum(p.numel() for p in found.network.parameters())
    stored = Stored(found.headers, frozenset(found.slots), parameters, int8_parameters(found.network))
    numbers, lines, bad = _network(folder, spec, stored)
    if source is not None and str(folder) != str(Path(source)):
        lines["folder"] = folder
    lines["circuit"] = "none"
    attached = {name: circuit(str(folder / kept)) for name, kept in CIRCUITS.items() if (folder / kept).is_dir()}
    for name, kept in CIRCUITS.items():
        report = attached.get(name)
        numbers[name.replace(" ", "_")] = None if report is None else report.numbers
        if report is not None:
            alien = _alien(report, spec.transformer)
            lines[name] = _brief(report) + (f"; {alien}: remove the folder {kept}/" if alien else "")
            bad = (*bad, name) if report.bad or alien else bad

    def check() -> str:
        said = [check_values(stored.headers)]
        said += [f"of the {name} {report.check()}" for name, report in attached.items() if report.check is not None]
        return "; ".join(said)

    return Report(numbers, lines, bad, check)


def _network(
    folder: Path, spec: ModelSpec, stored: Stored
) -> tuple[dict[str, Any], dict[str, object], tuple[str, ...]]:
    """Everything but the circuit."""
    network = spec.transformer
    tokenizer = Tokenizer.from_folder(folder, vocab_size=network.vocab_size)
    bundled = folder.resolve() == loading.BUNDLED.resolve()
    config = Config.read(folder)
    ids, id_lines = _special(spec, tokenizer, config)
    stated, intact = loading.stated_sha256(folder)
    numbers: dict[str, Any] = {
        "kind": "backbone",
        "family": spec.family,
        "bundled": bundled,
        "folder": str(folder),
        "parameters": stored.parameters,
        "layers": network.layers,
        "width": network.width,
        "heads": network.heads,
        "kv_heads": network.kv_heads,
        "mlp_width": network.mlp_width,
        "causal": network.causal,
        "block_size": network.block_size,
        "experts": None if network.experts is None else network.experts.count,
        "tied": network.tied,
        "vocab_size": network.vocab_size,
        "max_length": spec.max_length,
        **ids,
        "tokenizer": None if tokenizer is None else _tokenizer(spec, tokenizer),
        "dtypes": stored.dtypes,
        "int8_parameters": stored.int8,
        "shards": len(stored.shards),
        "tensors": len(stored.used),
        "unused_tensors": len(stored.unused),
        "bytes": stored.bytes,
        "sha256": stated,
        "sha256_matches": intact,
    }
    shared = "" if network.kv_heads == network.heads else f", sharing {network.kv_heads} of keys and values"
    lines: dict[str, object] = {
        "kind": "causal language model" if network.causal else "denoiser",
        "family": spec.family + (", the model that comes with codd" if bundled else ""),
        "parameters": f"{stored.parameters:,}",
        "layers": f"{network.layers}, {network.width:,} wide, {network.heads} heads{shared}",
        "attention": _attention(spec, config),
        "experts": "none" if network.experts is None else _experts(network.experts),
        "vocabulary": f"{network.vocab_size:,} tokens, {'tied' if network.tied else 'untied'}",
        "max length": "not stated" if spec.max_length is None else f"{spec.max_length:,} positions",
        **id_lines,
        "tokenizer": "none: give ids" if tokenizer is None else _tokenizer_line(spec, tokenizer),
        "dtype": ", ".join(f"{dtype} ({count:,})" for dtype, count in stored.dtypes.items()),
        "quantize": f"int8, {stored.int8:,} parameters" if stored.int8 else "none: a mixture of experts",
        "size": f"{console.size(stored.bytes)} in {_several(len(stored.shards), 'file')}",
    }
    if network.experts is None:
        del lines["experts"]
    if stored.unused:
        others = " and others" if len(stored.unused) > 1 else ""
        lines["unused"] = f"{_several(len(stored.unused), 'tensor')} in the files: {stored.unused[0]}{others}"
    if intact is not None:
        lines["sha256"] = sha256_line(stated, intact)
    return numbers, lines, ("sha256",) if intact is False else ()


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _attention(spec: ModelSpec, config: Config) -> str:
    network = spec.transformer
    if network.block_size is None:
        return "causal" if network.causal else "to all positions"
    stated = any(config.get(name) is not None for name in ("block_size", "bd_size"))
    whence = "" if stated else f" ({PUBLISHED} of {spec.family})"
    return f"block-causal, blocks of {network.block_size} positions{whence}"


def _experts(experts: ExpertsConfig) -> str:
    shared = "" if not experts.shared_width else f", and one of {experts.shared_width:,} that all share"
    return (
        f"{experts.count}, {experts.width:,} wide, {experts.chosen} for each token{shared}; "
        f"in {_several(sum(experts.layers), 'layer')}"
    )


def _special(
    spec: ModelSpec, tokenizer: Tokenizer | None, config: Config
) -> tuple[dict[str, int | None], dict[str, object]]:
    """The ids that config.json states, else the tokenizer's."""
    ids: dict[str, int | None] = {}
    lines: dict[str, object] = {}
    for name in ("mask", "eos", "pad", "bos"):
        stated = getattr(spec.special, name)
        other = None if tokenizer is None else getattr(tokenizer, f"{name}_id")
        found = ids[f"{name}_id"] = other if stated is None else stated
        if found is None:
            lines[f"{name} id"] = "not stated"
            continue
        token = None if tokenizer is None else tokenizer.id_to_token(found)
        differs = "" if other in (None, found) else f", but the tokenizer says {other}"
        lines[f"{name} id"] = f"{found}{'' if token is None else ' ' + token}{differs}"
    if spec.special.mask is not None and spec.family in ASSUMED and config.get("mask_token_id") is None:
        lines["mask id"] = f"{lines['mask id']} ({PUBLISHED} of {spec.family})"
    if ids["mask_id"] is None and not spec.transformer.causal:
        lines["mask id"] = "not stated: give mask_id to codd.load"
    return ids, lines


def _tokenizer(spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    template = "own" if tokenizer.chat_template else "family" if spec.chat_template else None
    kind = type(tokenizer.backend.model).__name__
    return {"kind": kind, "vocab_size": tokenizer.vocab_size, "chat_template": template}


def _tokenizer_line(spec: ModelSpec, tokenizer: Tokenizer) -> str:
    found = _tokenizer(spec, tokenizer)
    template = {"own": "its own chat template", "family": "the family's chat template", None: "no chat template"}
    line = f"{found['kind']}, {tokenizer.vocab_size:,} tokens, {template[found['chat_template']]}"
    beyond = tokenizer.vocab_size - spec.transformer.vocab_size
    return line if beyond <= 0 else f"{line}; {beyond:,} of its ids are beyond the network's vocabulary"


def _alien(attached: Report, network: TransformerConfig) -> str:
    """Why a circuit is none of this network's; nothing if it may be."""
    head = attached.numbers.get("head", {"features": network.width})
    if attached.numbers.get("vocab_size", network.vocab_size) != network.vocab_size:
        return f"it DOES NOT BELONG to a model of {network.vocab_size:,} tokens"
    if head["features"] != network.width:
        return f"with {head['features']:,} features it DOES NOT BELONG to a model that is {network.width:,} wide"
    return ""


def _brief(attached: Report) -> str:
    """A circuit in one line."""
    numbers, lines = attached.numbers, attached.lines
    line = str(lines["kind"])
    if "num_states" in numbers:
        window = "" if numbers["window"] is None else f", window of {numbers['window']} positions"
        line += f", {numbers['num_states']:,} states, {numbers['vocab_size']:,} tokens{window}"
    line += f", {lines['size']}"
    if attached.bad:
        line += "; its sha256 DOES NOT MATCH: save or download both of its files again"
    return line


def check_values(headers: Mapping[str, weights.TensorHeader]) -> str:
    """Read every tensor, one at a time, and refuse those with NaN or infinite values."""
    total = sum(math.prod(header.shape) for header in headers.values())
    with lasting_bar("reading the weights", total) as advance:
        for shard in sorted({header.file for header in headers.values()}):
            with safe_open(shard, framework="pt") as file:
                for name in sorted(name for name, header in headers.items() if header.file == shard):
                    weights.check_finite(f"{shard}: {name}", file.get_tensor(name), advance)
    return f"{len(headers):,} tensors read, every value is finite"
