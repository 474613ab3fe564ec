"""What every circuit answers, asked of one and compared with the table of all strings and all latent paths."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, Flows, ops
from codd.circuits.evidence import Kind
from codd.circuits.ops.leaf import eager as leaf_eager
from tests.support.strategies import Truth, generator

EXACT = 1e-9
"""How near answers in float64 are; beyond that, of rows the probabilities are compared and not their logarithms."""


class Unlisted(leaf_eager.Rows):
    """All rows with a mask, as on devices where choosing rows would wait for the device."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask)
        self.listed, self.all, self.index = False, True, ()


@contextmanager
def using(backend: str) -> Iterator[None]:
    """A backend by its name, or "unlisted"."""
    if backend != "unlisted":
        with ops.use(backend):
            yield
        return
    with patch.object(leaf_eager, "Rows", Unlisted), ops.use("eager"):
        yield


def totals(found: Tensor, wanted: Tensor, near: float) -> None:
    assert_close(found.double(), wanted, rtol=near, atol=near if near <= EXACT else 10 * near)


def rows(found: Tensor, wanted: Tensor, near: float) -> None:
    if near <= EXACT:
        assert_close(found, wanted, rtol=near, atol=near)
    else:
        assert_close(found.double().exp(), wanted.exp(), rtol=0, atol=near)


def check_sums(circuit, truth: Truth, near: float) -> None:
    """log Z, posteriors and marginals."""
    totals(circuit.log_partition(truth.ev), truth.log_partition, near)
    rows(circuit.posterior(truth.ev), truth.posterior, near)
    rows(circuit.marginals(truth.ev), truth.marginals, near)


def check_completions(circuit, truth: Truth, near: float) -> None:
    """The conditional probability of every string, as completion of every sequence."""
    for b in range(truth.ev.shape[0]):
        alone = truth.ev.select(torch.full((len(truth.strings),), b))
        found = circuit.conditional_log_prob(truth.strings, alone)
        hidden = ~truth.ev.rows(Kind.OBSERVED)[b]
        full = truth.strings if truth.ev.tokens is None else torch.where(hidden, truth.strings, truth.ev.tokens[b])
        place = (full * circuit.vocab_size ** torch.arange(truth.length - 1, -1, -1)).sum(-1)
        rows(found, truth.probability[b].logsumexp(-1)[place], near)
        # What is said at observed positions is ignored: each completion is counted once.
        once = (hidden | (truth.strings == 0)).all(-1)
        if bool(truth.log_partition[b] > -torch.inf):
            assert_close(found[once].double().logsumexp(0), torch.tensor(0.0).double(), rtol=0, atol=10 * near)


def check_incremental(circuit, truth: Truth, near: float) -> None:
    """Tokens that become known one by one, in random orders: as evidence that has them from the start."""
    ev, each, random = truth.ev, torch.arange(truth.ev.shape[0]), generator(3)
    counts = (None, 2) if ev.potentials is not None and circuit.vocab_size > 1 else (None,)
    conditioners = [circuit.incremental(ev, count) for count in counts]
    tokens = torch.randint(circuit.vocab_size, ev.shape, generator=random)
    order = torch.rand(ev.shape, generator=random).argsort(-1)
    known = torch.zeros(ev.shape, dtype=torch.bool)
    for t in range(truth.length + 1):
        now, at = truth.observing(tokens, known), order[:, t % truth.length]
        for found in conditioners:
            some = now.marginals if found.candidates is None else now.marginals.gather(-1, found.candidates)
            totals(found.log_partition, now.log_partition, near)
            rows(found.log_marginals(), some, near)
            rows(found.dense_log_marginals(), now.marginals, near)
            rows(found.dense_log_marginals(at), now.marginals[each, at], near)
            assert torch.equal(found.evidence.kind, now.ev.kind)
            found.commit(at, tokens[each, at])
            found.commit(at, (tokens[each, at] + 1) % circuit.vocab_size)  # what is known stays as it is
        known[each, at] = True


def check_pairwise(circuit, truth: Truth, near: float) -> None:
    shuffled = torch.rand(*truth.ev.shape, circuit.vocab_size, generator=generator(4)).argsort(-1)
    for count in {1, circuit.vocab_size}:
        wanted = truth.pairwise(shuffled[..., :count])
        assert_close(circuit.pairwise(truth.ev, shuffled[..., :count]).double(), wanted, rtol=0, atol=near)


