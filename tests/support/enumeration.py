"""The truth by brute force: every completion of a window, one by one, in float64."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def all_strings(vocab_size: int, length: int) -> Int[Tensor, "M L"]:
    """The V**L strings in lexicographic order."""
    return torch.cartesian_prod(*[torch.arange(vocab_size)] * length).reshape(-1, length)


def log_normalise(x: Tensor, dim: int = -1) -> Tensor:
    """x - logsumexp(x), and -inf throughout where all of x is."""
    total = x.logsumexp(dim, keepdim=True)
    return torch.where(total == -math.inf, -math.inf, x - total)


def string_log_weights(strings: Int[Tensor, "M L"], weights: Float[Tensor, "B L V"]) -> Float[Tensor, "B M"]:
    """The product of the evidence's weights along each string, in logs."""
    positions = torch.arange(strings.shape[1])
    return weights[:, positions, strings].sum(-1)


def token_marginals(
    strings: Int[Tensor, "M L"], log_table: Float[Tensor, "B M"], vocab_size: int
) -> Float[Tensor, "B L V"]:
    """Sum a table over strings into one over the tokens of each position."""
    tokens = range(vocab_size)
    columns = [torch.stack([log_table[:, col == v].logsumexp(-1) for v in tokens], -1) for col in strings.T]
    return torch.stack(columns, 1)


def chi_square_p_value(counts: Float[Tensor, " n"], log_probs: Float[Tensor, " n"]) -> float:
    """The p-value of Pearson's test; cells expected fewer than 5 times are pooled. Zero if an impossible cell hit."""
    expected = log_probs.double().exp() * counts.sum()
    if bool((counts[log_probs == -math.inf] > 0).any()):
        return 0.0
    rare = expected < 5
    seen = torch.cat([counts[~rare].double(), counts[rare].double().sum().reshape(1)])
    wanted = torch.cat([expected[~rare], expected[rare].sum().reshape(1)])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    half = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


def fits(counts: Tensor, probabilities: Tensor) -> bool:
    """Pearson's test at one in ten thousand."""
    return chi_square_p_value(counts.double(), probabilities.double().log()) > 1e-4
