"""``codd info``: what is at a path or hub id, from its JSON files and the headers of its weights."""

import argparse
import math
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from codd import files
from codd.backbones import Tokenizer, adapters, loading, weights
from codd.circuits import HMM, Modulated, load_circuit, storage
from codd.circuits.pyjuice import read_jpc
from codd.cli import console
from codd.decoding.model import CIRCUIT_FOLDERS
from codd.errors import CoddError, FormatError

NAME = "info"
HELP = """\
Describes what is at PATH: a model folder (config.json and safetensors) of any family that codd knows, a circuit
folder, a LoRA adapter of PEFT, the hub id of any of them (its files are downloaded), or a .jpc file of PyJuice.

Prints sizes, stored types, bytes and whether the sha256 is the stated one; of a model also its special tokens (the mask
among them, as it is typed in a prompt), its tokenizer and its circuits. Of a network only the headers of its files are
read; a missing shard, a missing or unknown tensor and a wrong shape are errors. No code of a checkpoint is run, not
even of a .jpc. With --check all weights are read: NaN and infinite values are refused."""
WANTED = "expected a circuit folder (it has circuit.safetensors), a model folder, the hub id of one, or a .jpc file"
CIRCUITS = {"circuit": CIRCUIT_FOLDERS["trained"], "static_circuit": CIRCUIT_FOLDERS["static"]}
"""The names of a checkpoint's circuits, and their folders."""
SIZES = ("layers", "width", "heads", "kv_heads", "mlp_width", "causal", "block_size", "vocab_size", "tied")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the path and the two switches."""
    parser.epilog = """\
examples:
  codd info --check
  codd info GSAI-ML/LLaDA-8B-Instruct --json
  codd info model.jpc"""
    what = "a folder, a hub id (user/name) or a .jpc file (default: the bundled model)"
    parser.add_argument("path", metavar="PATH", nargs="?", help=what)
    parser.add_argument("--check", action="store_true", help="read every value too, and refuse NaN and infinite ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the description; returns 1 if the files are damaged."""
    name = args.path or str(loading.BUNDLED)
    with console.working(f"reading {name}"):
        values = describe(name, args.check) | ({"checked": True} if args.check else {})
    wrong = _damage(values)
    if args.json:
        console.as_json({"path": name, **values})
    else:
        console.fields(name, values, wrong)
    return 1 if wrong else 0


def _damage(values: Mapping[str, Any]) -> dict[str, str]:
    """By the name of a value, what is wrong with it and what to do."""
    wrong = {}
    if values.get("sha256_matches") is False:
        wrong["sha256"] = " DOES NOT MATCH the weights: save or download both files again"
    for name, folder in CIRCUITS.items():
        if (own := values.get(name)) is None:
            continue
        features = own["head"]["features"] if "head" in own else values["width"]
        if (own["vocab_size"], features) != (values["vocab_size"], values["width"]):
            fits = f"of {values['vocab_size']:,} tokens that is {values['width']:,} wide"
            wrong[name] = f"; it DOES NOT BELONG to a model {fits}: remove the folder {folder}/"
        elif not own["sha256_matches"]:
            wrong[name] = "; its sha256 DOES NOT MATCH: save or download both of its files again"
    return wrong


def describe(source: str, check: bool) -> dict[str, Any]:
    """Describe what is at a path or hub id; FormatError if it is damaged or unknown."""
    path = Path(source)
    if path.suffix == ".jpc" and not path.is_dir():
        return _jpc(source)
    if path.exists() and not path.is_dir():
        raise FormatError(f"{path}: is a file; {WANTED}. Of a part of one give the folder: codd info {path.parent}")
    # Of a hub repository the configuration comes first: it says what the rest is, and whether gigabytes are worth it.
    folder = files.local_folder(source, (storage.CONFIG_FILE, adapters.CONFIG))
    known = (folder / storage.WEIGHTS_FILE).exists()
    with suppress(FormatError):  # a damaged one says nothing
        known = known or files.read_json_object(folder / storage.CONFIG_FILE).get("format") == storage.FORMAT
    if known:
        return _circuit(source)
    if (folder / storage.CONFIG_FILE).exists():
        loading.read_spec(folder)
        return _model(source, check)
    if (folder / adapters.CONFIG).exists():
        return _adapter(source, check)
    inside = sorted(path.parent for path in folder.glob(f"*/{storage.CONFIG_FILE}"))
    fix = f"give one inside it: codd info {inside[0]}" if inside else WANTED
    raise FormatError(f"{source}: is a folder, but not of a circuit or a model: it has no {storage.CONFIG_FILE}; {fix}")


def _jpc(source: str) -> dict[str, Any]:
    found = read_jpc(source)
    tables = {name: getattr(found, name) for name in ("initial", "transition", "emission")}
    sizes = {"num_states": found.emission.shape[-2], "vocab_size": found.emission.shape[-1], "window": found.length}
    kind = {"homogeneous": found.homogeneous, "leaf_class": found.leaf_class}
    return {"kind": "pyjuice-hmm", **sizes, **kind, **_stored(tables), "bytes": Path(source).stat().st_size}