def check_circuit(circuit, truth: Truth, near: float = EXACT) -> None:
    """What circuits of every kind answer."""
    for check in (check_sums, check_completions, check_incremental, check_pairwise):
        check(circuit, truth, near)


def check_hmm(hmm: HMM, truth: Truth, near: float = EXACT) -> None:
    """What an HMM answers besides: candidates, scores, paths from given numbers, and expected counts."""
    ev = truth.ev
    check_circuit(hmm, truth, near)
    candidates = torch.randint(hmm.vocab_size, (*ev.shape, 2), generator=generator(0))
    rows(hmm.marginals(ev, candidates), truth.marginals.gather(-1, candidates), near)
    uniforms = torch.rand(ev.shape, generator=generator(1))
    step = hmm.joint_step(ev, uniforms=uniforms)
    assert torch.equal(step.latents, truth.drawn(uniforms))
    totals(step.log_partition, truth.log_partition, near)
    emitted = truth.emission[torch.arange(truth.length), step.latents]
    scores = truth.weights + torch.where(ev.rows(Kind.OBSERVED)[..., None], 0.0, emitted)  # weight times emission
    for found in (step.scores, hmm.conditional_scores(ev, step.latents)):
        assert_close(found.double(), scores, rtol=near, atol=near)
    for weights in (None, torch.linspace(-2, 1, ev.shape[0])):
        flows = hmm.flows(ev, weights)
        share = torch.ones(ev.shape[0]) if weights is None else weights
        for part, wanted in zip(flat(flows), truth.flows(share), strict=True):
            assert_close(part.double(), wanted if part.ndim == wanted.ndim else wanted.sum(0), rtol=near, atol=near)
        totals(flows.log_partition, truth.log_partition, near)


def flat(flows: Flows) -> list[Tensor]:
    steps = flows.transition if isinstance(flows.transition, tuple) else (flows.transition,)
    return [flows.initial, *steps, flows.emission]


def assert_agrees(
    hmm: HMM, ev: Evidence, rtol: float = 1e-4, atol: float = 2e-3, backend: str | None = "eager"
) -> None:
    """Every query, by a backend (None: the device's own), against the reference in float64; and no NaN anywhere."""
    ids, random = torch.zeros(ev.shape, dtype=torch.int64), generator(0)
    uniforms, share = torch.rand(ev.shape, generator=random), torch.linspace(-1, 2, ev.shape[0])
    found = []
    for circuit, given, name in ((hmm, ev, backend), (hmm.to("cpu", torch.float64), ev.to("cpu"), "reference")):
        with ops.use(name) if name else nullcontext():
            device = given.device
            flows = circuit.flows(given, share.to(device, circuit.dtype))
            values = circuit.log_partition(given), flows.log_partition
            values += (circuit.conditional_log_prob(ids.to(device), given),)
            rows = (
                circuit.posterior(given),
                circuit.marginals(given),
                circuit.marginals(given, ids[..., None].to(device)),
            )
            latents = circuit.joint_step(given, uniforms=uniforms.to(device)).latents.cpu()
        assert all(x.dtype == circuit.dtype for x in (*values, *rows, *flat(flows)))
        found.append(([x.cpu().double() for x in (*values, *rows, *flat(flows))], latents))
    (answers, latents), (wanted, exact_latents) = found
    possible = wanted[0] > -torch.inf
    largest = float(wanted[0].abs().masked_fill(~possible, 0).amax())  # the difference of two numbers of this size
    for a, b in zip(answers[:2], wanted[:2], strict=True):
        assert_close(a, b, rtol=rtol, atol=min(atol, 1e-3))
    assert_close(answers[2], wanted[2], rtol=rtol, atol=atol + 1e-6 * largest)
    for a, b in zip(answers[3:6], wanted[3:6], strict=True):
        assert_close(a.exp(), b.exp(), rtol=0, atol=atol)
    for a, b in zip(answers[6:], wanted[6:], strict=True):
        assert_close(a, b, rtol=2e-3, atol=atol)
    assert torch.equal(latents[possible], exact_latents[possible])
