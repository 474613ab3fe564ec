import pytest
import torch
from torch import nn

from codd.backbones import Backbone
from codd.circuits import Factors, Head, HeadConfig
from codd.data.packing import PackedSequences
from codd.data.windows import MaskedRows, WindowBatch, choose_windows, predict_windows
from codd.training.circuit.initial import CircuitSpec
from codd.training.circuit.joint import LowRank, merge, trainable
from codd.training.circuit.updaters import GradientUpdater
from codd.training.circuit_recipe import CircuitRecipe, HeadRecipe, JointRecipe
from tests.support.small_windows import (
    ALONE,
    MASK,
    VOCAB,
    WIDTH,
    WINDOW,
    check_gradients,
    own_network,
    recipe_of,
    rows_of_pairs,
)

IDS = torch.tensor([[0, 3, MASK, 5, MASK, 1, 2, 7, 6, MASK, MASK, 4]])


def wide_awake(backbone: Backbone) -> Backbone:
    """With low-rank additions that say something."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in backbone.named_parameters():
        if name.endswith(".up"):
            parameter.data.normal_(0, 0.3, generator=generator)
    return backbone


def hidden_in(rows: PackedSequences, seed: int, recipe: CircuitRecipe) -> MaskedRows:
    return choose_windows(rows, recipe.windows, torch.Generator().manual_seed(seed), absolute=False)


def asked(backbone: Backbone, rows: MaskedRows) -> WindowBatch:
    """As `codd train` asks a network that changes: with a graph."""
    return predict_windows(backbone, MASK, rows, WINDOW)


def test_low_rank_additions_start_at_zero():
    backbone = own_network()
    before = backbone(IDS)
    found = trainable(backbone, "lora", 2, 0)
    assert torch.equal(backbone(IDS), before)
    layers = [x for x in backbone.modules() if isinstance(x, LowRank)]
    linears = [x for x in own_network().network.blocks.modules() if isinstance(x, nn.Linear)]
    assert len(layers) == len(linears) > 3
    assert len(found) == 2 * len(layers)
    assert all(bool(x.down.any()) and not bool(x.up.any()) for x in layers)
    again = own_network()
    same = trainable(again, "lora", 2, 0)
    assert all(torch.equal(x, same[name]) for name, x in found.items())
    other = trainable(own_network(), "lora", 2, 1)
    assert any(not torch.equal(x, other[name]) for name, x in found.items())


def test_merging_keeps_the_function():
    backbone = own_network()
    plain, names = backbone(IDS), set(backbone.state_dict())
    trainable(backbone, "lora", 2, 0)
    changed = wide_awake(backbone)(IDS)
    assert not torch.allclose(changed, plain, atol=1e-2)
    merge(backbone)
    assert set(backbone.state_dict()) == names  # saved like any other
    assert not any(isinstance(x, LowRank) for x in backbone.modules())
    torch.testing.assert_close(backbone(IDS), changed, atol=1e-5, rtol=1e-4)


def test_additions_are_more_precise_than_the_backbone():
    """As for a backbone in bfloat16; that, and float16, not every CPU computes."""
    layer = nn.Linear(6, 4)
    added = LowRank(layer, torch.randn(2, 6), torch.randn(4, 2), torch.float64)
    assert added.down.dtype == added.up.dtype == torch.float64
    x = torch.randn(3, 6)
    wanted = layer(x).double() + x.double() @ added.down.T @ added.up.T
    assert added(x).dtype == torch.float32
    torch.testing.assert_close(added(x).double(), wanted, atol=1e-5, rtol=1e-5)
    backbone = own_network().bfloat16()
    assert all(x.dtype == torch.float32 for x in trainable(backbone, "lora", 2, 0).values())
    assert all(x.base.weight.dtype == torch.bfloat16 for x in backbone.modules() if isinstance(x, LowRank))


@pytest.mark.parametrize("weights", ["lora", "all"])
@pytest.mark.parametrize("listens", [False, True], ids=["logits", "features"])
def test_gradients_are_those_of_finite_differences(weights, listens, monkeypatch):
    """With ``listens`` also through the head, which the network's states reach by another way than the logits."""
    recipe = recipe_of(head=HeadRecipe(latents=listens), joint=JointRecipe(weights, rank=2))
    given = hidden_in(rows_of_pairs(1, 8), 1, recipe)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    head = Head(HeadConfig(WIDTH, 4, 2, 5)).double() if listens else None
    generator = torch.Generator().manual_seed(1)
    for parameter in () if head is None else head.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    factors = Factors.near_neutral(4, VOCAB, inner_states=2, noise=1.5).map(torch.Tensor.double)
    backbone = own_network().double()
    updater = GradientUpdater(recipe, factors, head, CircuitSpec(VOCAB, WIDTH, ALONE, backbone))
    wide_awake(backbone)

    def loss() -> float:
        with torch.no_grad():
            return -float(updater.log_prob(asked(backbone, given)).sum())

    windows = asked(backbone, given)
    assert windows.logits.dtype == torch.float64
    updater.differentiate(windows)
    found = {name: x.grad.clone() for name, x in updater.network.items()}
    assert check_gradients(updater.network, found, loss) > len(found) // 2
    if not listens:
        return
    updater.differentiate(asked(backbone, given)._replace(features=windows.features.detach()))
    assert any(not torch.allclose(found[name], x.grad) for name, x in updater.network.items())