def _circuit(source: str) -> dict[str, Any]:
    folder = storage.local_folder(source)
    config, tensors = storage.read_folder(folder, check=False)  # a wrong sha256 is shown, not raised
    weights_file, stated = folder / storage.WEIGHTS_FILE, files.read_json_object(folder / storage.CONFIG_FILE)
    try:
        found = load_circuit(folder, check=False)
    except CoddError as error:
        if isinstance(error, FormatError):  # names the file, and says what to do
            raise
        raise FormatError(f"{weights_file}: {error}; save or download the circuit again.") from error
    hmm = found.hmm if isinstance(found, Modulated) else found
    return {
        **{"kind": config["circuit"], "vocab_size": found.vocab_size, "window": found.window},
        **({"num_states": hmm.num_states, "homogeneous": hmm.homogeneous} if isinstance(hmm, HMM) else {}),
        **({"head": vars(found.head.config)} if isinstance(found, Modulated) else {}),
        **_stored(tensors),
        "bytes": sum((folder / name).stat().st_size for name in (storage.WEIGHTS_FILE, storage.CONFIG_FILE)),
        **{name: stated.get(name) for name in ("format_version", "sha256")},
        "sha256_matches": stated.get("sha256") == files.sha256(weights_file),
    }


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """How many numbers the tables hold, and the type and shape of each."""
    tables = {name: f"{x.dtype} {'x'.join(map(str, x.shape))}".removeprefix("torch.") for name, x in tensors.items()}
    return {"parameters": sum(x.numel() for x in tensors.values() if x.is_floating_point()), "tables": tables}


def _model(source: str, check: bool) -> dict[str, Any]:
    folder = files.local_folder(source, loading.CHECKPOINT_FILES)
    spec = loading.read_spec(folder)
    found, network = loading.match(folder, spec), spec.transformer
    if check:
        weights.check_values(found.headers)
    tokenizer = Tokenizer.from_folder(folder, vocab_size=network.vocab_size)
    stated = {f"{name}_id": getattr(spec.special, name) for name in ("mask", "eos", "pad", "bos")}  # of config.json
    special = {name: getattr(tokenizer, name, None) if id is None else id for name, id in stated.items()}
    read: dict[str, Any] = {"mask_token": None, "tokenizer": None}
    if tokenizer is not None:
        template = "own" if tokenizer.chat_template else "family" if spec.chat_template else None
        kind, mask = type(tokenizer.backend.model).__name__, special["mask_id"]
        read["mask_token"] = None if mask is None else tokenizer.backend.id_to_token(mask)
        read["tokenizer"] = {"kind": kind, "vocab_size": tokenizer.vocab_size, "chat_template": template}
    counts: Counter[str] = Counter()
    for name in found.slots:
        counts[weights.DTYPES[found.headers[name].dtype]] += math.prod(found.headers[name].shape)
    shards = {header.file for header in found.headers.values()}
    used = found.slots.keys() | {name + weights.SCALE for name in found.slots}
    return {
        "kind": "backbone",
        "family": spec.family,
        "bundled": folder.resolve() == loading.BUNDLED.resolve(),
        "folder": str(folder),
        "parameters": sum(p.numel() for p in found.network.parameters()),
        **{name: getattr(network, name) for name in SIZES},
        "block_size": network.block_size or spec.block_length,
        "experts": None if network.experts is None else network.experts.count,
        "max_length": spec.max_length,
        "assumed": dict(spec.assumed) or None,
        **special,
        **read,
        "dtypes": dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
        "bytes": sum(shard.stat().st_size for shard in shards),
        "shards": len(shards),
        "tensors": len(found.slots),
        "unused_tensors": sorted({re.sub(r"\.\d+\.", ".*.", name) for name in found.headers.keys() - used}) or None,
        **dict(zip(("sha256", "sha256_matches"), loading.stated_sha256(folder), strict=True)),
        **{name: _circuit(str(folder / part)) if (folder / part).is_dir() else None for name, part in CIRCUITS.items()},
    }


def _adapter(source: str, check: bool) -> dict[str, Any]:
    folder = files.local_folder(source, adapters.FILES)
    config, path = adapters.read_config(folder), folder / adapters.WEIGHTS
    headers = weights.read_headers(path)
    if check:
        weights.check_values(headers)
    return {
        **{"folder": str(folder), "kind": "adapter"},
        "dora": config.flag("use_dora", False),
        "base": config.get("base_model_name_or_path"),
        "rank": config.count("r", 8),
        "alpha": config.number("lora_alpha", 8.0),
        "rank_stabilised": config.flag("use_rslora", False),
        "target_modules": config.get("target_modules"),
        "parameters": sum(math.prod(header.shape) for header in headers.values()),
        **{"tensors": len(headers), "bytes": path.stat().st_size},
    }
