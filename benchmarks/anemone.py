"""Anemone against Adam on windows whose best circuit is known, at equal time.

    python benchmarks/anemone.py --out docs/runs/anemone.json                  # a CPU: 64 states, LLaDA's vocabulary
    python benchmarks/anemone.py --device cuda --states 1024 --batch 256 --seconds 60 --out FILE

The truth is planted: an HMM whose states each prefer a share of the tokens and follow each other in a few ways. For
every window the "network" lists some candidates a position with noisy log-probabilities; the text is an exact sample
of the product of both. So the conditional log-likelihood of the planted circuit is the best there is, the network
alone is where training starts, and a score says which share of the way between them a circuit has gone, on windows
that no training saw. All optimizers draw the same batches in the same order, and are scored at equal seconds.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codd.circuits import HMM, Evidence, SparsePotentials
from codd.data.windows import WindowBatch
from codd.training.circuit.objectives import Signed, log_tables, signed_flows, weights_of, with_tables
from codd.training.circuit.optimizers import Anemone
from timing import clock, head, save


class Adam:
    """Adam on logits u with theta = softmax(u): dJ / du = G - theta sum G, where G = F+ - F-, per masked token."""

    def __init__(self, rate: float):
        self.rate = rate
        self.logits: list[Tensor] = []

    @torch.no_grad()
    def update(self, hmm: HMM, signed: Signed) -> HMM:
        """As `Anemone.update`."""
        if not self.logits:
            self.logits = [x.clone() for x in log_tables(hmm)]
            self.adam = torch.optim.Adam(self.logits, betas=(0.9, 0.99))
        for logits, log_theta, up, down in zip(self.logits, log_tables(hmm), signed.plus, signed.minus, strict=True):
            flow = up - down
            logits.grad = (log_theta.exp() * flow.sum(-1, keepdim=True) - flow) / signed.tokens
        self.adam.param_groups[0]["lr"] = self.rate
        self.adam.step()
        initial, transition, emission = (x.log_softmax(-1) for x in self.logits)
        return with_tables(hmm, (initial, transition, emission))


WAYS: dict[str, Callable[[], Adam | Anemone]] = {
    "adam 1.5e-2": lambda: Adam(1.5e-2),
    "adam 5e-2": lambda: Adam(5e-2),
    "adam 1.5e-1": lambda: Adam(1.5e-1),
    "ratio 0.4": lambda: Anemone(0.4, rule="ratio"),
    "ratio 0.1": lambda: Anemone(0.1, rule="ratio"),
    "baum-welch 0.4": lambda: Anemone(0.4),
    "ratio 0.4, momentum 0.9": lambda: Anemone(0.4, momentum=0.9, rule="ratio"),
    "baum-welch 0.4, momentum 0.9": lambda: Anemone(0.4, momentum=0.9),
}


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    planted = plant(args, generator)
    pool = draw(planted, args.windows, args, generator)
    held_out = draw(planted, args.held_out, args, generator)
    floor, best = float(network_alone(held_out)), score(planted, held_out)
    print(f"nats a masked token: network alone {floor:.4f}, planted circuit {best:.4f}")
    report: dict[str, Any] = {**head(args, args.device), "network alone": floor, "planted": best, "ways": {}}
    for name in args.ways or WAYS:
        report["ways"][name] = curve = []
        for updates, seconds, value in train(WAYS[name](), pool, held_out, args):
            curve.append({"updates": updates, "seconds": seconds, "value": value if math.isfinite(value) else None})
            share = (value - floor) / (best - floor)
            print(f"{name:30s} {updates:5d} updates {seconds:6.1f} s  {value:9.4f}  {share:7.1%}", flush=True)
        save(report, args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=126_464)
    parser.add_argument("--states", type=int, default=64, help="of the circuit that learns")
    parser.add_argument("--planted", type=int, default=32, help="states of the truth")
    parser.add_argument("--strength", type=float, default=3.0, help="log-odds by which a state prefers its tokens")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--candidates", type=int, default=64, help="tokens a position that the network lists")
    parser.add_argument("--noise", type=float, default=1.0, help="standard deviation of its log-probabilities")
    parser.add_argument("--windows", type=int, default=4096, help="to learn from, over and over")
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60, help="of updates, for each optimizer")
    parser.add_argument("--readings", type=int, default=6)
    parser.add_argument("--weighting", choices=("token", "elbo"), default="token")
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def plant(args: argparse.Namespace, generator: torch.Generator) -> HMM:
    """The truth: tokens by Zipf's law, each preferred by one state; from each state four others are likely."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=args.device)

    rank = torch.arange(args.vocab, device=args.device) + 10.0
    owner = (rand(args.vocab) * args.planted).long()
    emission = -rank.log().expand(args.planted, -1).clone()
    emission[owner, torch.arange(args.vocab, device=args.device)] += args.strength
    transition = rand(args.planted, args.planted)
    likely = transition.topk(4, dim=-1).indices
    transition = torch.zeros_like(transition).scatter(1, likely, args.strength)
    return HMM(rand(args.planted).log_softmax(-1), transition.log_softmax(-1), emission.log_softmax(-1))


