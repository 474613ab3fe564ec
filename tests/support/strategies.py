"""Circuits and evidence of every kind for the tests of the HMM, and the truth about them from all strings and paths."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from hypothesis import strategies as st
from jaxtyping import config
from torch import Tensor

from codd.circuits import HMM, Evidence, SparsePotentials
from codd.circuits.evidence import Kind
from tests.support.enumeration import all_strings, log_normalise

BACKENDS = ("reference", "eager")
LAYOUTS = ("dense", "per_position", "low_rank", "low_rank_per_position", "per_step", "per_emission")
KINDS = (
    "observed",
    "partly_observed",
    "log_potentials",
    "logits",
    "logits_temperature",
    "logits_temperatures",
    "sparse",
    "sparse_tail",
    "missing",
    "latent",
    "observed_latent",
    "mixed_dense",
    "mixed_sparse",
    "mixed_all",
)
"""Evidence of one kind alone, and several kinds in one batch."""


@contextmanager
def shape_checks(on: bool) -> Iterator[None]:
    """Switch jaxtyping's checks. Off is how users run it: wrong shapes meet the library's own errors, and fast."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", not on)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_hmm(
    layout: str,
    states: int = 3,
    vocab: int = 4,
    length: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
) -> HMM:
    """A random HMM of one layout; ``per_step`` and ``per_emission`` have only one of the two tables by position."""
    rank = 2 if "low_rank" in layout else None
    own = length if layout.endswith("per_position") else None
    hmm = HMM.random(states, vocab, seed, rank=rank, length=own, scale=scale, dtype=dtype)
    other = HMM.random(states, vocab, seed + 1, length=length, scale=scale, dtype=dtype)
    if layout == "per_step":
        return HMM(hmm.log_initial, other.log_transition, hmm.log_emission)
    if layout == "per_emission":
        return HMM(hmm.log_initial, hmm.log_transition, other.log_emission)
    return hmm


def make_sparse(shape: tuple[int, int], vocab: int, k: int, seed: int, tail: bool, dtype: torch.dtype):
    """Listed tokens in any order and weights that are no top-k of anything."""
    g = generator(seed)
    ids = torch.rand(*shape, vocab, generator=g).argsort(-1)[..., :k]
    weights = torch.randn(*shape, k, generator=g, dtype=torch.float64).to(dtype)
    rest = torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    return SparsePotentials(ids, weights, rest if tail else None)


