"""Mixtures of experts: routing and mixing against plain loops, their gradients, and the kernels of a GPU."""

import pytest
import torch
from torch import Tensor

from codd.backbones.experts import Experts, ExpertsConfig, Router
from codd.backbones.transformer import Transformer, TransformerConfig, initialise
from tests.support.devices import CUDA, DEVICE

SOFTMAX = ExpertsConfig(6, 2, 5, (True,))
BIASED = ExpertsConfig(6, 3, 5, (True,), bias=True)
SIGMOID = ExpertsConfig(12, 3, 5, (True,), "sigmoid", bias=True, groups=4, kept_groups=2, scale=2.5)
ROUTERS = {
    "softmax": SOFTMAX,
    "softmax, biased": BIASED,
    "sigmoid, in groups": SIGMOID,
    "sigmoid, one": ExpertsConfig(5, 1, 5, (True,), "sigmoid", scale=1.5),
    "sigmoid, all groups": ExpertsConfig(12, 3, 5, (True,), "sigmoid", bias=True, groups=3, kept_groups=3),
}
WIDTH = 7


def drawn(config: ExpertsConfig, width: int = WIDTH) -> Experts:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(width, config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter.data, generator=generator)
    return experts.requires_grad_(False)


def rows(count: int, width: int = WIDTH, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def softmax_routes(x: Tensor, router: Router) -> list[dict[int, float]]:
    """Expert -> weight of each row: the bias is added to the probabilities, which choose and weigh."""
    bias = torch.zeros(router.config.count) if router.bias is None else router.bias
    found = []
    for row in x.double():
        sums = (torch.exp(router.weight.double() @ row) / torch.exp(router.weight.double() @ row).sum() + bias).tolist()
        best = sorted(range(len(sums)), key=lambda e: -sums[e])[: router.config.chosen]
        found.append({e: sums[e] for e in best})
    return found


def sigmoid_routes(x: Tensor, router: Router) -> list[dict[int, float]]:
    """The bias takes part in the choice alone; only the best groups, by their two best, are chosen from."""
    config = router.config
    bias = [0.0] * config.count if router.bias is None else router.bias.tolist()
    size, found = config.count // config.groups, []
    for row in x.double():
        scores = torch.sigmoid(router.weight.double() @ row).tolist()
        ranks = [score + offset for score, offset in zip(scores, bias, strict=True)]
        groups = [list(range(g * size, (g + 1) * size)) for g in range(config.groups)]
        groups.sort(key=lambda group: -sum(sorted((ranks[e] for e in group), reverse=True)[:2]))
        allowed = [e for group in groups[: config.kept_groups] for e in group]
        best = sorted(allowed, key=lambda e: -ranks[e])[: config.chosen]
        total = sum(scores[e] for e in best) if config.chosen > 1 else 1.0
        found.append({e: config.scale * scores[e] / total for e in best})
    return found


def routes(x: Tensor, router: Router) -> list[dict[int, float]]:
    return (softmax_routes if router.config.score == "softmax" else sigmoid_routes)(x, router)


def mixed(x: Tensor, experts: Experts) -> Tensor:
    """Row by row and expert by expert, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for i, chosen in enumerate(routes(x, experts.router)):
        for e, weight in chosen.items():
            gate, inner = (experts.up[e].double() @ x[i].double()).chunk(2)
            out[i] += weight * (experts.down[e].double() @ (gate * gate.sigmoid() * inner))
    return out


def assert_routes(weights: Tensor, chosen: Tensor, wanted: list[dict[int, float]]) -> None:
    assert [set(row) for row in chosen.tolist()] == [set(row) for row in wanted]
    aligned = [[row[e] for e in some] for row, some in zip(wanted, chosen.tolist(), strict=True)]
    torch.testing.assert_close(weights.double().cpu(), torch.tensor(aligned).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", ROUTERS.values(), ids=list(ROUTERS))
@pytest.mark.parametrize("count", [0, 1, 11])
def test_mixing(config, count):
    """A single row leaves most experts without any."""
    experts, x = drawn(config), rows(count)
    wanted = mixed(x, experts).float()
    torch.testing.assert_close(experts(x), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(experts(x[None]), wanted[None], rtol=1e-4, atol=1e-4)


def test_only_chosen_experts_are_computed():
    experts, x = drawn(SIGMOID), rows(2)
    _, chosen = experts.router(x)
    experts.up[[e for e in range(SIGMOID.count) if e not in chosen]] = torch.nan
    assert bool(experts(x).isfinite().all())


@pytest.mark.parametrize("config", [BIASED, SIGMOID], ids=["softmax", "sigmoid"])
def test_gradients(config):
    """Of the input and of every weight, where the choice is not at an edge."""
    experts = drawn(config, width=4)
    chooses = ("router.bias",) if config.score == "sigmoid" else ()  # nothing flows through a choice
    names = [name for name, _ in experts.named_parameters() if name not in chooses]
    inputs = [rows(3, 4), *(experts.get_parameter(name) for name in names)]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(experts, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, [value.detach().double().requires_grad_() for value in inputs], fast_mode=True)


@pytest.mark.parametrize("config", ROUTERS.values(), ids=list(ROUTERS))
def test_the_routing_kernel(kernels, config):
    router, x = drawn(config).router, rows(9)
    bias = None if router.bias is None else router.bias.to(DEVICE)
    logits = (x @ router.weight.T).to(DEVICE)
    weights, chosen = kernels.route(logits, bias, config, torch.float32)
    assert_routes(weights, chosen, routes(x, router))


def test_the_routing_kernel_stays_among_the_experts(kernels):
    weights, chosen = kernels.route(torch.full((2, 12), torch.nan, device=DEVICE), None, SIGMOID, torch.float32)
    assert bool(((chosen >= 0) & (chosen < 12)).all())
    assert bool(weights.isnan().all())


def choices(kind: str, count: int, experts: int, chosen: int) -> Tensor:
    if kind == "one takes all":
        return torch.arange(chosen).expand(count, -1) + experts - chosen
    generator = torch.Generator().manual_seed(count)
    some = experts if kind == "any" else chosen + 1
    return torch.rand(count, some, generator=generator).argsort(-1)[:, :chosen]


@pytest.mark.parametrize("kind", ["any", "few", "one takes all"])
@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (5, 2), (18, 2)])
def test_the_mixing_kernels(kernels, kind, count, chosen):
    """Experts without rows, and ones with more than a program takes at once."""
    experts = drawn(ExpertsConfig(6, chosen, 20, (True,)), width=18)
    x, chosen_ones = rows(count, 18), choices(kind, count, 6, chosen)
    weights = rows(count, chosen, seed=2)
    wanted = torch.zeros(count, 18)
    for i in range(count):
        for weight, e in zip(weights[i], chosen_ones[i], strict=True):
            gate, inner = (experts.up[e] @ x[i]).chunk(2)
            wanted[i] += weight * (experts.down[e] @ (torch.nn.functional.silu(gate) * inner))
    arguments = (value.contiguous().to(DEVICE) for value in (x, weights, chosen_ones, experts.up, experts.down))
    torch.testing.assert_close(kernels.mix(*arguments).cpu(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not CUDA, reason="a CPU takes PyTorch's own functions")
@pytest.mark.parametrize("count", [1, 9, 300])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]
)
def test_experts_are_what_they_are_with_gradients(dtype, bound, count):
    """With gradients no kernel of ours takes part."""
    experts, x = drawn(SIGMOID, 64).to(DEVICE, dtype), rows(count, 64).to(DEVICE, dtype)
    wanted = experts(x)
    with torch.no_grad():
        found = experts(x)
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * float(wanted.abs().max()))


@pytest.mark.skipif(not CUDA, reason="graphs are captured on a GPU")
@torch.no_grad()
def test_a_captured_network_with_experts():
    mixture = ExpertsConfig(16, 2, 64, (False, True), "sigmoid", True, groups=4, kept_groups=2, shared_width=64)
    network = Transformer(TransformerConfig(50, 64, 2, 4, 2, 96, experts=mixture))
    initialise(network, generator=torch.Generator().manual_seed(0), std=0.2)
    network = network.to(DEVICE, torch.bfloat16)
    positions = torch.arange(7, device=DEVICE).expand(2, 7)
    first, second = torch.randint(50, (2, 2, 7), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted = [network.states(ids, positions) for ids in (first, second)][1]
    given, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = network.states(given, positions)
    given.copy_(second)
    graph.replay()
    assert torch.equal(captured, wanted)
