"""``codd demo``: the bundled model, and what multiplying a circuit into a factorized output does."""

import argparse
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import HMM, Circuit, Evidence, SparsePotentials, leaf, mixture, product
from codd.cli import console, demo_model, tables
from codd.cli.tables import Cell, Section
from codd.decoding import load

NAME = "demo"
HELP = """\
A worked example, in some seconds on a laptop, with no network connection.

First the bundled model: it answers a word problem with one token in a step of the network, and with more
and more at a time, which is faster and worse, since tokens of one step do not know of each other. Then
what to do about that, on the two masked words of "He is from [MASK] [MASK]". A network that fills each place on its own
gives a quarter of its probability to "San York"; multiplied with a circuit that knows which words go
together, all of it goes to cities that exist. Printed are the exact probabilities, samples, and log Z,
for the network alone, for a neutral circuit (the control: nothing may change), and for the same circuit
written in two ways. Then the speed of the engine on this machine at 8192 tokens and 256 states, with all
weights and with the 64 largest of each place, and the error of each in nats."""

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
    ("codd info", "what the bundled model is"),
    ("codd pretrain recipes/tiny.yaml", "train one of your own, in seconds"),
    ("codd convert model.jpc circuit/", "bring a circuit that PyJuice trained"),
    ("codd demo --html demo.html", "these tables as a page, to share"),
    ("README.md", "the same from Python: codd.load, codd.HMM, codd.Evidence"),
)

Pairs = Int[Tensor, "pairs 2"]


class Setting(NamedTuple):
    """The sizes of the timing: about those of one denoising step of a small model."""

    tokens: int = 8192
    states: int = 256
    length: int = 32
    batch: int = 8
    kept: int = 64
    repeats: int = 5


SETTING = Setting()
NUM_SAMPLES = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """A seed, and other forms of output."""
    parser.epilog = """\
examples:
  codd demo
  codd demo --seed 7 --html demo.html
  codd demo --json | python -m json.tool"""
    parser.add_argument("--seed", type=_seed, default=0, help="of the samples and of the timed circuit (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all numbers instead of text")
    parser.add_argument("--html", metavar="PATH", type=Path, help="also write the tables as a page of its own")


def run(args: argparse.Namespace) -> int:
    """Compute everything, then show it."""
    with console.working("the bundled model answers a question"):
        model = load()
        results: dict[str, Any] = {
            "seed": args.seed,
            "model": {"answers": demo_model.answers(model), "blanks": demo_model.blanks(model)},
        }
    with console.working("two masked words"):
        results["example"] = example(args.seed)
    with console.working("timing the engine"):
        results["timing"] = timing(args.seed, SETTING)
    if args.html is not None:
        args.html.write_text(tables.page("codd demo", sections(results)), encoding="utf-8")
    if args.json:
        console.as_json(results)
    else:
        tables.show(sections(results))
        _print_next(args.html)
    return 0


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


def timing(seed: int, setting: Setting) -> dict[str, Any]:
    """Milliseconds of the queries of one denoising step, and how far each answer is from the float64 one."""
    generator = torch.Generator().manual_seed(seed)
    hmm = HMM.random(setting.states, setting.tokens, seed=seed)
    # The r-th token of each place has a probability in proportion to 1 / r^2: as concentrated as a network's output.
    order = torch.rand(setting.batch, setting.length, setting.tokens, generator=generator).argsort(-1)
    logits = -2.0 * (order + 1).float().log()
    truth = hmm.to(dtype=torch.float64).log_partition(Evidence(logits=logits.double()))

    def measure(choose: Callable[[], Evidence]) -> dict[str, float]:
        def ms(query: Callable[[], object]) -> float:
            return _milliseconds(query, setting.repeats)

        evidence = choose()
        return {
            "evidence_ms": ms(choose),
            "log_partition_ms": ms(lambda: hmm.log_partition(evidence)),
            "sample_ms": ms(lambda: hmm.sample(evidence, generator=generator)),
            "error_nats": float((hmm.log_partition(evidence).double() - truth).abs().max()),
        }

    top = SparsePotentials.from_logits(logits, setting.kept)
    return {
        "setting": setting._asdict(),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "kept_mass": float(top.log_weights.exp().sum(-1).mean()),
        "log_z_mean": float(truth.mean()),
        "dense": measure(lambda: Evidence(logits=logits)),
        "sparse": measure(lambda: Evidence(sparse=SparsePotentials.from_logits(logits, setting.kept))),
    }


def _milliseconds(query: Callable[[], object], repeats: int) -> float:
    """The fastest, after one call that fills the caches: other programs can only add to it."""
    query()
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        query()
        durations.append(time.perf_counter() - start)
    return 1e3 * min(durations)


def _seed(text: str) -> int:
    """What a torch generator takes."""
    seed = int(text)
    if not 0 <= seed < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, found {text}")
    return seed


def sections(results: dict[str, Any]) -> list[Section]:
    """What people are shown, on a terminal or on a page."""
    example, timing = results["example"], results["timing"]
    columns = [example["columns"][name] for name in COLUMNS]
    before, after = (example["columns"][name]["diego_after_san"] for name in ("factorized", "circuit"))
    words = Section(
        title=example["sentence"],
        before=[
            "The network fills each place on its own: San or New, Diego or York, half each.",
            "x: multiplied with a circuit. Neutral is the control, which may change nothing;",
            "mixture and HMM are two ways to write one circuit, San Diego or New York.",
            f"Below: exact probabilities, and how many of {example['num_samples']} samples.",
        ],
        header=["", *COLUMNS.values()],
        rows=_example_rows(columns),
        after=[
            f'Once "San" is written, "Diego" has {before:.0%} without a circuit, {after:.0%} with it.',
        ],
    )
    setting = timing["setting"]
    engine = Section(
        title="The engine on this machine",
        before=[
            f"{setting['batch']} sequences of {setting['length']} masked places, {setting['tokens']} tokens, "
            f"{setting['states']} states, {timing['machine']['threads']} CPU thread(s).",
            f"The {setting['kept']} largest weights hold {timing['kept_mass']:.1%} of the mass; log Z is about "
            f"{timing['log_z_mean']:.0f}.",
        ],
        header=["evidence", "prepare", "log Z", "sample", "error (nats)"],
        rows=[
            _timing_row(f"all {setting['tokens']} weights", timing["dense"]),
            _timing_row(f"top {setting['kept']} of each place", timing["sparse"]),
        ],
        after=[
            f"Fastest of {setting['repeats']} runs. The error is that of log Z against float64 with all weights,",
            "the worst of the batch.",
        ],
    )
    return [*demo_model.sections(results["model"]), words, engine]


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


def _timing_row(label: str, found: dict[str, float]) -> list[Cell]:
    durations = [Cell(f"{found[stage]:.1f} ms") for stage in ("evidence_ms", "log_partition_ms", "sample_ms")]
    return [Cell(label), *durations, Cell(f"{found['error_nats']:.0e}")]


def _print_next(html: Path | None) -> None:
    from rich.text import Text

    terminal = console.out()
    terminal.print("\nNext", style="bold")
    width = max(len(command) for command, _ in NEXT)
    for command, purpose in NEXT:
        terminal.print(Text.assemble((f"  {command:<{width}}", "cyan"), f"  {purpose}"), soft_wrap=True)
    if html is not None:
        terminal.print(f"\nwritten: {console.one_line(html)}", soft_wrap=True)
