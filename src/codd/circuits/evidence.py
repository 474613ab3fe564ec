"""What is known about a window: hard, soft, sparse soft, missing and latent evidence in one frozen type.

A batch of B windows of L positions. Each position is of exactly one kind:

====================  ==========================================================================
observed              the token is given; the weight of every other token is zero
dense soft            a weight for each of the V tokens, as log-potentials or as raw logits
sparse soft           weights for K tokens, and the mass of all the others in one number
missing               every token has weight one
====================  ==========================================================================

The potential of an observed position is ignored: it is the same for all latent states, so it cancels in every
posterior and in every conditional probability.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from numbers import Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from codd.errors import ImpossibleEvidence, InvalidEvidence, shown

Index = tuple[slice | Int[Tensor, "..."], slice | Int[Tensor, "..."]]
"""Sequences and positions, as an index of a (B, L, ...) tensor."""
EVERYWHERE: Index = (slice(None), slice(None))


class Kind(IntEnum):
    """What kind of evidence a position has."""

    OBSERVED = 0
    DENSE = 1
    SPARSE = 2
    MISSING = 3


def log_softmax(x: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """The usual one, except that a row of -inf stays -inf instead of becoming NaN (as does its gradient)."""
    if x.device.type == "cpu":  # elsewhere, looking would wait for the device
        out = x.log_softmax(-1)
        if not bool(out[..., :1].isnan().any()):
            return out
    empty = (x == -math.inf).all(-1, keepdim=True)
    return x.masked_fill(empty, 0).log_softmax(-1).masked_fill(empty, -math.inf)


def tempered(
    logits: Float[Tensor, "*rows V"], temperature: float | Float[Tensor, "..."], dtype: torch.dtype
) -> Float[Tensor, "*rows V"]:
    """Logits over a temperature, up to a constant a row: where a large offset would cost digits, it is taken out.

    What needs neither division nor rounding stays as it is: a softmax takes the offset out by itself.
    """
    exact = torch.promote_types(logits.dtype, dtype)
    logits = logits.to(exact)
    if exact == dtype and isinstance(temperature, float | int) and temperature == 1:
        return logits
    return (logits - row_max(logits)).div_(temperature).to(dtype)


def _check_temperatures(temperatures: Sequence[Any]) -> None:
    least = torch.finfo(torch.float32).tiny
    for t in temperatures:
        number: Any = t if isinstance(t, Real) else math.nan
        if not least <= number <= 1 / least:
            raise InvalidEvidence(
                f"temperature must be positive and finite, found {shown(t)} (in float32: {least:.2g} to "
                f"{1 / least:.2g})"
            )


def check_fits(ev: "Evidence", circuit: Any) -> None:
    """Raise InvalidEvidence unless it has the positions, tokens and latents of a circuit, on its device."""
    if not isinstance(ev, Evidence):
        raise InvalidEvidence(f"expected codd.Evidence, found a {type(ev).__name__}: codd.Evidence(logits=...), say")
    length, vocab, latent = circuit.length, circuit.vocab_size, ev.latent_log_potentials
    if ev.device != circuit.device:
        raise InvalidEvidence(f"the evidence is on {ev.device}, the circuit on {circuit.device}: move one of them")
    if ev.shape[0] < 1:
        raise InvalidEvidence("the evidence has no sequences: its batch is empty")
    if ev.shape[1] < 1 or (length is not None and ev.shape[1] != length):
        wanted = "at least 1" if length is None else str(length)
        raise InvalidEvidence(f"the evidence has {ev.shape[1]} positions, the circuit serves {wanted}")
    if ev.potentials is not None and ev.potentials.shape[-1] != vocab:
        raise InvalidEvidence(f"the potentials are over {ev.potentials.shape[-1]} tokens, the circuit over {vocab}")
    if latent is not None and latent.shape[-1] != circuit.num_latents:
        raise InvalidEvidence(
            f"latent_log_potentials are over {latent.shape[-1]} states, the circuit has {circuit.num_latents}"
        )
    inner, gates = circuit.inner_states, ev.step_log_gates
    if gates is not None and gates.shape[-1] != inner:
        have = "no such steps" if inner is None else f"steps of rank {inner}"
        raise InvalidEvidence(f"step_log_gates are over {gates.shape[-1]} inner states, the circuit has {have}")
    if ev.device.type == "cpu":  # elsewhere, looking at values would wait for the device
        if ev.tokens is not None:
            check_ids("observed tokens", ev.tokens[ev.rows(Kind.OBSERVED)], vocab)
        if ev.sparse is not None:
            check_ids("sparse ids", ev.sparse.ids, vocab)


def check_ids(name: str, ids: Int[Tensor, "..."], count: int) -> None:
    """Raise InvalidEvidence unless all are in 0..count - 1."""
    if ids.numel() == 0:
        return
    low, high = (int(x) for x in torch.aminmax(ids))
    if low < 0 or high >= count:
        raise InvalidEvidence(f"{name} must be in 0..{count - 1}, found {low if low < 0 else high}")


def check_possible(log_z: Float[Tensor, " B"], check: bool | None = None) -> None:
    """Raise `ImpossibleEvidence` if there is some; None: unless a CUDA graph is being captured."""
    capturing = log_z.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if check is False or (check is None and capturing):
        return
    impossible = log_z == -torch.inf
    if bool(impossible.any()):
        raise ImpossibleEvidence(impossible.nonzero()[:, 0].tolist())


def check_tensors(**given: object) -> None:
    """Raise InvalidEvidence for what is not a tensor, by its name."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise InvalidEvidence(f"{name} must be a torch tensor, found {shown(value)}: torch.as_tensor makes one")


