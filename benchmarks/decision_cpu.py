"""The milliseconds of one decision of the circuit on a CPU, stage by stage, beside what bytes and operations need.

python benchmarks/decision_cpu.py --threads 1

A window of 32 positions of the bundled model, in states that a run over a word problem passes through. Needed: the
larger of multiplications over the rate of this core's product and bytes over how fast it reads, both measured first.
"""

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch

import codd
from codd.circuits.incremental import IncrementalConditioner
from codd.circuits.ops import native
from codd.decoding import loop
from codd.decoding.samplers import Ranking, WindowInputs, sample_window, sampling_rule
from codd_lab.problems import problems
from timing import milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=8, help="a step")
    parser.add_argument("--masks", type=int, nargs="+", default=(32, 16, 8), help="that are left in the window")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = codd.load(device="cpu")
    [problem] = problems(1, split="test", seed=args.seed)
    circuit, windows = model.circuit, passed_through(model, problem.question, args.tokens)
    assert isinstance(circuit, codd.Modulated)
    states, vocab = circuit.num_states, circuit.vocab_size
    rate, copying = ceilings(states, vocab, args.rounds)
    print(f"{circuit}, torch {torch.__version__}, {args.threads} thread(s), {args.tokens} tokens per step, float32")
    print(f"this machine: {rate / 1e9:.1f} G multiplications/s on one core, {copying / 1e9:.1f} GB/s read\n")
    print("| masks | stage | ms | needed, ms | by |\n|---|---|---|---|---|")
    for masks in args.masks:
        window = next(each for each in windows if int(each.masked.sum()) <= masks)
        for name, ms, work, read in stages(circuit, window, args):
            needed = max((work / rate, "operations"), (read / copying, "bytes"))
            print(f"| {int(window.masked.sum())} | {name} | {ms:.2f} | {1e3 * needed[0]:.2f} | {needed[1]} |")


def passed_through(model: codd.Model, question: str, tokens: int) -> list[WindowInputs]:
    """The windows that a run by number of tokens has."""
    found: list[WindowInputs] = []

    def kept(circuit: object, window: WindowInputs, *rest: object) -> Ranking:
        found.append(window)
        return sample_window(circuit, window, *rest)  # type: ignore[arg-type]

    with patch.object(loop, "sample_window", kept):
        model.generate(question, steps=128 // tokens, sampler="any_order", stop=False)
    return found


def ceilings(states: int, vocab: int, rounds: int) -> tuple[float, float]:
    """Multiplications a second of a product whose matrix stays in the cache, and bytes a second that are read."""
    panels = native.in_panels(torch.rand(256, states))
    rows, table = torch.rand(64, 256), torch.rand(vocab, states)
    product = (lambda: native.product(rows, panels)) if panels is not None else (lambda: rows @ table[:256])
    multiplying, reading = (milliseconds(each, rounds, "cpu", 1) / 1e3 for each in (product, table.sum))
    return 64 * 256 * states / multiplying, 4 * vocab * states / reading


def stages(
    circuit: codd.Modulated, window: WindowInputs, args: argparse.Namespace
) -> list[tuple[str, float, float, float]]:
    """Name, milliseconds, multiplications and bytes of each stage and of the whole."""
    length, masks, states, vocab = len(window.tokens), int(window.masked.sum()), circuit.num_states, circuit.vocab_size
    emission, options = circuit.hmm.emission, codd.Options(sampler="any_order", steps=1)
    logits = window.logits[window.masked]
    weights = logits.softmax(-1)
    with torch.no_grad():
        joint = window.joint(circuit, 1.0)
        conditioner = joint.conditionals(64)
        assert isinstance(conditioner, IncrementalConditioner)
        timings: dict[str, Callable[[], object]] = {
            "evidence and head": lambda: window.joint(circuit, 1.0),
            "leaf values": lambda: native.product(weights, emission.panels) if emission.panels is not None else None,
            "candidates (top 64)": lambda: logits.topk(64),
            "leaf values, candidates, the rest of it": lambda: joint.conditionals(64),
            "messages, first pick": lambda: committed(conditioner, window, options, 1),
            "messages, all picks": lambda: committed(conditioner, window, options, args.tokens),
            "the whole decision": lambda: sample_window(circuit, window, args.tokens, options),
        }
        ms = {name: milliseconds(function, args.rounds, "cpu", 1) for name, function in timings.items()}
    head = sum(parameter.numel() for parameter in circuit.head.parameters())
    matrix, width = states * states, 2 if circuit.hmm.transition.narrowed is not None else 4
    leaf, table = masks * vocab * states, 4 * vocab * states
    chain, picks = 2 * (length - 1) * matrix, args.tokens - 1
    again = chain + picks * (length - 1) * matrix
    work = {
        "evidence and head": (length * head, 4 * head),
        "leaf values": (leaf, table),
        "candidates (top 64)": (0, 4 * masks * vocab),
        "leaf values, candidates, the rest of it": (leaf, table),
        "messages, first pick": (chain, matrix * width),  # which then stays in the cache
        "messages, all picks": (again, matrix * width),
        "the whole decision": (length * head + leaf + again, 4 * head + table + matrix * width),
    }
    return [(name, ms[name], float(work[name][0]), float(work[name][1])) for name in timings]


def committed(conditioner: IncrementalConditioner, window: WindowInputs, options: codd.Options, count: int) -> object:
    """What the commit loop decides; the conditioner stays as it is."""
    rule = sampling_rule(options, count, count)
    return conditioner.commit_tokens(window.masked, window.noise.tokens, None, rule)


if __name__ == "__main__":
    main()
