"""Draw the validation losses of training runs, or what optimizers reach in a time, one panel a measure:

python benchmarks/curves.py docs/runs/mini.jsonl docs/runs/causal.jsonl --out FILE.svg   # metrics.jsonl of runs
python benchmarks/curves.py docs/runs/anemone.json --out FILE.svg                     # reports of anemone.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

Curves = dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg", help="the drawing")
    args = parser.parse_args()
    panels: dict[str, Curves] = {}
    for path in args.files:
        if path.suffix == ".json":
            title, curves = optimizers(json.loads(path.read_text()))
            panels[title] = curves
            continue
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            for name, value in entry.items():
                if name.startswith("validation/"):
                    title = f"{name}, nats per token by steps"
                    panels.setdefault(title, {}).setdefault(path.stem, []).append((entry["step"], value))
    figure = Figure(figsize=(7, 3.2 * len(panels)), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for label, points in curves.items():
            axes.plot(*zip(*points, strict=True), label=label)
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    with rc_context({"svg.hashsalt": "codd", "svg.fonttype": "none"}):
        figure.savefig(args.out, format="svg", metadata={"Date": None})
    print(f"written: {args.out}")


def optimizers(report: dict[str, Any]) -> tuple[str, Curves]:
    """The share of the way from the network alone to the planted circuit, by seconds; not of those that diverge."""
    floor, best = report["network alone"], report["planted"]
    curves: Curves = {}
    for way, readings in report["ways"].items():
        found = [(each["seconds"], (each["value"] - floor) / (best - floor)) for each in readings if each["value"]]
        if found[-1][1] > 0.5:
            curves[way] = [(0.0, 0.0), *found]
    return f"{report['settings']['states']} states: share of the way to the planted circuit, by seconds", curves


if __name__ == "__main__":
    main()
