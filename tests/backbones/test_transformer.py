"""Who sees whom, packed rows and initialisation; what the parts compute is compared in test_parity.py."""

import dataclasses

import pytest
import torch
from torch import Tensor

from codd.backbones.transformer import (
    LayerNorm,
    LocalLayers,
    RMSNorm,
    Transformer,
    TransformerConfig,
    initialise,
)

SMALL = TransformerConfig(vocab_size=40, width=32, layers=3, heads=4, kv_heads=2, mlp_width=48)


def build(**changes) -> Transformer:
    network = Transformer(dataclasses.replace(SMALL, **changes))
    initialise(network, generator=torch.Generator().manual_seed(1), std=0.3)
    return network.requires_grad_(False)


def tokens(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(length).expand(rows, length)


def test_norms_work_in_float32():
    x = (300 * torch.linspace(-3, 3, 32)).view(4, 8).to(torch.float16)  # squares would overflow
    assert RMSNorm(8, 1e-5).half()(x).dtype == torch.float16
    assert bool(RMSNorm(8, 1e-5).half()(x).isfinite().all())
    assert bool(LayerNorm(8, 1e-5, True).half()(x).isfinite().all())


def test_clipped_queries_keys_and_values():
    """No fixture reaches its clip: clipped to nothing, values are nothing, and so is what attention adds."""
    (ids, positions), clipped, silent = tokens(2, 5), build(clip_qkv=1e-8), build()
    for block in silent.blocks:
        block.attention.out.weight.zero_()
    assert torch.allclose(clipped.states(ids, positions), silent.states(ids, positions), atol=1e-5)
    assert not torch.allclose(clipped.states(ids, positions), build().states(ids, positions), atol=1e-2)


@pytest.mark.parametrize("local", [None, LocalLayers(every=2, reach=3, rope_theta=100.0)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_network_does_not_look_ahead(local, padded):
    network = build(causal=True, local=local)
    ids, positions = tokens(2, 10)
    valid = torch.ones_like(ids).bool() if padded else None
    before = network.states(ids, positions, valid=valid)
    for place in (9, 4, 1):
        changed = ids.clone()
        changed[:, place] = (ids[:, place] + 1) % 40
        after = network.states(changed, positions, valid=valid)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("local", [None, LocalLayers(every=2, reach=2, rope_theta=100.0)])
def test_packed_rows_equal_separate_rows(causal, local):
    network = build(causal=causal, local=local)
    lengths = (5, 3, 6)
    texts = [tokens(1, length, seed=length) for length in lengths]
    packed = torch.cat([ids for ids, _ in texts] + [torch.zeros(1, 2).long()], dim=1)
    positions = torch.cat([at for _, at in texts] + [torch.zeros(1, 2).long()], dim=1)
    segments = torch.tensor([[0] * 5 + [1] * 3 + [2] * 6 + [3] * 2])
    valid = segments < 3  # padding, which is a segment of its own and sees nothing else
    states = network.states(packed, positions, valid=valid, segments=segments)
    assert bool(states.isfinite().all())
    start = 0
    for ids, at in texts:
        end = start + ids.shape[1]
        assert torch.allclose(states[:, start:end], network.states(ids, at), atol=1e-5)
        start = end


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("local", [None, LocalLayers(every=2, reach=1, rope_theta=100.0)])
@pytest.mark.parametrize("packed", [False, True])
def test_nobody_is_blind(causal, local, packed):
    """A softmax over nothing is NaN on some devices, and NaN times a weight of zero would reach the others."""
    network = build(causal=causal, local=local)
    valid = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0], [0] * 6]).bool()
    segments = torch.tensor([[0, 0, 1, 1, 2, 2]]).expand(3, 6) if packed else None
    for context in network._attention_contexts(tokens(3, 6)[1], valid, segments):
        sees = context.mask.expand(3, 1, 6, 6)[:, 0]
        assert bool(sees.any(-1).all())
        for row, real in enumerate(valid[:2]):
            assert not bool(sees[row][real][:, ~real].any()), "padding is seen"


def test_initialisation_is_reproducible_and_scaled():
    one, other = (Transformer(dataclasses.replace(SMALL, layers=8, width=64, qkv_bias=True)) for _ in range(2))
    for network in (one, other):
        initialise(network.requires_grad_(False), generator=torch.Generator().manual_seed(7))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    block = one.blocks[0]
    assert float(block.attention.qkv.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.attention.out.weight.std()) == pytest.approx(0.02 / 4, rel=0.1)
    assert float(block.mlp.down.weight.std()) == pytest.approx(0.02 / 4, rel=0.1)
    assert bool((block.attention_norm.weight == 1).all())
    assert bool((block.attention.qkv.bias == 0).all())
