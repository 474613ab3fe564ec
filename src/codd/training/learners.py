"""What learns: a circuit's parameters, one update a batch. By the gradient of a loss, or by flows alone.

An update has two halves. The first adds up over windows, so that processes can share a batch; the second moves the
parameters by what all of them found.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from codd.backbones.backbone import Backbone
from codd.circuits import HMM, Circuit, Factors, Head, HeadConfig, Modulated, load_circuit
from codd.circuits.modulated import widened
from codd.circuits.ops.backend import use
from codd.errors import InvalidInput
from codd.training import joint
from codd.training.bank import Supply
from codd.training.circuit_recipe import CircuitRecipe
from codd.training.held_out import factorized_of
from codd.training.objectives import signed_flows, weights_of
from codd.training.optimizers import Adam, Anemone, Optimizer
from codd.training.windows import Windows

Share = Callable[[list[Tensor]], None]
"""Replaces each tensor by its sum over the processes."""
Usage = Callable[[HMM | Modulated], Float[Tensor, " N"]]
"""How much each state of a circuit is used."""


@runtime_checkable
class Learner(Protocol):
    """A circuit in the making."""

    def learn(self, windows: Windows, rate: float, share: Share) -> Float[Tensor, " 3"]:
        """One update at a part of the full rate: log-likelihood, the network's own, and tokens, summed over all."""

    def circuit(self) -> HMM | Modulated:
        """The circuit as it is, without gradients."""

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint keeps."""

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """The opposite."""


class Ground(NamedTuple):
    """What a circuit is trained for."""

    vocab_size: int
    features: int
    """Numbers in a hidden state; 0 if there are none to listen to."""
    device: torch.device
    backbone: Backbone | None = None
    """If it is trained along."""


def learner_for(recipe: CircuitRecipe, ground: Ground, usage: Usage | None = None) -> "FlowLearner | GradientLearner":
    """The one that a recipe needs, at step 0. A recipe with ``keep_states`` needs the usage of its start's states."""
    factors, head = _start(recipe, ground, usage)
    if recipe.by_flows and head is None and _is_free(factors):
        return FlowLearner(recipe, factors)
    if recipe.optimizer.rule != "adam" or recipe.objective != "conditional":
        raise InvalidInput(
            f"start: the circuit {recipe.start} is modulated or factored; the rule {recipe.optimizer.rule!r} with the "
            f"objective {recipe.objective!r} is for static circuits of free logits: use 'adam' and 'conditional'."
        )
    return GradientLearner(recipe, factors, head, ground)


def _is_free(factors: Factors) -> bool:
    """Whether flows are all that the numbers need."""
    single = len(factors.transition) == len(factors.emission) == 1
    return single and factors.bias is None and factors.detour is None


def _start(recipe: CircuitRecipe, ground: Ground, usage: Usage | None) -> tuple[Factors, Head | None]:
    """Near the null circuit, or a circuit that is to be trained on."""
    sizes = recipe.circuit
    if recipe.start is not None:
        return _started(load_circuit(recipe.start, device=ground.device), recipe, ground, usage)
    factors = Factors.near_neutral(
        sizes.num_states,
        ground.vocab_size,
        transition_rank=sizes.transition_rank,
        emission_rank=sizes.emission_rank,
        inner_states=recipe.head.inner_states,
        noise=sizes.noise,
        seed=recipe.seed,
        device=ground.device,
    )
    return factors, _new_head(recipe, ground, sizes.num_states)


def _new_head(recipe: CircuitRecipe, ground: Ground, num_states: int) -> Head | None:
    """At zero, if one is wanted."""
    wanted = recipe.head
    if not wanted.wanted:
        return None
    if not ground.features:
        raise InvalidInput("a head listens to hidden states, which this cache has not: make it with --features.")
    states = num_states if wanted.latents else 0
    config = HeadConfig(ground.features, states, wanted.inner_states, wanted.hidden, wanted.dropout)
    return Head(config, recipe.seed).to(ground.device)


