"""Draw the validation losses of training runs: python benchmarks/curves.py docs/runs/mini.jsonl ... > docs/mini.svg."""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 300, 46
COLOURS = ("#1b6ca8", "#c2571a", "#3a7d44", "#7a3b8f")


def main() -> None:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for path in map(Path, sys.argv[1:]):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            for name, value in entry.items():
                if name.startswith("validation/"):
                    panels.setdefault(name, {}).setdefault(path.stem, []).append((entry["step"], value))
    height = HEIGHT * len(panels)
    body = "\n".join(panel(name, curves, i * HEIGHT) for i, (name, curves) in enumerate(panels.items()))
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>'
    )


def panel(name: str, curves: dict[str, list[tuple[float, float]]], top: int) -> str:
    points = [point for curve in curves.values() for point in curve]
    last, high, low = max(p[0] for p in points), max(p[1] for p in points), min(p[1] for p in points)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def place(step: float, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        y = top + MARGIN + (HEIGHT - 2 * MARGIN) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<text x="{MARGIN}" y="{top + 24}" font-weight="bold">{name}, nats a token</text>']
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
        parts.append(f'<text x="{WIDTH - MARGIN - 90}" y="{top + 24 + 16 * i}" fill="{colour}">{label}</text>')
    return "\n".join(parts)


if __name__ == "__main__":
    main()
