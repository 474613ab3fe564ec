"""The hidden Markov model: the chain-shaped circuit that is used in practice."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import gradients, inference, pairwise, storage
from codd.circuits.evidence import Evidence, check_fits, check_ids, check_possible, log_ratio
from codd.circuits.factors import Factors
from codd.circuits.graph import Circuit, leaf, mixture, product
from codd.circuits.ops.backend import backend_for
from codd.circuits.parameters import Emission, Transition, check_rows, is_whole, seeded
from codd.circuits.protocol import Conditioner, Unconditioned
from codd.circuits.pyjuice import read_jpc
from codd.circuits.results import Flows, JointStep, Samples
from codd.circuits.sampling import as_asked, draw_token, sample_uniforms
from codd.errors import FormatError, InvalidCircuit, InvalidEvidence, shown

LogTransition = Float[Tensor, "*steps N N"] | tuple[Float[Tensor, "*steps N R"], Float[Tensor, "*steps R N"]]


class HMM(storage.HubMixin, Unconditioned):
    """A hidden Markov model with N states over V tokens.

    ``log_initial`` (N,), ``log_transition`` (N, N) with a row for each state that is left, ``log_emission`` (N, V), all
    log-probabilities. A transition may be a pair (N, R), (R, N) of low rank R, whose product is never formed in the
    message passing. Tables with a leading axis, (L - 1, N, N) and (L, N, V), give each position its own parameters and
    fix the length; otherwise any length is served, and ``window`` notes the one that the circuit was made for.

    Results have the type of the parameters: float32, or float64 for study. The tensors may require gradients.
    """

    kind = "hmm"
    supports_cuda_graphs = True
    """Whether queries can be captured in a CUDA graph."""

    def __init__(
        self,
        log_initial: Float[Tensor, " N"],
        log_transition: LogTransition,
        log_emission: Float[Tensor, "*L N V"],
        *,
        window: int | None = None,
        validate: bool = True,
        factors: Factors | None = None,
    ) -> None:
        """Check that shapes, devices and types fit and, with ``validate``, that every row is a distribution."""
        tables = log_transition if isinstance(log_transition, tuple) else (log_transition,)
        self.log_initial = log_initial
        self.factors = factors
        """The logits that the tables were made from, or None; they are saved in place of the tables."""
        self.transition = Transition(tuple(tables))
        self.emission = Emission(log_emission)
        self._check_shapes()
        first, stored = self.transition.log_factors[0], self.emission.stored
        self.num_states = self.num_latents = log_initial.shape[0]
        """N, the number of states; and the same under the name that all circuits share."""
        self.vocab_size = stored.shape[-1]
        """V, the number of tokens."""
        self.rank = first.shape[-1]
        """How many inner states a step goes through: N, unless the transition is of low rank."""
        self.inner_states = self.rank if self.transition.low_rank else None
        """R, the inner states that gates weigh; None: a dense transition has none."""
        self.homogeneous = not (self.transition.per_position or self.emission.per_position)
        """Whether all positions share their parameters."""
        self.length = stored.shape[0] if stored.ndim == 3 else first.shape[0] + 1 if first.ndim == 3 else None
        """The only length that is served, or None: any."""
        self.dtype, self.device = log_initial.dtype, log_initial.device
        """The type of the results, float32 or float64, and where the parameters are."""
        if window is not None and (window < 1 or self.length not in (None, window)):
            served = "at least 1" if self.length is None else self.length
            raise InvalidCircuit(f"window is {window}, but the circuit serves {served} position(s)")
        self.window = self.length if window is None else window
        if validate:
            check_rows("log_initial", log_initial)
            names = ("log_transition",) if len(tables) == 1 else ("log_transition[0]", "log_transition[1]")
            for name, factor in zip(names, tables, strict=True):
                check_rows(name, factor)
            check_rows("log_emission", self.emission.log, self.emission.compact)

    @classmethod
    def random(
        cls,
        num_states: int,
        vocab_size: int,
        seed: int = 0,
        *,
        rank: int | None = None,
        length: int | None = None,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> "HMM":
        """A circuit whose rows are softmaxes of normal numbers times ``scale``.

        Args:
            num_states: N.
            vocab_size: V.
            seed: of the numbers.
            rank: of the transition; None: a dense one.
            length: the number of positions, each with tables of its own; None: all positions share theirs.
            scale: of the normal numbers; the larger, the further from the null circuit.
            dtype: of the tables.
        """
        _check_sizes(num_states, vocab_size)
        generator = seeded(seed)

        def table(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).log_softmax(-1).to(dtype)

        steps = () if length is None else (length - 1,)
        places = () if length is None else (length,)
        transition: LogTransition = (
            table(*steps, num_states, num_states)
            if rank is None
            else (table(*steps, num_states, rank), table(*steps, rank, num_states))
        )
        return cls(table(num_states), transition, table(*places, num_states, vocab_size))

    @classmethod
    def neutral(cls, num_states: int, vocab_size: int, *, dtype: torch.dtype = torch.float32) -> "HMM":
        """The null circuit: every string has the same probability, so coupling with it changes nothing."""
        _check_sizes(num_states, vocab_size)

        def uniform(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype).log_softmax(-1)

        return cls(uniform(num_states), uniform(num_states, num_states), uniform(num_states, vocab_size))

    @classmethod
    def from_factors(cls, factors: Factors, *, window: int | None = None) -> "HMM":
        """The circuit of trainable logits; its queries are differentiable in them."""
        factors.check()
        return cls(*factors.tables(), window=window, validate=False, factors=factors)

    @classmethod
    def from_pyjuice(cls, path: str | PathLike[str]) -> "HMM":
        """Read an HMM saved by PyJuice (.jpc). Nothing in the file is run; see codd.circuits.pyjuice."""
        jpc = read_jpc(path)
        return cls(jpc.initial.log(), jpc.transition.log(), jpc.emission.log(), window=jpc.length)

    @property
    def log_transition(self) -> LogTransition:
        """The transition as given: one table, or a pair of low rank."""
        factors = self.transition.log_factors
        return factors[0] if len(factors) == 1 else (factors[0], factors[1])

    @property
    def log_emission(self) -> Float[Tensor, "*L N V"]:
        """The emission table as log-probabilities."""
        return self.emission.log

    def __repr__(self) -> str:
        """Sizes and layout in one line."""
        parts = [f"num_states={self.num_states}", f"vocab_size={self.vocab_size}"]
        if self.window is not None:
            parts.append(f"{'window' if self.length is None else 'length'}={self.window}")
        if self.transition.low_rank:
            parts.append(f"rank={self.rank}")
        if self.emission.compact:
            parts.append("emission=bfloat16")
        return f"HMM({', '.join(parts)}, {str(self.dtype).removeprefix('torch.')}, {self.device})"

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        emission: torch.dtype | None = None,
    ) -> "HMM":
        """The same circuit elsewhere, in float32 or float64, or with the emission kept as bfloat16 probabilities."""
        for name, given, allowed in (
            ("dtype", dtype, (torch.float32, torch.float64)),
            ("emission", emission, (torch.bfloat16, torch.float32, torch.float64)),
        ):
            if given is not None and given not in allowed:
                raise InvalidCircuit(f"{name} must be one of {', '.join(map(str, allowed))}, found {given}")
        dtype = dtype or self.dtype
        if emission == torch.bfloat16 and not self.emission.compact:
            table = self.emission.log.exp().to(torch.bfloat16)
        elif self.emission.compact and emission in (None, torch.bfloat16) and dtype == torch.float32:
            table = self.emission.stored
        else:
            table = self.emission.log.to(dtype)
        factors = [f.to(device, dtype) for f in self.transition.log_factors]
        transition: LogTransition = factors[0] if len(factors) == 1 else (factors[0], factors[1])
        initial = self.log_initial.to(device, dtype)
        kept = None if self.factors is None else self.factors.map(lambda x: x.to(device, dtype))
        return type(self)(initial, transition, table.to(device), window=self.window, validate=False, factors=kept)

    # Queries. B sequences of L positions; everything is exact, up to the rounding of the circuit's type.

    def log_partition(self, ev: Evidence) -> Float[Tensor, " B"]:
        """log Z of circuit times evidence. Differentiable.

        Args:
            ev: what is known about B windows.

        Returns:
            log Z of each window; -inf where the evidence is impossible.

        Raises:
            InvalidEvidence: the evidence does not fit the circuit.

        A constant in a row of log-weights is part of it (in a row of logits it is not: those are normalised), to the
        digits of the circuit's type: near 1e8 float32 has multiples of 8. Probabilities are not computed from it.
        """
        ev, offset = self.centred(ev)
        return (self._log_partition(ev) + offset).to(self.dtype)

    def _log_partition(self, ev: Evidence) -> Float[Tensor, " B"]:
        return gradients.log_partition(self, ev) if gradients.wanted(self, ev) else inference.log_partition(self, ev)

    def log_prob(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, " B"]:
        """Log-probabilities of whole strings. Differentiable.

        Args:
            ids: tokens of B strings.

        Raises:
            InvalidEvidence: ids that are not tokens of the circuit, or a length that it does not serve.
        """
        return self.log_partition(Evidence(tokens=ids))

    def conditional_log_prob(self, ids: Int[Tensor, "B L"], ev: Evidence) -> Float[Tensor, " B"]:
        """log-probability of ids at the positions that are not observed, given the evidence. Differentiable.

        Normalised: summed over all completions it is one. What ids says at observed positions is ignored.
        """
        ev, _ = self.centred(ev)
        hard, given = ev.completed(ids, self.vocab_size)
        self._check(hard)
        joint = self._log_partition(hard) + given
        total = self._log_partition(ev)
        return log_ratio(joint, total).to(self.dtype)

    def posterior(self, ev: Evidence) -> Float[Tensor, "B L N"]:
        """Log-probabilities of the latent states at each position by itself.

        Args:
            ev: what is known about B windows.

        Returns:
            log p(z_t | evidence); -inf throughout for impossible evidence.
        """
        return inference.posterior(self, self.centred(ev)[0])

    def marginals(self, ev: Evidence, candidates: Int[Tensor, "B L K"] | None = None) -> Float[Tensor, "B L V"]:
        """Log-probabilities of the tokens at each position by itself.

        Args:
            ev: what is known about B windows.
            candidates: tokens to which the answer is restricted; None: all of them.

        Returns:
            log p(x_t | evidence), (B, L, V), or (B, L, K) of K candidates.
        """
        ev, _ = self.centred(ev)
        if candidates is not None:
            check_ids("candidates", candidates, self.vocab_size)
            candidates = candidates.long()
        return inference.marginals(self, ev, candidates)

    def pairwise(self, ev: Evidence, candidates: Int[Tensor, "B L K"]) -> Float[Tensor, "B L L C C"]:
        """p(class at s, class at t | evidence) of every two positions: each candidate, and all other tokens together.

        C = K + 1, the others last. `codd.circuits.pairwise.mutual_information` says how much the two are coupled.
        """
        return pairwise.tables(self, self.centred(ev)[0], candidates.long())

    def incremental(self, ev: Evidence, candidates: int | None = None) -> Conditioner:
        """Marginals while tokens become known one by one, with what does not change computed once.

        With ``candidates`` those of that many tokens of each position, the ones with the largest dense potentials.
        """
        self._check(ev)
        backend = backend_for(ev.device, self.dtype)
        return backend.conditioner(self, ev, candidates, backend)

    @torch.no_grad()
    def sample(
        self,
        ev: Evidence,
        *,
        generator: torch.Generator | None = None,
        num_samples: int | None = None,
        check: bool | None = None,
    ) -> Samples:
        """Exact joint samples of latents and tokens.

        Args:
            ev: what is known about B windows.
            generator: of random numbers, on the evidence's device; None: PyTorch's own.
            num_samples: the number of samples per window, a leading axis of tokens and latents; None: one, no axis.
            check: whether impossible evidence raises. On a GPU the check waits for the device; inside a CUDA graph it
                is skipped. None: where it can be made.

        Raises:
            ImpossibleEvidence: the evidence has probability zero.
        """
        ev, offset = self.centred(ev)
        uniforms = sample_uniforms(ev, num_samples, generator)
        latents, log_z = inference.sample_latents(self, ev, uniforms[..., 0])
        check_possible(log_z, check)
        tokens, scores = torch.empty_like(latents), backend_for(ev.device, self.dtype).scores
        for s in range(uniforms.shape[1]):
            weights = scores(self.emission, ev, latents[:, s]).flatten(0, 1).softmax(-1).nan_to_num_(0.0)
            tokens[:, s] = draw_token(weights, uniforms[:, s, :, 1].flatten()).view(ev.shape)
        return as_asked(tokens, latents, (log_z + offset).to(self.dtype), num_samples)

    def conditional_scores(self, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """log w_t(v) + log E[z_t, v]: the scores of all tokens once the latents are known, not normalised.

        An observed position has 0 at its token and -inf elsewhere.
        """
        self._check(ev)
        if latents.shape != ev.shape:
            raise InvalidEvidence(f"latents must have the evidence's shape {ev.shape}, found {tuple(latents.shape)}")
        if ev.device.type == "cpu":
            check_ids("latents", latents, self.num_states)
        return backend_for(ev.device, self.dtype).scores(self.emission, ev, latents).to(self.dtype)

    def joint_step(
        self, ev: Evidence, *, generator: torch.Generator | None = None, uniforms: Float[Tensor, "B L"] | None = None
    ) -> JointStep:
        """One denoising step: a latent path from its posterior, and the scores of all tokens given it.

        On a GPU this is six kernels and a few fills without host synchronisation, and can be captured in a CUDA graph.
        Evidence of probability zero does not raise here: its log_partition is -inf.
        """
        self._check(ev)
        if uniforms is None:
            uniforms = torch.rand(ev.shape, generator=generator, device=ev.device)
        return JointStep(*backend_for(ev.device, self.dtype).joint_step(self, ev, uniforms))

    def flows(self, ev: Evidence, weights: Float[Tensor, " B"] | None = None) -> Flows:
        """Expected counts summed over the batch, each sequence with its weight: d sum(w log Z) / d log-parameters."""
        ev, offset = self.centred(ev)
        if weights is not None and weights.shape != ev.shape[:1]:
            raise InvalidEvidence(f"weights must be (B,) = ({ev.shape[0]},), found {tuple(weights.shape)}")
        (initial, steps, emission), log_z = inference.expected_counts(self, ev, weights)
        return Flows(
            initial, steps[0] if len(steps) == 1 else (steps[0], steps[1]), emission, (log_z + offset).to(self.dtype)
        )

    def as_circuit(self, length: int | None = None) -> "Circuit":
        """The same distribution as a general circuit over ``length`` positions, in float64, its rows summing to one."""
        length = length if length is not None else self.window
        if length is None or length < 1 or self.length not in (None, length):
            served = "any length: say which one the circuit should have" if self.length is None else f"{self.length}"
            raise InvalidCircuit(f"this HMM serves {served}, found length={length}")
        tables = (self.log_initial.double(), self.transition.dense_log, self.log_emission.double())
        initial, transition, emission = (x.detach().log_softmax(-1) for x in tables)
        transition = transition.expand(length - 1, *transition.shape[-2:])
        # Leaf k of a position is state k: leaves are numbered in the order in which they are made.
        leaves = [[leaf(t, log_probs=row) for row in table] for t, table in enumerate(emission.expand(length, -1, -1))]
        tails = leaves[-1]  # everything from a position on, given its state
        for here, step in zip(reversed(leaves[:-1]), transition.flip(0), strict=True):
            arrivals = [mixture(tails, log_weights=row) for row in step]
            tails = [product(pair) for pair in zip(here, arrivals, strict=True)]
        return Circuit(mixture(tails, log_weights=initial))

    # Storage, in the hub's conventions.

    def save(self, folder: str | PathLike[str], *, half: bool = False) -> Path:
        """Write config.json and circuit.safetensors, atomically; ``half``: factors in 16 bits."""
        return storage.write_folder(folder, self.description(), self.stored(half=half))

    def description(self) -> dict[str, Any]:
        """The entries of config.json that describe the circuit."""
        sizes = {"num_states": self.num_states, "vocab_size": self.vocab_size, "window": self.window}
        return {"circuit": self.kind, **sizes}

    def stored(self, *, half: bool = False) -> dict[str, Tensor]:
        """The tensors of circuit.safetensors: the tables, or the logits that they were made from."""
        if self.factors is not None:
            tensors = (self.factors.map(lambda x: x.half()) if half else self.factors).named()
        else:
            pair = ("log_transition_left", "log_transition_right")
            names = pair if self.transition.low_rank else ("log_transition",)
            tensors = dict(zip(names, self.transition.log_factors, strict=True))
            tensors["log_initial"] = self.log_initial
            tensors["emission" if self.emission.compact else "log_emission"] = self.emission.stored
        return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}

    @classmethod
    def from_stored(cls, config: dict[str, Any], tensors: dict[str, Tensor], source: str) -> "HMM":
        """Make a circuit of `description` and `stored`; half-precision tensors are computed with in float32.

        `FormatError` if a tensor is missing, `InvalidCircuit` if the tables are no distributions.
        """
        window = config.get("window")
        if window is not None and not (type(window) is int and 0 < window < 2**31):
            raise FormatError(f"{source}: window must be a number of positions, found {window!r:.60}")
        if "initial_logits" in tensors:
            factors = Factors.from_named(tensors, source)
            factors = factors.map(lambda x: x if x.dtype == torch.float64 else x.float())
            made = HMM.from_factors(factors, window=window)
            return cls(made.log_initial, made.log_transition, made.log_emission, window=made.window, factors=factors)
        try:
            transition: LogTransition = (
                tensors["log_transition"]
                if "log_transition" in tensors
                else (tensors["log_transition_left"], tensors["log_transition_right"])
            )
            emission = tensors["emission"] if "emission" in tensors else tensors["log_emission"]
            return cls(tensors["log_initial"], transition, emission, window=window)
        except KeyError as missing:
            raise FormatError(f"{source}: circuit.safetensors has no tensor {missing}") from None

    # Checks.

    def _check_shapes(self) -> None:
        for table in (self.log_initial, *self.transition.log_factors, self.emission.stored):
            if not isinstance(table, Tensor):
                raise InvalidCircuit(f"parameters must be torch tensors, found {shown(table)}")
        n = self.log_initial.shape[0] if self.log_initial.ndim == 1 else -1
        if n < 1:
            raise InvalidCircuit(f"log_initial must be (N,) with N >= 1, found shape {tuple(self.log_initial.shape)}")
        factors = self.transition.log_factors
        shapes = [tuple(f.shape) for f in factors]
        joined = len(factors) == 1 or (len(factors) == 2 and factors[0].shape[-1] == factors[1].shape[-2])
        if (
            not joined
            or any(f.ndim not in (2, 3) or f.ndim != factors[0].ndim for f in factors)
            or (factors[0].shape[-2] != n or factors[-1].shape[-1] != n)
        ):
            raise InvalidCircuit(
                f"log_transition must be ({n}, {n}), a pair ({n}, R), (R, {n}), or either with a leading L - 1; "
                f"found {' and '.join(map(str, shapes))} with log_initial of shape ({n},)"
            )
        emission = self.emission.stored
        if emission.ndim not in (2, 3) or emission.shape[-2] != n:
            raise InvalidCircuit(f"log_emission must be ({n}, V) or (L, {n}, V), found {tuple(emission.shape)}")
        if self.emission.per_position and self.transition.per_position and emission.shape[0] != shapes[0][0] + 1:
            raise InvalidCircuit(
                f"log_emission has {emission.shape[0]} positions and log_transition {shapes[0][0]} steps: "
                "there must be one step fewer than positions"
            )
        tables = (self.log_initial, *factors)
        if any(x.dtype not in (torch.float32, torch.float64) or x.dtype != tables[0].dtype for x in tables) or (
            self.emission.dtype != tables[0].dtype
        ):
            raise InvalidCircuit(
                "parameters must all be float32 (the emission may be bfloat16 probabilities) or all float64, found "
                + ", ".join(str(x.dtype) for x in (*tables, emission))
            )
        if any(x.device != emission.device for x in tables):
            raise InvalidCircuit(
                "parameters are on different devices: "
                + ", ".join(sorted({str(x.device) for x in (*tables, emission)}))
            )

    def centred(self, ev: Evidence) -> tuple[Evidence, Float[Tensor, " B"]]:
        """Evidence that fits, without the constants of its rows, and what log Z gets back for them."""
        self._check(ev)
        centred = ev.centred()
        return centred.evidence, centred.tokens.sum(-1) + centred.latents

    def _check(self, ev: Evidence) -> None:
        check_fits(ev, self)


def _check_sizes(num_states: int, vocab_size: int) -> None:
    if not all(is_whole(size) and size > 0 for size in (num_states, vocab_size)):
        found = f"{shown(num_states)} and {shown(vocab_size)}"
        raise InvalidCircuit(f"num_states and vocab_size must be positive, found {found}: give whole numbers")
