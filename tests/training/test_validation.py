import math

import pytest
import torch

from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated
from codd.coupling import Coupled
from codd.coupling.gap import SMALLEST_GAP
from codd.data.noise import segment_starts
from codd.data.windows import CPU, sample_blocks
from codd.errors import InvalidInput
from codd.training.circuit.validation import HeldOut
from tests.support.small_runs import packed
from tests.support.small_windows import WIDTH, WINDOW, network, prose

VOCAB, MASK, SEED = 31, 30, 4
RATIOS = (0.1, 0.5, 1.0)
ROWS = {"questions": packed([(5, 16), (3, 8), (2, 24)] * 3, 32), "prose": prose(20, 21, 30)}


def prepared(rows, ratios=RATIOS, seed=SEED) -> HeldOut:
    return HeldOut.prepare(network(vocab_size=VOCAB), MASK, rows, WINDOW, ratios, seed)


def static() -> HMM:
    hmm = HMM.random(3, VOCAB, 1, scale=2.0)
    return HMM(hmm.log_initial, hmm.log_transition, hmm.log_emission, window=WINDOW)


def modulated() -> Modulated:
    head = Head(HeadConfig(WIDTH, 4, 2))
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    factors = Factors.near_neutral(4, VOCAB, inner_states=2, noise=1.5)
    return Modulated(HMM.from_factors(factors, window=WINDOW), head.requires_grad_(False))


def slowly(rows, circuit, ratio: float) -> dict[str, float]:
    """One block after the other, each text by itself, the network asked for everything at each step."""
    backbone = network(vocab_size=VOCAB)
    tokens, segments, _ = rows.tensors(CPU)
    begins, valid, order = sample_blocks(rows, WINDOW, torch.Generator().manual_seed(SEED))
    first, count = segment_starts(segments), max(1, round(ratio * WINDOW))
    sums, blocks = dict.fromkeys(("factorized", "coupled", "sequential"), 0.0), 0
    for row in valid.nonzero()[:, 0].tolist():
        begin = int(begins[row])
        text, at = tokens[row, segments[row] == segments[row, begin]], begin - int(first[row, begin])

        def ask(hidden, text=text, at=at):
            shown = text.clone()
            shown[at + WINDOW :] = MASK
            shown[at + torch.tensor(hidden)] = MASK
            here = slice(at, at + WINDOW)
            logits = backbone(shown[None])[:, here].double()
            logits[..., MASK] = -torch.inf
            return logits, backbone.states(shown[None])[:, here]

        hidden, truth = order[row, :count].tolist(), text[at : at + WINDOW]
        logits, states = ask(hidden)
        masked = torch.zeros(1, WINDOW, dtype=torch.bool)
        masked[0, hidden] = True
        listened = {"features": states} if isinstance(circuit, Modulated) else {}
        joint = Coupled(circuit, logits=logits.float(), tokens=truth[None], masked=masked, **listened)
        sums["coupled"] += float(joint.log_prob(truth[None]))
        sums["factorized"] += float(logits.log_softmax(-1)[0, hidden, truth[hidden]].sum())
        for last in range(count, 0, -1):
            place = hidden[last - 1]
            logits, _ = ask(hidden[:last])
            sums["sequential"] += float(logits.log_softmax(-1)[0, place, truth[place]])
        blocks += 1
    assert blocks
    return {name: value / (blocks * count) for name, value in sums.items()} | {"tokens": float(blocks * count)}


@pytest.mark.parametrize(
    ("rows", "circuit"), [(ROWS["questions"], static()), (ROWS["prose"], modulated())], ids=["static", "modulated"]
)
def test_scores_are_those_of_a_slow_loop(rows, circuit):
    """Whatever else stands in a row; 20 rows are two batches."""
    found = prepared(rows).scores(circuit)
    assert list(found) == list(RATIOS)
    for ratio, score in found.items():
        wanted = slowly(rows, circuit, ratio)
        assert {name: score[name] for name in wanted} == pytest.approx(wanted, abs=1e-4)
        gap = score["sequential"] - score["factorized"]
        if gap > SMALLEST_GAP:  # with one token masked there is none, up to rounding
            assert score["gap_closed"] == pytest.approx((score["coupled"] - score["factorized"]) / gap)
        else:
            assert math.isnan(score["gap_closed"])


def test_the_seed_fixes_blocks_and_masks():
    first, again, other = (prepared(ROWS["prose"], (0.5, 1.0), seed).scores(static()) for seed in (1, 1, 2))
    assert first == again
    assert first[1.0] != other[1.0]


def test_text_without_a_block_is_refused():
    with pytest.raises(InvalidInput, match="no block of 8 tokens fits the held-out text"):
        prepared(packed([(3, 5)] * 4, 20))
