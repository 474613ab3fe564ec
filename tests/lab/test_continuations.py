import itertools

import pytest
import torch
from torch import Tensor

from codd.backbones.causal import CausalModel
from codd.circuits import HMM
from codd.coupling.gap import block_scores, reveal_order
from codd_lab.likelihood.studies import continuation_scores
from tests.support.small_denoisers import MASK, VOCAB, causal_log_prob, log_probs, network

LENGTH, CONTEXT, CONTINUATION = 2, 5, 6


def texts(rows: int = 3) -> Tensor:
    return torch.randint(MASK, (rows, CONTEXT + CONTINUATION), generator=torch.Generator().manual_seed(0))


def measured(ids: Tensor, **changes) -> dict[str, Tensor]:
    settings = {"context": CONTEXT, "mask_id": MASK, "block_length": LENGTH}
    circuits = {"random": HMM.random(4, VOCAB, 0, scale=2.0, length=LENGTH), "null": HMM.neutral(1, VOCAB)}
    given = {"circuits": circuits, "causal": CausalModel(network(causal=True)), **settings, **changes}
    return continuation_scores(network(), ids=ids, **given)


def factorized(row: Tensor, start: int) -> list[Tensor]:
    shown = row.clone()
    shown[start:] = MASK
    return [log_probs(network(), shown, place, MASK) for place in range(start, start + LENGTH)]


def coupled(circuit: HMM, row: Tensor, start: int) -> float:
    fillings = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    alone = factorized(row, start)
    weights = circuit.to(dtype=torch.float64).log_prob(fillings) + sum(alone[i][fillings[:, i]] for i in range(LENGTH))
    truth = (fillings == row[start : start + LENGTH]).all(1).nonzero().item()
    return float(weights[truth] - weights.logsumexp(0))


def revealed(row: Tensor, start: int, order: list[int]) -> float:
    shown, total = row.clone(), 0.0
    shown[start:] = MASK
    for place in order:
        total += float(log_probs(network(), shown, start + place, MASK)[row[start + place]])
        shown[start + place] = row[start + place]
    return total


def test_agrees_with_a_slow_evaluation_block_by_block():
    ids = texts()
    found = measured(ids, seed=2)
    starts = range(CONTEXT, CONTEXT + CONTINUATION, LENGTH)
    orders = iter(reveal_order(len(ids) * len(starts), LENGTH, 2).tolist())
    circuit = HMM.random(4, VOCAB, 0, scale=2.0, length=LENGTH)
    for number, row in enumerate(ids):
        alone = sum(float(p[row[start + i]]) for start in starts for i, p in enumerate(factorized(row, start)))
        assert float(found["factorized"][number]) == pytest.approx(alone, abs=1e-4)
        assert float(found["circuit:null"][number]) == pytest.approx(alone, abs=1e-4)
        joint = sum(coupled(circuit, row, start) for start in starts)
        assert float(found["circuit:random"][number]) == pytest.approx(joint, abs=1e-4)
        by_chance = sum(revealed(row, start, next(orders)) for start in starts)
        assert float(found["sequential"][number]) == pytest.approx(by_chance, abs=1e-4)
        reading = sum(revealed(row, start, list(range(LENGTH))) for start in starts)
        assert float(found["left_to_right"][number]) == pytest.approx(reading, abs=1e-4)
    assert not torch.allclose(found["sequential"], found["left_to_right"], atol=1e-2)


def test_dcd_is_the_causal_model():
    ids = texts()
    found = measured(ids)["dcd"]
    places = list(range(CONTEXT, CONTEXT + CONTINUATION))
    wanted = [causal_log_prob(network(causal=True), row, places, MASK) for row in ids]
    assert found.tolist() == pytest.approx(wanted, abs=1e-4)


def test_what_is_left_out_costs_nothing_and_changes_nothing():
    ids, told = texts(), []
    whole = measured(ids)
    part = measured(ids, causal=None, sequential=False, progress=lambda *at: told.append(at))
    assert set(part) == {"factorized", "circuit:random", "circuit:null"}
    assert all(torch.allclose(part[name], whole[name]) for name in part)
    assert told == [("circuits", 9, 9)]  # an evaluation a block


def test_every_measurement_is_told_by_name():
    told = []
    measured(texts(), progress=lambda *at: told.append(at))
    last = {what: (done, total) for what, done, total in told}
    assert last == {"circuits, sequential": (18, 18), "left to right": (18, 18), "dcd": (18, 18)}


def test_blocks_scored_without_sequential_say_so():
    ids, starts = texts(), torch.tensor([1, 5, 9])
    settings = {"mask_id": MASK, "block_length": LENGTH, "ratios": (0.5, 1.0)}
    circuits = {"": HMM.random(4, VOCAB, 0, scale=2.0)}
    whole = block_scores(network(), circuits, ids, starts, **settings)
    part = block_scores(network(), circuits, ids, starts, sequential=False, **settings)
    for ratio in whole:
        assert part[ratio].sequential.isnan().all()
        assert torch.equal(part[ratio].factorized, whole[ratio].factorized)
        assert torch.allclose(part[ratio].coupled[""], whole[ratio].coupled[""])
