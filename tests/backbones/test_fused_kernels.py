"""The kernels between the products of a transformer against PyTorch: on a GPU, elsewhere in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from codd.backbones.transformer import RMSNorm, Transformer, TransformerConfig, apply_rotary, initialise, rotary_angles
from tests.support.devices import CUDA, DEVICE, drawn


@pytest.mark.parametrize("shape", [(1, 3, 16), (2, 5, 20), (1, 1)], ids=str)
def test_the_norm(kernels, shape):
    x, norm = drawn(*shape), RMSNorm(shape[-1], 1e-5).to(DEVICE)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(kernels.rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize(("batch", "length", "heads", "half"), [(1, 3, 5, 4), (2, 2, 2, 3)])
def test_rotary_positions(kernels, batch, length, heads, half):
    joined = drawn(batch, length, (heads + 1) * 2 * half)
    angles = rotary_angles(torch.arange(length, device=DEVICE)[None], 2 * half, 10.0)
    parts = joined.unflatten(-1, (heads + 1, 2 * half)).transpose(1, 2)
    wanted = torch.cat((apply_rotary(parts[:, :heads], *angles), parts[:, heads:]), 1).transpose(1, 2).flatten(2)
    kernels.rotate_(joined, heads, *angles)
    torch.testing.assert_close(joined, wanted)


@pytest.mark.parametrize(("width", "turned"), [(8, 8), (12, 6), (10, 2)])
def test_norms_and_rotary_positions_of_heads(kernels, width, turned):
    joined = drawn(2, 3, 5 * width)
    q_norm, k_norm = (RMSNorm(width, 1e-5).to(DEVICE) for _ in range(2))
    for norm in (q_norm, k_norm):
        torch.nn.init.normal_(norm.weight)
    angles = rotary_angles(torch.arange(3, device=DEVICE)[None], turned, 10.0)
    q, k, v = joined.unflatten(-1, (5, width)).transpose(1, 2).split((3, 1, 1), 1)
    parts = (apply_rotary(q_norm(q), *angles), apply_rotary(k_norm(k), *angles), v)
    wanted = torch.cat(parts, 1).transpose(1, 2).flatten(2).detach()
    kernels.norm_rotate_(joined, (q_norm.weight, k_norm.weight), 1e-5, 3, 1, *angles)
    torch.testing.assert_close(joined, wanted)


@pytest.mark.parametrize(("batch", "length", "heads", "kv_heads"), [(1, 5, 2, 2), (2, 19, 4, 2)])
def test_attention(kernels, batch, length, heads, kv_heads):
    joined = drawn(batch, length, (heads + 2 * kv_heads) * 32)
    angles = rotary_angles(torch.arange(length, device=DEVICE)[None], 32, 10.0)
    parts = joined.unflatten(-1, (-1, 32)).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
    q, k = (apply_rotary(part, *angles) for part in parts[:2])
    wanted = F.scaled_dot_product_attention(q, k, parts[2], enable_gqa=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(kernels.attend(joined, heads, kv_heads, *angles), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 2)], ids=str)
def test_the_gate(kernels, shape):
    first, second = drawn(*shape).chunk(2, -1)
    torch.testing.assert_close(kernels.gated_silu(drawn(*shape)), F.silu(first) * second)


@pytest.mark.skipif(not CUDA, reason="a CPU takes PyTorch's own functions")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "parts", [{}, {"qk_norm": True, "head_width": 64, "rotary_width": 32, "block_size": 4}], ids=str
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_a_network_is_what_it_is_with_gradients(dtype, bound, biased, parts):
    """With gradients no kernel of ours takes part."""
    biases = {"qkv_bias": biased, "out_bias": biased, "mlp_bias": biased}
    shape = {"vocab_size": 50, "width": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 96}
    network = Transformer(TransformerConfig(**shape, **biases, **parts))
    initialise(network, generator=torch.Generator().manual_seed(0))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.ndim == 1 else None
    network = network.to(DEVICE, dtype)
    ids, positions = torch.arange(14, device=DEVICE).view(2, 7), torch.arange(7, device=DEVICE).expand(2, 7)
    wanted = network.states(ids, positions)
    with torch.no_grad():
        found = network.states(ids, positions)
    torch.testing.assert_close(found, wanted.detach(), rtol=bound, atol=bound)