def draw(planted: HMM, count: int, args: argparse.Namespace, generator: torch.Generator) -> WindowBatch:
    """Windows of the product of the planted circuit and noisy candidates; any share of a window may be masked."""
    ids = candidates(count, args, generator)
    noise = args.noise * torch.randn(ids.shape, generator=generator, device=args.device)
    phi = SparsePotentials(ids, noise.log_softmax(-1))
    parts = [
        planted.sample(Evidence(sparse=part(phi, rows)), generator=generator).tokens
        for rows in spans(count, args.batch)
    ]
    level = torch.rand(count, generator=generator, device=args.device)
    masked = torch.rand(count, args.length, generator=generator, device=args.device) < level[:, None]
    return WindowBatch(torch.cat(parts), masked, sparse=phi, level=level)


def candidates(count: int, args: argparse.Namespace, generator: torch.Generator) -> Tensor:
    """Different tokens by Zipf's law: one of each of so many groups of neighbouring ranks that are equally likely."""
    mass = (torch.arange(args.vocab, device=args.device) + 10.0).double().reciprocal().cumsum(0)
    even = torch.arange(1, args.candidates, device=args.device) / args.candidates
    ends = torch.cat([torch.searchsorted(mass, even * mass[-1]), torch.tensor([args.vocab - 1], device=args.device)])
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    assert (starts <= ends).all(), "a token is likelier than a group: list fewer candidates"
    low, high = torch.where(starts > 0, mass[starts - 1], 0), mass[ends]
    u = torch.rand(count, args.length, args.candidates, generator=generator, device=args.device)
    return torch.searchsorted(mass, low + u * (high - low)).clamp(starts, ends)


def spans(count: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, count, step))


def part(phi: SparsePotentials, rows: Any) -> SparsePotentials:
    return SparsePotentials(phi.ids[rows], phi.log_weights[rows])


def take(windows: WindowBatch, rows: Any) -> WindowBatch:
    assert windows.sparse is not None
    assert windows.level is not None
    return WindowBatch(
        windows.tokens[rows], windows.masked[rows], sparse=part(windows.sparse, rows), level=windows.level[rows]
    )


def network_alone(windows: WindowBatch) -> Tensor:
    return windows.factorized_log_prob().sum() / windows.masked.sum()


def score(hmm: HMM, windows: WindowBatch) -> float:
    """Nats a masked token."""
    parts = [signed_flows(hmm, take(windows, rows)).value for rows in spans(len(windows.tokens), 64)]
    return float(torch.stack(parts).sum() / windows.masked.sum())


def train(
    optimizer: Adam | Anemone, pool: WindowBatch, held_out: WindowBatch, args: argparse.Namespace
) -> Iterator[tuple[int, float, float]]:
    """Updates and seconds so far, and the score on held-out windows, at even times; ends early when it broke."""
    hmm = HMM.random(num_states=args.states, vocab_size=args.vocab, seed=args.seed, scale=0.5)
    hmm = hmm.to(args.device)
    order = torch.Generator().manual_seed(args.seed)
    updates, used, rate = 0, 0.0, optimizer.rate
    for reading in range(1, args.readings + 1):
        while used < args.seconds * reading / args.readings:
            begun = clock(args.device)
            rows = torch.randint(len(pool.tokens), (args.batch,), generator=order).to(args.device)
            windows = take(pool, rows)
            optimizer.rate = max(rate * (1 - used / args.seconds), 0.02 * rate)
            signed = signed_flows(hmm, windows, weights_of(windows, args.weighting))
            hmm = optimizer.update(hmm, signed)
            updates, used = updates + 1, used + clock(args.device) - begun
        value = score(hmm, held_out)
        yield updates, used, value
        if not math.isfinite(value):
            return


if __name__ == "__main__":
    main()
