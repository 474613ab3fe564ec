"""Int8 weights: the layer, its kernels (on a GPU, elsewhere in Triton's interpreter), and models that have them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import codd
from codd.backbones import quantized
from codd.backbones.loading import BUNDLED, load_checkpoint
from codd.backbones.quantized import Int8Linear, round_rows
from codd.errors import InvalidInput
from tests.support.checkpoints import FIXTURES, PUBLISHED, backbone, cases, stated
from tests.support.devices import CUDA, DEVICE, drawn

DENSE = [name for name in PUBLISHED if "moe" not in name]
pytestmark = pytest.mark.usefixtures("int8_cpu")


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_rows_are_rounded_by_their_own_largest_value():
    weight = torch.tensor([[127.0, -2.4, 0.0], [0.5, -1.27, 0.25], [0.0, 0.0, 0.0]])
    whole, scale = round_rows(weight)
    assert whole.tolist() == [[127, -2, 0], [50, -127, 25], [0, 0, 0]]
    torch.testing.assert_close(scale[:2], torch.tensor([1.0, 0.01]))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (2, 5), (70,)], ids=str)
def test_a_layer(shape, added, biased):
    x, weight = drawn(*shape, 96), drawn(40, 96, seed=1)
    bias = drawn(40, seed=2) if biased else None
    onto = drawn(*shape, 40, seed=3) if added else torch.zeros(*shape, 40, device=DEVICE)
    wanted = F.linear(x, weight, bias) + onto
    with torch.no_grad():
        found = Int8Linear(weight, bias, digits=2 if added else 1)(x, onto.clone() if added else None)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.8)  # sums of 96 products, each of the size of 1
    assert not wanted.numel() or relative(found, wanted) < 0.04


@pytest.mark.skipif(CUDA, reason="a GPU does not round the input")
def test_a_row_depends_on_no_other_row():
    """Neither its size nor its neighbours': products are of whole numbers."""
    x, layer = drawn(6, 96), Int8Linear(drawn(40, 96, seed=1))
    x[1], x[2] = 0, 1000 * x[0]
    found = layer(x)
    assert torch.equal(found[1], torch.zeros(40))
    assert all(torch.equal(layer(x[i : i + 1])[0], found[i]) for i in range(6))
    torch.testing.assert_close(found[2], 1000 * found[0], rtol=1e-2, atol=30)


@pytest.mark.skipif(CUDA, reason="a GPU does not round the input")
def test_a_second_byte_of_the_input():
    """Large values then leave the others as they are."""
    x, weight = drawn(6, 96), drawn(40, 96, seed=1)
    x[:, 7], x[1] = 100, 0
    whole, scale = round_rows(weight)
    wanted = F.linear(x, whole * scale[:, None])
    one, two = (relative(Int8Linear(weight, digits=digits)(x), wanted) for digits in (1, 2))
    assert two < 1e-4 < 1e-3 < one


@pytest.mark.skipif(CUDA, reason="a GPU does not round the input")
def test_pairs_of_products_do_not_overflow():
    """As 16-bit sums of two would on a CPU without VNNI, if inputs took all 8 bits."""
    x, weight = torch.ones(2, 64), torch.ones(16, 64)
    torch.testing.assert_close(Int8Linear(weight)(x), torch.full((2, 16), 64.0))


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 5, 7), (18, 33, 32), (3, 16, 50)])
@pytest.mark.parametrize("splits", [1, 4])
def test_the_kernel(kernels, rows, columns, depth, splits):
    x, bias, onto = drawn(rows, depth), drawn(columns, seed=2), drawn(rows, columns, seed=3)
    whole, scale = round_rows(drawn(columns, depth, seed=1))
    wanted = F.linear(x, whole * scale[:, None])
    tile = kernels.Tile(16, 16, 16, splits=splits)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(kernels.int8_product(x, whole, scale, tile=tile), wanted, **close)
    found = kernels.int8_product(x[None], whole, scale, bias, onto, tile)
    assert found is onto
    torch.testing.assert_close(found, wanted + bias + drawn(rows, columns, seed=3), **close)
    torch.testing.assert_close(kernels.int8_product(x, whole, scale, bias), wanted + bias, **close)


