"""Small windows, and what the objective is by definition: sums over all paths, differentiable, in float64."""

import itertools

import torch

from codd.circuits import HMM, Evidence, SparsePotentials
from codd.data.windows import WindowBatch
from codd.training.circuit.objectives import Signed, log_tables

STATES, VOCAB, LENGTH = 3, 4, 3


def draw(
    seed: int, count: int = 5, *, vocab: int = VOCAB, length: int = LENGTH, sparse: int | None = None
) -> WindowBatch:
    """Random truth, masks (the first window has none, the second no tokens) and answers of the network."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(count, length, vocab, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocab, (count, length), generator=generator)
    masked = torch.rand(count, length, generator=generator) < 0.6
    masked[0], masked[1] = False, True
    level = torch.rand(count, generator=generator)
    if sparse is None:
        return WindowBatch(tokens, masked, logits=logits, level=level)
    return WindowBatch(tokens, masked, sparse=SparsePotentials.from_logits(logits, sparse), level=level)


def circuit(seed: int, *, dtype: torch.dtype = torch.float64) -> HMM:
    return HMM.random(STATES, VOCAB, seed, dtype=dtype)


def known(windows: WindowBatch) -> Evidence:
    tokens = torch.where(windows.masked, 0, windows.tokens)
    return Evidence(tokens=tokens, observed=~windows.masked, logits=windows.logits, sparse=windows.sparse)


def log_phi(windows: WindowBatch, vocab: int) -> torch.Tensor:
    """The network's log-probabilities at masked positions, 0 elsewhere: (W, S, V)."""
    weights = known(windows).dense_log_weights(vocab)
    return torch.where(windows.masked[..., None], weights, 0)


def path_terms(tables: tuple[torch.Tensor, ...], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every path, and its log-probability."""
    initial, step, _ = tables
    paths = torch.tensor(list(itertools.product(range(len(initial)), repeat=length)))
    log_p = initial[paths[:, 0]] + step[paths[:, :-1], paths[:, 1:]].sum(-1)
    return paths, log_p


def log_prob(tables: tuple[torch.Tensor, ...], windows: WindowBatch) -> torch.Tensor:
    """The log-likelihood of each window, summed over paths (and over strings, for the normaliser)."""
    emission, vocab = tables[-1], tables[-1].shape[-1]
    paths, log_p = path_terms(tables, windows.tokens.shape[1])
    phi = log_phi(windows, vocab)
    out = []
    for tokens, masked, weights in zip(windows.tokens, windows.masked, phi, strict=True):
        spots = torch.arange(len(tokens))
        emitted = log_p + emission[paths, tokens].sum(-1)
        given = weights[spots, tokens].sum()
        strings = torch.cartesian_prod(*[torch.arange(vocab)] * len(tokens))
        strings = strings[((strings == tokens) | masked).all(-1)]
        weighed = log_p + emission[paths, strings[:, None]].sum(-1) + weights[spots, strings].sum(-1)[:, None]
        out.append(emitted.logsumexp(0) + given - weighed.logsumexp((0, 1)))
    return torch.stack(out)


def logits_of(hmm: HMM) -> list[torch.Tensor]:
    """Free logits of the circuit, none of them normalised."""
    return [(x + 0.3 * i).clone().requires_grad_() for i, x in enumerate(log_tables(hmm))]


def gradient_of(hmm: HMM, signed: Signed) -> list[torch.Tensor]:
    """dJ / du for logits u with theta = softmax(u): G - theta sum G, where G = F+ - F-."""
    flows = [plus - minus for plus, minus in zip(signed.plus, signed.minus, strict=True)]
    return [g - x.exp() * g.sum(-1, keepdim=True) for x, g in zip(log_tables(hmm), flows, strict=True)]