def _started(
    circuit: HMM | Modulated | Circuit, recipe: CircuitRecipe, ground: Ground, usage: Usage | None
) -> tuple[Factors, Head | None]:
    """The numbers behind a saved circuit; one that is static may be given a head, which starts at zero."""
    if isinstance(circuit, Circuit):
        raise InvalidInput(
            f"start: {recipe.start} is a general circuit; training starts from an HMM or a modulated one."
        )
    hmm = circuit.hmm if isinstance(circuit, Modulated) else circuit
    if hmm.vocab_size != ground.vocab_size:
        raise InvalidInput(
            f"start: the circuit {recipe.start} is over {hmm.vocab_size} tokens, the backbone over "
            f"{ground.vocab_size}: they do not belong together."
        )
    if not hmm.homogeneous or (hmm.transition.low_rank and hmm.factors is None):
        raise InvalidInput(f"start: the circuit {recipe.start} has tables that training does not change.")
    factors = hmm.factors
    if factors is None:
        factors = Factors(hmm.log_initial, (hmm.transition.log_factors[0],), (hmm.log_emission.clone(),))
    wanted = recipe.head
    if wanted.inner_states and (factors.detour is None or factors.detour.left.shape[1] != wanted.inner_states):
        raise InvalidInput(
            f"start: the circuit {recipe.start} was not made with {wanted.inner_states} inner states, which cannot be "
            "added: set head.inner_states to 0, or begin anew."
        )
    head = circuit.head if isinstance(circuit, Modulated) else None
    if head is not None and head.config.features != ground.features:
        raise InvalidInput(
            f"start: the circuit {recipe.start} listens to hidden states of {head.config.features} numbers, there are "
            f"{ground.features} (0: a cache made without --features)."
        )
    if recipe.keep_states is not None:
        kept = _most_used(circuit, recipe.keep_states, recipe.start, usage)
        factors, head = factors.restricted(kept), None if head is None else head.restricted(kept)
    if head is None:
        head = _new_head(recipe, ground, factors.num_states)
    return factors, None if head is None else head.to(ground.device)


def _most_used(circuit: HMM | Modulated, count: int, start: str | None, usage: Usage | None) -> Int[Tensor, " K"]:
    """In their order; of states that are used alike, the first."""
    if count > circuit.num_states:
        raise InvalidInput(
            f"keep_states: the circuit {start} has {circuit.num_states} states, fewer than the {count} that are to be "
            "kept: lower keep_states, or leave it out."
        )
    assert usage is not None
    return usage(circuit).argsort(descending=True, stable=True)[:count].sort().values


class FlowLearner:
    """A static circuit of free logits: flows, then EM or Adam. No graph."""

    def __init__(self, recipe: CircuitRecipe, factors: Factors):
        """Start from the circuit that the factors stand for."""
        self.recipe, self.optimizer = recipe, _optimizer(recipe)
        self.full_rate = self.optimizer.rate
        self.hmm = HMM(*factors.tables(), window=recipe.windows.length, validate=False)

    def learn(self, windows: Windows, rate: float, share: Share) -> Float[Tensor, " 3"]:
        """Flows of the batch, added up, and the optimizer's update."""
        weights = weights_of(windows, self.recipe.weighting)
        signed = signed_flows(self.recipe.objective, self.hmm, windows, weights)
        alone = (factorized_of(windows) * weights).sum()
        share([*signed.tensors(), alone])
        self.optimizer.rate = self.full_rate * rate if isinstance(self.optimizer, Adam) else self.full_rate
        self.hmm = self.optimizer.update(self.hmm, signed)
        return torch.stack([x.float() for x in (signed.value, alone, signed.tokens)])

    def circuit(self) -> HMM:
        """The circuit as it is."""
        return self.hmm

    def tensors(self) -> dict[str, Tensor]:
        """Tables and the optimizer's state."""
        hmm = self.hmm
        tables = {"initial": hmm.log_initial, "transition": hmm.transition.log_factors[0], "emission": hmm.log_emission}
        return {**{f"table.{k}": v for k, v in tables.items()}, **_prefixed("optimizer.", self.optimizer.tensors())}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """The opposite."""
        tables = (kept[f"table.{name}"] for name in ("initial", "transition", "emission"))
        self.hmm = HMM(*tables, window=self.recipe.windows.length, validate=False)
        self.optimizer.restore(_under("optimizer.", kept))


def _optimizer(recipe: CircuitRecipe) -> Optimizer:
    chosen = recipe.optimizer
    if chosen.rule == "adam":
        return Adam(lr=chosen.lr, betas=(chosen.betas[0], chosen.betas[1]))
    return Anemone(
        step_size=chosen.step_size, momentum=chosen.momentum, pseudocount=chosen.pseudocount, rule=chosen.rule
    )


