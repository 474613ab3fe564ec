"""Our one stack against the outputs that public implementations of each family gave for the same weights."""

import math

import pytest
import torch
from torch import Tensor

from codd.backbones import loading
from codd.backbones.backbone import default_positions
from codd.backbones.kv_cache import CachedPass, KVCache
from codd.backbones.loading import load_checkpoint
from tests.support.checkpoints import FIXTURES, PUBLISHED, backbone, cases, stated, tensors_of

TOLERANCE = 2e-4
IMPOSSIBLE = -1e5  # the references write log 0 as about -1e6
pytestmark = pytest.mark.numerics


def every_case(*families: str, needs: str) -> list[tuple[str, str]]:
    names = [name for name in PUBLISHED if name.split("_")[0] in families]
    return [(name, case) for name in names for case, fields in cases(name).items() if needs in fields]


def assert_close(found: Tensor, wanted: Tensor, where: Tensor | None = None) -> None:
    error = (found - wanted).abs()
    error = error if where is None else error[where]
    assert error.numel()
    print(f"largest difference {float(error.max()):.1e}")  # pytest -rP shows it; docs/results/checkpoints.md quotes it
    assert float(error.max()) <= TOLERANCE


@pytest.mark.parametrize(("name", "case"), every_case("llada", "llada2", "illada", "sdar", needs="logits"))
def test_aligned_families(name, case):
    fields = cases(name)[case]
    logits = backbone(name)(fields["input_ids"], fields.get("attention_mask"))
    assert_close(logits, fields["logits"])  # hidden positions too: they see the others


@pytest.mark.parametrize(("name", "case"), every_case("dream", needs="logits"))
def test_dream_before_the_shift(name, case):
    fields, dream = cases(name)[case], backbone(name)
    ids, visible = fields["input_ids"], fields.get("attention_mask", torch.ones_like(fields["input_ids"])).bool()
    positions = default_positions(ids, visible)
    assert torch.equal(positions[visible], fields.get("position_ids", positions)[visible])
    assert_close(dream.network.logits(dream.network.states(ids, positions, valid=visible)), fields["logits"], visible)


@pytest.mark.parametrize(("name", "case"), every_case("dream", needs="logits_shifted"))
def test_dream(name, case):
    fields = cases(name)[case]
    assert_close(backbone(name)(fields["input_ids"]), fields["logits_shifted"])


@pytest.mark.parametrize("name", ["dream_tied", "dream_untied_sharded"])
def test_dream_shifts_within_the_padding(name):
    fields = cases(name)["b2pad"]
    raw, visible = fields["logits"], fields["attention_mask"].bool()
    logits = backbone(name)(fields["input_ids"], fields["attention_mask"])
    for row in range(2):
        start = int(visible[row].int().argmax())
        assert_close(logits[row, start], raw[row, start])
        assert_close(logits[row, start + 1 :], raw[row, start:-1])


def test_dream_takes_positions():
    fields = cases("dream_tied")["b2pad"]
    ids, visible = fields["input_ids"], fields["attention_mask"]
    given = backbone("dream_tied")(ids, visible, fields["position_ids"])
    assert_close(given, backbone("dream_tied")(ids, visible), visible.bool())


@pytest.mark.parametrize(("name", "case"), every_case("bert", "modernbert", needs="logits"))
def test_bert_and_modernbert(name, case):
    fields = cases(name)[case]
    ids, visible = fields["input_ids"], fields.get("attention_mask", torch.ones_like(fields["input_ids"]))
    types = {key: fields[key] for key in ("token_type_ids",) if key in fields}
    assert_close(backbone(name)(ids, visible, **types), fields["logits"], visible.bool())


@pytest.mark.parametrize(("name", "case"), every_case("fastdllm", needs="logits"))
def test_fast_dllm_shifts_inside_a_block(name, case):
    fields, net = cases(name)[case], backbone(name)
    raw, ids = fields["logits"], fields["input_ids"]
    first = torch.arange(ids.shape[1]) % net.block_size == 0
    shifted = torch.where(first[:, None], raw, raw.roll(1, dims=1))
    assert torch.equal(fields.get("logits_block_shifted", shifted), shifted)
    assert_close(net(ids), shifted)


@pytest.mark.parametrize("name", ["fastdllm_v2", "fastdllm_v2_tied_sharded"])
def test_fast_dllm_predicts_the_first_of_a_block_by_the_last_of_the_one_before(name):
    fields, net = cases(name)["b2"], backbone(name)
    ids = fields["input_ids"]
    positions = torch.arange(1, ids.shape[1]).expand(len(ids), -1)
    found = net.masked_logits(ids, positions, mask_id=net.special.mask or 0).logits
    others = torch.arange(net.vocab_size) != (net.special.mask or 0)
    assert_close(found[..., others], fields["logits"][:, :-1, others])


@pytest.mark.parametrize(("name", "case"), every_case("sdar", "fastdllm", "llada2", needs="cached_logits"))
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


def test_bert_notices_token_types():
    fields = cases("bert")["b2tt"]
    assert float((backbone("bert")(fields["input_ids"]) - fields["logits"]).abs().max()) > 0.1


@pytest.mark.parametrize(("name", "case"), every_case("mdlm", needs="logits"))
def test_mdlm(name, case):
    fields, mdlm = cases(name)[case], backbone(name)
    ids, sigma = fields["input_ids"], fields["sigma"]
    assert_close(mdlm.network.logits(mdlm.states(ids, sigma=sigma)), fields["logits"])
    found, wanted = mdlm(ids, sigma=sigma), fields["subs_log_probs"]
    assert_close(found, wanted, wanted > IMPOSSIBLE)
    assert bool((found[wanted <= IMPOSSIBLE] < 10 * IMPOSSIBLE + 100).all())
    assert bool(found.isfinite().all())


def test_mdlm_without_time_conditioning_ignores_the_noise_level():
    ids = cases("mdlm")["b2"]["input_ids"]
    assert torch.equal(backbone("mdlm")(ids), backbone("mdlm")(ids, sigma=torch.tensor([0.3, 5.0])))


@pytest.mark.parametrize(("name", "case"), every_case("sedd", needs="log_score"))
def test_sedd(name, case):
    fields, sedd = cases(name)[case], backbone(name)
    ids, sigma = fields["input_ids"], fields["sigma"]
    scale = sigma.expm1().log()[:, None, None] + math.log(sedd.vocab_size - 1)
    for noise in ({"sigma": sigma}, {"t": fields["t"]}):
        found = sedd.network.logits(sedd.states(ids, **noise)) - scale
        assert_close(found.scatter(-1, ids[..., None], 0.0), fields["log_score"])


@pytest.mark.parametrize(("name", "case"), every_case("sedd", needs="log_score"))
def test_sedd_as_a_denoiser(name, case):
    """Spec 6.4: at a masked position the softmax of the log score over the real tokens."""
    fields, sedd = cases(name)[case], backbone(name)
    ids, absorbing = fields["input_ids"], sedd.special.mask
    masked = ids == absorbing
    assert bool(masked.any())
    assert not bool(masked.all())
    found = sedd(ids, sigma=fields["sigma"])
    assert_close(found[masked][:, :absorbing], fields["log_score"][masked][:, :absorbing].log_softmax(-1))
    assert bool((found[masked][:, absorbing] < -9e5).all())
    known = found[~masked]
    assert torch.equal(known.argmax(-1), ids[~masked])
    assert torch.equal(known.exp().sum(-1), torch.ones(len(known)))


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
