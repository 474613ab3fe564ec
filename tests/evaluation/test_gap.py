import functools
import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import codd
from codd.backbones import Backbone, load_checkpoint
from codd.circuits import HMM, Modulated
from codd.coupling.gap import (
    block_scores,
    check_blocks,
    gap_closed,
    reveal_order,
    rows_at_once,
    summary,
)
from codd.decoding import Model
from codd.errors import InvalidInput
from codd.evaluation import misspecification
from codd.evaluation.gap import circuit_length
from tests.support import FIXTURES
from tests.support.checkpoints import random_network
from tests.support.small_denoisers import log_probs, silent

VOCAB, MASK, PAD = 7, 5, 6
LENGTH = 4
RATIOS = (0.5, 0.25, 1.0)  # in no order


@functools.cache
def tiny(std: float = 0.5) -> Backbone:
    return random_network(std=std, vocab_size=VOCAB, max_length=64, mask_token_id=MASK, pad_token_id=PAD)


def windowed(hmm: HMM, window: int = LENGTH) -> HMM:
    return HMM(hmm.log_initial, hmm.log_transition, hmm.log_emission, window=window)


def random_hmm(seed: int = 0) -> HMM:
    return windowed(HMM.random(4, VOCAB, seed, scale=2.0))


def model(circuit: HMM | Modulated | None, backbone: Backbone | None = None) -> Model:
    return Model(backbone or tiny(), circuit, None, MASK)


