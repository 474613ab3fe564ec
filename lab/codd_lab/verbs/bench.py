"""``codd bench``: what the circuit costs on this machine."""

import argparse
from typing import Any

from codd.cli import console
from codd.errors import InvalidInput

NAME = "bench"
HELP = """\
Measures what the circuit adds to a denoising step on this machine: the model answers one word problem with the network
alone and with each sampler of the joint, in turns, with the same number of network calls, and the ratio is taken round
by round, so that a busy machine is busy for all. The comparison of the circuit engine with other libraries, kernel by
kernel, is in benchmarks/ of the repository.

Prints milliseconds a step and the ratio to the network alone, as medians with quartiles, and the machine."""

LABELS = {"factorized": "network alone", "coupled": "latent sampler", "any order": "any-order sampler"}
"""The samplers of `codd_lab.cost` in the words of --sampler."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the model, the circuit, the device and the sizes of a run."""
    parser.epilog = """\
examples:
  codd bench                                   # the bundled model; on a GPU if there is one
  codd bench --device cpu --threads 1
  codd bench --circuit static --rounds 20 --json > cost.json"""
    positive = console.number(int, 1)
    parser.add_argument("--model", metavar="PATH", help="a folder or hub id (default: the bundled model)")
    parser.add_argument(
        "--circuit",
        metavar="PATH",
        default="trained",
        help="a folder, hub id, static or null",
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--quantize", choices=("int8",), help="8-bit weights in the network")
    parser.add_argument("--threads", type=positive, help="of PyTorch on a CPU (default: all cores)")
    parser.add_argument("--gen-length", type=positive, default=64, help="tokens that are written (default: 64)")
    parser.add_argument("--steps", type=positive, default=8, help="network calls of a run (default: 8)")
    parser.add_argument("--rounds", type=positive, default=8, help="runs of each sampler (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the word problem and the samplers (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    report = measure(args)
    if args.json:
        console.as_json(report)
    else:
        _print(report)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step of every sampler, and the ratio to the network alone."""
    import torch  # here and below, so that --help answers at once

    import codd
    from codd_lab.cost import cost_study
    from codd_lab.problems import problems

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model = codd.load(args.model, args.circuit, device=args.device, quantize=args.quantize)
    if model.circuit is None:
        raise InvalidInput(f"{args.model or 'the bundled model'} has no circuit of its own: name one with --circuit.")
    with console.bar("rounds", args.rounds) as bar:
        study = cost_study(
            model,
            circuits=(args.circuit,),
            steps=(args.steps,),
            gen_length=args.gen_length,
            rounds=args.rounds,
            prompt=next(problems(1, split="test", seed=args.seed)).question,
            seed=args.seed,
            progress=lambda done, total: bar.advance(),
        )
    rows = {LABELS[row["way"]]: _row(row, args.steps) for row in study["data"]["rows"]}
    settings = {**study["settings"], "model": args.model, "circuit": repr(model.circuit), "steps": args.steps}
    return {"settings": settings, "provenance": study["provenance"], "samplers": rows}


def _row(row: dict[str, Any], steps: int) -> dict[str, Any]:
    ratio = row["overhead"] and {name: 1 + value for name, value in row["overhead"].items()}
    return {"ms_a_step": {name: 1e3 * value / steps for name, value in row["seconds"].items()}, "ratio": ratio}


def _print(report: dict[str, Any]) -> None:
    from codd.cli.tables import Section, show

    settings, where = report["settings"], report["provenance"]
    before = [
        f"{where['machine']}, {where['threads']} thread(s), {where['dtype']}, torch {where['versions']['torch']}",
        settings["circuit"],
        f"{settings['gen_length']} tokens in {settings['steps']} steps, {settings['rounds']} rounds, "
        f"seed {settings['seed']}",
    ]
    rows = [
        [name, _quartiles(row["ms_a_step"]), _quartiles(row["ratio"]) if row["ratio"] else "1"]
        for name, row in report["samplers"].items()
    ]
    header = ["", "ms a step (quartiles)", "times the network alone (quartiles)"]
    show([Section("What the circuit costs", before, header, rows)])


def _quartiles(values: dict[str, float]) -> str:
    return f"{values['median']:.3g} ({values['low']:.3g} to {values['high']:.3g})"
