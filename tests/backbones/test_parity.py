"""Our one stack against the outputs that public implementations of each family gave for the same weights."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from codd.backbones import loading
from codd.backbones.backbone import Backbone
from codd.backbones.kv_cache import CachedPass, KVCache
from codd.backbones.loading import load_checkpoint
from tests.support.checkpoints import FIXTURES, PUBLISHED, backbone, cases, stated, tensors_of

TOLERANCE = 1e-4
IMPOSSIBLE = -1e5  # the references write log 0 as about -1e6
pytestmark = pytest.mark.numerics

Fields = dict[str, Tensor]
Outputs = Iterator[tuple[Tensor, Tensor, Tensor | None]]
"""What is found, what was published, and where they must be equal (None: everywhere)."""


def assert_close(found: Tensor, wanted: Tensor, where: Tensor | None = None) -> None:
    error = (found - wanted).abs()
    error = error if where is None else error[where]
    assert error.numel()
    print(f"largest difference {float(error.max()):.1e}")  # pytest -rP shows it; docs/results/checkpoints.md quotes it
    assert float(error.max()) <= TOLERANCE


def aligned(net: Backbone, fields: Fields) -> Outputs:
    ids = fields["input_ids"]
    visible = fields.get("attention_mask", torch.ones_like(ids))
    types = {key: fields[key] for key in ("token_type_ids",) if key in fields}
    yield net(ids, visible, **types), fields["logits"], visible.bool()
    if "attention_mask" not in fields:
        yield net(ids, **types), fields["logits"], None
    if types:  # which matter
        assert float((net(ids, visible) - fields["logits"]).abs().max()) > 0.1


def shifted(net: Backbone, fields: Fields) -> Outputs:
    """Dream: a position's logits are read one before it; each sequence's first has its own."""
    ids, raw = fields["input_ids"], fields["logits"]
    visible = fields.get("attention_mask", torch.ones_like(ids))
    first = torch.arange(ids.shape[1]) == visible.int().argmax(1, keepdim=True)
    wanted = torch.where(first[..., None], raw, raw.roll(1, dims=1))
    if "logits_shifted" in fields:
        assert torch.equal(fields["logits_shifted"], wanted)
    yield net(ids, visible), wanted, visible.bool()
    if "position_ids" in fields:
        yield net(ids, visible, fields["position_ids"]), wanted, visible.bool()


def shifted_in_blocks(net: Backbone, fields: Fields) -> Outputs:
    """Fast-dLLM v2: shifted inside a block; but its first position is predicted by the last one of the block before."""
    ids, raw = fields["input_ids"], fields["logits"]
    first = torch.arange(ids.shape[1]) % net.block_size == 0
    wanted = torch.where(first[:, None], raw, raw.roll(1, dims=1))
    assert torch.equal(fields.get("logits_block_shifted", wanted), wanted)
    yield net(ids), wanted, None
    positions, mask = torch.arange(1, ids.shape[1]).expand(len(ids), -1), net.special.mask or 0
    others = torch.arange(net.vocab_size) != mask
    yield net.masked_logits(ids, positions, mask_id=mask).logits[..., others], raw[:, :-1, others], None


def denoised(net: Backbone, fields: Fields) -> Outputs:
    """MDLM: its raw output, and the denoiser (SUBS)."""
    ids, sigma, wanted = fields["input_ids"], fields["sigma"], fields["subs_log_probs"]
    yield net.network.logits(net.states(ids, sigma=sigma)), fields["logits"], None
    found = net(ids, sigma=sigma)
    yield found, wanted, wanted > IMPOSSIBLE
    assert bool((found[wanted <= IMPOSSIBLE] < 10 * IMPOSSIBLE + 100).all())
    assert bool(found.isfinite().all())


def scored(net: Backbone, fields: Fields) -> Outputs:
    """SEDD: its log scores, and as a denoiser (spec 6.4): at a mask the softmax of them over the real tokens."""
    ids, sigma, score = fields["input_ids"], fields["sigma"], fields["log_score"]
    scale = sigma.expm1().log()[:, None, None] + math.log(net.vocab_size - 1)
    for noise in ({"sigma": sigma}, {"t": fields["t"]}):
        found = net.network.logits(net.states(ids, **noise)) - scale
        yield found.scatter(-1, ids[..., None], 0.0), score, None
    absorbing = net.special.mask
    masked, found = ids == absorbing, net(ids, sigma=sigma)
    assert bool(masked.any())
    assert not bool(masked.all())
    yield found[masked][:, :absorbing], score[masked][:, :absorbing].log_softmax(-1), None
    assert bool((found[masked][:, absorbing] < -9e5).all())
    known = found[~masked]
    assert torch.equal(known.argmax(-1), ids[~masked])
    assert torch.equal(known.exp().sum(-1), torch.ones(len(known)))


def of_two_modes(net: Backbone, fields: Fields) -> Outputs:
    """Nemotron: without a mask, causal, and block after block against the causal keys of what stands before."""
    ids, told = fields["input_ids"], stated(f"nemotron_diffusion{'' if net.vocab_size == 211 else '_sharded'}")
    assert net.causal is not None
    yield net(ids), fields["logits"], None
    yield net.causal(ids), fields["causal_logits"], None
    for name, prompt in (("block_logits", 0), ("block_logits_from_prompt", told[f"b{len(ids)}_prompt_len"])):
        cache = net.network.kv_cache(len(ids), ids.shape[1])

        def at(view: Backbone, begin: int, end: int, cache: KVCache = cache) -> Tensor:
            positions = torch.arange(begin, end).expand(len(ids), -1)
            past = CachedPass(cache, torch.arange(len(ids)), positions, end)
            return view.network.logits(view.cached_states(ids[:, begin:end], past))

        if prompt:
            at(net.causal, 0, prompt)
        found = []
        for begin in range(prompt, prompt + fields[name].shape[1], told["block_size"]):
            end = min(begin + told["block_size"], ids.shape[1])
            found.append(at(net, begin, end))
            at(net.causal, begin, end)
        yield torch.cat(found, 1), fields[name], None


PARITY: dict[str, Callable[[Backbone, Fields], Outputs]] = {
    **dict.fromkeys(("llada", "llada2", "illada", "sdar", "stable", "a2d"), aligned),
    **dict.fromkeys(("bert", "modernbert", "roberta", "esm1b", "esm2"), aligned),
    "nemotron": of_two_modes,
    "dream": shifted,
    "fastdllm": shifted_in_blocks,
    "mdlm": denoised,
    "sedd": scored,
}
"""By the beginning of a fixture's name."""
CASES = [(name, case) for name in PUBLISHED for case in cases(name)]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_family_is_what_was_published(name, case):
    for found, wanted, where in PARITY[name.split("_")[0]](backbone(name), cases(name)[case]):
        assert_close(found, wanted, where)


