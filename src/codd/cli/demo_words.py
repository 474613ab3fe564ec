"""The two masked words of ``codd demo --more``: what multiplying a circuit into a factorized output does."""

import math
from typing import Any

import torch

from codd.circuits import HMM, Evidence
from codd.cli.tables import Cell, Section

WORDS = ("San", "New", "Diego", "York")
SHOWN = ("San Diego", "New York", "San York", "New Diego")
REAL = SHOWN[:2]
SENTENCE = "He is from [MASK] [MASK]"
COLUMNS = {"factorized": "network alone", "neutral": "x neutral", "circuit": "x circuit"}
NUM_SAMPLES = 1000


def example(seed: int) -> dict[str, Any]:
    """Exact joint probabilities, samples and log Z of the paper's two words, by the network alone and by circuits."""
    generator = torch.Generator().manual_seed(seed)
    # All the network can say: a distribution for each place. The right answer needs more than that.
    proposal = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(len(WORDS)), torch.arange(len(WORDS)))
    names = [" ".join(WORDS[word] for word in pair) for pair in pairs.tolist()]

    def column(probs: torch.Tensor, drawn: torch.Tensor, log_z: float) -> dict[str, Any]:
        counts = (drawn[:, None] == pairs).all(-1).sum(0)
        return {
            "log_z": log_z,
            "probabilities": dict(zip(names, probs.tolist(), strict=True)),
            "samples": dict(zip(names, counts.tolist(), strict=True)),
        }

    drawn = torch.multinomial(proposal.repeat(NUM_SAMPLES, 1), 1, generator=generator).reshape(NUM_SAMPLES, 2)
    columns = {"factorized": column(proposal[0][pairs[:, 0]] * proposal[1][pairs[:, 1]], drawn, 0.0)}
    neutral, logits = HMM.neutral(num_states=2, vocab_size=len(WORDS), dtype=torch.float64), proposal.log()[None]
    for name, circuit in {"neutral": neutral, "circuit": cities()}.items():
        columns[name] = column(
            circuit.conditional_log_prob(pairs, Evidence(logits=logits.expand(len(pairs), -1, -1))).exp(),
            circuit.sample(Evidence(logits=logits.expand(NUM_SAMPLES, -1, -1)), generator=generator).tokens,
            float(circuit.log_partition(Evidence(logits=logits))),
        )
    return {"sentence": SENTENCE, "vocabulary": list(WORDS), "num_samples": NUM_SAMPLES, "columns": columns}


def cities() -> HMM:
    """San Diego or New York: one state a city, kept from place to place, each place with its own words."""
    emission = torch.eye(len(WORDS), dtype=torch.float64).reshape(2, 2, len(WORDS))
    return HMM(torch.tensor([0.5, 0.5]).double().log(), torch.eye(2, dtype=torch.float64).log(), emission.log())


def section(example: dict[str, Any]) -> Section:
    """A table of the pairs that the network allows, all others together, and log Z."""
    columns = example["columns"].values()
    rest = [pair for pair in example["columns"]["circuit"]["probabilities"] if pair not in SHOWN]
    rows = []
    for label, pairs in {**{pair: [pair] for pair in SHOWN}, f"{len(rest)} others": rest}.items():
        row = [Cell(label)]
        for column in columns:
            probability = math.fsum(column["probabilities"][pair] for pair in pairs)
            count = sum(column["samples"][pair] for pair in pairs)
            tone = "faint" if probability == 0 else "good" if label in REAL else "bad"
            row.append(Cell(f"{probability:6.1%} {count:5d}", tone))
        rows.append(row)
    rows.append([Cell("log Z"), *(Cell(f"{column['log_z']:.4f}") for column in columns)])
    return Section(
        title=example["sentence"],
        before=[
            "Why that is so, on two words. The network fills each place on its own: San or New, Diego or York, half "
            "each. x: multiplied with a circuit. Neutral is the control, which may change nothing; the other knows San "
            "Diego and New York.",
            f"Below: exact probabilities, and how many of {example['num_samples']} samples.",
        ],
        header=["", *COLUMNS.values()],
        rows=rows,
    )
