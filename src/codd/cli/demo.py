"""``codd demo``: the bundled model, and what multiplying a circuit into a factorized output does."""

import argparse
import errno
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import HMM, Circuit, Evidence, leaf, mixture, product
from codd.cli import console, demo_model, figures, sampling, tables
from codd.cli.tables import Cell, Section
from codd.decoding import load
from codd.decoding.model import CIRCUIT_FOLDERS

NAME = "demo"
HELP = """\
The bundled model at work, in about a minute on a laptop, with no network connection.

It solves word problems and continues a passage of prose, with 1, 4 and 8 tokens in a step of the network.
More at a time is faster and worse, since tokens of one step do not know of each other. Side by side: the
network alone, multiplied with the null circuit (the control, which may change nothing), and multiplied
with the circuit that was trained for it, all with the same settings and seed. Then what a circuit does,
on the two masked words of "He is from [MASK] [MASK]": a network that fills each place on its own gives a
quarter of its probability to "San York"; multiplied with a circuit that knows which words go together,
all of it goes to cities that exist.

Prints the texts with network calls and seconds, right answers, and the exact probabilities, samples and
log Z of the two words; writes the same as a page with figures (codd-demo.html) and says where it is."""

WORDS = ("San", "New", "Diego", "York")
SHOWN = ("San Diego", "New York", "San York", "New Diego")
REAL = SHOWN[:2]
SENTENCE = "He is from [MASK] [MASK]"
COLUMNS = {
    "factorized": "network alone",
    "neutral": "x neutral",
    "circuit": "x mixture",
    "hmm": "x HMM",
}
NEXT = (
    ("codd serve", "a playground in your browser"),
    ("codd chat", "ask the model yourself, and watch the answer resolve"),
    ('codd generate "A question"', "the same for programs: files, pipes, --json"),
    ("codd info", "what the bundled model is"),
    ("codd pretrain recipes/tiny.yaml", "train one of your own, in seconds"),
    ("codd bench", "what the circuit costs on this machine"),
    ("README.md", "all of it from Python: codd.load, codd.HMM, codd.Evidence"),
)
PAGE = Path("codd-demo.html")

Pairs = Int[Tensor, "pairs 2"]
NUM_SAMPLES = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """A seed, a circuit, and other forms of output."""
    parser.epilog = """\
examples:
  codd demo
  codd demo --seed 7 --html demo.html
  codd demo --circuit static
  codd demo --circuit runs/circuit --no-html
  codd demo --json | python -m json.tool"""
    parser.add_argument("--seed", type=_seed, default=0, help="of the problems and of all that is drawn (default: 0)")
    sampling.add_circuit_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object with all numbers instead of text")
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--html", metavar="PATH", type=Path, help=f"where to write the page (default: {PAGE})")
    page.add_argument("--no-html", action="store_true", help="write no page")


def run(args: argparse.Namespace) -> int:
    """Compute everything, then show it."""
    html = page_path(args.html, wanted=not args.no_html)
    with console.working("loading the bundled model"):
        model = load(circuit=sampling.circuit_from(args))
    results: dict[str, Any] = {
        "seed": args.seed,
        "model": demo_model.compare(model, args.seed, own=args.circuit in CIRCUIT_FOLDERS),
    }
    with console.working("two masked words"):
        results["example"] = example(args.seed)
    shown = sections(results)
    if html is not None:
        html.write_text(tables.page("codd demo", shown), encoding="utf-8")
    if args.json:
        console.as_json(results)
    else:
        tables.show(shown)
        _print_next(html)
    return 0


def page_path(given: Path | None, *, wanted: bool) -> Path | None:
    """Where the page goes. That it cannot be written is better said before a minute of work than after it."""
    if not wanted:
        return None
    path = PAGE if given is None else given
    code = errno.ENOENT if not path.parent.is_dir() else errno.EISDIR if path.is_dir() else None
    if code is not None:
        raise OSError(code, os.strerror(code), str(path))
    if given is None and not os.access(path if path.exists() else path.parent, os.W_OK):
        console.err().print("no page: this folder cannot be written to; --html chooses another", style="yellow")
        return None
    return path


def example(seed: int) -> dict[str, Any]:
    """The paper's two words: exact joint probabilities, samples and log Z under each way of combining."""
    generator = torch.Generator().manual_seed(seed)
    # All the network can say: a distribution for each place. The right answer needs more than that.
    proposal = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]], dtype=torch.float64)
    pairs = torch.tensor(list(itertools.product(range(len(WORDS)), repeat=2)))
    circuits: dict[str, HMM | Circuit] = {
        "neutral": HMM.neutral(num_states=2, vocab_size=len(WORDS), dtype=torch.float64),
        "circuit": city_mixture(),
        "hmm": city_hmm(),
    }
    columns = {"factorized": _alone(proposal, pairs, generator)}
    columns |= {name: _coupled(circuit, proposal, pairs, generator) for name, circuit in circuits.items()}
    return {"sentence": SENTENCE, "vocabulary": list(WORDS), "num_samples": NUM_SAMPLES, "columns": columns}


def city_mixture() -> Circuit:
    """San Diego or New York, as a mixture of products of leaves."""
    san, new, diego, york = torch.eye(len(WORDS), dtype=torch.float64)
    return Circuit(
        mixture(
            [product([leaf(0, san), leaf(1, diego)]), product([leaf(0, new), leaf(1, york)])],
            weights=[0.5, 0.5],
        )
    )


