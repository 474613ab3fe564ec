"""An HMM times a regular language: exact queries given that the text is one that an automaton accepts.

The automaton is deterministic, so the pair (z_t, s_t) of the latent and of the state before token t is again a chain.
With the null circuit of one state it is the network alone, given the language.
"""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from codd.circuits.evidence import Evidence, check_possible, log_ratio
from codd.circuits.hmm import HMM
from codd.circuits.incremental import Recomputing
from codd.circuits.ops.backend import backend_for
from codd.circuits.ops.commit.eager import commit_tokens
from codd.circuits.ops.constrained.eager import Linear, Rows, numbered
from codd.circuits.ops.constrained.product_chain import ProductChain, ProductMessages
from codd.circuits.ops.constrained.reachable_states import TokenClasses
from codd.circuits.ops.constrained.reference import LogSpace
from codd.circuits.protocol import ProbabilisticCircuit
from codd.circuits.results import JointStep, Samples
from codd.circuits.sampling import as_asked, draw_token, sample_uniforms
from codd.circuits.underflow import Answer, Attempt, Select, either, first_sound, lost_some
from codd.constraints import Automaton
from codd.errors import InvalidCircuit, InvalidEvidence

Query: TypeAlias = Callable[[ProductMessages, Select], Answer]
"""From the messages, and what selects the same sequences of any tensor, to results and where they underflow."""

_CANDIDATES = 16
"""Tokens of a position that are followed while others are committed: a language leaves few."""
_BLOCK = 2**22
"""Scores of samples that are held at a time."""


class WindowConstraint(NamedTuple):
    """An automaton, and log-weights (S,) of its state before a window's first position and after its last.

    By default it starts in its start state and ends in any accepting one.
    """

    automaton: Automaton
    log_start: Float[Tensor, " S"] | None = None
    log_end: Float[Tensor, " S"] | None = None


