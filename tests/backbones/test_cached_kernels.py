"""Attention over a KV cache: the kernels against PyTorch; on a GPU, elsewhere in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codd.backbones import transformer
from codd.backbones.kv_cache import CachedPass, KVCache, KVShape
from codd.backbones.transformer import Transformer, TransformerConfig, initialise
from tests.support.devices import CUDA, DEVICE, drawn

LENGTH = 40


def a_pass(cache: KVCache, parts: list[tuple[int, int, int, int]], rows: int) -> CachedPass:
    """Of each sequence its slot, the first position that is computed and one beyond the last, and its end."""
    positions = torch.full((len(parts), rows), -1)
    for i, (_, begin, beyond, _) in enumerate(parts):
        positions[i, : beyond - begin] = torch.arange(begin, beyond)
    slots, ends = torch.tensor([part[0] for part in parts]), torch.tensor([part[3] for part in parts])
    return CachedPass(cache, slots, positions, LENGTH, ends).to(DEVICE)


def attended(joined: Tensor, past: CachedPass, heads: int, kv_heads: int, block_size: int | None) -> Tensor:
    """By the general branch of the cache and PyTorch's attention, in float64 on the host."""
    parts = joined.unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
    keys, values = past.update(0, *parts[1:])
    assert past.ends is not None
    n = torch.arange(past.seen)
    mask = (n < past.ends.cpu()[:, None])[:, None, None]
    if block_size is not None:
        mask = mask & (n // block_size <= past.positions.cpu()[:, None, :, None] // block_size)
    q, k, v = (part.cpu().double() for part in (parts[0], keys, values))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2).to(DEVICE, joined.dtype)


SEQUENCES = {
    "one": ([(1, 8, 16, 29)], 8, 1),
    "large scores": ([(1, 8, 16, 29)], 8, 100),
    "padded": ([(2, 33, 40, 40)], 12, 1),
    "ragged": ([(3, 0, 17, 17), (0, 5, 9, 33), (4, 38, 40, 40), (1, 3, 21, 21)], 19, 1),
}


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=list(SEQUENCES))
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 16), (6, 2, 32)])
@pytest.mark.parametrize("block_size", [None, 4])
def test_against_pytorch(kernels, sequences, heads, kv_heads, width, block_size):
    parts, rows, scale = sequences
    cache, other = (
        KVCache(KVShape(1, kv_heads, width), 5, LENGTH, device=DEVICE, dtype=torch.float32) for _ in range(2)
    )
    cache.memory.copy_(drawn(*cache.memory.shape, seed=1))
    other.memory.copy_(cache.memory)
    joined, past = drawn(len(parts), rows, (heads + 2 * kv_heads) * width), a_pass(cache, parts, rows)
    joined[..., : heads * width] *= scale
    wanted = attended(joined, past._replace(cache=other), heads, kv_heads, block_size)
    assert kernels.attends_cached(joined, cache.memory[0])
    kernels.store_kv(joined, cache.memory[0], past.slots, past.positions, heads)
    assert torch.equal(cache.memory, other.memory)
    assert past.ends is not None
    found = kernels.attend_cached(joined, cache.memory[0], past.slots, past.positions, past.ends, heads, block_size)
    assert bool(found.isfinite().all())
    real = past.positions >= 0
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-4 * scale, atol=1e-5 * scale)


def test_what_they_do_not_serve(kernels):
    for width, dtype, served in (
        (16, torch.float32, True),
        (256, torch.float32, True),
        (8, torch.float32, False),
        (48, torch.float32, False),
        (512, torch.float32, False),
        (64, torch.bfloat16, False),
    ):
        memory = torch.empty(2, 1, 1, 4, width, dtype=dtype)
        assert kernels.attends_cached(torch.empty(1, 1, 3 * width), memory) == served
    assert not kernels.attends_cached(torch.empty(1, 1, 48).double(), torch.empty(2, 1, 1, 4, 16).double())


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"qk_norm": True, "head_width": 32, "rotary_width": 16, "kv_heads": 1, "block_size": 4},
        {"clip_qkv": 0.1},
        {"local": transformer.LocalLayers(2, 3, 100.0)},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_batch_is_what_its_sequences_are_alone(kernels, parts, monkeypatch):
    """Of unequal lengths and rows, with kernels where they serve, against each without any of them."""
    shape = {"vocab_size": 50, "width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "mlp_width": 16}
    network = Transformer(TransformerConfig(**{**shape, **parts}))
    initialise(network, generator=torch.Generator().manual_seed(0), std=0.2)
    network = network.to(DEVICE)
    cache, other = (KVCache(network.config.kv_shape, 3, LENGTH, device=DEVICE, dtype=torch.float32) for _ in range(2))
    cache.memory.copy_(drawn(*cache.memory.shape))
    other.memory.copy_(cache.memory)
    ids, parts = torch.arange(20, device=DEVICE).view(2, 10), [(2, 5, 6, 17), (0, 4, 8, 10)]
    monkeypatch.setattr(transformer, "gpu_kernels", lambda *_: None)
    alone = []
    for row, part in enumerate(parts):
        own = ids[row : row + 1, part[1] : part[2]]
        past = a_pass(other, [part], own.shape[1])._replace(ends=None, seen=part[3])
        alone.append(network.states(own, past.positions, past=past)[0])
    past = a_pass(cache, parts, 5)
    monkeypatch.setattr(transformer, "gpu_kernels", lambda *_: kernels)
    together = network.states(ids.gather(1, past.positions.clamp(min=0)), past.positions, past=past)
    for row, wanted in enumerate(alone):
        torch.testing.assert_close(together[row, : len(wanted)], wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache.memory, other.memory, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not CUDA, reason="the interpreter has no half precision")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize(("rows", "heads", "block_size"), [(1, 8, None), (32, 4, None), (32, 8, 32), (300, 4, 4)])
def test_precisions_and_sizes(kernels, dtype, bound, width, rows, heads, block_size):
    cache = KVCache(KVShape(1, 4, width), 3, 1000, device=DEVICE, dtype=dtype)
    cache.memory.copy_(drawn(*cache.memory.shape, seed=1))
    joined = drawn(2, rows, (heads + 8) * width).to(dtype)
    positions = torch.arange(rows) + torch.tensor([[500], [700]])
    past = CachedPass(cache, torch.tensor([2, 0]), positions, 1000, torch.tensor([801, 1000])).to(DEVICE)
    wanted = attended(joined, past, heads, 4, block_size)
    assert past.ends is not None
    found = kernels.attend_cached(joined, cache.memory[0], past.slots, past.positions, past.ends, heads, block_size)
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