class GradientLearner:
    """Any circuit, with a head or without, and the backbone if wanted: AdamW on the exact conditional objective."""

    def __init__(self, recipe: CircuitRecipe, factors: Factors, head: Head | None, ground: Ground):
        """Start from the circuit that the factors stand for."""
        self.recipe, self.device = recipe, ground.device
        self.factors = {name: nn.Parameter(x.clone()) for name, x in factors.named().items()}
        self.head = None if head is None else head.train().requires_grad_(True)
        self.network: dict[str, nn.Parameter] = {}
        if ground.backbone is not None:
            chosen = recipe.joint
            self.network = joint.trainable(ground.backbone, chosen.weights, chosen.rank, recipe.seed)
        self.parameters: dict[str, nn.Parameter] = {
            **{f"factors.{name}": x for name, x in self.factors.items()},
            **({} if self.head is None else {f"head.{name}": x for name, x in self.head.named_parameters()}),
            **{f"backbone.{name}": x for name, x in self.network.items()},
        }
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer, self.rates = self._adam()

    def _adam(self) -> tuple[torch.optim.AdamW, list[float]]:
        chosen = self.recipe.optimizer
        head = [] if self.head is None else list(self.head.parameters())
        groups = [
            (list(self.factors.values()), chosen.lr, 0.0),
            (head, chosen.head_lr, chosen.weight_decay),
            (list(self.network.values()), self.recipe.joint.lr, 0.0),
        ]
        groups = [group for group in groups if group[0]]
        optimizer = torch.optim.AdamW(
            [{"params": parameters, "weight_decay": decay} for parameters, _, decay in groups],
            lr=chosen.lr,
            betas=(chosen.betas[0], chosen.betas[1]),
            fused=self.device.type == "cuda",
        )
        return optimizer, [rate for _, rate, _ in groups]

    def hmm(self) -> HMM:
        """Differentiable in the factors."""
        return HMM.from_factors(Factors.from_named(self.factors), window=self.recipe.windows.length)

    def log_prob(self, windows: Windows) -> Float[Tensor, " W"]:
        """Of what is masked; differentiable in all that is trained."""
        hmm, evidence = self.hmm(), windows.evidence()
        if self.head is not None:
            assert windows.features is not None
            evidence = windows.evidence(*widened(self.head(windows.features, windows.masked), hmm))
        with use("eager"):  # whole batches are matrix products, which its kernels for single windows are not
            return hmm.conditional_log_prob(windows.tokens, evidence)

    def differentiate(self, windows: Windows) -> Float[Tensor, " 3"]:
        """Leave in the gradients those of the weighted sum; the three sums."""
        torch._foreach_zero_(self._gradients())
        found, weights = self.log_prob(windows), weights_of(windows, self.recipe.weighting)
        torch.autograd.backward(-(found * weights).sum())
        counts = windows.masked.sum(-1)
        alone = factorized_of(windows)
        return torch.stack([x.detach().sum().float() for x in (found * weights, alone * weights, counts * weights)])

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def learn(self, windows: Windows, rate: float, share: Share) -> Float[Tensor, " 3"]:
        """Gradients of the batch, added up, and Adam's update."""
        with quick_products(self.device):
            return self.move(self.differentiate(windows), rate, share)

    def move(self, sums: Float[Tensor, " 3"], rate: float, share: Share) -> Float[Tensor, " 3"]:
        """The second half."""
        gradients = self._gradients()
        share([*gradients, sums])
        torch._foreach_div_(gradients, sums[2].clamp(min=1e-12))
        for group, full in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = full * rate
        self.optimizer.step()
        return sums

    def circuit(self) -> HMM | Modulated:
        """The circuit as it is."""
        with torch.no_grad():
            kept = Factors.from_named({name: x.detach().clone() for name, x in self.factors.items()})
            hmm = HMM.from_factors(kept, window=self.recipe.windows.length)
            if self.head is None:
                return hmm
            head = Head(self.head.config).to(hmm.device)
            head.load_state_dict(self.head.state_dict())
            return Modulated(hmm, head.requires_grad_(False))

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and Adam's moments."""
        kept = {name: p.detach() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state.get(parameter, {})
            kept |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in moments.items()}
        return kept

    @torch.no_grad()
    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """The opposite."""
        fused = self.device.type == "cuda"
        for name, parameter in self.parameters.items():
            parameter.copy_(kept[name])
            self.optimizer.state[parameter] = {
                key: value.to("cpu" if key == "step" and not fused else parameter.device, copy=True)
                for key, value in _under(f"optimizer.{name}.", kept).items()
            }


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """On a GPU, matrix products of float32 with ten bits of fraction, at several times the speed: enough to learn."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Captured:
    """The first half of a gradient update as a CUDA graph: its thousand small kernels are launched at once."""

    WARMUP = 3

    def __init__(self, learner: GradientLearner, supply: Supply, windows: int):
        """For batches of so many windows."""
        self.learner, self.supply = learner, supply
        self.index = torch.zeros(windows, dtype=torch.long, device=learner.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        self.graph = torch.cuda.CUDAGraph()
        with quick_products(learner.device):
            with torch.cuda.stream(stream):
                for _ in range(self.WARMUP):
                    self._differentiate()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self.graph, stream=stream):
                self.sums = self._differentiate()

    def _differentiate(self) -> Float[Tensor, " 3"]:
        return self.learner.differentiate(self.supply.windows(self.index))

    def learn(self, index: Int[Tensor, " n"], rate: float, share: Share) -> Float[Tensor, " 3"]:
        """As the learner's, from the numbers of the windows."""
        self.index.copy_(index, non_blocking=True)
        self.graph.replay()
        return self.learner.move(self.sums.clone(), rate, share)


def rate_at(step: int, part: float, warmup: int) -> float:
    """Linear warm-up over the first steps, under a cosine that ends with the run."""
    return min(1.0, (step + 1) / max(1, warmup)) * 0.5 * (1 + math.cos(math.pi * min(part, 1.0)))


def _prefixed(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {start + name: x for name, x in tensors.items()}


def _under(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
