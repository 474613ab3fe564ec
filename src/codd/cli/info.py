"""``codd info``: what is at a path or hub id, from its JSON files and the headers of its weights."""

import argparse
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open

from codd import files
from codd.backbones import adapters, loading, weights
from codd.backbones.progress import lasting_bar
from codd.backbones.quantized import int8_parameters
from codd.backbones.tokenizer import Tokenizer
from codd.circuits import HMM, Modulated, load_circuit, storage
from codd.circuits.pyjuice import read_jpc
from codd.cli import console
from codd.decoding.model import CIRCUIT_FOLDERS
from codd.errors import CoddError, FormatError

NAME = "info"
HELP = """\
Describes what is at PATH: a model folder (config.json and safetensors) of any family that codd knows, a
circuit folder, a LoRA adapter of PEFT, the hub id of any of them (its files are downloaded first), or a .jpc
file of PyJuice. Without PATH, the model that comes with codd.

Prints of a model its family, parameters, layers, vocabulary, mask, eos and pad ids, tokenizer and chat
template, stored types, bytes, the circuits that belong to it (subfolders circuit/ and circuit-static/), and,
where config.json states a sha256, whether the weights have it. The headers of the files tell the rest, so
that a model of any size is described at once; a missing shard, a missing or unknown tensor and a wrong shape
are errors. Prints of a circuit its states, tokens, window, parameters, bytes, types, format and sha256, and
of one that the network modulates also what is modulated and the sizes of the head; of an adapter its base,
rank, modules and bytes. No code of a checkpoint is run, not even of a .jpc.

Circuits are read whole: rows that are not distributions are refused. With --check so are all weights of a
network or an adapter: NaN and infinite ones are refused.

The exit code is 0 only if PATH is something that codd knows, whole and unchanged."""
WANTED = (
    "expected a circuit folder (config.json and circuit.safetensors), a model folder (config.json and "
    "model.safetensors), the hub id of one, or a .jpc file"
)
CIRCUITS = {"circuit": CIRCUIT_FOLDERS["trained"], "static_circuit": CIRCUIT_FOLDERS["static"]}
"""The names of a checkpoint's circuits, and their folders."""
SIZES = ("layers", "width", "heads", "kv_heads", "mlp_width", "causal", "block_size", "vocab_size", "tied")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the path and the two switches."""
    parser.epilog = """\
examples:
  codd info
  codd info runs/mini/model --check
  codd info GSAI-ML/LLaDA-8B-Instruct
  codd info user/circuit-on-the-hub --json
  codd info model.jpc"""
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="a folder, a hub id (user/name) or a .jpc file (default: bundled model)"
    )
    parser.add_argument("--check", action="store_true", help="read every value too, and refuse NaN and infinite ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the description; returns 1 if the files are damaged."""
    name = str(loading.BUNDLED) if args.path is None else args.path
    with console.working(f"reading {name}"):
        values = model(None, args.check) if args.path is None else describe(args.path, args.check)
    values |= {"checked": True} if args.check else {}
    wrong = _damage(values)
    if args.json:
        console.as_json({"path": name, **values})
    else:
        lines = {key: f"{_shown(key, value)}{wrong.get(key, '')}" for key, value in values.items()}
        console.fields(name, lines, tuple(wrong))
    return 1 if wrong else 0