@pytest.mark.parametrize(("name", "case"), [each for each in CASES if "cached_logits" in cases(each[0])[each[1]]])
def test_a_prefix_from_the_cache(name, case):
    fields, network = cases(name)[case], backbone(name).network
    ids, begin = fields["input_ids"], stated(name)[f"{case}_cached_from"]
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    slots, shape = torch.arange(len(ids)), network.config.kv_shape
    cache = KVCache(shape, len(ids), ids.shape[1] + 3, device=torch.device("cpu"), dtype=torch.float32)
    cache.memory.fill_(7.0)
    for part in (slice(0, begin), slice(begin, None)):
        end = begin if part.start == 0 else ids.shape[1]
        past = CachedPass(cache, slots, positions[:, part], end)
        found = network.logits(network.states(ids[:, part], positions[:, part], past=past))
    assert_close(found, fields["cached_logits"])


@pytest.mark.parametrize("name", ["sdar", "llada2_moe", "fastdllm_v2"])
def test_later_blocks_are_not_seen(name):
    """Any number of blocks alone gives what it gives before others: to the bit it need not, shapes differ."""
    net, ids = backbone(name), cases(name)["b1"]["input_ids"]
    whole = net(ids)
    for end in range(net.block_size, ids.shape[1], net.block_size):
        assert_close(net(ids[:, :end]), whole[:, :end])
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % net.vocab_size
    seen = (net(changed) - whole).abs().amax(-1)[0] > 1e-3
    last = ids.shape[1] - 1 - (ids.shape[1] - 1) % net.block_size
    assert not bool(seen[:last].any())
    assert bool(seen[last + 1 :].all())


def test_mdlm_without_time_conditioning_ignores_the_noise_level():
    ids = cases("mdlm")["b2"]["input_ids"]
    assert torch.equal(backbone("mdlm")(ids), backbone("mdlm")(ids, sigma=torch.tensor([0.3, 5.0])))


@pytest.mark.parametrize("name", ["llada_gqa_sharded", "dream_untied_sharded"])
def test_a_bfloat16_checkpoint_loads_bit_for_bit(name, monkeypatch):
    monkeypatch.setattr(loading, "_bfloat16_survives", lambda: True)  # nothing is multiplied here
    loaded = load_checkpoint(FIXTURES / name, device="cpu", dtype=torch.bfloat16).backbone
    stored = tensors_of(FIXTURES / name)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.dtype == torch.bfloat16
    written = {bytes(x.view(torch.uint8).numpy()) for x in stored.values()}
    network = dict(loaded.network.named_parameters())
    joined = loaded.config.row_ranges()
    for name_, parameter in network.items():
        kinds = {"qkv": ("q", "k", "v"), "up": ("gate", "up")}.get(name_.split(".")[-2], ())
        for part in [parameter[slice(*joined[kind])] for kind in kinds] or [parameter]:
            assert bytes(part.contiguous().view(torch.uint8).numpy()) in written
    assert sum(p.numel() for p in network.values()) == sum(x.numel() for x in stored.values())
