"""What is captured, what is kept, and steps on a device against steps on the host."""

import weakref
from dataclasses import replace

import pytest
import torch

import codd
from codd.backbones.kv_cache import CachedPass, KVCache
from codd.circuits import HMM, Modulated
from codd.decoding import cuda_graphs
from codd.decoding.cuda_graphs import WARMUP, GraphCache, sample_captured
from codd.decoding.options import PACES, Options
from codd.decoding.samplers import Ranking, sample_window
from tests.support.decoding_windows import heard
from tests.support.tiny_models import detouring, modulated, random_hmm

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")


class TestGraphCache:
    def test_a_call_is_captured_when_it_comes_again(self):
        kept, made = GraphCache(2), []

        def capture():
            made.append(1)
            return lambda: "graph"

        found = [kept.find("a", capture) for _ in range(WARMUP + 3)]
        assert [graph is not None for graph in found] == [False] * WARMUP + [True] * 3
        assert len(made) == 1

    def test_the_one_not_used_for_longest_goes_and_may_come_back(self):
        kept = GraphCache(2)

        def use(key):
            return kept.find(key, lambda: lambda: key)

        for key in "abab" * 2:
            use(key)
        assert list(kept.graphs) == ["a", "b"]
        use("a")
        for _ in range(WARMUP + 1):
            use("c")
        assert list(kept.graphs) == ["a", "c"]
        assert [use("b") is not None for _ in range(WARMUP + 1)] == [False] * WARMUP + [True]

    def test_what_cannot_be_captured_is_not_tried_again(self):
        kept, tried = GraphCache(2), []

        def capture():
            tried.append(1)
            raise RuntimeError("operation not permitted when stream is capturing")

        assert [kept.find("a", capture) for _ in range(WARMUP + 3)] == [None] * (WARMUP + 3)
        assert len(tried) == 1


def chain(kind: str, seed: int = 0) -> HMM | Modulated:
    if kind == "plain":
        return random_hmm(4, seed=seed)
    if kind == "latents":
        return modulated(random_hmm(4, seed=seed), scale=0.5, seed=seed)
    return modulated(detouring(), inner_states=4, scale=0.5, seed=seed)


class TestWindows:
    def test_packing_loses_nothing(self):
        ranking = Ranking(
            torch.tensor([3, 0]),
            torch.tensor([2**31 + 5, 1]),
            torch.tensor([0.1, 1.0]),
            torch.tensor([True, False]),
            torch.tensor(True),
        )
        for one in (ranking, ranking._replace(valid=torch.tensor(False))):
            for a, b in zip(Ranking.unpacked(one.packed()), one, strict=True):
                assert torch.equal(a, b)
        nothing = Ranking(*(part[:0] for part in ranking[:4]), valid=torch.tensor(False))
        assert not bool(Ranking.unpacked(nothing.packed()).valid)


@CUDA
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "latent"},
        {"sampler": "any_order"},
        {"sampler": "any_order", "threshold": 0.5, "steps": None},
        {"sampler": "any_order", "threshold": 0.9, "temperature": 0.7, "steps": None},
        {"sampler": "any_order", "threshold": 0.97, "steps": None, "blocks": "sliding"},
        {"sampler": "any_order", "threshold": 0.95, "temperature": 1.0, "min_tokens": 4, "steps": None},
        {"sampler": "any_order", "entropy_budget": 0.5, "steps": None},
        {"sampler": "any_order", "temperature": 0.7},
        {"sampler": "any_order", "temperature": 0.7, "top_p": 0.9, "remasking": "entropy"},
        {"sampler": "any_order", "remasking": "margin"},
        {"sampler": "latent", "temperature": 1.0, "remasking": "random"},
        {"sampler": "latent", "mode": "full"},
    ],
    ids=str,
)
def test_a_device_writes_what_the_host_writes(options):
    host, device = codd.load(device="cpu"), codd.load(device="cuda")
    prompts = ["What is 7 + 8?", "Mia has 84 stamps and gives away half of them. How many are left?"]
    for _ in range(2):  # without graphs, then with them
        found = [model.generate(prompts, **{"gen_length": 64, "steps": 16, **options}) for model in (host, device)]
        assert [ids.tolist() for ids in found[0].sequences] == [ids.tolist() for ids in found[1].sequences]


@CUDA
@pytest.mark.parametrize("kind", ["plain", "latents", "both"])
@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": "latent"},
        {"sampler": "latent", "temperature": 0.7},
        {},
        {"threshold": 0.3},
        {"threshold": 0.4, "temperature": 0.7},
        {"threshold": 0.3, "remasking": "random"},
        {"entropy_budget": 2.0},
        {"entropy_budget": 3.0, "temperature": 0.7, "remasking": "margin"},
        {"temperature": 0.7},
        {"temperature": 1.0, "remasking": "left_to_right", "top_k": 3},
        {"temperature": 0.7, "remasking": "margin", "top_p": 0.8},
        {"remasking": "entropy"},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_captured_step_is_the_hosts(settings, kind):
    """The graph reads the window and the features from buffers that every call fills anew."""
    pace = {} if settings.keys() & set(PACES) else {"steps": None}
    host, options = chain(kind), Options.of(**{"sampler": "any_order", **pace, **settings})
    count = 3 if options.fixed_count else 1
    device = host.to("cuda")
    windows = [heard(seed, 12, 0.8) for seed in range(1, WARMUP + 4)]  # in that of seed 0 two tokens are nearly tied
    for window in windows:
        moved = window._replace(logits=window.logits.cuda(), features=window.features.cuda())
        moved = moved if kind != "plain" else moved._replace(features=None)
        found = Ranking.unpacked(sample_captured(sample_window, device, moved, count, options).cpu())
        assert bool(found.valid)
        found, wanted = found.writes(), sample_window(host, window, count, options).writes()
        assert found.positions.tolist() == wanted.positions.tolist()
        assert found.tokens.tolist() == wanted.tokens.tolist()
        torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-3, atol=1e-4)
    assert len(cuda_graphs.graphs_of(device).graphs) == 1


