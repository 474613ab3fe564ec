"""The joint step on a GPU at the sizes of docs/results.md: python benchmarks/circuits_gpu.py [--json FILE]."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from codd.evaluation.joint_step import Settings, read_bandwidth, render, run

CASES = [
    Settings(),
    Settings(batch=8),
    Settings(emission="float32", logits="float32"),
    Settings(batch=8, emission="float32", logits="float32"),
    Settings(states=4096),
    Settings(mask_ratio=1.0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(width=120)
    bandwidth = read_bandwidth()
    reports = []
    for case in CASES:
        reports.append(run(replace(case, seed=args.seed), bandwidth))
        console.print(render(reports[-1]))
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
