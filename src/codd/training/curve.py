"""The picture of a run: its loss, and what it was worth on held-out text."""

from pathlib import Path
from typing import TYPE_CHECKING

from codd import files
from codd.errors import FormatError
from codd.training.run import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELD_OUT = "held_out/"
LOSS = ("loss", "factorized")
"""What is drawn of the training itself; all held-out figures are."""
FEW = 40
"""Points up to which each is marked."""

Curve = list[tuple[float, float]]
Panels = dict[str, dict[str, Curve]]
"""The curves of each panel, by name."""


def write_curve(metrics_jsonl: Path, out: Path) -> None:
    """Draw a run's metrics as a PNG: one panel of losses, and one for each figure that is taken on held-out text.

    ``held_out/books@0.5/gap`` is the curve books@0.5 in the panel gap. A text has one colour; of its mask ratios two
    are drawn, the largest and, dashed, the one nearest to half of it. The file appears whole or not at all.
    """
    from matplotlib.figure import Figure  # not before it is needed: it takes long

    panels = {name: _few(curves) for name, curves in read_panels(metrics_jsonl).items()}
    figure = Figure(figsize=(7, 2.8 * len(panels)), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for (name, curves), panel in zip(panels.items(), axes, strict=True):
        _draw(panel, name, curves)
    axes[-1].set_xlabel("step")
    with files.replacing(out.parent, out.name) as (temporary,), temporary.open("wb") as file:
        figure.savefig(file, format="png")


def read_panels(metrics_jsonl: Path) -> Panels:
    """The curves of a run's metrics, by panel."""
    panels: Panels = {}
    for entry in read_metrics(metrics_jsonl):
        for name, value in entry.items():
            if (place := _place(name)) is not None:
                panels.setdefault(place[0], {}).setdefault(place[1], []).append((float(entry["step"]), float(value)))
    if not panels:
        raise FormatError(
            f"{metrics_jsonl}: expected lines with a step and a loss or held_out/... figures, found none."
        )
    return dict(sorted(panels.items(), key=lambda panel: panel[0] != LOSS[0]))


def _place(name: str) -> tuple[str, str] | None:
    """The panel of a figure and the name of its curve."""
    if name in LOSS:
        return LOSS[0], name
    if not name.startswith(HELD_OUT):
        return None
    text, slash, kind = name.removeprefix(HELD_OUT).partition("/")
    return (kind, text) if slash else (text, "held out")


def _few(curves: dict[str, Curve]) -> dict[str, Curve]:
    """The curves of each text at its largest mask ratio, and at the one nearest to half of that."""
    ratios: dict[str, list[float]] = {}
    for text, ratio in map(_parts, curves):
        ratios.setdefault(text, []).append(ratio)
    kept = {(text, max(found)) for text, found in ratios.items()}
    kept |= {(text, min(found, key=lambda ratio: abs(ratio - max(found) / 2))) for text, found in ratios.items()}
    return {label: points for label, points in curves.items() if _parts(label) in kept}


def _parts(label: str) -> tuple[str, float]:
    """The text and the ratio of a curve, 1 if it says none."""
    text, _, ratio = label.rpartition("@")
    try:
        return (text, float(ratio)) if text else (label, 1.0)
    except ValueError:
        return label, 1.0


def _draw(panel: "Axes", name: str, curves: dict[str, Curve]) -> None:
    texts = list(dict.fromkeys(_parts(label)[0] for label in curves))
    largest = {text: max(ratio for each, ratio in map(_parts, curves) if each == text) for text in texts}
    for label, points in curves.items():
        text, ratio = _parts(label)
        steps, values = zip(*points, strict=True)
        panel.plot(
            steps,
            values,
            label=label,
            color=f"C{texts.index(text) % 10}",
            linestyle="-" if ratio == largest[text] else "--",
            linewidth=1.4,
            marker="." if len(points) <= FEW else "",
        )
    panel.set_ylabel(name.replace("_", " "))
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