def city_hmm() -> HMM:
    """The same distribution as a chain: one state a city, kept from place to place, each place with its own words."""
    san, new, diego, york = torch.eye(len(WORDS), dtype=torch.float64)
    emission = torch.stack([torch.stack([san, new]), torch.stack([diego, york])])
    return HMM(torch.tensor([0.5, 0.5]).double().log(), torch.eye(2, dtype=torch.float64).log(), emission.log())


def _alone(proposal: Float[Tensor, "1 2 V"], pairs: Pairs, generator: torch.Generator) -> dict[str, Any]:
    """Each place drawn by itself: what parallel decoding does without a circuit."""
    probs = proposal[0, 0, pairs[:, 0]] * proposal[0, 1, pairs[:, 1]]
    drawn = torch.multinomial(proposal[0].repeat(NUM_SAMPLES, 1), 1, generator=generator).reshape(NUM_SAMPLES, 2)
    return _column(probs, drawn, log_z=0.0, diego_after_san=float(proposal[0, 1, WORDS.index("Diego")]), pairs=pairs)


def _coupled(
    circuit: HMM | Circuit, proposal: Float[Tensor, "1 2 V"], pairs: Pairs, generator: torch.Generator
) -> dict[str, Any]:
    """The product of the network's output and a circuit, by exact queries."""
    logits = proposal.log()
    probs = circuit.conditional_log_prob(pairs, Evidence(logits=logits.expand(len(pairs), -1, -1))).exp()
    drawn = circuit.sample(Evidence(logits=logits.expand(NUM_SAMPLES, -1, -1)), generator=generator).tokens
    san_first = Evidence(
        tokens=torch.tensor([[WORDS.index("San"), 0]]), observed=torch.tensor([[True, False]]), logits=logits
    )
    after_san = circuit.marginals(san_first)[0, 1].exp()
    return _column(
        probs,
        drawn,
        log_z=float(circuit.log_partition(Evidence(logits=logits))),
        diego_after_san=float(after_san[WORDS.index("Diego")]),
        pairs=pairs,
    )


def _column(
    probs: Float[Tensor, " pairs"], drawn: Int[Tensor, "S 2"], log_z: float, diego_after_san: float, pairs: Pairs
) -> dict[str, Any]:
    names = [" ".join(WORDS[word] for word in pair) for pair in pairs.tolist()]
    counts = (drawn[:, None] == pairs).all(-1).sum(0)
    return {
        "log_z": log_z,
        "probabilities": dict(zip(names, probs.tolist(), strict=True)),
        "samples": dict(zip(names, counts.tolist(), strict=True)),
        "diego_after_san": diego_after_san,
    }


def _seed(text: str) -> int:
    """What a torch generator takes."""
    seed = int(text)
    if not 0 <= seed < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, found {text}")
    return seed


def sections(results: dict[str, Any]) -> list[Section]:
    """What people are shown, on a terminal or on a page."""
    example, model = results["example"], results["model"]
    columns = [example["columns"][name] for name in COLUMNS]
    before, after = (example["columns"][name]["diego_after_san"] for name in ("factorized", "circuit"))
    words = Section(
        title=example["sentence"],
        before=[
            "Why that is so, on two words. The network fills each place on its own: San or New, Diego or York, half "
            "each. x: multiplied with a circuit. Neutral is the control, which may change nothing; mixture and HMM are "
            "two ways to write one circuit, San Diego or New York.",
            f"Below: exact probabilities, and how many of {example['num_samples']} samples.",
        ],
        header=["", *COLUMNS.values()],
        rows=_example_rows(columns),
        after=[
            f'Once "San" is written, "Diego" has {before:.0%} without a circuit, {after:.0%} with it.',
            f"In all {model['network_evaluations']} network calls and {model['seconds']:.0f} seconds for the texts.",
        ],
        figure=_joint(example["columns"]),
    )
    return [*demo_model.sections(model), words]


def _joint(columns: dict[str, dict[str, Any]]) -> str:
    """The four pairs under the network alone, the control and the circuit."""
    series = {
        label: [columns[name]["probabilities"][pair] for pair in SHOWN]
        for name, label in COLUMNS.items()
        if name != "circuit"
    }
    return figures.bars("The exact probability of each pair", SHOWN, series, "{:.0%}".format)


def _example_rows(columns: list[dict[str, Any]]) -> list[list[Cell]]:
    """The pairs that the network allows, all others together, and log Z."""
    rest = [name for name in columns[0]["probabilities"] if name not in SHOWN]

    def row(label: str, names: Sequence[str]) -> list[Cell]:
        cells = [Cell(label)]
        for column in columns:
            probability = math.fsum(column["probabilities"][name] for name in names)
            count = sum(column["samples"][name] for name in names)
            tone = "faint" if probability == 0 else "good" if label in REAL else "bad"
            cells.append(Cell(f"{probability:6.1%} {count:5d}", tone))
        return cells

    rows = [row(name, [name]) for name in SHOWN]
    rows.append(row(f"{len(rest)} others", rest))
    rows.append([Cell("log Z"), *(Cell(f"{column['log_z']:.4f}") for column in columns)])
    return rows


def _print_next(html: Path | None) -> None:
    from rich.text import Text

    terminal = console.out()
    terminal.print("\nNext", style="bold")
    width = max(len(command) for command, _ in NEXT)
    for command, purpose in NEXT:
        terminal.print(Text.assemble((f"  {command:<{width}}", "cyan"), f"  {purpose}"), soft_wrap=True)
    if html is not None:
        terminal.print(f"\nA page with figures is written: {console.one_line(html)}", soft_wrap=True)
