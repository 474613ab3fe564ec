"""Curves for a report: as SVG inside the page, where they follow light and dark, and as PNG files.

Every curve has a colour that the colour-blind can tell apart, and a marker and a dash of its own beside it.
"""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from codd import files
from codd_lab.report.page import visible
from codd_lab.report.quality import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#808080")
"""The palette of Okabe and Ito; the last is grey, for the baseline."""
_COLOUR_OF = {"trained": 0, "null": 1, "static": 2, "dcd": 3, "sequential": 4, "left_to_right": 4}
OTHER = 5
"""The colour of circuits that have none of their own."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "<", ">")
DASHES = ("-", "--", ":", "-.")
INK, PAPER_INK = "#010203", "#222222"
"""Text and axes: on a page the text's own colour takes the place of the first."""
WIDTH, HEIGHT, ROW = 4.6, 3.1, 0.2
"""Inches of a panel, and of a line of its legend."""
FEW = 6
"""Curves up to which intervals are drawn as bars; of more they would hide each other."""
WIDE = 8
"""From this ratio of the largest to the smallest, an axis of costs is logarithmic."""


@dataclass(frozen=True)
class Look:
    """How a curve is told apart: indices into colours, markers and dashes.

    ``wide`` is for what others are compared with: it stays visible where another curve is the same.
    """

    colour: int = 0
    marker: int = 0
    dash: int = 0
    wide: bool = False


@dataclass(frozen=True)
class Curve:
    """Points from left to right, with intervals where they are known."""

    label: str
    points: Sequence[tuple[float, Estimate]]
    look: Look = Look()

    @property
    def xs(self) -> list[float]:
        """The x values of the points."""
        return [x for x, _ in self.points]

    @property
    def intervals(self) -> tuple[list[float], list[float]] | None:
        """The lower and upper ends of all points; None unless every point has both."""
        ends = [(y.low, y.high) for _, y in self.points if y.low is not None and y.high is not None]
        complete = len(ends) == len(self.points) > 0
        return ([low for low, _ in ends], [high for _, high in ends]) if complete else None


@dataclass(frozen=True)
class Panel:
    """Axes with curves. ``bands``: intervals are areas, else bars."""

    x: str
    y: str
    curves: Sequence[Curve]
    bands: bool = False
    ratio_axis: bool = False
    """Whether x is a cost, whose ratios matter."""


@dataclass(frozen=True)
class Chart:
    """Panels that share a legend; the name is that of its file, and unlike that of any other chart on a page."""

    name: str
    title: str
    panels: Sequence[Panel]


def look(name: str, marker: int = 0, dash: int = 0) -> Look:
    """The look of a circuit or of a score; a circuit has one colour in all figures."""
    if name in ("none", "factorized"):
        return Look(len(COLOURS) - 1, marker, dash, wide=True)
    return Look(_COLOUR_OF.get(name, OTHER), marker, dash)


def svg(chart: Chart) -> list[Markup]:
    """Its panels, each an SVG element to stand inside a page."""
    return [_panel_svg(chart, number) for number in range(len(chart.panels))]


def write_png(chart: Chart, path: Path) -> None:
    """All panels in one picture, on white. The file appears whole or not at all."""
    with files.replacing(path.parent, path.name) as (temporary,), temporary.open("wb") as file, _plainly():
        figure = _figure(chart.panels, PAPER_INK, title=chart.title)
        figure.savefig(file, format="png", dpi=150, facecolor="white", metadata={"Software": None})


def _panel_svg(chart: Chart, number: int) -> Markup:
    panel, out = chart.panels[number], io.StringIO()
    with _plainly():
        unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _figure([panel], INK).savefig(out, format="svg", transparent=True, metadata=unsaid)
    return inline(out.getvalue(), f"{chart.name}-{number}", f"{chart.title} ({panel.y} against {panel.x})")


def inline(text: str, name: str, title: str) -> Markup:
    """An SVG file as part of a page: without prolog and style sheet, with prefixed ids and an accessible title.

    ``name`` must be unlike that of any other figure on the page.
    """
    body = text[text.index("<svg") :].strip()
    prefix = re.sub(r"[^\w-]", "-", name)
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    body = body.replace(INK, "currentColor").replace("xlink:href", "href")
    body = re.sub(r"""font-family: [^;"]*;?""", "", body)
    body = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    head, rest = body.split(">", 1)
    head = head.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    shown = escape(visible(title))
    head += f' role="img" aria-label="{shown}" stroke-linejoin="round"'
    return Markup(f"{head}>\n<title>{shown}</title>{rest}")  # matplotlib escapes what it writes


@contextmanager
def _plainly() -> Iterator[None]:
    """Text stays text, ids depend on nothing but the figure, dollars are no formulas."""
    import matplotlib

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "codd", "text.parse_math": False}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a label that our font lacks is no reason to fail
        yield


def _figure(panels: Sequence[Panel], ink: str, title: str = "") -> "Figure":
    from matplotlib.figure import Figure  # not before it is needed: it takes long

    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    columns = len(panels) if len(labels) > 1 else 1
    rows = -(-len(labels) // columns)
    size = WIDTH * len(panels), HEIGHT + ROW * rows + 0.1 + (0.3 if title else 0)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, place in zip(panels, axes, strict=True):
        _draw(place, panel, ink)
    drawn = {line.get_label(): line for place in axes for line in place.get_lines() if line.get_label() in labels}
    figure.legend(
        [drawn[label] for label in labels],
        [visible(label) for label in labels],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=ink,
        handlelength=4.5,
    )
    if title:
        figure.suptitle(visible(title), fontsize=10, color=ink)
    return figure


def _draw(place: "Axes", panel: Panel, ink: str) -> None:
    bars = not panel.bands and len(panel.curves) <= FEW
    for curve in panel.curves:
        colour = COLOURS[curve.look.colour % len(COLOURS)]
        place.plot(
            curve.xs,
            [y.value for _, y in curve.points],
            label=curve.label,
            color=colour,
            linestyle=DASHES[curve.look.dash % len(DASHES)],
            marker=MARKERS[curve.look.marker % len(MARKERS)],
            markersize=9 if curve.look.wide else 5,
            linewidth=3.2 if curve.look.wide else 1.6,
            alpha=0.6 if curve.look.wide else 1,
        )
        if curve.intervals and panel.bands:
            place.fill_between(curve.xs, *curve.intervals, color=colour, alpha=0.18, linewidth=0)
        elif curve.intervals and bars:
            place.vlines(curve.xs, *curve.intervals, color=colour, alpha=0.45, linewidth=1)
    _scale(place, panel)
    place.set_xlabel(visible(panel.x), color=ink)
    place.set_ylabel(visible(panel.y), color=ink)
    place.tick_params(colors=ink, which="both")
    place.grid(color=ink, alpha=0.15, linewidth=0.6)
    for side, spine in place.spines.items():
        spine.set_color(ink)
        spine.set_visible(side in ("left", "bottom"))


def _scale(place: "Axes", panel: Panel) -> None:
    """Costs over a wide range double from tick to tick."""
    xs = [x for curve in panel.curves for x in curve.xs]
    if panel.ratio_axis and xs and min(xs) > 0 and max(xs) / min(xs) >= WIDE:
        place.set_xscale("log", base=2)
        place.xaxis.set_major_formatter("{x:.3g}")
        place.xaxis.set_minor_formatter("")
