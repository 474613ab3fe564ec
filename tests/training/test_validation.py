import math

import pytest
import torch

from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated, SparsePotentials
from codd.coupling import Coupled
from codd.coupling.gap import SMALLEST_GAP
from codd.data.noise import segment_starts
from codd.data.windows import CPU, sample_blocks
from codd.errors import InvalidInput
from codd.evaluation import gap
from codd.training.circuit import validation as module
from codd.training.circuit.validation import HeldOut, coupled_log_prob
from tests.support.small_runs import packed
from tests.support.small_windows import WIDTH, WINDOW, flat, network, prose

VOCAB, MASK, SEED = 31, 30, 4
RATIOS = (0.1, 0.5, 1.0)
ROWS = {"questions": packed([(5, 16), (3, 8), (2, 24)] * 3, 32), "prose": prose(5, 21, 30)}


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
    return {name: value / (blocks * count) for name, value in sums.items()}


@pytest.mark.parametrize(
    ("rows", "circuit"), [(ROWS["questions"], static()), (ROWS["prose"], modulated())], ids=["static", "modulated"]
)
def test_scores_are_those_of_a_slow_loop(rows, circuit, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 3)
    found = HeldOut.prepare(network(vocab_size=VOCAB), MASK, rows, WINDOW, RATIOS, SEED).scores(circuit)
    assert list(found) == list(RATIOS)
    for ratio, score in found.items():
        wanted = slowly(rows, circuit, ratio)
        assert vars(score) == pytest.approx(wanted, abs=1e-4)
        gap = score.sequential - score.factorized
        if gap > SMALLEST_GAP:  # with one token masked there is none, up to rounding
            assert score.gap_closed == pytest.approx((score.coupled - score.factorized) / gap)
        else:
            assert math.isnan(score.gap_closed)


def test_one_token_at_a_time_is_one_step_of_one_token():
    prepared = HeldOut.prepare(network(vocab_size=VOCAB), MASK, ROWS["prose"], WINDOW, (0.1,), SEED)
    score = prepared.scores(static())[0.1]
    assert score.sequential == pytest.approx(score.factorized, abs=1e-5)


def test_masks_of_higher_ratios_contain_those_of_lower_ones():
    prepared = HeldOut.prepare(network(vocab_size=VOCAB), MASK, ROWS["questions"], WINDOW, RATIOS, SEED)
    masks = [prepared.datasets[ratio].masked for ratio in RATIOS]
    assert [mask.sum(1).unique().tolist() for mask in masks] == [[1], [4], [8]]
    assert not bool((masks[0] & ~masks[1]).any())
    torch.testing.assert_close(prepared.datasets[0.5].level, torch.full((len(masks[1]),), 0.5))


def test_the_neutral_circuit_closes_nothing():
    prepared = HeldOut.prepare(network(vocab_size=VOCAB), MASK, ROWS["questions"], WINDOW, RATIOS, SEED)
    for score in prepared.scores(flat(VOCAB)).values():
        assert score.coupled == pytest.approx(score.factorized, abs=1e-5)
        assert math.isnan(score.gap_closed) or abs(score.gap_closed) < 5e-3


def test_a_seed_is_a_measurement():
    def scores(seed):
        return HeldOut.prepare(network(vocab_size=VOCAB), MASK, ROWS["prose"], WINDOW, RATIOS, seed).scores(static())

    assert scores(1) == scores(1)
    assert scores(1) != scores(2)


@pytest.mark.parametrize("circuit", [static(), modulated()], ids=["static", "modulated"])
def test_finished_models_are_measured_alike(circuit, monkeypatch):
    """`codd.evaluation` masks what it reveals last; told to take this order, it finds the same figures."""
    backbone, rows = network(vocab_size=VOCAB), ROWS["prose"]
    first, _, order = sample_blocks(rows, WINDOW, torch.Generator().manual_seed(SEED))
    monkeypatch.setattr(gap, "reveal_order", lambda *_: order.flip(1))
    wanted = gap.block_scores(
        backbone, {"": circuit}, rows.tensors(CPU)[0], first[:, 0], mask_id=MASK, block_length=WINDOW, ratios=RATIOS
    )
    for ratio, score in HeldOut.prepare(backbone, MASK, rows, WINDOW, RATIOS, SEED).scores(circuit).items():
        summary = gap.summary(wanted[ratio], wanted[ratio].coupled[""])
        assert vars(score) == pytest.approx({name: summary[name] for name in vars(score)}, abs=1e-4)


def test_windows_are_scored_by_their_masks():
    prepared = HeldOut.prepare(network(vocab_size=VOCAB), MASK, ROWS["prose"], WINDOW, (1.0,), SEED)
    windows = prepared.datasets[1.0].windows(torch.arange(4))
    nothing = windows._replace(masked=torch.zeros_like(windows.masked))
    assert nothing.factorized_log_prob().abs().max() == 0
    assert coupled_log_prob(static(), nothing).abs().max() < 1e-5
    listed = windows._replace(logits=None, sparse=SparsePotentials.from_logits(windows.logits, MASK))
    for found in (windows.factorized_log_prob(), listed.factorized_log_prob()):
        torch.testing.assert_close(found, coupled_log_prob(flat(VOCAB), windows), atol=1e-4, rtol=1e-5)


def test_text_without_a_block_is_refused():
    with pytest.raises(InvalidInput, match="no block of 8 tokens fits the held-out text"):
        HeldOut.prepare(network(vocab_size=VOCAB), MASK, packed([(3, 5)] * 4, 20), WINDOW, RATIOS, SEED)
