"""Draw the validation losses of training runs, or what optimizers reach in a time, one panel a measure:

python benchmarks/curves.py docs/runs/mini.jsonl docs/runs/causal.jsonl > FILE.svg   # metrics.jsonl of runs
python benchmarks/curves.py docs/runs/anemone.json > FILE.svg                        # reports of anemone.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 300, 46
COLOURS = ("#1b6ca8", "#c2571a", "#3a7d44", "#7a3b8f", "#8a7a1f", "#555555", "#b0305c")
Curves = dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="the drawing (default: printed)")
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
                    title = f"{name}, nats a token by steps"
                    panels.setdefault(title, {}).setdefault(path.stem, []).append((entry["step"], value))
    height = HEIGHT * len(panels)
    body = "\n".join(panel(name, curves, i * HEIGHT) for i, (name, curves) in enumerate(panels.items()))
    drawing = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>'
    )
    if args.out:
        args.out.write_text(drawing + "\n")
    else:
        print(drawing)


def optimizers(report: dict[str, Any]) -> tuple[str, Curves]:
    """The share of the way from the network alone to the planted circuit, by seconds; not of those that diverge."""
    floor, best = report["network alone"], report["planted"]
    curves: Curves = {}
    for way, readings in report["ways"].items():
        found = [(each["seconds"], (each["value"] - floor) / (best - floor)) for each in readings if each["value"]]
        if found[-1][1] > 0.5:
            curves[way] = [(0.0, 0.0), *found]
    return f"{report['settings']['states']} states: share of the way to the planted circuit, by seconds", curves


def panel(name: str, curves: Curves, top: int) -> str:
    points = [point for curve in curves.values() for point in curve]
    last, high, low = max(p[0] for p in points), max(p[1] for p in points), min(p[1] for p in points)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def place(step: float, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        y = top + MARGIN + (HEIGHT - 2 * MARGIN) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<text x="{MARGIN}" y="{top + 24}" font-weight="bold">{name}</text>']
    for i in range(5):
        value = low + (high - low) * i / 4
        x, y = place(0, value).split(",")
        parts.append(f'<line x1="{x}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{float(y) + 4}" text-anchor="end">{value:.2f}</text>')
        step = last * i / 4
        x = place(step, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{top + HEIGHT - 26}" text-anchor="middle">{step:,.0f}</text>')
    for i, (label, curve) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = " ".join(place(*point) for point in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        place_ = f'x="{WIDTH - MARGIN}" y="{top + HEIGHT - MARGIN - 8 - 16 * i}" text-anchor="end"'
        parts.append(f'<text {place_} fill="{colour}">{label}</text>')
    return "\n".join(parts)


if __name__ == "__main__":
    main()
