"""The two masked words of ``codd demo --more``: what multiplying a circuit into a factorized output does."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import HMM, Circuit, Evidence, leaf, mixture, product
from codd.cli import figures
from codd.cli.tables import Cell, Section

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

Pairs = Int[Tensor, "pairs 2"]
NUM_SAMPLES = 1000


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


def section(example: dict[str, Any]) -> Section:
    """What people are shown."""
    columns = [example["columns"][name] for name in COLUMNS]
    before, after = (example["columns"][name]["diego_after_san"] for name in ("factorized", "circuit"))
    return Section(
        title=example["sentence"],
        before=[
            "Why that is so, on two words. The network fills each place on its own: San or New, Diego or York, half "
            "each. x: multiplied with a circuit. Neutral is the control, which may change nothing; mixture and HMM are "
            "two ways to write one circuit, San Diego or New York.",
            f"Below: exact probabilities, and how many of {example['num_samples']} samples.",
        ],
        header=["", *COLUMNS.values()],
        rows=_rows(columns),
        after=[f'Once "San" is written, "Diego" has {before:.0%} without a circuit, {after:.0%} with it.'],
        figure=_joint(example["columns"]),
    )


def _joint(columns: dict[str, dict[str, Any]]) -> str:
    """The four pairs under the network alone, the control and the circuit."""
    series = {
        label: [columns[name]["probabilities"][pair] for pair in SHOWN]
        for name, label in COLUMNS.items()
        if name != "circuit"
    }
    return figures.bars("The exact probability of each pair", SHOWN, series, "{:.0%}".format)


def _rows(columns: list[dict[str, Any]]) -> list[list[Cell]]:
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
