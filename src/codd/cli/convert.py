"""``codd convert``: a PyJuice file becomes a circuit folder."""

import argparse
import contextlib
from pathlib import Path

from codd.cli import console
from codd.errors import CoddError, FormatError

NAME = "convert"
HELP = """\
Reads a hidden Markov model that PyJuice saved (.jpc) and writes it as a codd circuit: a folder with
config.json and circuit.safetensors, which codd.HMM.load reads. A .jpc is a pickle, and a pickle is a
program; here nothing of it is run, and a file that asks for anything but plain arrays is refused.

Prints the number of states and tokens, the window (none: any length), whether all positions share their parameters
(homogeneous), and the bytes of both forms."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Two paths, and how to write."""
    parser.epilog = """\
examples:
  codd convert model.jpc circuit/
  codd convert model.jpc circuit/ --dtype bfloat16    # half the size; probabilities rounded by up to 0.4%"""
    parser.add_argument("source", metavar="IN.jpc", type=Path, help="the file that PyJuice saved")
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
    report = {
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
    if args.json:
        console.as_json(report)
    else:
        console.fields(f"{args.source} -> {folder}", report)
    return 0


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
