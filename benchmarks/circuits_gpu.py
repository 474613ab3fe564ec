"""What the joint step costs on a GPU: every stage with the bytes that it must move, and the whole step.

    python benchmarks/circuits_gpu.py                            # the cases of docs/results/kernels.md: LLaDA's
    python benchmarks/circuits_gpu.py --states 64 --tokens 500      # one case of these sizes

Stages are timed inside a CUDA graph and set against the time in which this GPU reads as many bytes.
Needs a CUDA device.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Console, Group, RenderableType
from rich.table import Table
from torch import Tensor

from codd.circuits import HMM, Evidence, ops
from codd_lab.provenance import provenance
from timing import save


@dataclass(frozen=True)
class Settings:
    """One case: the defaults are LLaDA's vocabulary with half of a block masked."""

    states: int = 1024
    tokens: int = 126_464
    length: int = 32
    batch: int = 1
    mask_ratio: float = 0.5
    emission: str = "bfloat16"
    logits: str = "bfloat16"
    seed: int = 0


CASES = [
    Settings(),
    Settings(batch=8),
    Settings(emission="float32", logits="float32"),
    Settings(batch=8, emission="float32", logits="float32"),
    Settings(states=4096),
    Settings(mask_ratio=1.0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for size in ("states", "tokens", "length", "batch"):
        parser.add_argument(f"--{size}", type=int, help="of one case, instead of those of docs/results/kernels.md")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "circuits_gpu.py: measures CUDA kernels, and PyTorch finds no CUDA device on this machine\n")
    sizes = {name: value for name in ("states", "tokens", "length", "batch") if (value := getattr(args, name))}
    console, bandwidth = Console(width=120), read_bandwidth()
    reports = []
    for case in [replace(Settings(), **sizes)] if sizes else CASES:
        reports.append(run(replace(case, seed=args.seed), bandwidth))
        console.print(render(reports[-1]))
        torch.cuda.empty_cache()
    save(reports, args.json)


def problem(settings: Settings) -> tuple[HMM, Evidence, Float[Tensor, "B L"]]:
    """A random circuit, logits with the given share of positions masked, and uniforms; on the GPU."""
    generator = torch.Generator("cuda").manual_seed(settings.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    n, v = settings.states, settings.tokens
    hmm = HMM(normal(n).log_softmax(-1), normal(n, n).log_softmax(-1), normal(n, v).log_softmax(-1), validate=False)
    if settings.emission == "bfloat16":
        hmm = hmm.to(emission=torch.bfloat16)
    shape = (settings.batch, settings.length)
    logits = (3 * normal(*shape, v)).to(getattr(torch, settings.logits))
    place = torch.rand(shape, generator=generator, device="cuda").argsort(-1)
    observed = place >= round(settings.mask_ratio * settings.length)
    tokens = torch.randint(0, v, shape, generator=generator, device="cuda")
    uniforms = torch.rand(shape, generator=generator, device="cuda")
    return hmm, Evidence(tokens=tokens, observed=observed, logits=logits), uniforms


def plain_step(
    table: Float[Tensor, "N V"], hmm: HMM, ev: Evidence, uniforms: Float[Tensor, "B L"]
) -> tuple[Int[Tensor, "B L"], Float[Tensor, "B L V"], Float[Tensor, " B"]]:
    """The same step as one would write it in PyTorch: log-softmax, one matrix product, loops over the positions."""
    assert ev.logits is not None
    assert ev.tokens is not None
    assert ev.observed is not None
    log_phi = ev.logits.float().log_softmax(-1)
    soft = (log_phi.exp().to(table.dtype) @ table.T).float()
    leaf = torch.where(ev.observed[..., None], table.T[ev.tokens].float(), soft)
    transition, length = hmm.transition.dense, leaf.shape[1]
    message = torch.ones_like(leaf[:, 0])
    targets, log_z = [], torch.zeros_like(leaf[:, 0, 0])
    for t in reversed(range(length)):
        target = leaf[:, t] * message
        norm = target.sum(-1, keepdim=True)
        log_z = log_z + norm[:, 0].log()
        targets.append(target / norm)
        message = targets[-1] @ transition.T
    targets.reverse()
    rows: Tensor = hmm.log_initial.exp()
    path: list[Tensor] = []
    for t in range(length):
        cumulative = (rows * targets[t]).cumsum(-1)
        path.append((cumulative <= uniforms[:, t, None] * cumulative[:, -1:]).sum(-1).clamp_max(len(transition) - 1))
        rows = transition[path[-1]]
    latents = torch.stack(path, 1)
    first = (hmm.log_initial.exp() * targets[0]).sum(-1).log()
    return latents, log_phi + table[latents].float().log(), log_z + first


def graph_time(function: Callable[[], object], repeats: int = 50) -> float:
    """Median milliseconds of a replay of the captured function."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # compile and warm up outside of the capture
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times: list[float] = []
    for _ in range(repeats + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[5:])[repeats // 2]


def read_bandwidth() -> float:
    """Bytes a second at which this GPU reads a large buffer once, measured (row-wise maxima of 4 GiB)."""
    buffer = torch.zeros(2**14, 2**16, dtype=torch.int32, device="cuda")
    return buffer.numel() * 4 / graph_time(lambda: buffer.amax(-1), 20) * 1e3


def run(settings: Settings, bandwidth: float) -> dict[str, Any]:
    """Check one case against float64, time its stages and the whole, and set them against the bytes they move."""
    from codd.circuits.ops.chain.triton import messages
    from codd.circuits.ops.leaf.triton import fused
    from codd.circuits.ops.path.triton import launch as sample
    from codd.circuits.ops.scores.triton import launch as scores

    hmm, ev, uniforms = problem(settings)
    assert ev.observed is not None
    assert ev.logits is not None
    n, v, rows = settings.states, settings.tokens, settings.batch * settings.length
    masked = int((~ev.observed).sum())
    e, x = hmm.emission.linear.element_size(), ev.logits.element_size()
    leaf, log_total = fused(hmm.emission, ev)
    backward = messages(hmm.transition, None, leaf, True)
    path, _ = sample(hmm.transition, hmm.log_initial, leaf, backward, uniforms[None])
    stages: dict[str, tuple[Callable[[], object], int]] = {
        "contraction": (lambda: fused(hmm.emission, ev), n * v * e + masked * v * x + rows * n * 4),
        "chain": (lambda: messages(hmm.transition, None, leaf, True), n * n * 4 + 2 * rows * n * 4),
        "latent path": (
            lambda: sample(hmm.transition, hmm.log_initial, leaf, backward, uniforms[None]),
            3 * rows * n * 4,
        ),
        "new scores": (
            lambda: scores(hmm.emission, ev, path[0], log_total),
            masked * v * (x + e) + rows * v * 4,
        ),
    }
    report: dict[str, Any] = {
        "settings": asdict(settings),
        "machine": provenance("cuda", settings.emission),
        "bandwidth": bandwidth,
        "stages": {},
    }
    report["error"] = _error(hmm, ev)
    for name, (function, size) in stages.items():
        report["stages"][name] = _row(graph_time(function), size, bandwidth)
    total = sum(size for _, size in stages.values())
    report["stages"]["whole step"] = _row(graph_time(lambda: hmm.joint_step(ev, uniforms=uniforms)), total, bandwidth)
    table = hmm.emission.linear
    report["stages"]["plain PyTorch"] = _row(graph_time(lambda: plain_step(table, hmm, ev, uniforms)), total, bandwidth)
    return report


def _row(ms: float, size: int, bandwidth: float) -> dict[str, float]:
    floor = size / bandwidth * 1e3
    return {"ms": ms, "bytes": size, "bytes_per_s": size / ms * 1e3, "floor_ms": floor, "ratio": ms / floor}


def _error(hmm: HMM, ev: Evidence) -> dict[str, float]:
    """How far the kernels are from float64 with the same table: log Z a position, and the posterior."""
    exact = HMM(
        hmm.log_initial.double(), hmm.transition.dense.double().log(), hmm.log_emission.double(), validate=False
    )
    got, q = hmm.log_partition(ev), hmm.posterior(ev).exp()
    with ops.use("eager"):
        want, want_q = exact.log_partition(ev), exact.posterior(ev).exp()
    return {
        "log_partition_nats_per_position": float((got - want).abs().max()) / ev.shape[1],
        "posterior_max": float((q - want_q).abs().max()),
    }


def render(report: dict[str, Any]) -> RenderableType:
    """The report as a table."""
    s = report["settings"]
    table = Table(
        title=f"N {s['states']}, V {s['tokens']}, L {s['length']}, B {s['batch']}, mask ratio {s['mask_ratio']}, "
        f"emission {s['emission']}, logits {s['logits']}, seed {s['seed']}"
    )
    for name in ("stage", "ms", "MB", "TB/s", "floor ms", "ms / floor"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for name, row in report["stages"].items():
        table.add_row(
            name,
            f"{row['ms']:.4f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['bytes_per_s'] / 1e12:.2f}",
            f"{row['floor_ms']:.4f}",
            f"{row['ratio']:.2f}",
        )
    m, error = report["machine"], report["error"]
    note = (
        f"{m['machine']}, torch {torch.__version__}; a buffer is read at "
        f"{report['bandwidth'] / 1e12:.2f} TB/s; error against float64: "
        f"{error['log_partition_nats_per_position']:.1e} nats per position, posterior {error['posterior_max']:.1e}"
    )
    return Group(table, note)


if __name__ == "__main__":
    main()
