"""Coupled steps on a GPU: captured in CUDA graphs, with as few looks of the host as possible."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from codd.circuits.protocol import ProbabilisticCircuit
from codd.coupling import Coupled
from codd.decoding.accelerate import cuda_graphs
from codd.decoding.options import Options
from codd.decoding.samplers.ranking import Noise, Ranking
from codd.decoding.samplers.window import WindowInputs, logits_temperature, sample_whole_window, sample_window

PICKS_AT_A_TIME = 8
"""Picks between two looks at whether they pass a joint threshold."""
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
    "sharpening",
)
"""The options that a captured step depends on."""


def sample_window_on_gpu(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int | None, options: Options
) -> Float[Tensor, "4 more"]:
    """What `sample_window` gives, by captured steps where the number of tokens is known before they are drawn."""
    if count is not None:
        return _sample_count(circuit, window, count, options)
    if options.sampler == "any_order" and options.threshold is not None and options.remasking == "low_confidence":
        return joint_threshold(
            window, options.threshold, lambda rest, some: _sample_count(circuit, rest, some, options)
        ).packed()
    return sample_window(circuit, window, count, options)


def sample_eagerly(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int, options: Options, *, dense: bool = False
) -> Float[Tensor, "4 more"]:
    """What a captured step computes, without a graph."""
    joint = window.joint(circuit, logits_temperature(options))
    return sample_whole_window(joint, window.noise.to(window.logits.device), count, options, dense=dense).packed()


def sample_captured(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int, options: Options
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

    def __init__(self, circuit: ProbabilisticCircuit, window: WindowInputs, count: int, options: Options):
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


def _sample_count(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int, options: Options
) -> Float[Tensor, "4 more"]:
    """``count`` tokens; the host looks once, at the end, whether the candidates sufficed."""
    packed = sample_captured(circuit, window, count, options)
    if options.sampler == "any_order" and not bool(packed[0, -1]):
        return sample_eagerly(circuit, window, count, options, dense=True)
    return packed


def joint_threshold(
    window: WindowInputs, threshold: float, pick: Callable[[WindowInputs, int], Float[Tensor, "4 more"]]
) -> Ranking:
    """Commit while conditional probabilities reach the threshold, looking only every few picks; at least one token."""
    parts: list[Ranking] = []
    while len(window.positions):
        ranking = Ranking.unpacked(pick(window, min(PICKS_AT_A_TIME, len(window.positions))).cpu())
        passed = ranking.scores >= threshold
        if not parts:
            passed[0] = True
        passed = passed.cumprod(0).bool()
        parts.append(ranking._replace(keep=passed).chosen())
        if not bool(ranking.valid) or not bool(passed.all()):
            break
        window = window.after(ranking.rows, ranking.tokens)
    return Ranking.joined(parts)