def make_evidence(
    kind: str,
    shape: tuple[int, int],
    states: int = 3,
    vocab: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
) -> Evidence:
    """Evidence of one of ``KINDS``. Tokens that are not observed hold an id outside the vocabulary, as a mask would."""
    g = generator(seed)

    def normal(*more: int) -> Tensor:
        return (torch.randn(*shape, *more, generator=g, dtype=torch.float64) * scale).to(dtype)

    tokens = torch.randint(vocab, shape, generator=g)
    observed, missing, dense = (torch.rand(shape, generator=g) < p for p in (0.4, 0.25, 0.5))
    masked = torch.where(observed, tokens, vocab + 7)
    potentials, latent = normal(vocab), normal(states)
    temperatures = (0.5 + torch.rand(shape[0], generator=g, dtype=torch.float64)).to(dtype)
    k = max(1, vocab // 2)
    match kind:
        case "observed":
            return Evidence(tokens=tokens)
        case "partly_observed":
            return Evidence(tokens=masked, observed=observed)
        case "log_potentials":
            return Evidence(log_potentials=potentials)
        case "logits":
            return Evidence(logits=potentials)
        case "logits_temperature":
            return Evidence(logits=potentials, temperature=0.7)
        case "logits_temperatures":
            return Evidence(logits=potentials, temperature=temperatures)
        case "sparse" | "sparse_tail":
            return Evidence(sparse=make_sparse(shape, vocab, k, seed, kind == "sparse_tail", dtype))
        case "missing":
            return Evidence(missing=torch.ones(shape, dtype=torch.bool))
        case "latent":
            return Evidence(latent_log_potentials=latent)
        case "observed_latent":
            return Evidence(tokens=tokens, latent_log_potentials=latent)
        case "mixed_dense":
            return Evidence(
                tokens=masked,
                observed=observed,
                log_potentials=potentials,
                missing=missing,
                latent_log_potentials=latent,
            )
        case "mixed_sparse":
            sparse = make_sparse(shape, vocab, k, seed, True, dtype)
            return Evidence(tokens=masked, observed=observed, sparse=sparse, missing=missing)
        case "mixed_all":
            return Evidence(
                tokens=masked,
                observed=observed,
                logits=potentials,
                temperature=temperatures,
                sparse=make_sparse(shape, vocab, k, seed, True, dtype),
                dense=dense,
                missing=missing,
                latent_log_potentials=latent,
            )
    raise ValueError(kind)


def with_gates(ev: Evidence, rank: int, seed: int = 0, size: float = 1.0) -> Evidence:
    """Gates of normal numbers, or (with a size beyond them) plus or minus the size with some noise."""
    g = generator(seed)
    noise = torch.randn(ev.shape[0], ev.shape[1] - 1, rank, generator=g, dtype=torch.float64)
    gates = noise if size == 1.0 else (torch.randint(2, noise.shape, generator=g) * 2 - 1) * size + noise
    return replace(ev, step_log_gates=gates)


def observing(ev: Evidence, tokens: Tensor, known: Tensor) -> Evidence:
    """The evidence with the tokens observed where ``known``, too; what is observed already stays."""
    before = ev.rows(Kind.OBSERVED)
    given = tokens if ev.tokens is None else torch.where(before, ev.tokens, tokens)
    return replace(ev, tokens=given, observed=before | known)


def token_log_weights(ev: Evidence, vocab: int) -> Tensor:
    """The log-weight of every token, (B, L, V), written down from the meaning of the fields, number by number."""
    batch, length = ev.shape
    out = torch.zeros(batch, length, vocab, dtype=torch.float64)
    for b in range(batch):
        for t in range(length):
            out[b, t] = torch.tensor(_weights_at(ev, b, t, vocab), dtype=torch.float64)
    return out


def _weights_at(ev: Evidence, b: int, t: int, vocab: int) -> list[float]:
    hard = ev.tokens is not None and (ev.observed is None or bool(ev.observed[b, t]))
    if hard:
        return [0.0 if v == int(ev.tokens[b, t]) else -math.inf for v in range(vocab)]
    if ev.missing is not None and bool(ev.missing[b, t]):
        return [0.0] * vocab
    if ev.sparse is not None and (ev.dense is None or not bool(ev.dense[b, t])):
        listed = dict(zip(ev.sparse.ids[b, t].tolist(), ev.sparse.log_weights[b, t].tolist(), strict=True))
        others = vocab - len(listed)
        tail = -math.inf
        if ev.sparse.log_tail is not None and others > 0:
            tail = float(ev.sparse.log_tail[b, t]) - math.log(others)
        return [listed.get(v, tail) for v in range(vocab)]
    if ev.log_potentials is not None:
        return ev.log_potentials[b, t].tolist()
    if ev.logits is not None:
        warm = float(ev.temperature[b]) if isinstance(ev.temperature, Tensor) else ev.temperature
        return (ev.logits[b, t].double() / warm).log_softmax(-1).tolist()
    return [0.0] * vocab


@dataclass(frozen=True, eq=False)
class Truth:
    """Every answer from the table of all strings and all latent paths, in float64."""

    hmm: HMM
    ev: Evidence
    reading: Tensor | None = None
    """What a language adds to the log-weight of each string, (M,)."""

    @property
    def length(self) -> int:
        return self.ev.shape[1]

    def observing(self, tokens: Tensor, known: Tensor) -> "Truth":
        return replace(self, ev=observing(self.ev, tokens, known))

    @cached_property
    def strings(self) -> Tensor:
        return all_strings(self.hmm.vocab_size, self.length)

    @cached_property
    def paths(self) -> Tensor:
        return all_strings(self.hmm.num_latents, self.length)

    @cached_property
    def weights(self) -> Tensor:
        return token_log_weights(self.ev, self.hmm.vocab_size)

    @cached_property
    def latent(self) -> Tensor:
        given = self.ev.latent_log_potentials
        return torch.zeros(*self.ev.shape, self.hmm.num_latents).double() if given is None else given.double()

    @cached_property
    def ways(self) -> Tensor:
        """Probabilities of the ways from state to state, times the gates: (B, L - 1, N, R, N), or R = 1."""
        factors = self.hmm.log_transition
        if not isinstance(factors, tuple):
            steps = factors.double().exp().expand(self.length - 1, -1, -1)
            return steps[None, :, :, None].expand(self.ev.shape[0], -1, -1, -1, -1)
        left, right = (f.double().exp().expand(self.length - 1, -1, -1) for f in factors)
        gates = self.ev.step_log_gates
        weights = torch.ones(self.ev.shape[0], *right.shape[:2]).double() if gates is None else gates.double().exp()
        return torch.einsum("tir,btr,trj->btirj", left, weights, right)

    @cached_property
    def emission(self) -> Tensor:
        """Log-probabilities, (L, N, V)."""
        table = self.hmm.log_emission.double()
        return table if table.ndim == 3 else table.expand(self.length, -1, -1)

    @cached_property
    def joint(self) -> Tensor:
        """log p(string, path) plus what evidence adds to it, (B, M, P)."""
        steps, positions = self.ways.sum(3).log(), torch.arange(self.length)
        on_paths = self.hmm.log_initial.double()[self.paths[:, 0]] + self.latent[:, positions, self.paths].sum(-1)
        for t in range(self.length - 1):
            on_paths = on_paths + steps[:, t, self.paths[:, t], self.paths[:, t + 1]]
        emitted = sum(self.emission[t][self.paths[:, t]][:, self.strings[:, t]].T for t in range(self.length))
        on_strings = self.weights[:, positions, self.strings].sum(-1)
        if self.reading is not None:
            on_strings = on_strings + self.reading
        return on_paths[:, None, :] + emitted + on_strings[:, :, None]

    @cached_property
    def log_partition(self) -> Tensor:
        return self.joint.flatten(1).logsumexp(-1)

    @cached_property
    def probability(self) -> Tensor:
        """p(string, path | evidence) in logarithms, (B, M, P)."""
        return log_normalise(self.joint.flatten(1)).reshape(self.joint.shape)

    def _by_state(self, log_table: Tensor, t: int) -> Tensor:
        states = range(self.hmm.num_latents)
        return torch.stack([log_table[:, :, self.paths[:, t] == i].flatten(1).logsumexp(-1) for i in states], -1)

    @cached_property
    def posterior(self) -> Tensor:
        return torch.stack([self._by_state(self.probability, t) for t in range(self.length)], 1)

    @cached_property
    def marginals(self) -> Tensor:
        by_string = self.probability.logsumexp(-1)
        tokens = range(self.hmm.vocab_size)
        rows = [torch.stack([by_string[:, s == v].logsumexp(-1) for v in tokens], -1) for s in self.strings.T]
        return torch.stack(rows, 1)

    def flows(self, share: Tensor) -> list[Tensor]:
        """Counts of the first state (N,), of each factor of the steps (L - 1, ., .) and of the emissions (L, N, V)."""
        table = self.probability.exp() * share.double()[:, None, None]
        states = torch.eye(self.hmm.num_states).double()[self.paths]
        tokens = torch.eye(self.hmm.vocab_size).double()[self.strings]
        on_paths = table.sum(1)
        steps = torch.einsum("bp,pti,ptj->btij", on_paths, states[:, :-1], states[:, 1:])
        through = torch.einsum("btij,btirj->tirj", steps, (self.ways / self.ways.sum(3, keepdim=True)).nan_to_num(0))
        low_rank = isinstance(self.hmm.log_transition, tuple)
        factors = (through.sum(3), through.sum(1)) if low_rank else (through[:, :, 0],)
        emissions = torch.einsum("mp,pti,mtv->tiv", table.sum(0), states, tokens)
        return [on_paths.sum(0) @ states[:, 0], *factors, emissions]

    def drawn(self, uniforms: Tensor) -> Tensor:
        """The paths by inverse CDF, position by position, from one number each: (B, L)."""
        weights, states = self.probability.logsumexp(1).exp(), torch.arange(self.hmm.num_states)
        out = []
        for t in range(self.length):
            here = (weights[:, :, None] * (self.paths[:, t, None] == states)).sum(1).cumsum(-1)
            passed = here <= uniforms[:, t, None].double() * here[:, -1:] * (1 - 2**-23)
            out.append(passed.sum(-1))
            weights = torch.where(self.paths[:, t] == out[-1][:, None], weights, 0)
        return torch.stack(out, 1)

    def pairwise(self, candidates: Tensor) -> Tensor:
        """The tables of every two positions, each token being one of the candidates or, last, any other."""
        count, vocabulary = candidates.shape[-1] + 1, torch.arange(self.hmm.vocab_size)
        listed = candidates[..., None] == vocabulary  # (B, L, K, V)
        classes = torch.cat([listed, ~listed.any(2, keepdim=True)], 2).double().movedim(2, 3)
        of_string = classes[:, torch.arange(self.length), self.strings]  # (B, M, L, C)
        p = self.probability.logsumexp(-1).exp()
        assert of_string.shape[-1] == count
        return torch.einsum("bm,bmsc,bmtd->bstcd", p, of_string, of_string)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32, kinds: tuple[str, ...] = KINDS) -> tuple[HMM, Evidence]:
    """An HMM of any layout and evidence of any kind that fits it."""
    layout, kind = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(kinds))
    states, vocab = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    seed, scale = draw(st.integers(0, 2**20)), draw(st.sampled_from((0.1, 1.0, 4.0)))
    with shape_checks(False):  # they draw random numbers, which Hypothesis does not allow while it makes a case
        hmm = make_hmm(layout, states, vocab, length, seed, dtype, scale)
        return hmm, make_evidence(kind, (batch, length), states, vocab, seed, dtype, scale)
