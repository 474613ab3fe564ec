"""The parts of the stack against their plain definitions."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codd.backbones.transformer import (
    MLP,
    Attention,
    AttentionContext,
    LayerNorm,
    LocalLayers,
    NoiseLevel,
    RMSNorm,
    Transformer,
    TransformerConfig,
    activate,
    apply_rotary,
    initialise,
    rotary_angles,
)

SMALL = TransformerConfig(vocab_size=40, width=32, layers=3, heads=4, kv_heads=2, mlp_width=48)


def random_(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.requires_grad_(False)


def build(**changes) -> Transformer:
    network = Transformer(dataclasses.replace(SMALL, **changes))
    initialise(network, generator=torch.Generator().manual_seed(1), std=0.3)
    return network.requires_grad_(False)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(length).expand(rows, length)


def attend(x: Tensor, attention: Attention, sees: Tensor) -> Tensor:
    """Grouped-query attention with loops over sequences, heads and positions."""
    config = attention.config
    size, ranges = config.head_dim, config.row_ranges()
    weight, bias = attention.qkv.weight, attention.qkv.bias
    out = torch.zeros(*x.shape[:2], config.heads * size)
    for b in range(x.shape[0]):
        q, k, v = (x[b] @ weight[slice(*ranges[part])].T + bias[slice(*ranges[part])] for part in ("q", "k", "v"))
        for head in range(config.heads):
            group = head // (config.heads // config.kv_heads)
            mine, shared = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            for i in range(x.shape[1]):
                scores = torch.tensor(
                    [
                        float(q[i, mine] @ k[j, shared]) / math.sqrt(size) if sees[b, i, j] else -torch.inf
                        for j in range(x.shape[1])
                    ]
                )
                out[b, i, mine] = scores.softmax(0) @ v[:, shared]
    return out @ attention.out.weight.T


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("hidden", [False, True])
def test_attention(kv_heads, hidden):
    attention = random_(Attention(dataclasses.replace(SMALL, kv_heads=kv_heads, qkv_bias=True)))
    x = draw(2, 6, 32)
    sees = torch.ones(2, 6, 6, dtype=torch.bool)
    if hidden:
        sees[0, :, 4:] = False
        sees[1, 2, :3] = False
    found = attention(x, AttentionContext(None, sees[:, None] if hidden else None))
    assert torch.allclose(found, attend(x, attention, sees), atol=1e-5)


def test_normalised_queries_and_keys():
    attention = random_(Attention(dataclasses.replace(SMALL, qk_norm=True)))
    x = draw(1, 5, 32)
    before = attention(x, AttentionContext(None, None))
    with torch.no_grad():
        attention.qkv.weight[:48] *= 7  # queries and keys, but not values
    assert torch.allclose(attention(x, AttentionContext(None, None)), before, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(first=st.integers(0, 3000), second=st.integers(0, 3000), shift=st.integers(-500, 500))
def test_rotary_products_depend_on_the_distance_alone(first, second, shift):
    q, k = draw(1, 1, 1, 16), draw(1, 1, 1, 16, seed=1)

    def product(i: int, j: int) -> float:
        turned = [apply_rotary(x, *rotary_angles(torch.tensor([[at]]), 16, 500.0)) for x, at in ((q, i), (k, j))]
        return float((turned[0] * turned[1]).sum())

    assert product(first, second) == pytest.approx(product(first + shift, second + shift), abs=5e-3)


def test_rotary_turns_pairs():
    x = draw(1, 1, 2, 6)
    turned = apply_rotary(x, *rotary_angles(torch.tensor([[0, 3]]), 6, 100.0))
    assert torch.equal(turned[0, 0, 0], x[0, 0, 0])
    for pair in range(3):
        angle = 3 * 100.0 ** (-2 * pair / 6)
        a, b = float(x[0, 0, 1, pair]), float(x[0, 0, 1, pair + 3])
        assert float(turned[0, 0, 1, pair]) == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-5)
        assert float(turned[0, 0, 1, pair + 3]) == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-5)


def test_norms():
    x = draw(3, 7, 8) * 5 + 2
    rms = random_(RMSNorm(8, 1e-3))
    assert torch.allclose(rms(x), x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * rms.weight, atol=1e-6)
    for bias in (False, True):
        layer = random_(LayerNorm(8, 1e-3, bias))
        centred = x - x.mean(-1, keepdim=True)
        wanted = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight
        assert torch.allclose(layer(x), wanted + (layer.bias if bias else 0), atol=1e-5)


def test_norms_work_in_float32():
    x = (draw(4, 8) * 300).to(torch.float16)  # squares would overflow
    assert RMSNorm(8, 1e-5).half()(x).dtype == torch.float16
    assert bool(RMSNorm(8, 1e-5).half()(x).isfinite().all())
    assert bool(LayerNorm(8, 1e-5, True).half()(x).isfinite().all())


def test_activations():
    x = torch.linspace(-4, 4, 33)
    assert torch.allclose(activate(x, "silu"), x / (1 + torch.exp(-x)), atol=1e-6)
    assert torch.allclose(activate(x, "gelu"), x * (1 + torch.erf(x / math.sqrt(2))) / 2, atol=1e-6)
    tanh = x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    assert torch.allclose(activate(x, "gelu_tanh"), tanh, atol=1e-6)


def test_a_gated_mlp_activates_the_first_half():
    mlp = random_(MLP(dataclasses.replace(SMALL, mlp_bias=True)))
    x = draw(2, 3, 32)
    gate, up = (x @ mlp.up.weight[rows].T + mlp.up.bias[rows] for rows in (slice(0, 48), slice(48, 96)))
    wanted = (activate(gate, "silu") * up) @ mlp.down.weight.T + mlp.down.bias
    assert torch.allclose(mlp(x), wanted, atol=1e-5)


def test_the_noise_level_is_a_vector_of_sinusoids():
    level = random_(NoiseLevel(8))
    sigma = torch.tensor([0.0, 0.7])
    angles = sigma[:, None] * torch.tensor([10_000 ** (-i / 128) for i in range(128)])
    features = torch.cat((angles.cos(), angles.sin()), -1)
    inner = activate(features @ level.up.weight.T + level.up.bias, "silu")
    wanted = activate(inner @ level.down.weight.T + level.down.bias, "silu")
    assert torch.allclose(level(sigma), wanted, atol=1e-5)


def test_modulation_shifts_scales_and_gates():
    """With every modulation zero the gates are shut, and the stack does nothing at all."""
    network = build(conditioning=8, norm="layer", gated=False)
    ids, positions = tokens(2, 5)
    for name, parameter in network.named_parameters():
        if "modulation" in name:
            parameter.zero_()
    sigma = torch.tensor([0.1, 2.0])
    wanted = network.final_norm(network.embedding.tokens(ids))
    assert torch.allclose(network.states(ids, positions, sigma=sigma), wanted, atol=1e-6)
    network.final_modulation.bias[:32] = 3.0  # shift
    network.final_modulation.bias[32:] = 1.0  # scale
    assert torch.allclose(network.states(ids, positions, sigma=sigma), 2 * wanted + 3, atol=1e-5)


def test_norms_after_each_part():
    network = build(norm_after=True, norm="layer", norm_bias=True, layers=1, rope_theta=None)
    ids, positions = tokens(2, 5)
    block, x = network.blocks[0], network.embedding.tokens(ids)
    x = block.attention_norm(x + block.attention(x, AttentionContext(None, None)))
    x = block.mlp_norm(x + block.mlp(x))
    assert network.final_norm is None
    assert torch.allclose(network.states(ids, positions), x, atol=1e-6)


def test_a_first_layer_without_a_norm():
    network = build(first_norm=False, layers=1)
    ids, positions = tokens(1, 4)
    block, x = network.blocks[0], network.embedding.tokens(ids)
    turns = rotary_angles(positions, 8, 10_000.0)
    x = x + block.attention(x, AttentionContext(turns, None))
    x = x + block.mlp(block.mlp_norm(x))
    assert torch.allclose(network.states(ids, positions), network.final_norm(x), atol=1e-6)


def test_the_embedding_adds_up():
    network = build(positions=9, token_types=2, embedding_norm=True)
    ids, positions = tokens(2, 5)
    types = torch.tensor([[0, 0, 1, 1, 1]]).expand(2, 5)
    table = network.embedding
    wanted = table.norm(table.tokens.weight[ids] + table.types.weight[types] + table.positions.weight[positions])
    assert torch.allclose(table(ids, positions, types), wanted, atol=1e-6)
    assert torch.equal(table(ids, positions, None), table(ids, positions, torch.zeros_like(ids)))


def test_heads():
    states = draw(2, 3, 32)
    tied = build(tied=True)
    assert tied.head.weight is None
    assert torch.allclose(tied.logits(states), states @ tied.embedding.tokens.weight.T, atol=1e-5)
    full = build(head_transform="gelu", head_transform_bias=True, head_bias=True)
    random_(full.head)
    inner = full.head.norm(activate(full.head.dense(states), "gelu"))
    assert torch.allclose(full.logits(states), inner @ full.head.weight.T + full.head.bias, atol=1e-5)


@pytest.mark.parametrize("layers", [2, 3])
def test_local_layers_see_their_neighbourhood(layers):
    """The first layer is global: silenced, what is far away reaches a position only through steps of ``reach``."""
    network = build(layers=layers, local=LocalLayers(every=9, reach=2, rope_theta=100.0))
    network.blocks[0].attention.out.weight.zero_()
    ids, positions = tokens(1, 16)
    before = network.states(ids, positions)
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 40
    after = network.states(changed, positions)
    moved = (after - before).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [i <= 2 * (layers - 1) for i in range(16)]


def test_every_nth_layer_is_global():
    network = build(layers=4, local=LocalLayers(every=3, reach=1, rope_theta=100.0))
    ids, positions = tokens(1, 12)
    for block in (network.blocks[0], network.blocks[1], network.blocks[2]):
        block.attention.out.weight.zero_()
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 40
    moved = (network.states(changed, positions) - network.states(ids, positions)).abs().amax(-1)[0] > 1e-6
    assert bool(moved.all())


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


def test_without_the_flag_everyone_sees_everyone():
    network = build()
    ids, positions = tokens(1, 10)
    changed = ids.clone()
    changed[0, 9] = (ids[0, 9] + 1) % 40
    assert not torch.allclose(network.states(changed, positions)[0, 0], network.states(ids, positions)[0, 0])


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


def test_only_distances_matter_to_a_rotary_network():
    network = build()
    ids, positions = tokens(2, 8)
    assert torch.allclose(network.states(ids, positions), network.states(ids, positions - 5), atol=1e-4)


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
