"""``codd info``: what is at a path or hub id."""

import argparse
from pathlib import Path

from codd import files
from codd.backbones import adapters, loading
from codd.circuits import storage
from codd.cli import console
from codd.cli.info_circuit import Report, circuit, is_circuit, jpc
from codd.cli.info_model import adapter, model
from codd.errors import FormatError

NAME = "info"
HELP = """\
Describes what is at PATH: a model folder (config.json and safetensors) of any family that codd knows, a
circuit folder, a LoRA adapter of PEFT, the hub id of any of them (its files are downloaded first), or a .jpc
file of PyJuice. Without PATH, the model that comes with codd.

Prints of a model its family, parameters, layers, vocabulary, mask, eos and pad ids, tokenizer and chat
template, stored types, bytes, the circuits that belong to it (subfolders circuit/ and circuit-static/), and,
where config.json states a sha256, whether the weights have it. The headers of the files tell the rest, so
that a model of any size is described at once; a missing shard, a missing or unknown tensor and a wrong shape
are errors. Prints of a circuit its states, tokens, layout, parameters, bytes, types, format and sha256, and
of one that the network modulates also what is modulated and the sizes of the head; of an adapter its base,
rank, modules and bytes. No code of a checkpoint is run, not even of a .jpc.

With --check every value is read as well: NaN and infinite weights are refused, and rows of a circuit that
are no distributions.

The exit code is 0 only if PATH is something that codd knows, whole and unchanged."""

WANTED = (
    "expected a circuit folder (config.json and circuit.safetensors), a model folder (config.json and "
    "model.safetensors), the hub id of one, or a .jpc file"
)


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
        report = model(None) if args.path is None else describe(args.path)
    if args.check and report.check is not None:
        report.add("checked", report.check(), checked=True)
    if args.json:
        console.as_json({"path": name, **report.numbers})
    else:
        console.fields(name, report.lines, tuple(report.bad))
    return 1 if report.bad else 0


def describe(source: str) -> Report:
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
    if is_circuit(folder):
        return circuit(source)
    if (folder / storage.CONFIG_FILE).exists():
        loading.read_spec(folder)
        return model(source)
    if (folder / adapters.CONFIG).exists():
        return adapter(source)
    inside = sorted(path.parent for path in folder.glob(f"*/{storage.CONFIG_FILE}"))
    fix = f"give one inside it: codd info {inside[0]}" if inside else WANTED
    raise FormatError(f"{source}: is a folder, but not of a circuit or a model: it has no {storage.CONFIG_FILE}; {fix}")