def _shown(key: str, value: Any) -> str:
    """A value for people; of a part, such as a circuit, what is in a line."""
    if isinstance(value, dict):
        return ", ".join(f"{each} {_shown(each, part)}" for each, part in value.items() if not isinstance(part, dict))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if key == "bytes":
        return console.size(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


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
    """Describe what is at a path or a hub id; FormatError if it is damaged or nothing that codd knows."""
    path = Path(source)
    if path.suffix == ".jpc" and not path.is_dir():
        return jpc(source)
    if path.exists() and not path.is_dir():
        if path.name == storage.CONFIG_FILE or path.name.endswith((".safetensors", ".safetensors.index.json")):
            raise FormatError(f"{path}: is one file of a circuit or a model; give the folder: codd info {path.parent}")
        raise FormatError(f"{path}: is a file of another kind; {WANTED}")
    # Of a hub repository the configuration comes first: it says what the rest is, and whether gigabytes are worth it.
    folder = files.local_folder(source, (storage.CONFIG_FILE, adapters.CONFIG))
    config = folder / storage.CONFIG_FILE
    known = (folder / storage.WEIGHTS_FILE).exists()
    with suppress(FormatError):  # a damaged one says nothing
        known = known or files.read_json_object(config).get("format") == storage.FORMAT
    if known:
        return circuit(source)
    if config.exists():
        loading.read_spec(folder)
        return model(source, check)
    if (folder / adapters.CONFIG).exists():
        return adapter(source, check)
    inside = sorted(path.parent for path in folder.glob(f"*/{storage.CONFIG_FILE}"))
    fix = f"give one inside it: codd info {inside[0]}" if inside else WANTED
    raise FormatError(f"{source}: is a folder, but not of a circuit or a model: it has no {storage.CONFIG_FILE}; {fix}")


def jpc(source: str) -> dict[str, Any]:
    """A file that PyJuice saved; FormatError if it is damaged or holds anything but an HMM."""
    found = read_jpc(source)
    states, tokens = found.emission.shape[-2:]
    return {
        "kind": "pyjuice-hmm",
        "num_states": states,
        "vocab_size": tokens,
        "window": found.length,
        "homogeneous": found.homogeneous,
        "leaf_class": found.leaf_class,
        "parameters": sum(x.numel() for x in (found.initial, found.transition, found.emission)),
        "bytes": Path(source).stat().st_size,
    }


def circuit(source: str) -> dict[str, Any]:
    """A circuit in a folder or on the hub; FormatError if it is damaged."""
    folder = storage.local_folder(source)
    config, tensors = storage.read_folder(folder, check=False)  # a wrong sha256 is shown, not raised
    stated, path = files.read_json_object(folder / storage.CONFIG_FILE), folder / storage.WEIGHTS_FILE
    try:
        found = load_circuit(folder, check=False)
    except FormatError:  # names the file, and says what to do
        raise
    except CoddError as error:
        raise FormatError(f"{path}: {error}; save or download the circuit again.") from error
    values = {"kind": config["circuit"], "vocab_size": found.vocab_size, "window": found.window}
    hmm = found.hmm if isinstance(found, Modulated) else found
    if isinstance(hmm, HMM):
        left = tensors.get("log_transition_left")
        values |= {"num_states": hmm.num_states, "homogeneous": hmm.homogeneous}
        values |= {"rank": None if left is None else left.shape[-1]}
        if (kept := hmm.factors) is not None:
            tables = {"transition_rank": kept.transition, "emission_rank": kept.emission}
            ranks = {name: table[0].shape[-1] if len(table) == 2 else None for name, table in tables.items()}
            inner = None if kept.detour is None else kept.detour.left.shape[-1]
            values["factors"] = {**ranks, "inner_states": inner}
    else:
        names = {"nodes": "kinds", "edges": "children", "leaves": "leaf_variables"}
        values |= {what: tensors[name].numel() for what, name in names.items()}
    if isinstance(found, Modulated):
        head, own = found.head.config, sum(x.numel() for x in found.head.state_dict().values())
        values["modulates"] = [name for name, size in (("latents", head.states), ("steps", head.inner_states)) if size]
        values["head"] = {**dataclasses.asdict(head), "parameters": own}
    return {
        **values,
        "parameters": sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        "bytes": sum(each.stat().st_size for each in (path, folder / storage.CONFIG_FILE)),
        "dtypes": {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()},
        "format_version": stated["format_version"],
        "sha256": stated.get("sha256"),
        "sha256_matches": stated.get("sha256") == files.sha256(path),
    }


def model(source: str | None, check: bool) -> dict[str, Any]:
    """The model in a folder or on the hub (None: the bundled one); FormatError if it cannot be loaded."""
    folder = loading.BUNDLED if source is None else files.local_folder(source, loading.CHECKPOINT_FILES)
    spec = loading.read_spec(folder)
    found, network = loading.match(folder, spec), spec.transformer
    bundled = folder.resolve() == loading.BUNDLED.resolve()
    values = {"kind": "backbone", "family": spec.family, "bundled": bundled, "folder": str(folder)}
    values["parameters"] = sum(p.numel() for p in found.network.parameters())
    values |= {name: getattr(network, name) for name in SIZES}
    values["experts"] = None if network.experts is None else network.experts.count
    values["max_length"] = spec.max_length
    tokenizer = Tokenizer.from_folder(folder, vocab_size=network.vocab_size)
    for name in ("mask", "eos", "pad", "bos"):  # config.json comes first
        stated = getattr(spec.special, name)
        values[f"{name}_id"] = getattr(tokenizer, f"{name}_id", None) if stated is None else stated
    values["tokenizer"] = None
    if tokenizer is not None:
        template = "own" if tokenizer.chat_template else "family" if spec.chat_template else None
        kind = type(tokenizer.backend.model).__name__
        values["tokenizer"] = {"kind": kind, "vocab_size": tokenizer.vocab_size, "chat_template": template}
    counts: Counter[str] = Counter()
    for name in found.slots:
        counts[weights.DTYPES[found.headers[name].dtype]] += math.prod(found.headers[name].shape)
    values["dtypes"] = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    values["int8_parameters"] = int8_parameters(found.network)
    shards = {header.file for header in found.headers.values()}
    values |= {"bytes": sum(shard.stat().st_size for shard in shards), "shards": len(shards)}
    used = found.slots.keys() | {name + weights.SCALE for name in found.slots}
    values |= {"tensors": len(found.slots), "unused_tensors": len(found.headers.keys() - used)}
    values["sha256"], values["sha256_matches"] = loading.stated_sha256(folder)
    for name, part in CIRCUITS.items():
        values[name] = circuit(str(folder / part)) if (folder / part).is_dir() else None
    if check:
        check_values(found.headers)
    return values


def adapter(source: str, check: bool) -> dict[str, Any]:
    """A LoRA adapter in a folder or on the hub; FormatError if codd cannot read it."""
    folder = files.local_folder(source, adapters.FILES)
    config, path = adapters.read_config(folder), folder / adapters.WEIGHTS
    headers = weights.read_headers(path)
    if check:
        check_values(headers)
    return {
        "folder": str(folder),
        "kind": "adapter",
        "dora": config.flag("use_dora", False),
        "base": config.get("base_model_name_or_path"),
        "rank": config.count("r", 8),
        "alpha": config.number("lora_alpha", 8.0),
        "rank_stabilised": config.flag("use_rslora", False),
        "target_modules": config.get("target_modules"),
        "parameters": sum(math.prod(header.shape) for header in headers.values()),
        "tensors": len(headers),
        "bytes": path.stat().st_size,
    }


def check_values(headers: Mapping[str, weights.TensorHeader]) -> None:
    """Read every tensor, one at a time; FormatError if one has NaN or infinite values."""
    total = sum(math.prod(header.shape) for header in headers.values())
    with lasting_bar("reading the weights", total) as advance:
        for shard in sorted({header.file for header in headers.values()}):
            with safe_open(shard, framework="pt") as file:
                for name in sorted(name for name, header in headers.items() if header.file == shard):
                    weights.check_finite(f"{shard}: {name}", file.get_tensor(name), advance)
