"""Incremental conditioning: tokens become known one after the other, and the marginals of the rest follow each.

The evidence of a position that is not yet known stays as it is, so its leaf values, which cost a pass over the
vocabulary, are computed once. A token that becomes known replaces them with its column of the emission. What a token at
t changes is the forward messages after t and the backward messages before t:

    p(x_t = v | evidence) = w_t(v) sum_i f_t(i) pot_t(i) E[i, v] b_t(i) / sum_i f_t(i) L_t(i) b_t(i)

The denominator sums over the whole vocabulary, so the probabilities of a few candidates are exact, too.

On the CPU only the messages that changed, up to the last position that needs them, are computed again, and sequences in
which float32 may have lost something are answered by the reference. Elsewhere the host never looks at a position, which
would wait for the device: both directions run again, in one launch where they fit.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from codd.circuits import inference, pairwise
from codd.circuits.evidence import Evidence, Kind, log_softmax, tempered
from codd.circuits.ops import native
from codd.circuits.ops.backend import EAGER, REFERENCE, backend_for, use
from codd.circuits.ops.chain import eager as chain_eager
from codd.circuits.ops.doubt import Doubt
from codd.circuits.ops.draw.eager import Draw, Marginals
from codd.circuits.ops.leaf.eager import FLUSH
from codd.circuits.ops.pick import eager as pick_eager
from codd.circuits.ops.pick.eager import RULES, Limits, Offers, Picked
from codd.circuits.ops.scaled import Scaled, exponentials
from codd.circuits.parameters import Emission
from codd.circuits.protocol import Conditioner, ProbabilisticCircuit, Unconditioned
from codd.errors import InvalidEvidence

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM

_BLOCK = 2**24
"""Entries of a bfloat16 emission table that are widened at a time: 64 MiB."""


class _Places:
    """Some positions of each sequence: the same ones everywhere (all, or a list), or one a sequence."""

    def __init__(self, index: slice | Int[Tensor, " R"] | Int[Tensor, "B 1"], batch: int) -> None:
        """``index``: all positions as a slice, a list that all sequences share, or (B, 1)."""
        self.index = index
        self._sequences: Tensor | None = None
        if isinstance(index, Tensor) and index.ndim == 2:
            self._sequences = torch.arange(batch, device=index.device)[:, None]

    @property
    def own(self) -> bool:
        """Whether each sequence has a position of its own."""
        return self._sequences is not None

    def take(self, x: Shaped[Tensor, "B L *K"]) -> Shaped[Tensor, "B R *K"]:
        """The entries of a (B, L, ...) tensor at these positions."""
        return x[self._sequences, self.index] if self.own else x[:, self.index]


class IncrementalConditioner:
    """An HMM and evidence to which tokens are added one by one. Made by ``HMM.incremental``."""

    @torch.no_grad()
    def __init__(self, hmm: "HMM", ev: Evidence, candidates: int | None = None) -> None:
        """Compute what no later token changes: leaf values, and the emission columns of the candidates."""
        backend = backend_for(ev.device, hmm.dtype)
        self._offered, self._centred = ev, ev.centred()
        self._given = ev = self._centred.evidence
        self._hmm, self._steps = hmm, inference.steps_of(hmm, ev)
        self._backend = EAGER if backend is REFERENCE else backend
        self._host = ev.device.type == "cpu" and self._backend is EAGER
        batch, length = ev.shape
        self._leaf, doubt, self._totals = self._leaves()
        self._faint = torch.full((batch,), backend is REFERENCE, device=ev.device)  # to be answered by the reference
        self._lost: Tensor | None = None  # the share of Z that may be, where it is known
        self._doubt = torch.zeros((batch,), dtype=torch.bool, device=ev.device)  # to be looked at more closely
        if doubt is not None:
            self._doubt |= doubt
        self._sequences = torch.arange(batch, device=ev.device)
        self._observed = ev.rows(Kind.OBSERVED)
        self._tokens = (
            torch.zeros(ev.shape, dtype=torch.int64, device=ev.device)
            if ev.tokens is None
            else torch.where(self._observed, ev.tokens, 0)  # a mask's id need not be in the vocabulary
        )
        latent = ev.latent_log_potentials
        self._latent = None if latent is None else exponentials(latent.to(hmm.dtype))
        self._log_partition: Tensor | None = None
        self._both: tuple[Scaled, Scaled] | None = self._ends() if self._host else None  # forward, backward
        self._ahead, self._behind = 0, length - 1  # forward messages are right up to here, backward ones from here
        self._places = _Places(self._open() if self._host else slice(None), batch)
        self.candidates = None if candidates is None else _heaviest(ev, candidates)
        if not self._host and self.candidates is not None:
            _ = self._prepared  # now, not in a graph that is captured later

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L): the numbers of sequences and of positions."""
        return self._given.shape

    @property
    def evidence(self) -> Evidence:
        """The evidence with all tokens that were committed."""
        return self._with_tokens(self._offered)

    def _with_tokens(self, ev: Evidence) -> Evidence:
        return replace(ev, tokens=self._tokens.clone(), observed=self._observed.clone())

    @property
    @torch.no_grad()
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of the evidence and all committed tokens; -inf where they are impossible together."""
        log_z = self._surely(self._root().clone(), lambda ev, _: inference.log_partition(self._hmm, ev))
        taken = torch.where(self._observed, 0, self._centred.tokens).sum(-1) + self._centred.latents
        return (log_z + taken).to(self._hmm.dtype)

    @torch.no_grad()
    def commit(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> None:
        """Observe one more token in each sequence; a position that is known already stays as it is."""
        self._check("positions", positions, self._given.shape[1])
        self._check("tokens", tokens, self._hmm.vocab_size)
        self._observe(positions.long(), tokens.long(), torch.ones_like(positions, dtype=torch.bool))

    @torch.no_grad()
    def pick(
        self,
        rule: str,
        open_: Bool[Tensor, "B L"],
        given: Float[Tensor, "B L"] | None = None,
        threshold: float | None = None,
    ) -> Picked:
        """Commit the most probable token of the open position that comes first, and close the position in ``open_``.

        First by the probability of the token ("low_confidence"), by its lead over the second ("margin"), or by the
        largest number in ``given`` ("given"); of equals the leftmost. A sequence with nothing open stays as it is, as
        does one whose token is below the threshold, which "low_confidence" may have: there all positions are closed.
        """
        self._check_pick(rule, open_, given)
        candidates = self.candidates
        if not self._host and candidates is not None:
            scale = None if self._latent is None else self._latent.log_scale
            state = (self._leaf, self._tokens, self._observed)
            log_p = self._candidate_marginals(open_)
            picked = self._backend.pick(
                log_p, candidates, open_, rule, given, self._prepared[0], scale, *state, threshold
            )
            self._log_partition = self._both = None
            return picked
        choice = pick_eager.choose(self.log_marginals(), open_, rule, given, candidates is not None, threshold)
        at, tokens = (self._sequences, choice.positions), choice.tokens
        if candidates is not None:
            tokens = candidates[(*at, tokens)]
        self._observe(choice.positions, tokens, choice.keep)
        pick_eager.close(open_, choice.positions, choice.keep)
        return Picked(choice.positions, tokens, choice.probabilities.float(), choice.sure, choice.keep)

    @torch.no_grad()
    def picks(
        self,
        rule: str,
        open_: Bool[Tensor, " L"],
        given: Float[Tensor, " L"] | None,
        count: int,
        threshold: float | None = None,
        draw: native.Drawing | None = None,
    ) -> native.Picks | None:
        """The tokens that `pick` would commit in one sequence, one by one, or tokens that are drawn; commits nothing.

        ``count`` of them at most; after the first one, none below the threshold. Tokens can be drawn with the rule
        "low_confidence", by which the one drawn counts. All of it runs in C, on a CPU; None where it cannot.
        """
        ev, emission, steps = self._given, self._hmm.emission, self._steps
        one_table = self._hmm.dtype == torch.float32 and not (steps.low_rank or steps.stepwise or emission.per_position)
        dense = ev.potentials is not None and ev.sparse is None and len(ev.kind) == 1
        if self.candidates is None or not (self._host and one_table and dense) or bool(self._faint.any()):
            return None
        everywhere = _Places(slice(None), 1)
        chain = native.Chain(
            steps.linear[0] if steps.narrowed is None else steps.narrowed,
            self._hmm.log_initial.detach().softmax(-1),
            emission.columns,
            None if self._latent is None else self._latent.values[0],
            self._leaf.values[0],
            self.candidates[0],
            (self._log_weights_of(self.candidates, everywhere) + self._offset(everywhere))[0].exp(),
        )
        most, least = min(count, int(open_.sum())), 0.0 if threshold is None else threshold
        return native.pick(chain, open_, RULES.index(rule), given, most, least, pick_eager.ROUNDING, draw)

    @property
    def proposes(self) -> bool:
        """Whether `propose` can be called: on a GPU, with dense evidence and one emission table."""
        return self._totals is not None and self._backend.propose is not None

    @torch.no_grad()
    def propose(self, open_: Bool[Tensor, "B L"], draw: Draw, uniforms: Float[Tensor, "B L"] | None) -> Offers:
        """A token for every open position, given what is committed: drawn with ``uniforms``, or the most probable one.

        On a GPU only: see `proposes`.
        """
        assert self._backend.propose is not None
        return self._backend.propose(self._dense_marginals(open_, draw), open_, draw, uniforms)

    @torch.no_grad()
    def take(self, offers: Offers, open_: Bool[Tensor, "B L"], limits: Limits) -> Picked:
        """Commit the open position's offer that comes first, of equals the leftmost, and close the position.

        Offers that reach the threshold come before all others. Where the limits are reached, nothing is committed, and
        all positions are closed.
        """
        take = self._backend.take if self.proposes else None
        if take is not None:
            state = (self._hmm.emission, self._latent, self._leaf, self._tokens, self._observed)
            picked = take(offers, open_, limits, *state)
            self._log_partition = self._both = None
            return picked
        picked = pick_eager.first_offer(offers, open_, limits)
        self._observe(picked.positions, picked.tokens, picked.keep)
        pick_eager.close(open_, picked.positions, picked.keep)
        return picked

    def _observe(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"], where: Bool[Tensor, " B"]) -> None:
        """Replace leaf values by columns of the emission, in some sequences, unless a position is known already."""
        at = (self._sequences, positions)
        new = where & ~self._observed[at]
        log = _log_column(self._hmm.emission, positions, tokens)
        if self._given.latent_log_potentials is not None:
            log = log + self._given.latent_log_potentials[at].to(log.dtype)
        row = exponentials(log[:, None])
        self._leaf.values[at] = torch.where(new[:, None], row.values[:, 0], self._leaf.values[at])
        self._leaf.log_scale[at] = torch.where(new[:, None], row.log_scale[:, 0], self._leaf.log_scale[at])
        self._tokens[at] = torch.where(new, tokens, self._tokens[at])
        self._observed[at] |= new
        self._log_partition = self._lost = None
        if self._host:
            low, high = (int(x) for x in torch.aminmax(positions))
            self._ahead, self._behind = min(self._ahead, low), max(self._behind, high)
            tiny = torch.finfo(log.dtype).tiny
            self._doubt |= ((log > -torch.inf) & (row.values[:, 0] < tiny)).any(-1) & new
        else:
            self._both = None

    @torch.no_grad()
    def log_marginals(self) -> Float[Tensor, "B L K"]:
        """log p(x_t | evidence, committed tokens) of the candidates, or of all tokens if there are none.

        Normalised over all tokens: what the candidates leave to one is the probability of all others.
        """
        if self.candidates is None:
            return self.dense_log_marginals()
        places, candidates = self._places, self.candidates
        if not self._host:
            return self._candidate_marginals(None)
        cavity, possible = self._cavity(places)
        # The states last in both: read as it lies, this product is several times faster than the other way round.
        columns, weights = self._prepared
        log_p = (cavity[:, :, None] @ columns.mT)[:, :, 0].log_().add_(weights)
        out = torch.where(candidates == self._tokens[..., None], 0.0, -torch.inf).to(self._hmm.dtype)
        hidden = ~places.take(self._observed)[..., None]
        out[:, places.index] = torch.where(hidden, log_p, places.take(out))
        out.masked_fill_(~possible, -torch.inf)
        return self._surely(out, lambda ev, index: inference.marginals(self._hmm, ev, candidates[index]))

    def _candidate_marginals(self, open_: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L K"]:
        """Log-probabilities of the candidates by the kernels; anything in sequences with no position in ``open_``."""
        forward, backward = self._messages(open_)
        messages = (forward.values, backward.values, self._leaf.values)
        cached = (*self._prepared, self.candidates)
        return self._backend.candidate_marginals(*messages, *cached, self._tokens, self._observed, open_)

    def _dense_marginals(self, open_: Bool[Tensor, "B L"] | None, draw: Draw) -> Marginals:
        """Log-probabilities of all tokens by the backend's kernel; anything at positions that are not in ``open_``."""
        assert self._backend.dense_marginals is not None
        state = (self._leaf, self._latent, self._tokens, self._observed)
        messages = self._messages(open_)
        return self._backend.dense_marginals(
            self._hmm.emission, self._given, self._totals, messages, *state, open_, draw
        )

    @torch.no_grad()
    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        """Log-probabilities of all tokens: (B, L, V), or (B, V) at one position of each sequence."""
        batch, length = self._given.shape
        if positions is not None:
            self._check("positions", positions, length)
        if positions is None and self.proposes:
            return self._dense_marginals(None, Draw()).log_p
        everywhere = _Places(self._open() if self._host else slice(None), batch)
        places = everywhere if positions is None else _Places(positions.long()[:, None], batch)
        cavity, possible = self._cavity(places)
        if self._latent is not None:
            cavity = cavity * places.take(self._latent.values)
        log_p = _emitted(self._hmm.emission, cavity, places)
        log_p = log_p.log_().add_(self._log_weights(places)).add_(self._offset(places))
        vocabulary = torch.arange(self._hmm.vocab_size, device=log_p.device)
        tokens = self._tokens if positions is None else places.take(self._tokens)
        out = torch.where(vocabulary == tokens[..., None], 0.0, -torch.inf).to(log_p.dtype)
        hidden = ~places.take(self._observed)[..., None]
        if positions is None:
            out[:, places.index] = torch.where(hidden, log_p, places.take(out))
        else:
            out = torch.where(hidden, log_p, out)
        out.masked_fill_(~possible, -torch.inf)

        def exact(ev: Evidence, index: Int[Tensor, " S"]) -> Tensor:
            full = inference.marginals(self._hmm, ev)
            return full if positions is None else _Places(positions[index].long()[:, None], len(index)).take(full)

        out = self._surely(out, exact)
        return out if positions is None else out[:, 0]

    def _check(self, name: str, given: Int[Tensor, " B"], limit: int) -> None:
        batch = self._given.shape[0]
        if given.shape != (batch,) or given.dtype.is_floating_point or given.dtype == torch.bool:
            raise InvalidEvidence(
                f"{name} must be integers, one a sequence: ({batch},); found {tuple(given.shape)} of {given.dtype}"
            )
        if given.device != self._given.device:
            raise InvalidEvidence(f"{name} are on {given.device}, the evidence on {self._given.device}: move them")
        if given.device.type == "cpu":  # elsewhere, looking at values would wait for the device
            wrong = given[(given < 0) | (given >= limit)]
            if len(wrong):
                raise InvalidEvidence(f"{name} must be in 0..{limit - 1}, found {int(wrong[0])}")

    def _check_pick(self, rule: str, open_: Bool[Tensor, "B L"], given: Float[Tensor, "B L"] | None) -> None:
        if rule not in RULES:
            raise InvalidEvidence(f"rule must be one of {', '.join(RULES)}, found {rule!r}")
        if (rule == "given") != (given is not None):
            raise InvalidEvidence(
                'the order of the positions, (B, L), is for rule="given", which needs it: '
                f"found {'none' if given is None else 'one'} with rule={rule!r}"
            )
        for name, x in (("open_", open_), ("given", given)):
            if x is not None and (x.shape != self._given.shape or x.device != self._given.device):
                raise InvalidEvidence(
                    f"{name} must have the shape and the device of the evidence, {self._given.shape} on "
                    f"{self._given.device}; found {tuple(x.shape)} on {x.device}"
                )
        if open_.dtype != torch.bool:
            raise InvalidEvidence(f"open_ must be a boolean mask, found {open_.dtype}")

    # What no later token changes.

    def _leaves(self) -> tuple[Scaled, Doubt, Float[Tensor, "2 B L"] | None]:
        """Leaf values, and the normalisers of the dense rows where the backend has them from the same pass."""
        hmm, ev, backend, totals = self._hmm, self._given, self._backend, None
        fits = ev.potentials is not None and ev.sparse is None and not hmm.emission.per_position
        if fits and backend.leaf_totals is not None:
            leaf_values, totals = backend.leaf_totals(hmm.emission, ev)
            backend = replace(backend, leaf_values=lambda *_: leaf_values)  # to be looked at as all leaf values are
        leaf, doubt = inference._leaf(hmm, ev, backend, each=False)
        if not self._host:  # as the kernels read and write them
            leaf = Scaled(leaf.values.contiguous(), leaf.log_scale.contiguous())
        return leaf, doubt, totals

    @cached_property
    def _prepared(self) -> tuple[Float[Tensor, "B R K N"], Float[Tensor, "B R K"]]:
        """Columns of the candidates times latent potentials, and log-weights with the scales that belong to them."""
        assert self.candidates is not None
        hmm, places = self._hmm, self._places
        if self._totals is not None and self._backend.prepare is not None:
            state = (self._leaf.log_scale, self._totals, self._latent)
            return self._backend.prepare(hmm.emission, self._given, self.candidates, *state)
        ids = places.take(self.candidates)
        columns = _columns(hmm.emission, ids, places.index)
        if self._latent is not None:
            columns *= places.take(self._latent.values)[:, :, None]
        return columns, self._log_weights_of(ids, places) + self._offset(places)

    # Messages.

    def _open(self) -> Int[Tensor, " R"]:
        """The positions that some sequence does not know."""
        return (~self._observed).any(0).nonzero()[:, 0]

    def _ends(self) -> tuple[Scaled, Scaled]:
        """Buffers for all messages, with the first forward and the last backward one filled in."""
        values, scale = self._leaf.values.transpose(0, 1), self._leaf.log_scale
        forward, backward = (
            Scaled(torch.zeros_like(values).transpose(0, 1), torch.zeros_like(scale, dtype=torch.float64))
            for _ in range(2)
        )
        first = exponentials(self._hmm.log_initial.detach().expand(values.shape[1], 1, -1))
        forward.values[:, :1], forward.log_scale[:, :1] = first.values, first.log_scale
        backward.values[:, -1] = 1
        return forward, backward

    def _messages(self, open_: Bool[Tensor, "B L"] | None = None) -> tuple[Scaled, Scaled]:
        """Forward and backward messages, right wherever a position is not yet known, and at ``_ahead``.

        On a device sequences with no position in ``open_`` may get anything instead.
        """
        hmm, backend, both = self._hmm, self._backend, self._both
        if both is None:
            assert backend.forward_backward is not None
            both = backend.forward_backward(self._steps, hmm.log_initial, self._leaf, open_=open_)
            self._both = both
        if not self._host:
            return both
        places, last = self._open(), self._given.shape[1] - 1
        low, high = (int(places[0]), int(places[-1])) if len(places) else (self._ahead, self._ahead)
        if bool(self._doubt.any()):  # what may be lost shows where both are right
            low, high = 0, last
        # Tables that belong to their steps serve the whole chain only.
        whole = self._steps.stepwise
        if high > self._ahead:
            self._ahead, begin = (last, 0) if whole else (high, self._ahead)
            self._renew(both[0], begin, self._ahead)
        if low < self._behind:
            self._behind, begin = (0, last) if whole else (low, self._behind)
            self._renew(both[1], begin, self._behind)
        return both

    def _renew(self, messages: Scaled, begin: int, end: int) -> None:
        """Make the messages after ``begin``, where one is known, up to ``end``: backward ones if that is before."""
        reverse, here = end < begin, slice(min(begin, end), max(begin, end) + 1)
        leaf, message = (Scaled(x.values[:, here], x.log_scale[:, here]) for x in (self._leaf, messages))
        # The chain starts from one: what is known goes into the first leaf, whose largest entry is at one, so that
        # scales do not pile up over many short chains.
        start = Scaled(leaf.values.clone(), leaf.log_scale.to(torch.float64, copy=True))
        edge, new = (slice(-1, None), slice(None, -1)) if reverse else (slice(1), slice(1, None))
        first = start.values[:, edge].mul_(message.values[:, edge])
        top = first.amax(-1, keepdim=True)
        top.masked_fill_(top == 0, 1)
        first.div_(top)
        start.log_scale[:, edge] += message.log_scale[:, edge] + top.log()
        found = chain_eager.messages(self._steps, None, start, reverse)
        message.values[:, new], message.log_scale[:, new] = found.values[:, new], found.log_scale[:, new]
        # Doubt all sequences if a product of message and leaf may have lost something; `_in_doubt` says which.
        if not chain_eager.nothing_lost(leaf * message):
            self._doubt.fill_(True)

    def _root(self) -> Float[Tensor, " B"]:
        """log Z, at a position where both messages are right."""
        if self._log_partition is None:
            forward, backward = self._messages()
            at = self._ahead if self._host else 0
            # Through logarithms: the product of the three could leave the range of float32.
            here = [x.values[:, at].double().log() + x.log_scale[:, at] for x in (forward, self._leaf, backward)]
            self._log_partition = (here[0] + here[1] + here[2]).logsumexp(-1)
        return self._log_partition

    # Answers.

    def _cavity(self, places: _Places) -> tuple[Float[Tensor, "B R N"], Shaped[Tensor, "B #R 1"]]:
        """Forward times backward over Z (up to the scale of the leaf), and whether the evidence is possible."""
        forward, backward = self._messages()
        cavity = places.take(forward.values) * places.take(backward.values)
        total = (cavity * places.take(self._leaf.values)).sum(-1, keepdim=True)
        if not self._host:
            return cavity / total, total > 0
        possible = self._root() > -torch.inf
        faint = (total[..., 0] < FLUSH) & ~places.take(self._observed)
        self._faint |= faint.any(-1) & possible
        return cavity / torch.where(total > 0, total, 1), possible[:, None, None]

    def _offset(self, places: _Places) -> Float[Tensor, "B R 1"]:
        """The logarithm of the scale that the latent potential has and the leaf has not."""
        scale = -places.take(self._leaf.log_scale)
        return scale if self._latent is None else scale + places.take(self._latent.log_scale)

    def _log_weights(self, places: _Places) -> Float[Tensor, "B R V"]:
        """The log-weight of every token before anything was committed; zero where it was observed."""
        ev, dtype, vocab = self._given, self._hmm.dtype, self._hmm.vocab_size
        kind = places.take(ev.kind)[..., None]
        out = torch.zeros(*kind.shape[:2], vocab, dtype=dtype, device=ev.device)
        if ev.potentials is not None:
            out = torch.where(kind == Kind.DENSE, self._dense_log_weights(places), out)
        if ev.sparse is not None:
            tail = places.take(ev.sparse.log_tail_weight(vocab)).to(dtype)
            listed = places.take(ev.sparse.log_weights).to(dtype)
            rest = tail[..., None].expand_as(out)
            out = torch.where(kind == Kind.SPARSE, rest.scatter(-1, places.take(ev.sparse.ids), listed), out)
        return out

    def _dense_log_weights(self, places: _Places) -> Float[Tensor, "B R V"]:
        ev, dtype = self._given, self._hmm.dtype
        x = places.take(ev.potentials)  # type: ignore[arg-type]  # the caller looked
        return log_softmax(tempered(x, ev.heat(dtype), dtype)) if ev.normalised else x.to(dtype)

    def _log_weights_of(self, ids: Int[Tensor, "B R K"], places: _Places) -> Float[Tensor, "B R K"]:
        """The log-weights of some tokens of each place."""
        ev, dtype = self._given, self._hmm.dtype
        kind = places.take(ev.kind)[..., None]
        out = torch.where(kind == Kind.DENSE, self._dense_log_weights(places).gather(-1, ids), 0)
        if ev.sparse is not None:
            hit = places.take(ev.sparse.ids)[:, :, None] == ids[..., None]
            listed = torch.where(hit, places.take(ev.sparse.log_weights).to(dtype)[:, :, None], -torch.inf).amax(-1)
            tail = places.take(ev.sparse.log_tail_weight(self._hmm.vocab_size)).to(dtype)[..., None]
            out = torch.where(kind == Kind.SPARSE, torch.where(hit.any(-1), listed, tail), out)
        return out

    def _surely(self, fast: Tensor, exact: Callable[[Evidence, Int[Tensor, " S"]], Tensor]) -> Tensor:
        """The answer, with that of the reference for the sequences in doubt."""
        if self._host and bool((wrong := self._in_doubt()).any()):
            index = wrong.nonzero()[:, 0]
            with use("reference"):
                fast[index] = exact(self._with_tokens(self._given).select(index), index)
        return fast

    def _in_doubt(self) -> Bool[Tensor, " B"]:
        """The sequences in which more may be lost than counts."""
        if not bool(self._doubt.any()):
            return self._faint
        if self._lost is None:
            forward, backward = self._messages()
            self._lost = inference.lost_share(forward.values, self._leaf.values, backward.values)
        return self._faint | (self._doubt & ~(self._lost <= inference.TOLERATED))


