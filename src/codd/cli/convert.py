"""``codd convert``: a PyJuice file becomes a circuit folder; a checkpoint of pickled weights one of safetensors."""

import argparse
import contextlib
import shutil
from pathlib import Path
from typing import Any

from codd.cli import console
from codd.errors import CoddError, FormatError

NAME = "convert"
PICKLED, CONVERTED = "pytorch_model.bin", "model.safetensors"
BESIDE = (
    "config.json",
    "generation_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What is copied along with the weights."""
HELP = """\
Reads a hidden Markov model that PyJuice saved (.jpc) and writes it as a codd circuit: a folder with
config.json and circuit.safetensors, which codd.HMM.load reads. A .jpc is a pickle, and a pickle is a
program; here nothing of it is run, and a file that asks for anything but plain arrays is refused.
Of a checkpoint's folder it reads pytorch_model.bin, a pickle as well, under the same rule, and writes
model.safetensors beside copies of config.json and the tokenizer: a folder that codd.load reads.

Prints, of a circuit, the number of states and tokens, the window (none: any length), whether all positions share
their parameters (homogeneous), and the bytes of both forms."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Two paths, and how to write."""
    parser.epilog = """\
examples:
  codd convert download/ model/                       # pytorch_model.bin to model.safetensors
  codd convert model.jpc circuit/
  codd convert model.jpc circuit/ --dtype bfloat16    # half the size; probabilities rounded by up to 0.4%"""
    parser.add_argument("source", metavar="IN", type=Path, help="the file that PyJuice saved, or a checkpoint's folder")
    parser.add_argument("folder", metavar="OUT_DIR", type=Path, help="the folder to write; made if need be")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="how to keep the emission table, by far the largest (default: float32, which is exact)",
    )
    parser.add_argument("--force", action="store_true", help="replace a circuit that OUT_DIR holds already")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Convert and say what was written."""
    report = _convert_checkpoint(args) if args.source.is_dir() else _convert_circuit(args)
    if args.json:
        console.as_json(report)
    else:
        console.fields(f"{args.source} -> {args.folder}", report)
    return 0


def _convert_circuit(args: argparse.Namespace) -> dict[str, Any]:
    """Write the circuit of a .jpc file."""
    import torch  # here, so that --help answers at once

    from codd.circuits import HMM
    from codd.circuits.storage import CONFIG_FILE, WEIGHTS_FILE

    _check_target(args.folder, args.force)
    with console.working(f"reading {args.source}"):
        hmm = HMM.from_pyjuice(args.source)
    if args.dtype == "bfloat16":
        hmm = hmm.to(emission=torch.bfloat16)
    with console.working(f"writing {args.folder}"):
        folder = hmm.save(args.folder)
    return {
        "input": str(args.source),
        "output": str(folder),
        "num_states": hmm.num_states,
        "vocab_size": hmm.vocab_size,
        "window": hmm.window,
        "homogeneous": hmm.homogeneous,
        "emission_dtype": args.dtype,
        "bytes_in": args.source.stat().st_size,
        "bytes_out": sum((folder / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE)),
        "pickle_executed": False,
    }


def _convert_checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    """Write the weights of a folder as safetensors, and copy what else `codd.load` reads."""
    import torch

    from codd import files

    source = args.source / PICKLED
    if not source.is_file():
        raise FormatError(f"{args.source}: has no {PICKLED}. Give a folder with one, or a .jpc file.")
    if args.folder.exists() and (args.folder / CONVERTED).exists() and not args.force:
        raise CoddError(f"{args.folder}: holds {CONVERTED} already; give another folder, or --force to replace")
    with console.working(f"reading {source}"), files.open_regular(source) as file:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever reading a damaged file, or one that asks for more than tensors, raises
            raise FormatError(f"{source}: cannot be read as plain tensors ({type(error).__name__}).") from error
    if not isinstance(tensors, dict) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
        raise FormatError(f"{source}: holds other things than named tensors.")
    args.folder.mkdir(parents=True, exist_ok=True)
    with console.working(f"writing {args.folder}"):
        for path in args.source.iterdir():
            if path.name in BESIDE and path.is_file():
                shutil.copyfile(path, args.folder / path.name)
        with files.replacing(args.folder, CONVERTED) as (target,):
            files.write_weights(target, files.standalone(tensors))
    written = {"tensors": len(tensors), "bytes_out": (args.folder / CONVERTED).stat().st_size}
    return {"input": str(source), "output": str(args.folder), "pickle_executed": False, **written}


def _check_target(folder: Path, force: bool) -> None:
    """Refuse to replace anything but, with --force, a circuit."""
    from codd.circuits.storage import CONFIG_FILE, FORMAT, WEIGHTS_FILE
    from codd.files import read_json_object

    if folder.exists() and not folder.is_dir():
        raise CoddError(f"{folder}: is a file; give the name of a folder to write the circuit to")
    present = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    if present and not force:
        raise CoddError(f"{folder}: holds {' and '.join(present)} already; give another folder, or --force to replace")
    if CONFIG_FILE in present:
        with contextlib.suppress(FormatError):  # a circuit that was damaged may be replaced
            if read_json_object(folder / CONFIG_FILE).get("format") != FORMAT:
                raise CoddError(
                    f"{folder / CONFIG_FILE}: belongs to something that is not a circuit; give another folder"
                )
