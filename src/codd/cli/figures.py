"""Grouped bars as SVG inside a page: coloured by the page's own style, so that they follow light and dark."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, LEFT, BAR, GAP, LINE = 640, 190, 18, 16, 20


def bars(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    label: Callable[[float], str],
) -> str:
    """For each group a bar of every series, from the left, with its value at its end."""
    largest = max((value for values in series.values() for value in values), default=0) or 1
    scale = (WIDTH - LEFT - 90) / largest
    parts, y = _legend(list(series)), LINE + GAP
    for number, group in enumerate(groups):
        parts.append(_text(0, y + len(series) * BAR / 2 + 4, group))
        for kind, values in enumerate(series.values()):
            width = values[number] * scale
            parts.append(
                f'<rect class="series{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 3}"></rect>'
            )
            parts.append(_text(LEFT + width + 6, y + 12, label(values[number])))
            y += BAR
        y += GAP
    axis = f'<line class="axis" x1="{LEFT}" y1="{LINE + GAP - 6}" x2="{LEFT}" y2="{y - GAP + 4}"></line>'
    body = "\n".join([f"<title>{escape(title)}</title>", *parts, axis])
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    return f'<p>{escape(title)}</p>\n<svg role="img" {size}>\n{body}\n</svg>'


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for kind, name in enumerate(names):
        x = LEFT + kind * 150
        parts.append(f'<rect class="series{kind}" x="{x}" y="2" width="12" height="12"></rect>')
        parts.append(_text(x + 18, 13, name))
    return parts


def _text(x: int | float, y: int | float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
