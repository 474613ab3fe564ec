import pytest
import torch
from torch import Tensor

from codd.backbones import Backbone, load_checkpoint
from codd.backbones.causal import CausalModel
from codd.coupling.gap import reveal_order, rows_at_once
from codd.errors import InvalidInput
from codd_lab.likelihood.copula import dcd_scores
from tests.support import FIXTURES
from tests.support.small_denoisers import MASK, log_probs, network, silent, without

LENGTH = 6
RATIOS = (0.17, 0.5, 0.84, 1.0)
SETTINGS = {"mask_id": MASK, "block_length": LENGTH, "ratios": RATIOS}


def texts(rows: int = 4, length: int = 14, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(MASK, (rows, length), generator=generator)
    return ids, torch.randint(1, length - LENGTH + 1, (rows,), generator=generator)


def hidden_places(count: int, start: int, order: list[int]) -> list[int]:
    return sorted(start + place for place in order[LENGTH - count :])


def slowly(
    backbone: Backbone, causal: Backbone, ids: Tensor, starts: Tensor, ratio: float, mask: int, seed: int = 0
) -> list[float]:
    """Straight from the formula: a text, then a position at a time, three evaluations for each."""
    found, count = [], max(1, round(ratio * LENGTH))
    for row, start, order in zip(ids, starts.tolist(), reveal_order(len(ids), LENGTH, seed).tolist(), strict=True):
        hidden = hidden_places(count, start, order)
        observed = row.clone()
        observed[hidden] = mask
        observed[start + LENGTH :] = mask
        total = 0.0
        for place in hidden:
            noncausal = log_probs(backbone, observed, place, mask)
            left = observed.clone()
            left[place:] = mask
            behind = (noncausal - log_probs(backbone, left, place, mask)).nan_to_num(0)  # of the mask
            joint = causal(row[None, :place])[0, -1].double() + behind if place else noncausal
            total += float(without(joint, mask).log_softmax(-1)[row[place]])
        found.append(total)
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_the_formula_position_by_position(seed):
    ids, starts = texts(seed=seed)
    starts[0], starts[1] = 0, ids.shape[1] - LENGTH  # nothing before it, nothing behind it
    causal = network(causal=True)
    found = dcd_scores(network(), CausalModel(causal), ids, starts, seed=seed, **SETTINGS)
    assert list(found) == list(RATIOS)
    for ratio, scores in found.items():
        assert scores.dtype == torch.float64
        wanted = slowly(network(), causal, ids, starts, ratio, MASK, seed)
        assert scores.tolist() == pytest.approx(wanted, abs=1e-4), ratio


@pytest.mark.parametrize("name", ["decode_dream", "mdlm", "sedd"])
def test_serves_families_with_quirks(name):
    backbone = load_checkpoint(FIXTURES / name, device="cpu").backbone
    mask = backbone.special.mask
    assert mask is not None
    causal = CausalModel(network(causal=True, vocab=backbone.vocab_size, mask=mask))
    ids = torch.randint(backbone.vocab_size - 1, (2, 12), generator=torch.Generator().manual_seed(1))
    ids += (ids >= mask).long()
    starts = torch.tensor([2, 5])
    found = dcd_scores(backbone, causal, ids, starts, mask_id=mask, block_length=LENGTH, ratios=(0.5,))[0.5]
    assert found.tolist() == pytest.approx(slowly(backbone, causal.network, ids, starts, 0.5, mask), abs=1e-3)


def test_a_block_depends_neither_on_others_nor_on_what_stands_right_of_it():
    ids, starts = texts(40)
    assert rows_at_once(network(), LENGTH) < len(ids)
    whole = dcd_scores(network(), CausalModel(network(causal=True)), ids, starts, **SETTINGS)
    changed = ids[:5].clone()
    for row, start in zip(changed, starts[:5].tolist(), strict=True):
        row[start + LENGTH :] = -100
    part = dcd_scores(network(), CausalModel(network(causal=True)), changed, starts[:5], **SETTINGS)
    for ratio in RATIOS:
        assert torch.allclose(whole[ratio][:5], part[ratio], atol=1e-6)


class Watched(Backbone):
    """Remembers what it saw."""

    def states(self, ids: Tensor, *args, **inputs) -> Tensor:
        self.__dict__.setdefault("seen", []).extend(map(tuple, ids.tolist()))
        return super().states(ids, *args, **inputs)


def test_there_are_as_many_evaluations_as_different_views_and_it_tells_how_far_it_is():
    ids, starts = texts(20)
    watched = Watched(network().spec, network().network)
    told: list[tuple[int, int]] = []
    settings = {**SETTINGS, "ratios": (0.5, 1.0)}
    dcd_scores(
        watched, CausalModel(network(causal=True)), ids, starts, progress=lambda *at: told.append(at), **settings
    )
    wanted = set()
    for row, start, order in zip(ids, starts.tolist(), reveal_order(len(ids), LENGTH, 0).tolist(), strict=True):
        for count in (3, 6):
            observed = row.clone()
            observed[[*hidden_places(count, start, order), *range(start + LENGTH, len(row))]] = MASK
            wanted.add(tuple(observed.tolist()))
            for place in hidden_places(count, start, order):
                left = observed.clone()
                left[place:] = MASK
                wanted.add(tuple(left.tolist()))
    assert set(watched.seen) == wanted
    assert told == sorted(told)
    assert told[-1] == (len(watched.seen) + len(ids),) * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": network()}, "is a denoiser .*, expected a causal model"),
        ({"causal": network(causal=True, vocab=5, mask=4)}, "the causal model has 5 tokens, the network 7, 6 for one"),
        ({"causal": silent(network(causal=True))}, "text 0: .* NaN"),
        ({"ratios": (0.0,)}, "ratios must be above 0"),
        ({"ids": torch.full((4, 14), MASK)}, r"the mask \(5\) stands in or before the block"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(change, message):
    ids, starts = texts()
    given = {"causal": network(causal=True), "ids": ids, "starts": starts, **SETTINGS, **change}
    given["causal"] = CausalModel(given["causal"])
    with pytest.raises(InvalidInput, match=message) as caught:
        dcd_scores(network(), **given)
    assert "\n" not in str(caught.value)
