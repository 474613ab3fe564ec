"""``codd demo``: what the circuit gains, counted on this machine; with ``--more``, how."""

import argparse
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
  codd demo --more
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


def run(args: argparse.Namespace) -> int:
    """Compute everything, and show it; the first screen as soon as it is known."""
    if args.circuit == "none":
        raise InvalidInput("the demo compares the network with and without a circuit: --circuit must not be none.")
    with console.working("loading the bundled model"):
        model = load(circuit=sampling.circuit_from(args))
    results: dict[str, Any] = {"seed": args.seed}
    results["comparison"] = demo_comparison.compare(model, args.seed, args.problems)
    if not args.json:
        tables.show(demo_comparison.sections(results["comparison"]))
    if args.more:
        results["model"] = demo_model.compare(model, args.seed, own=args.circuit in CIRCUIT_FOLDERS)
        results["example"] = demo_words.example(args.seed)
    if args.json:
        console.as_json(results)
        return 0
    if args.more:
        tables.show([*demo_model.sections(results["model"]), demo_words.section(results["example"])])
    console.out().print()
    console.fields("Next", NEXT)
    return 0
