"""``codd info``: what is at a path or hub id."""

import argparse
from collections.abc import Callable
from pathlib import Path

from codd import files
from codd.backbones import adapters, loading
from codd.circuits import storage
from codd.cli import console
from codd.cli.info_adapter import adapter
from codd.cli.info_circuit import Report, circuit, is_circuit, is_jpc, jpc
from codd.cli.info_model import model
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
    """One path, or none."""
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
    """Describe it; 1 if something is wrong with it."""
    name = str(loading.BUNDLED) if args.path is None else args.path
    with console.working(f"reading {name}"):
        report = model(None) if args.path is None else describe(args.path)
    if args.check and report.check is not None:
        said = report.check()
        report.numbers["checked"] = True
        report.lines["checked"] = said
    if args.json:
        console.as_json({"path": name, **report.numbers})
    else:
        console.fields(name, report.lines, report.bad)
    return 1 if report.bad else 0


def describe(source: str) -> Report:
    """The report of the first kind that recognises the source."""
    for recognises, report in KINDS:
        if recognises(source):
            return report(source)
    raise FormatError(_other_file(Path(source)))


def _may_be_folder(source: str) -> bool:
    """A folder, or a name that is not here and may be on the hub."""
    return Path(source).is_dir() or not Path(source).exists()


def _folder(source: str) -> Report:
    # Of a hub repository the configuration comes first: it says what the rest is, and whether gigabytes are worth it.
    folder = files.local_folder(source, (storage.CONFIG_FILE, adapters.CONFIG))
    if is_circuit(folder):
        return circuit(source)
    if (folder / adapters.CONFIG).exists() and not (folder / storage.CONFIG_FILE).exists():
        return adapter(source)
    if not (folder / storage.CONFIG_FILE).exists():
        raise FormatError(_other_folder(source, folder))
    loading.read_spec(folder)
    return model(source)


# A kind of checkpoint: how it is recognised, and what is said of it. The first that recognises a source describes it.
KINDS: tuple[tuple[Callable[[str], bool], Callable[[str], Report]], ...] = (
    (is_jpc, jpc),
    (_may_be_folder, _folder),
)


def _other_folder(source: str, folder: Path) -> str:
    """Why a folder is none of the kinds."""
    said = f"{source}: is a folder, but not of a circuit or a model: it has no {storage.CONFIG_FILE}"
    inside = sorted(path.parent for path in folder.glob(f"*/{storage.CONFIG_FILE}"))
    return f"{said}; give one inside it: codd info {inside[0]}" if inside else f"{said}; {WANTED}"


def _other_file(path: Path) -> str:
    """Why a file is none of the kinds."""
    if path.name == storage.CONFIG_FILE or path.name.endswith((".safetensors", ".safetensors.index.json")):
        return f"{path}: is one file of a circuit or a model; give the folder: codd info {path.parent}"
    return f"{path}: is a file of another kind; {WANTED}"
