"""Batches that do not lie: what a sequence gets does not depend on its neighbours, its padding or its place.

Equal to the bit where both sides are one computation: the same function on tensors of the same shapes, in which other
positions change nothing but terms that are multiplied by zero. Everything else has a tolerance.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.errors import InvalidInput
from tests.support.checkpoints import PUBLISHED, backbone, random_mini

EVERY = (*PUBLISHED, "mini", "mini_causal")
SIDES = ("left", "right")
TOLERANCE = 1e-5


def model(name: str) -> Backbone:
    return random_mini(causal=True) if name == "mini_causal" else backbone(name)


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    mask: Tensor


def pad(rows: list[Tensor], side: str, filler: Tensor) -> Batch:
    """``filler`` (B, L) shows through where a row has no token."""
    ids, mask = filler.clone(), torch.zeros_like(filler)
    for i, row in enumerate(rows):
        place = slice(filler.shape[1] - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return Batch(ids, mask)


def masked_id(net: Backbone) -> int:
    return net.vocab_size - 1 if net.special.mask is None else net.special.mask


def draw(net: Backbone, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random tokens, about half of them masked."""
    ids = torch.randint(0, net.vocab_size, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, masked_id(net), ids)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Up to rounding: matrix products of other shapes add in another order. The fixtures' logits reach 10."""
    possible = wanted > -1e5  # -1e6 stands for log 0 in some families, where float32 has steps of 0.06
    assert torch.equal(found > -1e5, possible)
    size = max(1.0, float(wanted[possible].abs().max()))
    assert float((found - wanted)[possible].abs().max()) <= TOLERANCE * size


def one_by_one(net: Backbone, ids: Tensor, mask: Tensor) -> Tensor:
    """What a CPU does."""
    return net(ids, mask)


def together(net: Backbone, ids: Tensor, mask: Tensor) -> Tensor:
    """What an accelerator does: all sequences and their padding at once."""
    inputs = net._prepare_inputs(ids, mask, None, {})
    return net._logits(inputs)


WAYS = (one_by_one, together)


def of_row(logits: Tensor, batch: Batch, i: int) -> Tensor:
    return logits[i][batch.mask[i].bool()][None]


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    extra=st.integers(0, 3),
    side=st.sampled_from(SIDES),
    seed=st.integers(0, 2**32),
)
def test_a_padded_sequence_gets_what_it_gets_alone(name, lengths, extra, side, seed):
    net, generator = model(name), torch.Generator().manual_seed(seed)
    rows = [draw(net, (length,), generator) for length in lengths]
    shape = (len(rows), max(lengths) + extra)
    batch = pad(rows, side, draw(net, shape, generator))
    logits, at_once = one_by_one(net, batch.ids, batch.mask), together(net, batch.ids, batch.mask)
    assert bool(logits.isfinite().all())
    for i, row in enumerate(rows):
        alone = net(row[None])
        assert torch.equal(of_row(logits, batch, i), alone), "to the bit on a CPU"
        assert_same(of_row(at_once, batch, i), alone)


@pytest.mark.parametrize("name", EVERY)
def test_masks_and_ids_of_any_type(name, monkeypatch):
    net, generator = model(name), torch.Generator().manual_seed(4)
    batch = pad([draw(net, (n,), generator) for n in (3, 7)], "left", draw(net, (2, 7), generator))
    real, logits = batch.mask.bool(), net(batch.ids, batch.mask)
    for ids in (batch.ids, batch.ids.to(torch.int32), batch.ids.to(torch.int16)):
        assert torch.equal(net(ids, real), logits)
    assert not bool(logits[~real].any()), "padding is not computed"
    assert_same(net(batch.ids, torch.ones_like(batch.ids)), net(batch.ids))
    monkeypatch.setattr(net, "batch_invariant", False)
    assert torch.equal(net(batch.ids, batch.mask), together(net, batch.ids, batch.mask))


@pytest.mark.parametrize("name", EVERY)
def test_a_row_of_padding_alone_does_no_harm(name):
    net, generator = model(name), torch.Generator().manual_seed(5)
    ids, mask = draw(net, (2, 6), generator), torch.tensor([[0] * 6, [1] * 6])
    for way in WAYS:
        logits = way(net, ids, mask)
        assert bool(logits.isfinite().all())
        assert_same(logits[1:], net(ids[1:]))


# These read the prediction of a position at the one before it, which depends on what stands there, hidden or not.
SHIFTED = ("dream", "fastdllm")


@pytest.mark.parametrize("name", [name for name in EVERY if not name.startswith(SHIFTED)])
def test_hidden_tokens_in_the_middle(name):
    net, generator = model(name), torch.Generator().manual_seed(7)
    ids, mask = draw(net, (2, 8), generator), torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0], [1] * 8])
    other = torch.where(mask.bool(), ids, draw(net, (2, 8), generator))
    if net.config.experts is None:
        assert torch.equal(net(ids, mask)[mask.bool()], net(other, mask)[mask.bool()])
    else:  # hidden tokens go to other experts, whose products then have other shapes
        assert_same(net(ids, mask)[mask.bool()], net(other, mask)[mask.bool()])
    assert_same(net(ids, mask)[mask.bool()], together(net, ids, mask)[mask.bool()])


@pytest.mark.parametrize("name", ["mdlm_timecond", "sedd"])
def test_the_noise_level_comes_from_the_sequence_alone(name):
    net = backbone(name)
    mask = masked_id(net)
    ids = torch.tensor([[mask, mask, 1, mask, 2, 3], [1, 2, 3, mask, 4, 5]])
    visible = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])  # shares of 1/4 and 1/6
    told = net(ids, visible, sigma=-torch.log(torch.tensor([3 / 4, 5 / 6])))
    assert_same(net(ids, visible)[visible.bool()], told[visible.bool()])
    elsewhere = net(ids, visible, sigma=torch.tensor([5.0, 5.0]))
    assert float((elsewhere - told)[0, 3].abs().max()) > 1e-3, "the noise level should matter"


def test_time_and_noise_level_say_the_same():
    net, ids = backbone("mdlm_timecond"), torch.tensor([[1, 63, 63, 4]])
    t = torch.tensor([0.7])
    assert_same(net(ids, t=t), net(ids, sigma=-torch.log(1 - (1 - 1e-3) * t)))


ROW, WRONG = torch.zeros(1, 4).long(), torch.tensor([0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "ids", "extra", "message"),
    [
        ("mdlm_timecond", ROW, {"t": WRONG[:1], "sigma": WRONG[:1]}, "give one of them"),
        ("mdlm_timecond", ROW, {"t": WRONG}, "one value a sequence"),
        ("llada_mha", ROW, {"sigma": WRONG}, "takes no input called sigma"),
        ("sedd", ROW, {"token_type_ids": ROW}, "takes no input called token_type_ids"),
        ("bert", ROW, {"t": WRONG}, "takes no input called t"),
        ("bert", torch.tensor([[3, 120]]), {}, "id 120 is not in the vocabulary of 120"),
        ("bert", torch.tensor([[3, -1]]), {}, "id -1 is not"),
        ("bert", torch.zeros(1, 41).long(), {}, "41 positions, but this bert checkpoint has learned only 40"),
        ("bert", ROW, {"token_type_ids": ROW[:, :3]}, "token_type_ids have shape"),
        ("bert", ROW, {"token_type_ids": ROW + 2}, "token_type_ids must be from 0 to 1"),
    ],
)
def test_what_a_network_cannot_take_is_refused(name, ids, extra, message):
    with pytest.raises(InvalidInput, match=message):
        backbone(name)(ids, **extra)
