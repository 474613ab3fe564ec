"""Coupled steps on a GPU: captured in CUDA graphs, whatever the options; the host looks at the result alone."""

from jaxtyping import Float
from torch import Tensor

from codd.circuits.protocol import ProbabilisticCircuit
from codd.coupling import Coupled
from codd.decoding.accelerate import cuda_graphs
from codd.decoding.options import Options
from codd.decoding.samplers.ranking import Noise
from codd.decoding.samplers.window import WindowInputs, logits_temperature, sample_whole_window

SAMPLER_OPTIONS = (
    "sampler",
    "remasking",
    "temperature",
    "top_p",
    "top_k",
    "circuit_temperature",
    "tempering",
    "threshold",
    "entropy_budget",
)
"""The options that a captured step depends on."""


def sample_eagerly(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int | None, options: Options, *, dense: bool = False
) -> Float[Tensor, "4 more"]:
    """What a captured step computes, without a graph; ``dense``: from all tokens, where candidates did not suffice."""
    joint = window.joint(circuit, logits_temperature(options))
    return sample_whole_window(joint, window.noise.to(window.logits.device), count, options, dense=dense).packed()


def sample_captured(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int | None, options: Options
) -> Float[Tensor, "4 more"]:
    """The same from a CUDA graph, once steps of this kind have come often enough to be captured."""
    features = window.features
    kind = (
        len(window.tokens),
        *window.logits.shape[1:],
        window.logits.dtype,
        None if features is None else features.dtype,
    )
    key = (*kind, count, *(getattr(options, name) for name in SAMPLER_OPTIONS))
    graph = cuda_graphs.graphs_of(circuit).find(key, lambda: _CapturedStep(circuit, window, count, options))
    return sample_eagerly(circuit, window, count, options) if graph is None else graph(window)


class _CapturedStep:
    """The coupled part of a step, captured for windows of one length and one number of tokens."""

    def __init__(self, circuit: ProbabilisticCircuit, window: WindowInputs, count: int | None, options: Options):
        # Logits of an earlier step may remain at observed positions: nothing reads them there.
        self.logits = window.logits.new_zeros(1, len(window.tokens), window.logits.shape[-1])
        self.features = None if window.features is None else window.features[None].clone()
        self.packed = window.packed().to(window.logits.device)

        def step() -> Float[Tensor, "4 more"]:
            tokens, masked, hidden = self.packed[:1].long(), self.packed[1:2].bool(), self.packed[5:].bool()
            joint = Coupled(
                circuit,
                logits=self.logits,
                tokens=tokens,
                masked=masked,
                temperature=logits_temperature(options),
                features=self.features,
                hidden=None if self.features is None else hidden,
            )
            return sample_whole_window(joint, Noise(*self.packed[2:5].float()), count, options).packed()

        self.graph, self.output = cuda_graphs.capture(step)

    def __call__(self, window: WindowInputs) -> Float[Tensor, "4 more"]:
        self.logits[0].index_copy_(0, window.positions.to(self.logits.device, non_blocking=True), window.logits)
        self.packed.copy_(window.packed(), non_blocking=True)
        if self.features is not None and window.features is not None:
            self.features[0].copy_(window.features)
        self.graph.replay()
        return self.output.clone()  # the next sequence replays the same graph