def texts(rows: int = 3, length: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(MASK, (rows, length), generator=generator)
    return ids, torch.randint(length - LENGTH + 1, (rows,), generator=generator)


def slowly(backbone: Backbone, circuit: HMM | None, ids: Tensor, starts: Tensor, ratio: float, seed: int) -> dict:
    """One block at a time, the network asked for the logits of everything, the circuit by enumeration."""
    mask, sums, tokens = int(backbone.special.mask), {"factorized": 0.0, "coupled": 0.0, "sequential": 0.0}, 0
    for row, start, order in zip(ids, starts.tolist(), reveal_order(len(ids), LENGTH, seed).tolist(), strict=True):
        masked = max(1, round(ratio * LENGTH))
        hidden = [start + place for place in order[LENGTH - masked :]]
        shown = row.clone()
        shown[hidden] = mask
        shown[start + LENGTH :] = mask
        tokens += masked
        alone = {place: log_probs(backbone, shown, place, mask) for place in hidden}
        sums["factorized"] += sum(float(alone[place][row[place]]) for place in hidden)
        if circuit is not None:
            sums["coupled"] += enumerate_joint(circuit, row, start, alone)
        for place in hidden:
            sums["sequential"] += float(log_probs(backbone, shown, place, mask)[row[place]])
            shown[place] = row[place]
    return {name: value / tokens for name, value in sums.items()}


def enumerate_joint(circuit: HMM, row: Tensor, start: int, alone: dict[int, Tensor]) -> float:
    places = sorted(alone)
    fillings = torch.tensor(list(itertools.product(range(circuit.vocab_size), repeat=len(places))))
    blocks = row[start : start + LENGTH].repeat(len(fillings), 1)
    blocks[:, [place - start for place in places]] = fillings
    network = sum(alone[place][fillings[:, i]] for i, place in enumerate(places))
    weights = circuit.to(dtype=torch.float64).log_prob(blocks) + network
    truth = (fillings == row[places]).all(1).nonzero().item()
    return float(weights[truth] - weights.logsumexp(0))


@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_a_slow_evaluation_of_every_block(seed):
    ids, starts = texts(seed=seed)
    starts[0], starts[1] = 0, ids.shape[1] - LENGTH  # nothing left of it, nothing right of it
    circuit = random_hmm(seed)
    found = misspecification(model(circuit), ids, starts, RATIOS, seed)
    assert list(found) == list(RATIOS)
    for ratio, masked in zip(RATIOS, (2, 1, 4), strict=True):
        wanted = slowly(tiny(), circuit, ids, starts, ratio, seed)
        got = found[ratio]
        for name, value in wanted.items():
            assert got[name] == pytest.approx(value, abs=1e-5), (ratio, name)
        closed = gap_closed(wanted["factorized"], wanted["coupled"], wanted["sequential"])
        assert got["gap_closed"] == pytest.approx(closed, rel=1e-3, nan_ok=True)
        assert got["tokens"] == masked * len(ids)
        assert all(type(value) is float for value in got.values())


@pytest.mark.parametrize("name", ["decode_dream", "decode_llada", "mdlm", "mdlm_timecond", "sedd"])
def test_serves_families_with_quirks(name):
    backbone = load_checkpoint(FIXTURES / name, device="cpu").backbone
    assert backbone.special.mask is not None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(backbone.vocab_size - 1, (2, 10), generator=generator)
    ids += (ids >= backbone.special.mask).long()
    starts = torch.tensor([2, 4])
    given = Model(backbone, None, None, backbone.special.mask)
    found = misspecification(given, ids, starts, (0.5, 1.0), block_length=LENGTH)
    for ratio in found:
        wanted = slowly(backbone, None, ids, starts, ratio, 0)
        assert found[ratio]["factorized"] == pytest.approx(wanted["factorized"], abs=1e-4)
        assert found[ratio]["sequential"] == pytest.approx(wanted["sequential"], abs=1e-4)


def test_the_neutral_circuit_changes_nothing():
    ids, starts = texts(8)
    found = misspecification(model(windowed(HMM.neutral(3, VOCAB))), ids, starts, (0.5, 1.0))
    without = misspecification(model(None), ids, starts, (0.01, 0.5, 1.0), block_length=LENGTH)
    assert without[0.01]["tokens"] == len(ids)  # at least one of each block
    assert math.isnan(without[0.01]["gap_closed"])  # which one step writes as well as any number
    for ratio in found:
        assert without[ratio]["coupled"] == without[ratio]["factorized"] == found[ratio]["factorized"]
        assert (without[ratio]["gap_closed"], without[ratio]["gap_closed_error"]) == (0, 0)
    for figures in found.values():
        assert figures["coupled"] == pytest.approx(figures["factorized"], abs=1e-5)
        assert figures["gap_closed"] == pytest.approx(0, abs=1e-3)
        assert figures["sequential"] != pytest.approx(figures["factorized"], abs=1e-2)


class Counting(Backbone):
    """Knows that text counts 0, 1, 2, 0, 1, 2, ..., but only by looking at the neighbours; remembers what it saw."""

    def states(self, ids: Tensor, *args, **inputs) -> Tensor:
        self.__dict__.setdefault("seen", []).append(ids)
        out = torch.zeros(*ids.shape, VOCAB)
        near = torch.nn.functional.pad(ids, (1, 1), value=MASK)
        for token in range(3):
            out[..., token] += 6.0 * (near[:, :-2] == (token - 1) % 3)
            out[..., token] += 6.0 * (near[:, 2:] == (token + 1) % 3)
        return out

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        return states.clone()


def counting() -> Counting:
    return Counting(tiny().spec, tiny().network)


def counted(rows: int = 4) -> tuple[Tensor, Tensor]:
    return (torch.arange(24) + torch.arange(rows)[:, None]) % 3, torch.arange(rows) + 5


def counting_hmm(window: int = 8) -> HMM:
    """A state for each of the three tokens, one after the other."""
    following = torch.full((3, 3), 1e-3)
    following[torch.arange(3), (torch.arange(3) + 1) % 3] = 1
    emission = torch.full((3, VOCAB), 1e-3)
    emission[torch.arange(3), torch.arange(3)] = 1
    rows = (torch.ones(3), following, emission)
    return HMM(*((row / row.sum(-1, keepdim=True)).log() for row in rows), window=window)


def test_a_circuit_that_knows_how_text_goes_on_closes_the_gap():
    ids, starts = counted()
    found = misspecification(model(counting_hmm(), counting()), ids, starts, (0.5, 1.0))
    assert all(figures["factorized"] < figures["coupled"] - 0.1 for figures in found.values())
    assert found[1.0]["factorized"] < found[1.0]["sequential"] - 0.1
    assert found[1.0]["gap_closed"] > 0.9
    assert math.isnan(found[0.5]["gap_closed"])  # neighbours tell all, so that one token at a time gains nothing
    backwards = counting_hmm()
    wrong = HMM(backwards.log_initial, backwards.log_transition.T.contiguous(), backwards.log_emission, window=8)
    assert misspecification(model(wrong, counting()), ids, starts, (1.0,))[1.0]["gap_closed"] < -0.5


def test_masks_are_nested_and_all_ratios_share_one_run():
    ids, starts = counted()
    backbone = counting()
    misspecification(model(counting_hmm(), backbone), ids, starts, (0.25, 0.5, 1.0))
    assert len(backbone.seen) == 8  # as many as the block has tokens
    hidden = [seen == MASK for seen in backbone.seen]
    assert all((after <= before).all() for before, after in itertools.pairwise(hidden))
    for left, masks in zip(range(8, 0, -1), hidden, strict=True):
        for row, start in zip(masks, starts.tolist(), strict=True):
            assert not row[:start].any()
            assert row[start : start + 8].sum() == left
            assert row[start + 8 :].all()
    assert not torch.equal(hidden[4][0, 5:13], hidden[4][1, 6:14])  # each block has an order of its own


def test_neither_blocks_nor_circuits_depend_on_the_others():
    ids, starts = texts(40)
    assert rows_at_once(tiny(), LENGTH) < len(ids)
    circuits = {"random": random_hmm(), "other": random_hmm(1)}
    settings = {"mask_id": MASK, "block_length": LENGTH, "ratios": RATIOS}
    whole = block_scores(tiny(), circuits, ids, starts, **settings)
    part = block_scores(tiny(), circuits, ids[:5], starts[:5], **settings)
    for ratio in RATIOS:
        # Sums of a batch of another size may be rounded otherwise.
        assert torch.allclose(whole[ratio].factorized[:5], part[ratio].factorized, atol=1e-5)
        assert torch.allclose(whole[ratio].sequential[:5], part[ratio].sequential, atol=1e-5)
        for name, circuit in circuits.items():
            assert torch.allclose(whole[ratio].coupled[name][:5], part[ratio].coupled[name], atol=1e-5)
            alone = misspecification(model(circuit), ids, starts, (ratio,))[ratio]
            assert summary(whole[ratio], whole[ratio].coupled[name]) == pytest.approx(alone, abs=1e-6, nan_ok=True)


def test_only_what_is_right_of_the_block_does_not_matter():
    ids, starts = texts()
    starts[:] = 4
    found = misspecification(model(random_hmm()), ids, starts, RATIOS)
    for padding in (PAD, MASK, -100):
        padded = ids.clone()
        padded[:, 4 + LENGTH :] = padding
        again = misspecification(model(random_hmm()), padded, starts, RATIOS)
        assert all(again[ratio] == pytest.approx(found[ratio], nan_ok=True) for ratio in RATIOS)
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % MASK
    assert misspecification(model(random_hmm()), changed, starts, RATIOS)[1.0] != found[1.0]


def test_the_standard_error_is_that_of_resampled_blocks():
    ids, starts = texts(60)
    scores = block_scores(tiny(), {"": random_hmm()}, ids, starts, mask_id=MASK, block_length=LENGTH, ratios=(1.0,))[
        1.0
    ]
    figures = summary(scores, scores.coupled[""])
    picks = torch.randint(60, (4000, 60), generator=torch.Generator().manual_seed(0))
    gains, gaps = scores.coupled[""] - scores.factorized, scores.sequential - scores.factorized
    spread = (gains[picks].sum(1) / gaps[picks].sum(1)).quantile(torch.tensor([0.16, 0.84], dtype=torch.float64))
    assert figures["gap_closed_error"] == pytest.approx(float(spread[1] - spread[0]) / 2, rel=0.25)


def test_a_circuit_that_excludes_the_truth_is_infinitely_wrong():
    ids, starts = counted()
    circuit = counting_hmm()
    emission = torch.full_like(circuit.log_emission, -torch.inf)
    emission[:, 3] = 0
    never = HMM(circuit.log_initial, circuit.log_transition, emission, window=8)
    found = misspecification(model(never, counting()), ids, starts, (1.0,))[1.0]
    assert found["coupled"] == found["gap_closed"] == -math.inf
    assert found["factorized"] > -math.inf


def test_tells_how_far_it_is():
    ids, starts = texts(rows_at_once(tiny(), LENGTH) + 3)
    told: list[tuple[int, int]] = []
    misspecification(model(None), ids, starts, (0.5,), block_length=LENGTH, progress=lambda *at: told.append(at))
    assert told == sorted(told)
    assert told[-1] == (2 * len(ids), 2 * len(ids))


def test_blocks_have_the_circuits_length():
    assert circuit_length(random_hmm()) == LENGTH
    assert circuit_length(HMM.random(2, VOCAB, length=3)) == 3
    assert circuit_length(HMM.random(2, VOCAB).as_circuit(length=5)) == 5
    assert circuit_length(HMM.neutral(1, VOCAB)) == circuit_length(None) == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.tensor([0, -1, 3])}, r"starts at -1 of a text of 12: starts must be from 0 to 8"),
        ({"starts": torch.tensor([0, 9, 3])}, r"starts at 9 of a text of 12: starts must be from 0 to 8"),
        ({"ids": torch.zeros(3, 3, dtype=torch.long)}, "texts of 3 tokens hold no block of 4"),
        ({"ids": torch.zeros(0, 12, dtype=torch.long), "starts": torch.zeros(0, dtype=torch.long)}, "at least one"),
        ({"ids": torch.full((3, 12), MASK)}, r"text 0, position 0: the mask \(5\) stands in or before the block"),
        ({"ids": torch.full((3, 12), VOCAB)}, "text 0, position 0: id 7 is not in the vocabulary of 7"),
        ({"ids": torch.full((3, 12), -1)}, "id -1 is not in the vocabulary"),
        ({"ratios": ()}, "ratios must be above 0"),
        ({"ratios": (0.5, 0.0)}, "ratios must be above 0"),
        ({"ratios": (1.1,)}, r"at most 1, found \[1.1\]"),
        ({"model": Model(tiny(), None, None, None)}, "which token is the mask"),
        ({"model": model(None, silent(tiny()))}, "text 0: the network's logits are NaN"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(change, message):
    ids, starts = texts()
    given = {"model": model(None), "ids": ids, "starts": starts, "block_length": LENGTH, **change}
    with pytest.raises(InvalidInput, match=message) as caught:
        misspecification(**given)
    assert "\n" not in str(caught.value)


def test_shapes_are_checked_without_jaxtyping_too():
    ids, starts = texts()
    with pytest.raises(InvalidInput, match=r"found \(3, 12\) and \(2,\)"):
        check_blocks(ids, starts[:2], (1.0,), LENGTH, MASK, VOCAB)


def test_is_there_after_import_codd():
    assert codd.evaluation.misspecification is misspecification
    code = "import codd, sys; codd.evaluation.misspecification; sys.exit('codd.training' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@functools.cache
def block_causal(size: int) -> Model:
    built = random_network(vocab_size=VOCAB, max_length=64, mask_token_id=MASK, block_size=size)
    return Model(built, None, None, MASK)


def test_blocks_of_a_block_causal_network_stand_on_its_grid():
    ids = torch.randint(MASK, (3, 16), generator=torch.Generator().manual_seed(0))
    found = misspecification(block_causal(4), ids, torch.tensor([0, 4, 12]), (1.0,))
    assert found[1.0]["tokens"] == 3 * 4  # its own blocks, where no circuit says another length
    halves = misspecification(block_causal(4), ids, torch.tensor([0, 6, 14]), (1.0,), block_length=2)
    assert halves[1.0]["tokens"] == 3 * 2
    with pytest.raises(InvalidInput, match="a block starts at 6, off the grid of this network"):
        misspecification(block_causal(4), ids, torch.tensor([0, 6, 12]), (1.0,))
    with pytest.raises(InvalidInput, match="reads blocks of 4 tokens, of which one of 8 is no part"):
        misspecification(block_causal(4), ids, torch.tensor([0, 8, 8]), (1.0,), block_length=8)
