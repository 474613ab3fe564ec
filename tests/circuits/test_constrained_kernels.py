"""A circuit given a language, by the GPU kernels, against float64 on the host; elsewhere in Triton's interpreter."""

import warnings

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, ops
from codd.circuits.constrained import ConstrainedHMM
from codd.constraints import Automaton
from tests.circuits.test_constrained import end_weights, random_automaton
from tests.support.strategies import generator

pytest.importorskip("triton")
from codd.circuits.ops.constrained import device

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# (B, L, N, V, S): not multiples of any tile; one position, state, token or latent.
SHAPES = [(2, 3, 3, 5, 3), (1, 1, 3, 5, 2), (1, 3, 1, 6, 3), (1, 2, 2, 1, 1)]
CASES = [(SHAPES[0], 0), *((shape, 1) for shape in SHAPES)]
if CUDA:
    SHAPES += [(3, 12, 130, 355, 40), (1, 32, 256, 3000, 17), (2, 32, 64, 500, 300), (1, 32, 1024, 8192, 70)]
    CASES = [(shape, seed) for shape in SHAPES for seed in (0, 1, 2, 3, 5)]
LOOSE = {"rtol": 3e-3, "atol": 2e-3}  # tensor cores round weights and emission to ten bits
ROUNDED = 3e-3  # by how much that moves a cumulative probability, at most


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Uninitialised memory is NaN, so that what reads an unwritten row fails loudly."""

    def empty(*size, **options):
        return EMPTY(*size, **options).fill_(float("nan"))

    EMPTY = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    with warnings.catch_warnings():  # numpy under the interpreter warns of the infinities that the kernels allow for
        warnings.simplefilter("ignore", RuntimeWarning)
        with ops.use("triton"):
            yield


def coarse_automaton(states, vocab, seed):
    """One of at most 20 classes, so that a large one stays one that the kernels serve."""
    g = generator(seed)
    count = min(vocab, 20)
    classes = torch.cat([torch.arange(count), torch.randint(count, (vocab - count,), generator=g)])
    small = random_automaton(states, count, seed, holes=0.1)
    table = torch.as_tensor(small.table)[:, torch.as_tensor(small.classes)]
    accepting = torch.as_tensor(small.accepting).nonzero()[:, 0].tolist()
    return Automaton.from_classes(table.numpy(), classes.numpy(), start=small.start, accepting=accepting)


def circuits(shape, seed, compact=False):
    """The same circuit and automaton in float64 on the host, and for the kernels."""
    _, _, latents, vocab, states = shape
    hmm = HMM.random(latents, vocab, seed=seed)
    ours = hmm.to(DEVICE, emission=torch.bfloat16) if compact else hmm.to(DEVICE)
    ends = (end_weights(states, seed), end_weights(states, seed + 1)) if seed % 2 else (None, None)
    automaton = coarse_automaton(states, vocab, seed)
    truth = ours.to("cpu", torch.float64) if compact else hmm.to(dtype=torch.float64)
    return ConstrainedHMM(truth, automaton, *ends), ConstrainedHMM(ours, automaton, *ends)


def evidence(shape, seed):
    batch, length, latents, vocab, _ = shape
    g = generator(seed)
    potentials = 3 * torch.randn(batch, length, vocab, generator=g) + 100
    tokens = torch.randint(vocab, (batch, length), generator=g)
    fields = {"tokens": tokens, "observed": torch.rand(batch, length, generator=g) < 0.15}
    fields |= {"logits": potentials, "temperature": 0.7} if seed % 2 else {"log_potentials": potentials}
    if seed % 3 == 0:
        fields |= {"latent_log_potentials": torch.randn(batch, length, latents, generator=g)}
    if seed % 5 == 0:
        fields |= {"missing": torch.rand(batch, length, generator=g) < 0.2}
    return Evidence(**fields)


def exactly(truth, ev):
    """What float64 on the host says, which enumeration agrees with (test_constrained.py)."""
    with ops.use("eager"):
        return truth.log_partition(ev), truth.marginals(ev).exp(), truth.posterior(ev).exp()


@pytest.mark.parametrize(("shape", "seed"), CASES)
def test_queries(shape, seed):
    truth, ours = circuits(shape, seed)
    ev = evidence(shape, seed)
    there = ev.to(DEVICE)
    assert device.served(ours._chain, there)
    log_z, marginals, posterior = exactly(truth, ev)
    assert_close(ours.log_partition(there).cpu().double(), log_z, **LOOSE)
    assert_close(ours.marginals(there).exp().cpu().double(), marginals, **LOOSE)
    assert_close(ours.posterior(there).exp().cpu().double(), posterior, **LOOSE)


@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[4:])
def test_commitments(shape):
    """Messages that a commitment leaves alone are those of before; two between questions count as well as one."""
    truth, ours = circuits(shape, 1)
    ev = evidence(shape, 2)
    conditioner, g = ours.incremental(ev.to(DEVICE)), generator(4)
    for turn in range(4 if CUDA else 2):
        for _ in range(1 + turn % 2):
            log_p = conditioner.log_marginals().cpu()
            positions = torch.randint(shape[1], shape[:1], generator=g)
            tokens = log_p[torch.arange(shape[0]), positions].argmax(-1)
            conditioner.commit(positions.to(DEVICE), tokens.to(DEVICE))
        log_z, marginals, _ = exactly(truth, conditioner.evidence.to("cpu"))
        assert_close(conditioner.log_partition.cpu().double(), log_z, **LOOSE)
        assert_close(conditioner.log_marginals().exp().cpu().double(), marginals, **LOOSE)
        at = conditioner.dense_log_marginals(positions.to(DEVICE)).exp().cpu().double()
        assert_close(at, marginals[torch.arange(shape[0]), positions], **LOOSE)


def outside(truth, ev, numbers, uniforms):
    """How far each uniform number lies from the interval that the truth gives to what was drawn with it, (B, L).

    The truth is given what was drawn before: a path that leaves another one for a rounding goes its own way from there
    on. 0 in sequences that are impossible.
    """
    width, found = truth.hmm.num_states, torch.zeros(numbers.shape, dtype=torch.float64)
    states, latents = numbers // width, numbers % width
    with ops.use("eager"):
        messages = truth._messages(truth.hmm.centred(ev)[0])
    possible = (messages.log_partition() > -torch.inf).tolist()
    for b, t in np.ndindex(*numbers.shape):
        if not possible[b]:
            continue
        rows, wanted = messages.joint(t), int(states[b, t])
        if t == 0:
            targets, before = (
                rows.ids,
                messages.forward(0).logs()[np.searchsorted(messages.forward(0).ids, rows.ids), b],
            )
        else:
            pairs = messages.reachable.pairs[t - 1].select(
                messages.reachable.pairs[t - 1].source == int(states[b, t - 1])
            )
            leaf, z = messages._leaf[t - 1], int(latents[b, t - 1])
            targets = pairs.target
            emitted = leaf.logs()[np.searchsorted(leaf.ids, pairs.group), b, z]
            before = emitted[:, None] + truth.hmm.transition.dense_log[z]
        assert wanted in targets, f"no way leads to state {wanted} before position {t} of sequence {b}"
        weights = (before + rows.logs()[np.searchsorted(rows.ids, targets), b]).flatten().softmax(0)
        places = torch.from_numpy((targets == wanted).nonzero()[0]) * width + latents[b, t]  # each class is a way
        high = weights.cumsum(0)[places]
        low = high - weights[places]
        found[b, t] = torch.maximum(low - uniforms[b, t], uniforms[b, t] - high).clamp_min(0).min()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_paths_and_scores(shape):
    """What is drawn is what the numbers say, but for those that fall between two roundings; and scores given it."""
    truth, ours = circuits(shape, 1)
    ev = evidence(shape, 1)
    uniforms = torch.rand(shape[:2], generator=generator(5))
    got = ours.joint_step(ev.to(DEVICE), uniforms=uniforms.to(DEVICE))
    far = outside(truth, ev, got.latents.cpu(), uniforms)
    assert not bool((far > ROUNDED).any()), f"a number is {float(far.max()):.2g} outside of what was drawn with it"
    with ops.use("eager"):
        possible = truth.log_partition(ev) > -torch.inf
        scores = truth.conditional_scores(ev, got.latents.cpu())[possible]
    assert_close(got.scores.softmax(-1).cpu().double()[possible], scores.softmax(-1), **LOOSE)


def test_a_table_in_bfloat16():
    shape = SHAPES[0]
    truth, ours = circuits(shape, 3, compact=True)
    ev = evidence(shape, 1)
    _, marginals, _ = exactly(truth, ev)
    assert_close(ours.marginals(ev.to(DEVICE)).exp().cpu().double(), marginals, rtol=1e-2, atol=5e-3)


def test_what_is_not_served_is_answered_all_the_same(monkeypatch):
    shape = SHAPES[0]
    truth, ours = circuits(shape, 1)
    ev = evidence(shape, 1)
    monkeypatch.setattr(device, "_MOST", 1)
    assert not device.served(ours._chain, ev.to(DEVICE))
    assert_close(ours.marginals(ev.to(DEVICE)).exp().cpu().double(), exactly(truth, ev)[1], **LOOSE)