def log_ratio(part: Float[Tensor, "..."], whole: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``part - whole``, and -inf (not NaN) where the whole is impossible."""
    return torch.where(whole > -math.inf, part - whole, -math.inf)


def row_max(x: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows 1"]:
    """The largest entry of each row, 0 for a row of -inf. A constant: no gradient goes through it."""
    top = x.detach().amax(-1, keepdim=True)
    return top.masked_fill_(top == -math.inf, 0)


_SMALL = 16
"""A constant up to which no digits of float32 are lost by leaving it in a row of log-weights."""


def _centred(x: Float[Tensor, "*rows V"]) -> tuple[Float[Tensor, "*rows V"], Float[Tensor, "*rows"]]:
    """Each row less its largest entry, and that entry. In float64: others may be small and count all the same.

    A small entry stays where it is; where all are small, nothing is done on a CPU, where one can look.
    """
    top = row_max(x)
    if x.device.type == "cpu" and bool((top.abs() <= _SMALL).all()):
        return x, torch.zeros(top.shape[:-1], dtype=torch.float64)
    top = top.masked_fill_(top.abs() <= _SMALL, 0).double()
    return x.double() - top, top[..., 0]


@dataclass(frozen=True, eq=False)
class SparsePotentials:
    """The weights of K candidate tokens per position, and the total weight of the V - K others.

    The tail is spread evenly over the tokens that are not listed.
    """

    ids: Int[Tensor, "B L K"]
    log_weights: Float[Tensor, "B L K"]
    log_tail: Float[Tensor, "B L"] | None = None

    def __post_init__(self) -> None:
        """Check that the tensors fit together."""
        if self.ids.ndim != 3 or self.ids.shape != self.log_weights.shape:
            raise InvalidEvidence(
                f"sparse ids and log_weights must both be (B, L, K), found {tuple(self.ids.shape)} and "
                f"{tuple(self.log_weights.shape)}"
            )
        if self.ids.dtype.is_floating_point or self.ids.dtype == torch.bool:
            raise InvalidEvidence(f"sparse ids must be integers, found {self.ids.dtype}")
        object.__setattr__(self, "ids", self.ids.long())  # what PyTorch indexes with
        if self.log_tail is not None and self.log_tail.shape != self.ids.shape[:2]:
            raise InvalidEvidence(
                f"log_tail must be (B, L) = {tuple(self.ids.shape[:2])}, found {tuple(self.log_tail.shape)}"
            )
        if self.ids.device.type == "cpu" and bool((self.ids.sort(-1).values.diff(dim=-1) == 0).any()):
            raise InvalidEvidence("the sparse ids of a position must differ from each other: a token is listed twice")

    @classmethod
    def from_logits(cls, logits: Float[Tensor, "B L V"], k: int, temperature: float = 1.0) -> "SparsePotentials":
        """Keep the k most probable tokens of ``softmax(logits / temperature)`` and the mass of the rest."""
        if not 1 <= k <= logits.shape[-1]:
            raise InvalidEvidence(f"k must be between 1 and V = {logits.shape[-1]}, found {k}")
        _check_temperatures([temperature])
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_p = log_softmax(tempered(logits, temperature, dtype))
        ids = logits.topk(k, dim=-1).indices
        return cls(ids, log_p.gather(-1, ids), log_p.scatter(-1, ids, -math.inf).logsumexp(-1))

    def centred(self) -> tuple["SparsePotentials", Float[Tensor, "B L"]]:
        """The same with the largest weight of each row, or its tail, at one, and the logarithm of what it was."""
        if self.log_tail is None:
            weights, top = _centred(self.log_weights)
            return replace(self, log_weights=weights), top
        weights, top = _centred(torch.cat([self.log_weights, self.log_tail[..., None]], -1))
        return replace(self, log_weights=weights[..., :-1], log_tail=weights[..., -1]), top

    def log_tail_weight(self, vocab_size: int) -> Float[Tensor, "B L"]:
        """The log-weight of each token that is not listed."""
        rest = vocab_size - self.ids.shape[-1]
        if self.log_tail is None or rest <= 0:
            return torch.full_like(self.log_weights[..., 0], -math.inf)
        return self.log_tail - math.log(rest)


class Modulation(NamedTuple):
    """Latent evidence from a network's hidden states: log-weights of latents, and of the inner states of steps."""

    latent_log_potentials: Float[Tensor, "B L N"] | None = None
    step_log_gates: Float[Tensor, "B T R"] | None = None


_TENSORS = {
    "tokens": (2, "integer ids"),
    "observed": (2, "a boolean mask"),
    "log_potentials": (3, "floating point"),
    "logits": (3, "floating point"),
    "latent_log_potentials": (3, "floating point"),
    "step_log_gates": (3, "floating point"),
    "missing": (2, "a boolean mask"),
    "dense": (2, "a boolean mask"),
}
"""The tensors of evidence: their axes, and what their numbers must be."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known about B windows of L positions; see the module for the kinds of evidence.

    Args:
        tokens: ids; observed everywhere if ``observed`` is not given.
        observed: where the tokens count.
        log_potentials: log-weights of all tokens, used as they are; they need not be normalised.
        latent_log_potentials: log-weights of the circuit's latents.
        logits: in place of ``log_potentials``: they mean ``softmax(logits / temperature)``, and are never expanded to a
            (B, L, V) log-softmax.
        temperature: one number, or one per sequence.
        sparse: weights of K tokens per position.
        missing: positions without evidence although potentials are given.
        step_log_gates: log-weights on the R inner states through which a transition of low rank goes from each position
            to the next (T = L - 1).
        dense: which positions use the dense potentials, when dense and sparse ones are both given.

    Raises:
        InvalidEvidence: shapes, types, devices or values do not fit; the message names the tensor.
    """

    tokens: Int[Tensor, "B L"] | None = None
    observed: Bool[Tensor, "B L"] | None = None
    log_potentials: Float[Tensor, "B L V"] | None = None
    latent_log_potentials: Float[Tensor, "B L N"] | None = None
    logits: Float[Tensor, "B L V"] | None = None
    temperature: float | Float[Tensor, " B"] = 1.0
    sparse: SparsePotentials | None = None
    missing: Bool[Tensor, "B L"] | None = None
    step_log_gates: Float[Tensor, "B T R"] | None = None
    dense: Bool[Tensor, "B L"] | None = None
    kind: Int[Tensor, "B L"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check shapes, types and devices, and decide the kind of every position."""
        check_tensors(**{name: value for name in _TENSORS if (value := getattr(self, name)) is not None})
        shape, device = self._frame()
        self._check_members(shape, device)
        if self.tokens is not None:
            object.__setattr__(self, "tokens", self.tokens.long())  # what PyTorch indexes with
        object.__setattr__(self, "kind", self._kinds(shape, device))

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L): sequences and positions."""
        return self.kind.shape[0], self.kind.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.kind.device

    @property
    def potentials(self) -> Float[Tensor, "B L V"] | None:
        """The dense potentials as given: log-potentials, or raw logits."""
        return self.logits if self.log_potentials is None else self.log_potentials

    @property
    def normalised(self) -> bool:
        """Whether the dense potentials are logits, to be tempered and normalised."""
        return self.logits is not None

    def rows(self, kind: Kind) -> Bool[Tensor, "B L"]:
        """A mask of the positions of one kind."""
        return self.kind == kind

    def inverse_temperature(self) -> Float[Tensor, "B"]:
        """1 / temperature of each sequence, in float32: what the kernels multiply with."""
        if isinstance(self.temperature, Tensor):
            return 1.0 / self.temperature.float()
        return torch.full((self.shape[0],), 1.0 / self.temperature, device=self.device)

    def log_weights(self, dtype: torch.dtype | None = None, at: Index = EVERYWHERE) -> Float[Tensor, "*R V"]:
        """The dense log-weights of all tokens, of logits their log-softmax; in float32 or better."""
        assert self.potentials is not None
        given = self.potentials[at]
        dtype = dtype or torch.promote_types(given.dtype, torch.float32)
        if not self.normalised:
            return given.to(dtype)
        heat = self.heat(dtype)
        heat = heat.expand(*self.shape, 1)[at] if isinstance(heat, Tensor) else heat
        return log_softmax(tempered(given, heat, dtype))

    def heat(self, dtype: torch.dtype) -> float | Float[Tensor, "B 1 1"]:
        """The temperature in the shape that logits are divided with."""
        t = self.temperature
        return t.to(dtype)[:, None, None] if isinstance(t, Tensor) else t

    def centred(self) -> "Centred":
        """The same with the largest log-weight of each row at zero: a constant in a row then costs no digits.

        No conditional probability changes. Logits stay as they are: they are normalised wherever they are used.
        """
        changes: dict[str, Tensor | SparsePotentials] = {}
        tokens = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        latents = tokens.new_zeros(self.shape[0])
        if self.log_potentials is not None:
            changes["log_potentials"], top = _centred(self.log_potentials)
            tokens = torch.where(self.rows(Kind.DENSE), top, tokens)
        if self.sparse is not None:
            changes["sparse"], top = self.sparse.centred()
            tokens = torch.where(self.rows(Kind.SPARSE), top, tokens)
        for name in ("latent_log_potentials", "step_log_gates"):
            if (given := getattr(self, name)) is not None:
                changes[name], top = _centred(given)
                latents = latents + top.sum(-1)
        same = all(value is getattr(self, name) for name, value in changes.items())
        return Centred(self if same else replace(self, **changes), tokens, latents)  # type: ignore[arg-type]

    def dense_log_weights(
        self, vocab_size: int, dtype: torch.dtype = torch.float64, at: Index = EVERYWHERE
    ) -> Float[Tensor, "*R V"]:
        """The log-weight of every token, at every position or at some of them, whatever the kind."""
        kind = self.kind[at][..., None]
        out = torch.zeros(*kind.shape[:-1], vocab_size, dtype=dtype, device=self.device)
        if self.potentials is not None:
            given = self.log_weights(dtype, at)
            whole = self.device.type == "cpu" and bool((kind == Kind.DENSE).all())
            out = given if whole else torch.where(kind == Kind.DENSE, given, out)
        if self.sparse is not None:
            tail = self.sparse.log_tail_weight(vocab_size)[at].to(dtype)[..., None].expand_as(out)
            listed = tail.scatter(-1, self.sparse.ids[at], self.sparse.log_weights[at].to(dtype))
            out = torch.where(kind == Kind.SPARSE, listed, out)
        if self.tokens is not None and (self.device.type != "cpu" or bool((kind == Kind.OBSERVED).any())):
            token = self.tokens[at].clamp(0, vocab_size - 1)[..., None]  # a mask may be any number
            hard = torch.full_like(out, -math.inf).scatter_(-1, token, 0.0)
            out = torch.where(kind == Kind.OBSERVED, hard, out)
        return out

    def completed(
        self, ids: Int[Tensor, "B L"], vocab_size: int, dtype: torch.dtype | None = None
    ) -> tuple["Evidence", Float[Tensor, " B"]]:
        """Whole strings, ``ids`` where nothing is observed, and the log-weight that this evidence gives to the latter.

        What weighs latents and steps stays. Differentiable.
        """
        if ids.shape != self.shape:
            raise InvalidEvidence(f"ids must have the evidence's shape {self.shape}, found {tuple(ids.shape)}")
        hidden = ~self.rows(Kind.OBSERVED)
        full = ids if self.tokens is None else torch.where(hidden, ids, self.tokens)
        given = torch.where(hidden, self.log_weights_of(full, vocab_size, dtype), 0).sum(-1)
        latents = {name: getattr(self, name) for name in ("latent_log_potentials", "step_log_gates")}
        return Evidence(tokens=full, **latents), given

    def log_weights_of(
        self, ids: Int[Tensor, "B L"], vocab_size: int, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "B L"]:
        """The log-weight of one token per position (zero where observed or missing). Differentiable."""
        at = ids.clamp(0, vocab_size - 1)[..., None]
        out = torch.zeros(self.shape, device=self.device)
        if self.potentials is not None:
            out = torch.where(self.rows(Kind.DENSE), self.log_weights(dtype).gather(-1, at)[..., 0], out)
        if self.sparse is not None:
            hit = self.sparse.ids == at
            listed = torch.where(hit, self.sparse.log_weights, -math.inf).amax(-1)
            tail = self.sparse.log_tail_weight(vocab_size)
            out = torch.where(self.rows(Kind.SPARSE), torch.where(hit.any(-1), listed, tail), out)
        return out

    def select(self, sequences: Shaped[Tensor, " S"]) -> "Evidence":
        """The evidence of some sequences only (indices or a boolean mask)."""
        return self._map(lambda x: x[sequences])

    def to(self, device: torch.device | str) -> "Evidence":
        """The same evidence on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, f) -> "Evidence":  # type: ignore[no-untyped-def]  # a tensor function, local to this file
        changes = {n: f(v) for n in _TENSORS if (v := getattr(self, n)) is not None}
        if isinstance(self.temperature, Tensor):
            changes["temperature"] = f(self.temperature)
        if self.sparse is not None:
            ids, weights, tail = self.sparse.ids, self.sparse.log_weights, self.sparse.log_tail
            changes["sparse"] = SparsePotentials(f(ids), f(weights), None if tail is None else f(tail))
        return replace(self, **changes)

    def _frame(self) -> tuple[tuple[int, int], torch.device]:
        """(B, L) and the device, from the first tensor that has them."""
        sparse = None if self.sparse is None else self.sparse.ids
        given = (self.tokens, self.log_potentials, self.logits, sparse, self.latent_log_potentials, self.missing)
        first = next((x for x in given if x is not None), None)
        if first is None:
            raise InvalidEvidence(
                "empty evidence: give tokens, log_potentials, logits, sparse, latent_log_potentials or missing, "
                "so that the batch and the length are known"
            )
        if first.ndim < 2:
            raise InvalidEvidence(f"evidence needs a batch and a length, (B, L, ...), found shape {tuple(first.shape)}")
        return (first.shape[0], first.shape[1]), first.device

    def _check_members(self, shape: tuple[int, int], device: torch.device) -> None:
        sparse = self.sparse
        members: list[tuple[str, Tensor | None, int, str]] = [(n, getattr(self, n), *of) for n, of in _TENSORS.items()]
        if sparse is not None:
            members.append(("sparse.ids", sparse.ids, 3, "integer ids"))
            members.append(("sparse.log_weights", sparse.log_weights, 3, "floating point"))
            members.append(("log_tail", sparse.log_tail, 2, "floating point"))
        for name, value, ndim, kind in members:
            if value is None:
                continue
            length = shape[1] - (name == "step_log_gates")
            if value.ndim != ndim or value.shape[:2] != (shape[0], length):
                wanted = f"({shape[0]}, {length}{', *' if ndim == 3 else ''})"
                raise InvalidEvidence(f"{name} must have shape {wanted}, found {tuple(value.shape)}")
            if value.device != device:
                raise InvalidEvidence(f"{name} is on {value.device}, the rest of the evidence on {device}: move it")
            floating, mask = value.dtype.is_floating_point, value.dtype == torch.bool
            if kind != ("floating point" if floating else "a boolean mask" if mask else "integer ids"):
                raise InvalidEvidence(f"{name} must be {kind}, found {value.dtype}")
        gates = self.step_log_gates
        if gates is not None and device.type == "cpu" and not bool(gates.isfinite().all()):
            raise InvalidEvidence("step_log_gates must be finite: a gate weighs a way, it does not close it")
        if self.tokens is None and self.observed is not None:
            raise InvalidEvidence("observed says which tokens are given, but tokens is None")
        if self.log_potentials is not None and self.logits is not None:
            raise InvalidEvidence("give log_potentials (used as they are) or logits (tempered, normalised), not both")
        if self.dense is not None and (self.potentials is None or sparse is None):
            raise InvalidEvidence("dense chooses between dense and sparse potentials: give both, or drop it")
        self._check_temperature(shape)

    def _check_temperature(self, shape: tuple[int, int]) -> None:
        t = self.temperature
        if not isinstance(t, Tensor):
            _check_temperatures([t])
        elif t.shape != shape[:1]:
            raise InvalidEvidence(f"a temperature per sequence must have shape ({shape[0]},), found {tuple(t.shape)}")
        elif t.device.type == "cpu":  # elsewhere, reading the values would wait for the device
            _check_temperatures(t.tolist())
        if self.logits is None and (isinstance(t, Tensor) or t != 1.0):
            raise InvalidEvidence("temperature divides logits; log_potentials are used as they are. Give logits")

    def _kinds(self, shape: tuple[int, int], device: torch.device) -> Int[Tensor, "B L"]:
        soft = Kind.MISSING if self.sparse is None else Kind.SPARSE
        kind = torch.full(shape, int(soft if self.potentials is None else Kind.DENSE), dtype=torch.int8, device=device)
        if self.dense is not None:
            kind.masked_fill_(~self.dense, int(Kind.SPARSE))
        if self.missing is not None:
            kind.masked_fill_(self.missing, int(Kind.MISSING))
        if self.observed is not None:
            kind.masked_fill_(self.observed, int(Kind.OBSERVED))
        elif self.tokens is not None:
            kind.fill_(int(Kind.OBSERVED))
        return kind


class Centred(NamedTuple):
    """Evidence with the largest log-weight of each row at zero, and the logarithms of what was taken out, in float64.

    The log Z of the evidence as given is that of ``evidence`` plus all of ``tokens`` and ``latents``.
    """

    evidence: Evidence
    tokens: Float[Tensor, "B L"]
    """Out of the weights of tokens; 0 where the token is observed, and for logits."""
    latents: Float[Tensor, " B"]
    """Out of the weights of latents and of steps."""
