"""What samplers share: their random numbers, the choice of a token, and rankings by how early it may be committed."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.sampling import draw_token
from codd.decoding.options import Options

COLDEST, HOTTEST = 1e-30, 1e30
"""Temperatures beyond these count as these: float32 would make 0 or infinity of some of them."""


class Noise(NamedTuple):
    """Uniform numbers in [0, 1), one of each kind for a position, whether the options need them or not.

    A position's numbers are then the same with and without a circuit, so that the null circuit writes the network's
    own text.
    """

    tokens: Float[Tensor, " n"]
    order: Float[Tensor, " n"]
    path: Float[Tensor, " n"]

    @classmethod
    def drawn(cls, size: int, generator: torch.Generator) -> "Noise":
        """Draw the numbers of ``size`` positions."""
        return cls(*torch.rand(3, size, generator=generator))

    @classmethod
    def none(cls, size: int) -> "Noise":
        """Zeros, for queries that draw nothing."""
        return cls(*torch.zeros(3, size))

    def at(self, positions: Int[Tensor, " R"] | slice) -> "Noise":
        """The random numbers of some of the positions, in the order given."""
        return Noise(*(part[positions] for part in self))

    def to(self, device: torch.device) -> "Noise":
        """Copy to a device, in one transfer."""
        return Noise(*torch.stack(tuple(self)).to(device, non_blocking=True))


class Ranking(NamedTuple):
    """Rows in the order of commitment, with a token and a score each, and which of them to commit."""

    rows: Int[Tensor, " k"]
    tokens: Int[Tensor, " k"]
    scores: Float[Tensor, " k"]
    """The probability of each token under the distribution that it was taken from."""
    keep: Bool[Tensor, " k"]
    valid: Bool[Tensor, ""]
    """False: the circuit gives zero probability to the evidence, or the candidates did not suffice; discard it."""

    def chosen(self) -> "Ranking":
        """Only the rows that are to be committed."""
        kept = self.keep.nonzero()[:, 0]
        rows, tokens, scores, keep = (part.index_select(0, kept) for part in self[:4])
        return Ranking(rows, tokens, scores, keep, self.valid)

    def packed(self) -> Float[Tensor, "4 more"]:
        """One float64 tensor (exact for ids of any vocabulary), so that it crosses to the host in one transfer.

        The last column holds ``valid``.
        """
        parts = torch.stack([part.double() for part in self[:4]])
        return torch.cat((parts, self.valid.double().expand(4, 1)), dim=1)

    @classmethod
    def unpacked(cls, packed: Float[Tensor, "4 more"]) -> "Ranking":
        """The inverse of ``packed``."""
        rows, tokens, scores, keep = packed[:, :-1]
        return cls(rows.long(), tokens.long(), scores.float(), keep.bool(), packed[0, -1].bool())

    @classmethod
    def joined(cls, parts: "list[Ranking]") -> "Ranking":
        """Several rankings one after the other; valid if all of them are."""
        rows, tokens, scores, keep, valid = zip(*parts, strict=True)
        return cls(torch.cat(rows), torch.cat(tokens), torch.cat(scores), torch.cat(keep), torch.stack(valid).all())


def token_probability(log_p: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """The probability of one token in each row."""
    return log_p.gather(-1, tokens[:, None])[:, 0].exp()


def margin(log_p: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """The probability of the best token less that of the second best."""
    if log_p.shape[-1] == 1:
        return log_p[:, 0].exp()
    top = log_p.topk(2, dim=-1).values.exp()
    return top[:, 0] - top[:, 1]


def entropy(log_p: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """The entropy of each row, in nats."""
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)


def priority(
    rule: str,
    log_p: Float[Tensor, "R V"],
    tokens: Int[Tensor, " R"],
    uniforms: Float[Tensor, " R"] | None,
) -> Float[Tensor, " R"]:
    """How early each row may be committed by a remasking rule: larger is earlier.

    Rows stand in the order of their positions; ``tokens`` are the proposed ones, ``log_p`` the log-probabilities of all
    tokens, and ``uniforms`` the numbers of the random order.
    """
    if rule == "low_confidence":
        return token_probability(log_p, tokens)
    if rule == "margin":
        return margin(log_p)
    if rule == "entropy":
        return -entropy(log_p)
    if rule == "random":
        assert uniforms is not None
        return uniforms
    assert rule == "left_to_right"
    return torch.arange(len(tokens), 0, -1, dtype=log_p.dtype, device=log_p.device)


def by_priority(priorities: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Rows from the earliest to the latest; of equals, the leftmost comes first."""
    return priorities.argsort(descending=True, stable=True)


def temper(scores: Float[Tensor, "R V"], temperature: float) -> Float[Tensor, "R V"]:
    """Scores over a temperature, the best of each row at 0: nothing overflows but what becomes impossible."""
    return (scores - scores.amax(-1, keepdim=True)) / min(max(temperature, COLDEST), HOTTEST)


def temper_conditional(log_p: Float[Tensor, "*R V"], options: Options) -> Float[Tensor, "*R V"]:
    """Log-probabilities of tokens given what is written, as the any-order sampler tempers them, or as they are.

    With ``tempering="paper"`` that is each token's conditional under the joint to the power of 1 / circuit temperature.
    """
    if not tempers_conditionals(options):
        return log_p
    return temper(log_p, options.circuit_temperature).log_softmax(-1)


def tempers_conditionals(options: Options) -> bool:
    """Whether the circuit temperature acts on conditionals of the joint rather than on the network's logits."""
    return options.sampler == "any_order" and options.tempering == "paper" and options.circuit_temperature != 1


def keep_top_k(scores: Float[Tensor, "R V"], k: int | None) -> Float[Tensor, "R V"]:
    """Set all but the k largest scores of each row (and what equals the k-th) to -inf."""
    if k is None or k >= scores.shape[-1]:
        return scores
    least = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf)


def keep_top_p(scores: Float[Tensor, "R V"], p: float | None) -> Float[Tensor, "R V"]:
    """Keep the smallest set of tokens whose probability exceeds p, the one that crosses it included; -inf elsewhere."""
    if p is None or p >= 1:
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = 0
    drop = before > p
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)


def choose_tokens(
    scores: Float[Tensor, "R V"],
    uniforms: Float[Tensor, " R"] | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Int[Tensor, " R"]:
    """One token a row: the best at temperature 0, otherwise drawn by inverse CDF with one uniform number a row.

    A token whose score is -inf is never chosen while there is another, whatever the temperature.
    """
    if temperature == 0:
        return scores.argmax(-1)
    assert uniforms is not None
    kept = keep_top_p(keep_top_k(temper(scores, temperature), top_k), top_p)
    return draw_token(kept.softmax(-1), uniforms)
