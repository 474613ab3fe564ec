"""Updates of a circuit's parameters, one a batch: by the gradient of a loss, or by flows alone.

An update has two halves. The first adds up over windows, so that processes can share a batch; the second moves the
parameters by what all of them found.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from codd.circuits import HMM, Factors, Head, Modulated
from codd.circuits.modulated import widened
from codd.circuits.ops.backend import use
from codd.data.datasets import HiddenStateDataset
from codd.data.windows import WindowBatch
from codd.errors import InvalidInput
from codd.training.checkpoints import adam_tensors, below, restore_adam
from codd.training.circuit import joint
from codd.training.circuit.initial import CircuitSpec, Draw, initial_circuit
from codd.training.circuit.objectives import signed_flows, weights_of
from codd.training.circuit.optimizers import Anemone
from codd.training.circuit_recipe import AUTO, CircuitRecipe
from codd.training.logit_cache.cached_windows import CachedWindows


def make_updater(recipe: CircuitRecipe, spec: CircuitSpec, draw: Draw | None = None) -> "FlowUpdater | GradientUpdater":
    """The updater of a recipe, at step 0; ``keep_states`` keeps the states that the windows of ``draw`` use most."""
    factors, head = initial_circuit(recipe, spec, draw)
    if recipe.optimizer.rule == "adam":
        return GradientUpdater(recipe, factors, head, spec)
    if head is not None or not _is_free(factors):
        raise InvalidInput(
            f"start: the circuit {recipe.start} is modulated or factored; the rule {recipe.optimizer.rule!r} is for "
            "static circuits of free logits: use 'adam'."
        )
    return FlowUpdater(recipe, factors, spec)


def _is_free(factors: Factors) -> bool:
    """Whether the tables are free logits, which flows alone can update."""
    single = len(factors.transition) == len(factors.emission) == 1
    return single and factors.bias is None and factors.detour is None


class FlowUpdater:
    """For a static circuit of free logits: flows, then EM, without autograd."""

    def __init__(self, recipe: CircuitRecipe, factors: Factors, spec: CircuitSpec):
        """Start from the circuit that the factors stand for."""
        chosen = recipe.optimizer
        assert chosen.rule != "adam"
        self.recipe, self.context = recipe, spec.context
        self.optimizer = Anemone(chosen.step_size, chosen.momentum, chosen.pseudocount, chosen.rule)
        self.hmm = HMM(*factors.tables(), window=recipe.windows.length, validate=False)

    def update(self, windows: WindowBatch, rate: float) -> Float[Tensor, " 3"]:
        """Flows, summed over processes, and an update; a mini-batch EM has no learning rate.

        Gives the sums of log-likelihood, the network's own, and tokens.
        """
        weights = weights_of(windows, self.recipe.weighting)
        signed = signed_flows(self.hmm, windows, weights)
        alone = (windows.factorized_log_prob() * weights).sum()
        self.context.all_reduce([*signed.tensors(), alone])
        self.hmm = self.optimizer.update(self.hmm, signed)
        return torch.stack([x.float() for x in (signed.value, alone, signed.tokens)])

    def circuit(self) -> HMM:
        """The circuit after the last update; the next one makes another."""
        return self.hmm

    def tensors(self) -> dict[str, Tensor]:
        """Tables and the optimizer's state, for a checkpoint."""
        hmm = self.hmm
        tables = {"initial": hmm.log_initial, "transition": hmm.transition.log_factors[0], "emission": hmm.log_emission}
        kept = {f"table.{name}": x for name, x in tables.items()}
        return kept | {f"optimizer.{name}": x for name, x in self.optimizer.tensors().items()}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` gave."""
        tables = (kept[f"table.{name}"] for name in ("initial", "transition", "emission"))
        self.hmm = HMM(*tables, window=self.recipe.windows.length, validate=False)
        self.optimizer.restore(below("optimizer.", kept))


class GradientUpdater:
    """For any circuit, with a head or without, and the backbone too: AdamW on the exact conditional objective."""

    def __init__(self, recipe: CircuitRecipe, factors: Factors, head: Head | None, spec: CircuitSpec):
        """Start from the circuit that the factors stand for."""
        self.recipe, self.context, self.device = recipe, spec.context, spec.device
        self.factors = {name: nn.Parameter(x.clone()) for name, x in factors.named().items()}
        self.head = None if head is None else head.train().requires_grad_(True)
        self.network: dict[str, nn.Parameter] = {}
        if spec.backbone is not None:
            chosen = recipe.joint
            self.network = joint.trainable(spec.backbone, chosen.weights, chosen.rank, recipe.seed)
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
        lr, head_lr = (1.5e-2, 1e-3) if self.recipe.start in (None, AUTO) else (1.5e-3, 1e-4)
        groups = [
            (list(self.factors.values()), chosen.lr or lr),
            (head, chosen.head_lr or head_lr),
            (list(self.network.values()), self.recipe.joint.lr),
        ]
        groups = [group for group in groups if group[0]]
        optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters, _ in groups],
            weight_decay=0.0,
            betas=(chosen.betas[0], chosen.betas[1]),
            fused=self.device.type == "cuda",
        )
        return optimizer, [rate for _, rate in groups]

    def hmm(self) -> HMM:
        """The circuit's chain, differentiable in the factors."""
        return HMM.from_factors(Factors.from_named(self.factors), window=self.recipe.windows.length)

    def log_prob(self, windows: WindowBatch) -> Float[Tensor, " W"]:
        """Log-probability of the masked tokens of each window; differentiable in all that is trained."""
        hmm, evidence = self.hmm(), windows.evidence()
        if self.head is not None:
            assert windows.features is not None
            evidence = windows.evidence(*widened(self.head(windows.features, windows.masked), hmm))
        with use("eager"):  # whole batches are matrix products, which its kernels for single windows are not
            return hmm.conditional_log_prob(windows.tokens, evidence)

    def differentiate(self, windows: WindowBatch) -> Float[Tensor, " 3"]:
        """Set the gradients to those of the weighted sum; gives log-likelihood, the network's own, and tokens."""
        torch._foreach_zero_(self._gradients())
        log_prob, weights = self.log_prob(windows), weights_of(windows, self.recipe.weighting)
        torch.autograd.backward(-(log_prob * weights).sum())
        counts = windows.masked.sum(-1)
        alone = windows.factorized_log_prob()
        return torch.stack([x.detach().sum().float() for x in (log_prob * weights, alone * weights, counts * weights)])

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def update(self, windows: WindowBatch, rate: float) -> Float[Tensor, " 3"]:
        """Gradients, summed over processes, and Adam's update at ``rate`` times the full learning rates."""
        with fast_matmul(self.device):
            return self.move(self.differentiate(windows), rate)

    def move(self, sums: Float[Tensor, " 3"], rate: float) -> Float[Tensor, " 3"]:
        """The second half of an update: sum over processes, normalise, step."""
        gradients = self._gradients()
        self.context.all_reduce([*gradients, sums])
        torch._foreach_div_(gradients, sums[2].clamp(min=1e-12))
        for group, full in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = full * rate
        self.optimizer.step()
        return sums

    def circuit(self) -> HMM | Modulated:
        """A copy of the circuit as it is now, without gradients."""
        with torch.no_grad():
            kept = Factors.from_named({name: x.detach().clone() for name, x in self.factors.items()})
            window = self.recipe.windows.length
            if self.head is None and _is_free(kept):  # stored as the tables that they are
                return HMM(*kept.tables(), window=window, validate=False)
            hmm = HMM.from_factors(kept, window=window)
            if self.head is None:
                return hmm
            head = Head(self.head.config).to(hmm.device)
            head.load_state_dict(self.head.state_dict())
            return Modulated(hmm, head.requires_grad_(False))

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and Adam's moments, for a checkpoint."""
        parameters = {name: p.detach() for name, p in self.parameters.items()}
        return {**parameters, **adam_tensors(self.optimizer, self.parameters)}

    @torch.no_grad()
    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` gave."""
        for name, parameter in self.parameters.items():
            parameter.copy_(kept[name])
        restore_adam(self.optimizer, self.parameters, kept)


@contextmanager
def fast_matmul(device: torch.device) -> Iterator[None]:
    """On a GPU, matrix products of float32 with ten bits of fraction, at several times the speed: enough to learn."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class CapturedUpdater:
    """The first half of a gradient update as a CUDA graph: its thousand small kernels are launched at once."""

    WARMUP = 3

    def __init__(self, updater: GradientUpdater, dataset: HiddenStateDataset | CachedWindows, windows: int):
        """Capture the gradients of batches of this many windows."""
        self.updater, self.dataset = updater, dataset
        self.index = torch.zeros(windows, dtype=torch.long, device=updater.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        self.graph = torch.cuda.CUDAGraph()
        with fast_matmul(updater.device):
            with torch.cuda.stream(stream):
                for _ in range(self.WARMUP):
                    self._differentiate()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self.graph, stream=stream):
                self.sums = self._differentiate()

    def _differentiate(self) -> Float[Tensor, " 3"]:
        return self.updater.differentiate(self.dataset.windows(self.index))

    def update(self, index: Int[Tensor, " n"], rate: float) -> Float[Tensor, " 3"]:
        """As `GradientUpdater.update`, from the numbers of the windows."""
        self.index.copy_(index, non_blocking=True)
        self.graph.replay()
        return self.updater.move(self.sums.clone(), rate)