@CUDA
@pytest.mark.parametrize("inner_states", [0, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "latent"},
        {"sampler": "any_order"},
        {"sampler": "any_order", "threshold": 0.5, "steps": None},
        {"sampler": "latent", "mode": "full"},
        # Guidance makes most tokens certain to the last digit, and rounding would decide which is surest.
        {"sampler": "latent", "cfg_scale": 1.0},
    ],
    ids=str,
)
def test_a_device_conditions_on_what_the_host_does(options, inner_states):
    models = [codd.load(circuit=None, device=device, dtype=torch.float32) for device in ("cpu", "cuda")]
    backbone = models[0].backbone
    hmm = detouring(8, 4, backbone.vocab_size) if inner_states else random_hmm(8, backbone.vocab_size)
    circuit = modulated(hmm, inner_states=inner_states, scale=0.05, features=backbone.config.width)
    heard = [replace(model, circuit=circuit.to(model.backbone.device)) for model in models]
    prompts = ["What is 7 + 8?", "Mia has 84 stamps and gives away half of them. How many are left?"]
    # The kernels round to tf32: noise of 0.003 on the logits does not change what the host draws with this seed, while
    # with others it changes a text in four.
    for _ in range(2):  # without graphs, then with them
        found = [model.generate(prompts, **{"gen_length": 32, "steps": 8, "seed": 2, **options}) for model in heard]
        assert [ids.tolist() for ids in found[0].sequences] == [ids.tolist() for ids in found[1].sequences]


@CUDA
@pytest.mark.parametrize("kind", ["prefix", "dual"])
@pytest.mark.parametrize("told", [{"threshold": 0.9}, {"steps": 16}, {"sampler": "factorized", "steps": 16}], ids=str)
def test_a_device_writes_what_the_host_writes_with_a_cache(told, kind):
    host, device = codd.load(device="cpu"), codd.load(device="cuda", dtype=torch.float32)
    prompts = ["What is 7 + 8?", "Mia has 84 stamps and gives away half of them. How many are left?"]
    for _ in range(2):  # without graphs, then with them
        found = [model.generate(prompts, gen_length=64, cache=kind, **told) for model in (host, device)]
        assert [ids.tolist() for ids in found[0].sequences] == [ids.tolist() for ids in found[1].sequences]


@CUDA
@torch.no_grad()
def test_a_captured_pass_is_what_it_is_without():
    """Whatever it is given: other slots, positions and ends; and the memory of its cache can be given back."""
    backbone, draw = codd.load(circuit=None, device="cuda", dtype=torch.float32).backbone, torch.Generator()
    cache, other = (
        KVCache(backbone.config.kv_shape, 5, 40, device=backbone.device, dtype=torch.float32) for _ in range(2)
    )
    for turn in range(WARMUP + 4):
        ids = torch.randint(backbone.vocab_size, (2, 8), generator=draw.manual_seed(turn))
        positions = torch.stack((torch.arange(8) + 3 * turn, torch.arange(8) + turn))
        positions[1, 6:] = -1
        past = CachedPass(cache, torch.tensor([turn % 5, (turn + 1) % 5]), positions, 40, torch.tensor([33, 20]))
        found = cuda_graphs.cached_states(backbone, ids, past)
        wanted = backbone.cached_states(ids.cuda(), past._replace(cache=other).to(backbone.device))
        torch.testing.assert_close(found[positions >= 0], wanted[positions >= 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache.memory, other.memory, rtol=1e-4, atol=1e-4)
    assert len(cuda_graphs._PASSES[backbone].graphs) == 1
    alive = weakref.ref(cache.memory)
    del cache, past
    assert alive() is None


def test_it_is_noticed_when_weights_move_or_layers_are_replaced():
    backbone = codd.load(circuit=None).backbone
    weights = cuda_graphs._Weights(backbone)
    assert not weights.replaced()
    assert weights.addresses() == tuple(parameter.data_ptr() for parameter in backbone.parameters())
    before, block = weights.addresses(), backbone.network.blocks[1]
    block.mlp_norm.weight.data = block.mlp_norm.weight.data.clone()
    assert sum(a != b for a, b in zip(before, weights.addresses(), strict=True)) == 1
    assert not weights.replaced()
    block.mlp_norm.weight = torch.nn.Parameter(block.mlp_norm.weight.clone())
    assert weights.replaced()
    weights = cuda_graphs._Weights(backbone)
    assert not weights.replaced()
    block.mlp.down = torch.nn.Linear(block.mlp.down.in_features, block.mlp.down.out_features, bias=False)
    assert weights.replaced()