class RecomputingConditioner:
    """`codd.circuits.protocol.Conditioner` by asking again after every token: for any circuit, and for comparison."""

    candidates: Int[Tensor, "B L K"] | None = None
    """Always None: `log_marginals` covers all V tokens."""

    def __init__(self, circuit: ProbabilisticCircuit, ev: Evidence) -> None:
        """Start from evidence; nothing is computed yet."""
        self._circuit = circuit
        self.evidence = ev
        """The evidence with all tokens that were committed."""

    @property
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of the evidence and all committed tokens."""
        return self._circuit.log_partition(self.evidence)

    def log_marginals(self) -> Float[Tensor, "B L V"]:
        """log p(x_t | evidence, committed tokens) of all tokens."""
        return self._circuit.marginals(self.evidence)

    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        """Log-probabilities of all tokens: (B, L, V), or (B, V) at one position of each sequence."""
        log_p = self.log_marginals()
        return log_p if positions is None else log_p[torch.arange(len(log_p), device=log_p.device), positions]

    def commit(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> None:
        """Observe one more token in each sequence; a position that is known already stays as it is."""
        ev = self.evidence
        observed = ev.rows(Kind.OBSERVED)
        known = (
            torch.zeros_like(ev.kind, dtype=torch.int64) if ev.tokens is None else torch.where(observed, ev.tokens, 0)
        )
        new = torch.zeros_like(observed).scatter(1, positions[:, None], True) & ~observed
        self.evidence = replace(ev, tokens=torch.where(new, tokens[:, None], known), observed=observed | new)


class Recomputing(Unconditioned):
    """The queries that any circuit answers by being asked for its marginals again and again."""

    def pairwise(
        self: ProbabilisticCircuit, ev: Evidence, candidates: Int[Tensor, "B L K"]
    ) -> Float[Tensor, "B L L C C"]:
        """p(class at s, class at t | evidence) of every two positions: each candidate, and last all other tokens."""
        return pairwise.by_conditioning(self, ev, candidates.long()).to(self.dtype)

    def incremental(self: ProbabilisticCircuit, ev: Evidence, candidates: int | None = None) -> Conditioner:
        """Marginals of all tokens while tokens are committed one by one; fewer ``candidates`` would save no work."""
        return RecomputingConditioner(self, ev)


def _heaviest(ev: Evidence, count: int) -> Int[Tensor, "B L K"]:
    """The tokens with the largest dense potentials; a temperature does not change which they are."""
    if ev.potentials is None:
        raise InvalidEvidence(
            "candidates are the tokens with the largest dense potentials, and this evidence has none: "
            "give logits or log_potentials, or candidates=None for all tokens"
        )
    if not 1 <= count <= ev.potentials.shape[-1]:
        raise InvalidEvidence(f"candidates must be between 1 and V = {ev.potentials.shape[-1]}, found {count}")
    if ev.device.type != "cpu":
        return ev.potentials.topk(count, dim=-1).indices
    dense, out = ev.rows(Kind.DENSE), torch.zeros(*ev.shape, count, dtype=torch.int64)
    out[dense] = ev.potentials[dense].topk(count, dim=-1).indices  # of the others nothing is asked
    return out


def _log_column(emission: Emission, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """The log-probabilities of some tokens, each at its position, under every state."""
    table = emission.stored.detach()
    column = table[positions, :, tokens] if emission.per_position else table[:, tokens].T
    return column.float().log() if emission.compact else column


def _columns(
    emission: Emission, ids: Int[Tensor, "B R K"], rows: slice | Int[Tensor, " R"]
) -> Float[Tensor, "B R K N"]:
    """The probabilities of some tokens under every state, without a second copy of the whole table on a GPU."""
    if ids.device.type == "cpu":
        if not emission.per_position:
            return torch.nn.functional.embedding(ids, emission.columns)
        columns = emission.columns[rows]
        return torch.stack([columns[r][ids[:, r]] for r in range(len(columns))], 1)
    batch, places, count = ids.shape
    if not emission.per_position:
        return emission.linear[:, ids].permute(1, 2, 3, 0).to(emission.dtype).contiguous()
    index = ids.transpose(0, 1).reshape(places, 1, -1).expand(-1, emission.stored.shape[-2], -1)
    columns = emission.linear[rows].gather(-1, index).reshape(places, -1, batch, count)
    return columns.permute(2, 0, 3, 1).to(emission.dtype).contiguous()


def _emitted(emission: Emission, cavity: Float[Tensor, "B R N"], places: _Places) -> Float[Tensor, "B R V"]:
    """sum_i c(i) E[i, v]: the weight of every token under weights of the states."""
    table, dtype = emission.linear, cavity.dtype
    if emission.per_position:
        if places.own:
            return cavity @ table[places.index][:, 0].to(dtype)
        return (cavity.transpose(0, 1) @ table[places.index].to(dtype)).transpose(0, 1)
    if not emission.compact:
        return cavity @ table
    if cavity.device.type == "cpu":
        return cavity @ emission.columns.T
    width = max(1, _BLOCK // table.shape[0])
    return torch.cat([cavity @ block.to(dtype) for block in torch.split(table, width, -1)], -1)
