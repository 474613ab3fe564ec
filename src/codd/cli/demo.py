"""``codd demo``: what the circuit gains, counted on this machine; with ``--more``, how."""

import argparse
import errno
import os
from pathlib import Path
from typing import Any

from codd.cli import console, demo_comparison, demo_model, demo_words, sampling, tables
from codd.decoding import load
from codd.decoding.model import CIRCUIT_FOLDERS
from codd.errors import InvalidInput

NAME = "demo"
HELP = """\
The bundled model at work, in under a minute on a laptop, with no network connection.

It solves word problems that it was not trained on, in turn by the network alone, under its own best rule for
how many tokens to write in a call, and with the circuit, as codd does where nothing is said. Prints how many
answers are right, network calls and seconds, all counted in this run, and one of the problems in full.

--more goes on for another minute: the network alone, with the null circuit (the control, which may change
nothing) and with its circuit, side by side at 1, 4 and 8 tokens a call; and the exact probabilities of the
two masked words of "He is from [MASK] [MASK]", of which a network that fills each place on its own gives a
quarter to "San York", and multiplied with a circuit that knows which words go together, nothing."""

NEXT = {
    "codd serve": "a playground in your browser",
    "codd chat": "ask the model yourself, and watch the answer resolve",
    "codd demo --more": "at 1, 4 and 8 tokens a call, and what a circuit does",
    "README.md": "all of it from Python: codd.load, codd.HMM, codd.Evidence",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the seed, the number of problems, the circuit, and the forms of output."""
    parser.epilog = """\
examples:
  codd demo
  codd demo --problems 100 --seed 7
  codd demo --more --html demo.html
  codd demo --circuit static
  codd demo --json | python -m json.tool"""
    parser.add_argument(
        "--seed", type=console.seed, default=0, help="of the problems and of all that is drawn (default: 0)"
    )
    parser.add_argument(
        "--problems",
        type=console.whole_number(1),
        metavar="N",
        help=f"how many, however long it takes (default: {demo_comparison.PROBLEMS}, or as many as fit in "
        f"{demo_comparison.SECONDS} seconds)",
    )
    parser.add_argument("--more", action="store_true", help="show more after that")
    sampling.add_circuit_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object with all numbers instead of text")
    parser.add_argument("--html", metavar="PATH", type=Path, help="also write it as a page, with figures")


def run(args: argparse.Namespace) -> int:
    """Compute everything, and show it; the first screen as soon as it is known."""
    _check(args)
    with console.working("loading the bundled model"):
        model = load(circuit=sampling.circuit_from(args))
    results: dict[str, Any] = {"seed": args.seed}
    shown: list[tables.Section] = []

    def show(sections: list[tables.Section]) -> None:
        shown.extend(sections)
        if not args.json:
            tables.show(sections)

    results["comparison"] = demo_comparison.compare(model, args.seed, args.problems)
    show(demo_comparison.sections(results["comparison"]))
    if args.more:
        results["model"] = demo_model.compare(model, args.seed, own=args.circuit in CIRCUIT_FOLDERS)
        results["example"] = demo_words.example(args.seed)
        show([*demo_model.sections(results["model"]), demo_words.section(results["example"])])
    if args.html is not None:
        args.html.write_text(tables.page("codd demo", shown), encoding="utf-8")
    if args.json:
        console.as_json(results)
    else:
        console.out().print()
        console.fields("Next", NEXT)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise before a minute of work for what would fail after it."""
    if args.circuit == "none":
        raise InvalidInput("the demo compares the network with and without a circuit: --circuit must not be none.")
    if args.html is not None and (args.html.is_dir() or not args.html.parent.is_dir()):
        code = errno.EISDIR if args.html.is_dir() else errno.ENOENT
        raise OSError(code, os.strerror(code), str(args.html))