class ConstrainedHMM(Recomputing):
    """An HMM whose strings are read by an automaton, all windows of a batch by the same one.

    A latent is a pair: number ``s * N + z`` for the automaton's state s before the position and the HMM's state z;
    `posterior` is about z alone. Which states can occur is worked out on the host from the observed tokens, so that on
    a GPU a query waits for these, and nothing is differentiable.
    """

    supports_cuda_graphs = False

    def __init__(
        self,
        hmm: ProbabilisticCircuit,
        automaton: Automaton,
        log_start: Float[Tensor, " S"] | None = None,
        log_end: Float[Tensor, " S"] | None = None,
    ) -> None:
        """Check that the automaton reads the circuit's tokens.

        Args:
            hmm: the circuit; `InvalidCircuit` if it is not an HMM over the automaton's vocabulary.
            automaton: what reads the strings.
            log_start: log-weights of its state before the first position; by default it is the start state.
            log_end: log-weights of its state after the last position; by default any accepting one has weight 1.
        """
        if not isinstance(hmm, HMM):
            raise InvalidCircuit(
                f"a constraint needs an HMM, or a Modulated circuit through Coupled; found a {type(hmm).__name__}"
            )
        if automaton.vocab_size != hmm.vocab_size:
            raise InvalidCircuit(
                f"the automaton is over {automaton.vocab_size} tokens, the circuit over {hmm.vocab_size}: compile the "
                "constraint for the vocabulary of the circuit"
            )
        self.hmm, self.automaton = hmm, automaton
        self.vocab_size, self.length, self.window = hmm.vocab_size, hmm.length, hmm.window
        self.device, self.dtype = hmm.device, hmm.dtype
        start = np.where(np.arange(automaton.num_states) == automaton.start, 0.0, -np.inf)
        end = np.where(np.asarray(automaton.accepting), 0.0, -np.inf)
        ends = self._ends("log_start", log_start, start), self._ends("log_end", log_end, end)
        tables = hmm.log_initial, hmm.transition, hmm.emission
        self._chain = ProductChain(*tables, TokenClasses.of(automaton), *ends)

    def _ends(self, name: str, given: Tensor | None, otherwise: np.ndarray) -> Float[Tensor, " S"]:
        if given is None:
            return torch.from_numpy(otherwise).to(self.hmm.device)
        if given.shape != otherwise.shape or not given.dtype.is_floating_point or bool((~(given < torch.inf)).any()):
            raise InvalidEvidence(
                f"{name} must be ({len(otherwise)},) log-weights, finite or -inf, one for each state of the automaton; "
                f"found {given.dtype} of shape {tuple(given.shape)}"
            )
        return given.to(self.hmm.device, torch.float64)

    @property
    def num_latents(self) -> int:
        """S N: pairs of an automaton's state and a state of the HMM."""
        return self.automaton.num_states * self.hmm.num_states

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "ConstrainedHMM":
        """The same constrained circuit on another device, or in another type (float32 or float64)."""
        return ConstrainedHMM(self.hmm.to(device, dtype), self.automaton, self._chain.log_start, self._chain.log_end)

    def save(self, folder: str | PathLike[str]) -> Path:
        """`InvalidCircuit`: a circuit is saved without the constraint of a run."""
        raise InvalidCircuit("a constrained circuit is not saved: save its .hmm, and the constraint where it came from")

    # Queries.

    def log_partition(self, ev: Evidence) -> Float[Tensor, " B"]:
        """log Z: of all strings of the language that the evidence allows; -inf if there are none."""
        ev, offset = self.hmm.centred(ev)
        return (self._log_partition(ev) + offset).to(self.dtype)

    def _log_partition(self, ev: Evidence) -> Float[Tensor, " B"]:
        return self._answer(ev, lambda messages, _: ((messages.log_partition(),), messages.underflow))[0]

    def conditional_log_prob(self, ids: Int[Tensor, "B L"], ev: Evidence) -> Float[Tensor, " B"]:
        """log p(ids at the positions that are not observed | evidence, language); -inf for strings outside of it."""
        ev, _ = self.hmm.centred(ev)
        hard, given = ev.completed(ids, self.vocab_size)
        assert hard.tokens is not None
        joint = self.hmm.log_partition(hard).double() + given + self._log_reading(hard.tokens)
        return log_ratio(joint, self._log_partition(ev)).to(self.dtype)

    def _log_reading(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, " B"]:
        """The log-weight of reading whole strings: summed over the states to begin with, with that of where it ends."""
        table, classes = self._chain.classes.tables(ids.device)
        state = torch.arange(len(table), device=ids.device).expand(len(ids), -1)
        for one in classes[ids].T:
            state = torch.where(state >= 0, table[state, one[:, None]], -1)
        end = torch.where(state >= 0, self._chain.log_end[state], -torch.inf)
        return (self._chain.log_start + end).logsumexp(-1)

    def marginals(self, ev: Evidence) -> Float[Tensor, "B L V"]:
        """log p(x_t | evidence, language) of every token."""

        def query(messages: ProductMessages, select: Select) -> Answer:
            out, underflow = messages.marginals()
            return (out,), either(underflow, messages.underflow)

        return self._answer(self.hmm.centred(ev)[0], query)[0].to(self.dtype)

    def posterior(self, ev: Evidence) -> Float[Tensor, "B L N"]:
        """log p(z_t | evidence, language) of every state of the HMM; -inf throughout for impossible evidence."""

        def query(messages: ProductMessages, select: Select) -> Answer:
            rows = [messages.posterior(t) for t in range(messages.length)]
            log = torch.stack([row.logs().logsumexp(0) for row in rows], 1)
            total = log.logsumexp(-1, keepdim=True)
            return (log - torch.where(total > -torch.inf, total, 0),), either(*(row.underflow for row in rows))

        return self._answer(self.hmm.centred(ev)[0], query)[0].to(self.dtype)

    def passages(self, ev: Evidence) -> "Passages":
        """Which states of the automaton the strings of one window pass through."""
        return Passages(self, ev)

    def sample(
        self, ev: Evidence, *, generator: torch.Generator | None = None, num_samples: int | None = None
    ) -> Samples:
        """Exact joint samples; with ``num_samples`` they get a leading axis. `ImpossibleEvidence` if there are none."""
        ev, offset = self.hmm.centred(ev)
        uniforms = sample_uniforms(ev, num_samples, generator)

        def query(messages: ProductMessages, select: Select) -> Answer:
            numbers = select(uniforms).transpose(0, 1)
            paths = messages.paths(numbers[..., 0])
            size = max(1, _BLOCK // (numbers[0, ..., 1].numel() * self.vocab_size))
            parts = []
            for m in range(0, len(paths), size):
                weights = messages.scores(paths[m : m + size]).softmax(-1).nan_to_num_(0.0)
                parts.append(draw_token(weights.flatten(0, 2), numbers[m : m + size, ..., 1].flatten()))
            tokens = torch.cat(parts).view(paths.shape)
            return (paths.transpose(0, 1), tokens.transpose(0, 1), messages.log_partition()), messages.underflow

        latents, tokens, log_z = self._answer(ev, query)
        check_possible(log_z, None)
        return as_asked(tokens, latents, (log_z + offset).to(self.dtype), num_samples)

    @torch.no_grad()
    def conditional_scores(self, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """log w_t(v) + log E[z_t, v] of the tokens v that lead to the next latent's state; -inf for all others.

        At the last position each token counts with the log-weight of the state that it leads to.
        """
        self.hmm.centred(ev)
        if latents.shape != ev.shape:
            raise InvalidEvidence(f"latents must have the evidence's shape {ev.shape}, found {tuple(latents.shape)}")
        return self._messages(ev).scores(latents[None])[0].to(self.dtype)

    def joint_step(
        self, ev: Evidence, *, generator: torch.Generator | None = None, uniforms: Float[Tensor, "B L"] | None = None
    ) -> JointStep:
        """A path of latents and automaton states, and the scores given it; impossible evidence does not raise here."""
        centred, offset = self.hmm.centred(ev)
        if uniforms is None:
            uniforms = torch.rand(ev.shape, generator=generator, device=ev.device)

        def query(messages: ProductMessages, select: Select) -> Answer:
            paths = messages.paths(select(uniforms)[None])
            return (paths[0], messages.scores(paths)[0], messages.log_partition()), messages.underflow

        latents, scores, log_z = self._answer(centred, query)
        scores = scores + ev.centred().tokens[..., None]
        return JointStep(latents, scores.to(self.dtype), (log_z + offset).to(self.dtype))

    def incremental(self, ev: Evidence, candidates: int | None = None) -> "ConstrainedConditioner":
        """Marginals while tokens are committed one by one: of all tokens, or of the likeliest (at most 16)."""
        return ConstrainedConditioner(self, ev, candidates)

    def _messages(self, ev: Evidence) -> ProductMessages:
        """The messages, by the fastest backend that supports this dtype, device and automaton."""
        backend = backend_for(ev.device, self.dtype).name
        if backend == "triton" and self.dtype == torch.float32:
            from codd.circuits.ops.constrained.device import DeviceMessages, served

            if served(self._chain, ev):
                return DeviceMessages(self._chain, ev)
        algebra = LogSpace() if backend == "reference" else Linear(self.dtype, compiled=backend == "native")
        return ProductMessages(self._chain, ev, algebra)

    def _answer(self, ev: Evidence, query: Query) -> tuple[Tensor, ...]:
        """Answer a query whose results have the batch first."""

        def attempt(messages: Callable[[Evidence], ProductMessages]) -> Attempt:
            return lambda ev, select: query(messages(ev), select)

        return first_sound(ev, map(attempt, self._ways()))

    def _ways(self) -> list[Callable[[Evidence], ProductMessages]]:
        """What gives the messages: the fastest backend, then float64 and logarithms, for what float32 may have lost."""
        slower = (Linear(torch.float64), LogSpace())

        def exact(algebra: Linear) -> Callable[[Evidence], ProductMessages]:
            return lambda ev: ProductMessages(self.to(dtype=torch.float64)._chain, ev, algebra)

        return [self._messages, *map(exact, slower if self.dtype == torch.float32 else slower[1:])]


class Passages:
    """How probable it is that a string of the language passes through states of the automaton, one after the other.

    Made by ``ConstrainedHMM.passages``, for one window. What follows a state does not depend on how it was reached, so
    that only forward messages are made again.
    """

    @torch.no_grad()
    def __init__(self, circuit: ConstrainedHMM, ev: Evidence) -> None:
        """Compute the messages, in float64 or logarithms where float32 loses something."""
        ev, _ = circuit.hmm.centred(ev)
        for messages in circuit._ways():
            self._messages = messages(ev)
            if not lost_some(self._messages.underflow):
                break
        self._log_z = float(self._messages.log_partition())

    @torch.no_grad()
    def begin(self) -> dict[int, Rows]:
        """What enters the first position: with `onward` it goes on from there."""
        return {0: self._messages.forward(0)}

    @torch.no_grad()
    def onward(self, entered: dict[int, Rows], exits: NDArray[np.int64]) -> dict[int, Rows]:
        """What of that reaches some states, or the end of the window."""
        return self._messages.onward(entered, exits)

    def at(self, reached: dict[int, Rows], state: int) -> dict[int, Rows]:
        """What has reached one state."""
        places = {t: np.flatnonzero(rows.ids == state) for t, rows in reached.items()}
        return {t: numbered([reached[t]], place) for t, place in places.items() if len(place)}

    @torch.no_grad()
    def log_probs(self, reached: dict[int, Rows]) -> Float[Tensor, " S"]:
        """log p(a string takes that way to the state), of each state; -inf for others, and if there are no strings."""
        out = torch.full((self._messages.chain.classes.num_states,), -torch.inf, dtype=torch.float64)
        for t, rows in reached.items():
            at, masses = torch.from_numpy(rows.ids), self._messages.log_masses(t, rows)[:, 0].double().cpu()
            out[at] = torch.logaddexp(out[at], masses)
        return out - self._log_z if self._log_z > -np.inf else out

    @torch.no_grad()
    def log_visits(self) -> Float[Tensor, "T S"]:
        """log p(a string is in the state before each position and, T = L + 1, after the last)."""
        length, forward = self._messages.length, self._messages.forward
        steps = [{t: forward(t)} for t in range(length)]
        nowhere = np.zeros(0, dtype=np.int64)
        return torch.stack([self.log_probs(each) for each in (*steps, self.onward(steps[-1], nowhere))])


class ConstrainedConditioner:
    """Token marginals given the language while tokens are committed. Made by ``ConstrainedHMM.incremental``.

    After a token at t the forward messages after t and the backward ones before t are made again, for the states of the
    automaton that are left.
    """

    candidates: Int[Tensor, "B L K"] | None = None
    certain_is_free = True
    """A language makes many tokens certain."""
    commit_tokens = commit_tokens

    @torch.no_grad()
    def __init__(self, circuit: ConstrainedHMM, ev: Evidence, candidates: int | None = None) -> None:
        """Compute what no later token changes: the leaf values. On a GPU and in logarithms there are no candidates."""
        self._circuit, self._offered = circuit, ev
        self._taken = ev.centred()
        self._messages = circuit._messages(circuit.hmm.centred(ev)[0])
        self._observed = self._messages.observed.cpu().clone()
        count = min(candidates or circuit.vocab_size, _CANDIDATES)
        few = candidates is not None and count < circuit.vocab_size and ev.device.type == "cpu"
        if few and type(self._messages) is ProductMessages and type(self._messages.algebra) is Linear:
            self.candidates = self.dense_log_marginals().topk(count, dim=-1).indices
            self._messages.list_candidates(self.candidates)

    @property
    def evidence(self) -> Evidence:
        """The evidence with all tokens that were committed."""
        device, messages = self._offered.device, self._messages
        return replace(self._offered, tokens=messages.tokens.to(device), observed=messages.observed.clone().to(device))

    @property
    @torch.no_grad()
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of the evidence, the language and all committed tokens; -inf where they are impossible together."""
        if lost_some(self._messages.underflow):
            return self._circuit.log_partition(self.evidence)
        observed = self._messages.observed.to(self._taken.tokens.device)
        taken = torch.where(observed, 0, self._taken.tokens).sum(-1) + self._taken.latents
        return (self._messages.log_partition() + taken).to(self._circuit.dtype)

    @torch.no_grad()
    def commit(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> None:
        """Observe one more token in each sequence; a position that is known already stays as it is."""
        batch, length = self._offered.shape
        known = torch.cat([positions, tokens]).tolist()  # one wait for the device
        places, words = known[: len(positions)], known[len(positions) :]
        for name, given, limit in (("positions", places, length), ("tokens", words, self._circuit.vocab_size)):
            if len(given) != batch or not all(0 <= one < limit for one in given):
                raise InvalidEvidence(f"{name} must be ({batch},) numbers in 0..{limit - 1}, found {given}")
        for b, (t, token) in enumerate(zip(places, words, strict=True)):
            if not self._observed[b, t]:
                self._messages.commit(b, t, token)
                self._observed[b, t] = True

    @torch.no_grad()
    def log_marginals(self) -> Float[Tensor, "B L K"]:
        """log p(x_t | evidence, language, committed tokens) of the candidates, or of all tokens."""
        if self.candidates is None:
            return self.dense_log_marginals()
        out, underflow = self._messages.candidate_marginals()
        if lost_some(either(underflow, self._messages.underflow)):
            return self.dense_log_marginals().gather(-1, self.candidates)
        return out.to(self._circuit.dtype)

    @torch.no_grad()
    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        """Log-probabilities of all tokens: (B, L, V), or (B, V) at one position of each sequence."""
        wanted = None if positions is None else torch.tensor(sorted(set(positions.tolist())), device=positions.device)
        out, underflow = self._messages.marginals(wanted)
        if lost_some(either(underflow, self._messages.underflow)):
            out = self._circuit.marginals(self.evidence)
            out = out if wanted is None else out[:, wanted]
        out = out.to(self._circuit.dtype)
        if positions is None or wanted is None:
            return out
        return out[torch.arange(len(out), device=out.device), torch.searchsorted(wanted, positions.contiguous())]