def test_which_inputs_the_kernel_serves(kernels):
    sizes = ((1, True), (kernels.FEW, True), (kernels.FEW + 1, False), (0, False))
    assert all(kernels.multiplies_int8(torch.empty(1, rows, 8)) == served for rows, served in sizes)
    assert not kernels.multiplies_int8(torch.empty(1, 8, dtype=torch.float64))


@pytest.mark.skipif(not CUDA, reason="a CPU rounds its inputs; the interpreter has no half precision")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 5e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 300])
@torch.no_grad()
def test_precisions_and_sizes_on_a_gpu(dtype, bound, rows):
    for columns, depth in ((300, 1000), (4096, 4096)):
        x, weight, onto = drawn(rows, depth).to(dtype), drawn(columns, depth, seed=1), drawn(rows, columns).to(dtype)
        layer, (whole, scale) = Int8Linear(weight.to(dtype)), round_rows(weight.to(dtype))
        wanted = F.linear(x.double(), whole.double() * scale[:, None]) + onto
        assert relative(layer(x, onto.clone()).double(), wanted) < bound


@pytest.mark.parametrize("name", DENSE)
@torch.no_grad()
def test_families(name):
    fields = cases(name)["b1"]
    given = {"device": DEVICE, "block_size": stated(name).get("block_size"), "dtype": torch.float32}
    made = load_checkpoint(FIXTURES / name, quantize="int8", **given).backbone
    ids = fields["input_ids"]
    wanted, found = (each.network.logits(each.states(ids)).cpu().float() for each in (backbone(name), made))
    assert relative(found, wanted) < 0.2  # narrow networks of large weights, with 7-bit inputs on some CPUs
    assert made.precision == "float32 and int8"
    assert sum(isinstance(each, Int8Linear) for each in made.network.modules()) == 4 * made.config.layers + 1
    left = [each for path, each in made.network.named_modules() if isinstance(each, torch.nn.Linear)]
    assert len(left) == (made.config.conditioning > 0) * (made.config.layers + 3) + bool(made.config.head_transform)


@functools.cache
def small() -> codd.Model:
    return codd.load(quantize="int8", device="cpu")


@pytest.fixture
def bundled(int8_cpu) -> codd.Model:
    return small()


@torch.no_grad()
def test_the_bundled_model_in_nats(bundled):
    """Its file has int8 weights already: what is lost is the input's rounding alone."""
    plain = load_checkpoint(device="cpu").backbone
    ids = torch.tensor(bundled.encode("Tom has 3 apples and buys 4 more. How many apples does he have?"))
    ids = torch.cat((ids, torch.full((1, 24), bundled.mask_id)), 1)
    wanted, found = (each(ids)[0, -24:].log_softmax(-1) for each in (plain, bundled.backbone))
    divergence = (wanted.exp() * (wanted - found)).sum(-1)
    assert 0 < float(divergence.mean()) < 0.02


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (BUNDLED, {"quantize": "int4"}, "quantize must be \"int8\" or None, found 'int4'"),
        (BUNDLED, {"quantize": "int8", "adapter": "x", "merge": False}, "merge=False adds an adapter to weights"),
        (FIXTURES / "llada_moe", {"quantize": "int8"}, "for networks without experts"),
    ],
    ids=["kind", "adapter", "experts"],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_what_cannot_be_quantized(source, options, said):
    with pytest.raises(InvalidInput, match=said):
        codd.load(source, device="cpu", **options)


def test_other_processors_are_refused(monkeypatch):
    monkeypatch.setattr(quantized.platform, "machine", lambda: "arm64")
    with pytest.raises(InvalidInput, match="needs oneDNN on an x86-64 processor; this is arm64"):
        Int8Linear(torch.ones(2, 2))


def test_it_stays_on_its_device(bundled):
    before = bundled.backbone.device
    with pytest.raises(InvalidInput, match="stay as they were made"):
        bundled.backbone.to("meta")
    assert bundled.backbone.device == before
