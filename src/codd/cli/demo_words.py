"""The two masked words of ``codd demo --more``: what multiplying a circuit into a factorized output does."""

import math
from typing import Any

import torch

from codd.circuits import HMM, Circuit, Evidence, leaf, mixture, product
from codd.cli import figures
from codd.cli.tables import Cell, Section

WORDS = ("San", "New", "Diego", "York")
SHOWN = ("San Diego", "New York", "San York", "New Diego")
REAL = SHOWN[:2]
SENTENCE = "He is from [MASK] [MASK]"
COLUMNS = {"factorized": "network alone", "neutral": "x neutral", "circuit": "x mixture", "hmm": "x HMM"}
NUM_SAMPLES = 1000


def example(seed: int) -> dict[str, Any]:
    """Exact joint probabilities, samples and log Z of the paper's two words, by the network alone and by circuits."""
    generator = torch.Generator().manual_seed(seed)
    # All the network can say: a distribution for each place. The right answer needs more than that.
    proposal = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(len(WORDS)), torch.arange(len(WORDS)))
    names = [" ".join(WORDS[word] for word in pair) for pair in pairs.tolist()]
    san, diego = WORDS.index("San"), WORDS.index("Diego")

    def column(probs: torch.Tensor, drawn: torch.Tensor, log_z: float, after_san: torch.Tensor) -> dict[str, Any]:
        counts = (drawn[:, None] == pairs).all(-1).sum(0)
        return {
            "log_z": log_z,
            "probabilities": dict(zip(names, probs.tolist(), strict=True)),
            "samples": dict(zip(names, counts.tolist(), strict=True)),
            "diego_after_san": float(after_san[diego]),
        }

    drawn = torch.multinomial(proposal.repeat(NUM_SAMPLES, 1), 1, generator=generator).reshape(NUM_SAMPLES, 2)
    columns = {"factorized": column(proposal[0][pairs[:, 0]] * proposal[1][pairs[:, 1]], drawn, 0.0, proposal[1])}
    neutral = HMM.neutral(num_states=2, vocab_size=len(WORDS), dtype=torch.float64)
    circuits: dict[str, HMM | Circuit] = {"neutral": neutral, "circuit": city_mixture(), "hmm": city_hmm()}
    for name, circuit in circuits.items():
        logits = proposal.log()[None]
        given_san = Evidence(tokens=torch.tensor([[san, 0]]), observed=torch.tensor([[True, False]]), logits=logits)
        columns[name] = column(
            circuit.conditional_log_prob(pairs, Evidence(logits=logits.expand(len(pairs), -1, -1))).exp(),
            circuit.sample(Evidence(logits=logits.expand(NUM_SAMPLES, -1, -1)), generator=generator).tokens,
            float(circuit.log_partition(Evidence(logits=logits))),
            circuit.marginals(given_san)[0, 1].exp(),
        )
    return {"sentence": SENTENCE, "vocabulary": list(WORDS), "num_samples": NUM_SAMPLES, "columns": columns}


def city_mixture() -> Circuit:
    """San Diego or New York, as a mixture of products of leaves."""
    san, new, diego, york = torch.eye(len(WORDS), dtype=torch.float64)
    cities = [product([leaf(0, san), leaf(1, diego)]), product([leaf(0, new), leaf(1, york)])]
    return Circuit(mixture(cities, weights=[0.5, 0.5]))


def city_hmm() -> HMM:
    """The same distribution as a chain: one state a city, kept from place to place, each place with its own words."""
    emission = torch.eye(len(WORDS), dtype=torch.float64).reshape(2, 2, len(WORDS))
    return HMM(torch.tensor([0.5, 0.5]).double().log(), torch.eye(2, dtype=torch.float64).log(), emission.log())


def section(example: dict[str, Any]) -> Section:
    """A table of the pairs that the network allows, all others together, and log Z; a figure of the pairs."""
    columns = {name: example["columns"][name] for name in COLUMNS}
    rest = [pair for pair in columns["hmm"]["probabilities"] if pair not in SHOWN]
    rows = []
    for label, pairs in {**{pair: [pair] for pair in SHOWN}, f"{len(rest)} others": rest}.items():
        row = [Cell(label)]
        for column in columns.values():
            probability = math.fsum(column["probabilities"][pair] for pair in pairs)
            count = sum(column["samples"][pair] for pair in pairs)
            tone = "faint" if probability == 0 else "good" if label in REAL else "bad"
            row.append(Cell(f"{probability:6.1%} {count:5d}", tone))
        rows.append(row)
    rows.append([Cell("log Z"), *(Cell(f"{column['log_z']:.4f}") for column in columns.values())])
    bars = {
        COLUMNS[name]: [column["probabilities"][pair] for pair in SHOWN]
        for name, column in columns.items()
        if name != "circuit"  # the same distribution as the HMM
    }
    before, after = (columns[name]["diego_after_san"] for name in ("factorized", "circuit"))
    return Section(
        title=example["sentence"],
        before=[
            "Why that is so, on two words. The network fills each place on its own: San or New, Diego or York, half "
            "each. x: multiplied with a circuit. Neutral is the control, which may change nothing; mixture and HMM are "
            "two ways to write one circuit, San Diego or New York.",
            f"Below: exact probabilities, and how many of {example['num_samples']} samples.",
        ],
        header=["", *COLUMNS.values()],
        rows=rows,
        after=[f'Once "San" is written, "Diego" has {before:.0%} without a circuit, {after:.0%} with it.'],
        figure=figures.bars("The exact probability of each pair", SHOWN, bars, "{:.0%}".format),
    )
