"""Logits at masked positions, from ids or from hidden states: the head's own, with the mask token excluded."""

import copy

import pytest
import torch

from tests.support.checkpoints import PUBLISHED, backbone

pytestmark = pytest.mark.numerics
POSITIONS = torch.tensor([[1, 4, 6], [0, 6, 2]])


def masked_ids(vocab_size: int, mask: int) -> torch.Tensor:
    """Two sequences of 8 tokens, masked at the positions asked about and at position 7."""
    ids = torch.randint(0, vocab_size - 1, (2, 8), generator=torch.Generator().manual_seed(0))
    return ids.scatter(1, POSITIONS, mask).index_fill(1, torch.tensor([7]), mask)


@pytest.mark.parametrize("name", [*PUBLISHED, "mini"])
def test_they_are_those_of_the_whole_network_without_the_mask(name):
    net = backbone(name)
    mask = net.vocab_size - 1 if net.special.mask is None else net.special.mask
    ids = masked_ids(net.vocab_size, mask)
    output = net.masked_logits(ids, POSITIONS, mask_id=mask)
    rows = torch.arange(2)[:, None]
    assert torch.equal(output.states, net.states(ids)[rows, POSITIONS])  # the same call
    assert output.logits.dtype == torch.float32
    assert bool((output.logits[..., mask] == -torch.inf).all())
    whole = net(ids)[rows, POSITIONS].float()
    others = torch.arange(net.vocab_size) != mask
    # A product over fewer positions adds in another order.
    torch.testing.assert_close(output.logits[..., others], whole[..., others], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["mini", "mdlm"])
def test_from_states_every_position_is_masked_unless_ids_are_given(name):
    net = backbone(name)
    mask = net.special.mask
    output = net.masked_logits(masked_ids(net.vocab_size, mask), POSITIONS, mask_id=mask)
    assert torch.equal(net.masked_logits_from_states(output.states, mask_id=mask), output.logits)
    shown = torch.full_like(POSITIONS, 3)
    given = net.masked_logits_from_states(output.states, shown, mask_id=mask)
    if name == "mdlm":  # a token that is there is certain
        assert bool((given.argmax(-1) == 3).all())
    else:
        assert torch.equal(given, output.logits)


def test_without_exclusion_they_are_the_heads_in_its_own_precision():
    net = copy.deepcopy(backbone("mini")).double()
    mask = net.special.mask
    states = net.states(masked_ids(net.vocab_size, mask))
    raw = net.masked_logits_from_states(states, mask_id=mask, exclude_mask=False)
    assert raw.dtype == torch.float64
    assert torch.equal(raw, net.network.logits(states))
    assert bool(raw.isfinite().all())
    excluded = net.masked_logits_from_states(states, mask_id=mask)
    assert excluded.dtype == torch.float32
    assert torch.equal(excluded[..., :mask], raw[..., :mask].float())
