"""The GPU kernels against the float64 reference: on a GPU at full size, elsewhere in Triton's interpreter."""

import itertools
import warnings

import pytest
import torch

from codd.circuits import HMM, Evidence, ops

pytest.importorskip("triton")
from codd.circuits.ops.chain import triton as chain_kernels
from codd.circuits.ops.leaf import triton as leaf_kernels
from codd.circuits.ops.path import triton as path_kernels
from codd.circuits.ops.scores import triton as scores_kernels

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# (B, L, N, V): not multiples of any tile, one position, one state, more rows than one tile of rows.
SHAPES = [(2, 5, 20, 70), (1, 1, 3, 5), (3, 4, 1, 9), (2, 3, 17, 1), (5, 4, 33, 40)]
if CUDA:
    SHAPES += [
        (1, 32, 1024, 126464),
        (8, 32, 1024, 32003),
        (1, 32, 4096, 8192),
        (33, 16, 256, 1000),
        (2, 4096, 64, 100),
    ]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Uninitialised memory is NaN, so that an unwritten output fails loudly."""

    def empty(*size, **options):
        out = EMPTY(*size, **options)
        return out.fill_(float("nan") if out.dtype.is_floating_point else -(2**30))

    EMPTY = torch.empty
    for module in (leaf_kernels, chain_kernels, path_kernels, scores_kernels):
        monkeypatch.setattr(module.torch, "empty", empty)
    with warnings.catch_warnings():  # numpy under the interpreter warns of the infinities that the kernels allow for
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def evidence(batch, length, states, vocab, seed, style):
    g = torch.Generator().manual_seed(seed)

    def rand(*size):
        return torch.rand(*size, generator=g)

    def randn(*size):
        return torch.randn(*size, generator=g)

    tokens = torch.randint(0, vocab, (batch, length), generator=g)
    observed = rand(batch, length) < 0.4
    logits = 3 * randn(batch, length, vocab)
    fields = {
        "logits": {"logits": logits, "temperature": 0.7},
        "offset": {"logits": 8 * logits + 1e8 * randn(batch, length, 1), "temperature": 0.7},
        "bf16": {"logits": logits.bfloat16()},
        "potentials": {"log_potentials": logits},
        "mixed": {
            "logits": logits,
            "temperature": 0.5 + rand(batch),
            "latent_log_potentials": randn(batch, length, states),
            "missing": rand(batch, length) < 0.2,
        },
        "hard": {"observed": torch.ones_like(observed)},
        "banned": {"logits": torch.where(rand(batch, length, vocab) < 0.5, -torch.inf, logits)},
    }[style]
    return Evidence(**{"tokens": tokens, "observed": observed, **fields}).to(DEVICE)


STYLES = ["logits", "offset", "bf16", "potentials", "mixed", "hard", "banned"]
if CUDA:
    AGREE = [*itertools.product(SHAPES, STYLES)]
else:  # every style and every shape: the interpreter is slow
    AGREE = [
        *((SHAPES[0], style) for style in STYLES),
        *zip(SHAPES[1:], ["potentials", "hard", "banned", "mixed"], strict=True),
    ]


@pytest.mark.parametrize(("shape", "style"), AGREE, ids=str)
def test_kernels_agree_with_the_reference(shape, style):
    batch, length, states, vocab = shape
    hmm = HMM.random(states, vocab, seed=3).to(DEVICE)
    ev = evidence(*shape, seed=5, style=style)
    uniforms = torch.rand(batch, length, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    big = states * vocab * length > 10**7
    exact = "eager" if big else "reference"
    truth = hmm.to(dtype=torch.float64)
    with ops.use(exact):
        want_z, want_q = truth.log_partition(ev), truth.posterior(ev)
    with ops.use("triton"):
        step = hmm.joint_step(ev, uniforms=uniforms)
        got_z, got_q = hmm.log_partition(ev), hmm.posterior(ev)
    with ops.use(exact):
        want_scores = truth.conditional_scores(ev, step.latents)
    # The contraction rounds its factors to tf32: ten bits, 3e-4 of a leaf value when few tokens carry the weight.
    tolerance = 1e-3 * length**0.5
    torch.testing.assert_close(got_z.double(), want_z, rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(step.log_partition.double(), want_z, rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(got_q.double().exp(), want_q.exp(), rtol=0, atol=tolerance)
    torch.testing.assert_close(step.scores.double(), want_scores, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_paths_are_those_of_the_reference_for_the_same_uniforms(shape):
    batch, length, states, vocab = shape
    hmm = HMM.random(states, vocab, seed=3).to(DEVICE)
    ev = evidence(*shape, seed=6, style="mixed")
    uniforms = torch.rand(batch, length, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    with ops.use("reference"):
        want = hmm.joint_step(ev, uniforms=uniforms).latents
    with ops.use("triton"):
        got = hmm.joint_step(ev, uniforms=uniforms).latents
    assert torch.equal(got, want)


@pytest.mark.parametrize("layout", [{}, {"rank": 3}])
@pytest.mark.parametrize("shape", [*SHAPES, (17, 3, 4, 5)], ids=str)  # the last has more sequences than it serves
def test_both_directions_in_one_launch(shape, layout):
    batch, length, states, vocab = shape
    hmm = HMM.random(states, vocab, seed=3, **layout).to(DEVICE)
    g = torch.Generator().manual_seed(7)
    leaf = ops.Scaled(torch.rand(batch, length, states, generator=g), torch.randn(batch, length, 1, generator=g))
    leaf.values[0, -1] *= torch.rand(states, generator=g) < 0.5
    leaf = ops.Scaled(leaf.values.to(DEVICE), leaf.log_scale.to(DEVICE))
    got = chain_kernels.forward_backward(hmm.transition, hmm.log_initial, leaf)
    truth = hmm.to(dtype=torch.float64)
    exact = ops.Scaled(leaf.values.double(), leaf.log_scale.double())
    with ops.use("eager" if CUDA else "reference"):
        backend = ops.backend_for(leaf.values.device, torch.float64)
        forward = backend.messages(truth.transition, truth.log_initial, exact, False)
        backward = backend.messages(truth.transition, None, exact, True)
    for found, want in zip(got, (forward, backward), strict=True):
        torch.testing.assert_close(found.log_sum().double(), want.log_sum(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found.normalised().double(), want.normalised(), rtol=1e-4, atol=1e-6)


def test_both_directions_take_one_launch_where_they_fit(monkeypatch):
    """And two where half of the chip does not hold the matrix in registers."""
    hmm = HMM.random(20, 5, seed=3).to(DEVICE)
    leaf = ops.Scaled(torch.ones(2, 3, 20, device=DEVICE), torch.zeros(2, 3, 1, device=DEVICE))
    calls = []
    messages = chain_kernels.messages
    monkeypatch.setattr(chain_kernels, "messages", lambda *args: calls.append(args[3]) or messages(*args))
    chain_kernels.forward_backward(hmm.transition, hmm.log_initial, leaf)
    assert calls == []
    streamed = chain_kernels.plan_for(2, 20, 1)._replace(stages=3)
    chain_kernels.forward_backward(hmm.transition, hmm.log_initial, leaf, streamed)
    assert calls == [False, True]


@pytest.mark.parametrize("states", [64, 256, 1000, 1024, 4096])
@pytest.mark.parametrize("batch", [1, 5, 16])
def test_both_directions_are_resident_at_once(states, batch):
    plan = chain_kernels.plan_for(batch, states, 132 // 2)
    assert 2 * plan.programs * plan.groups <= 132
    assert plan.programs * plan.tiles * plan.rows >= states
    assert plan.groups * plan.sequences >= batch


def test_bfloat16_emission_error_is_small():
    shape = (2, 6, 24, 500) if not CUDA else (2, 32, 1024, 32000)
    _, length, states, vocab = shape
    hmm = HMM.random(states, vocab, seed=3).to(DEVICE)
    ev = evidence(*shape, seed=5, style="logits")
    with ops.use("triton"):
        got = hmm.to(emission=torch.bfloat16).log_partition(ev)
    with ops.use("eager"):
        want = hmm.to(dtype=torch.float64).log_partition(ev)
    error = (got.double() - want).abs().max() / length
    assert 0 < error < 2e-3


def test_gradients_through_the_kernels():
    shape = (2, 5, 20, 70) if not CUDA else (4, 32, 256, 5000)
    batch, _, states, vocab = shape
    base = HMM.random(states, vocab, seed=3).to(DEVICE)
    ev = evidence(*shape, seed=5, style="mixed")
    weights = torch.randn(batch, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    grads = []
    for name, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        tables = [
            x.detach().to(dtype).requires_grad_() for x in (base.log_initial, base.log_transition, base.log_emission)
        ]
        logits = ev.logits.detach().to(dtype).requires_grad_()
        latent = ev.latent_log_potentials.detach().to(dtype).requires_grad_()
        hmm = HMM(*tables, validate=False)
        given = Evidence(
            tokens=ev.tokens,
            observed=ev.observed,
            logits=logits,
            temperature=ev.temperature,
            latent_log_potentials=latent,
            missing=ev.missing,
        )
        with ops.use(name):
            (hmm.log_partition(given) * weights.to(dtype)).sum().backward()
        grads.append([x.grad.double() for x in (*tables, logits, latent)])
    for got, want in zip(*grads, strict=True):
        assert (got - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_impossible_evidence_gives_minus_infinity(backend):
    hmm = HMM.random(8, 12, seed=0).to(DEVICE)
    ev = evidence(3, 4, 8, 12, seed=1, style="logits")
    logits = ev.logits.clone()
    logits[1] = -torch.inf
    ev = Evidence(tokens=ev.tokens, observed=torch.zeros_like(ev.observed), logits=logits)
    with ops.use(backend):
        step = hmm.joint_step(ev, uniforms=torch.rand(3, 4, device=DEVICE))
        assert torch.isneginf(hmm.log_partition(ev)).tolist() == [False, True, False]
        assert torch.isneginf(step.log_partition).tolist() == [False, True, False]
        assert not hmm.posterior(ev).isnan().any()


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a CUDA device")
def test_the_joint_step_can_be_captured_in_a_graph():
    hmm = HMM.random(256, 5000, seed=3).to(DEVICE)
    ev = evidence(4, 32, 256, 5000, seed=5, style="logits")
    uniforms = torch.rand(4, 32, device=DEVICE)
    want = hmm.joint_step(ev, uniforms=uniforms)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = hmm.joint_step(ev, uniforms=uniforms)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got.latents, want.latents)
    torch.testing.assert_close(got.log_partition, want.log_partition)


def test_any_memory_layout_and_any_float_temperature():
    """Logits whose last axis is not the contiguous one, as a transposed head gives them, and a float64 temperature."""
    hmm = HMM.random(20, 70, seed=3).to(DEVICE)
    plain = evidence(2, 5, 20, 70, seed=5, style="logits")
    strided = plain.logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert strided.stride(-1) != 1
    ev = Evidence(
        tokens=plain.tokens.int(),
        observed=plain.observed,
        logits=strided,
        temperature=torch.tensor([0.5, 2.0], dtype=torch.float64, device=DEVICE),
    )
    uniforms = torch.full((2, 5), 0.5, device=DEVICE)
    with ops.use("reference"):
        want = hmm.joint_step(ev, uniforms=uniforms)
    with ops.use("triton"):
        got = hmm.joint_step(ev, uniforms=uniforms)
        alone = hmm.conditional_scores(ev, got.latents)
    torch.testing.assert_close(got.log_partition, want.log_partition, rtol=1e-5, atol=3e-3)
    assert torch.equal(got.latents, want.latents)
    torch.testing.assert_close(got.scores, want.scores, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(alone, want.scores, rtol=1e-4, atol=1e-3)
