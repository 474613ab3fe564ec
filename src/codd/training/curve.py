"""The picture of a run: its loss, and what it was worth on held-out text."""

from pathlib import Path

from codd import files
from codd.errors import FormatError
from codd.training.run import read_metrics

HELD_OUT = "held_out/"
LOSS = ("loss", "factorized")
"""What is drawn of the training itself; all held-out figures are."""
FEW = 40
"""Points up to which each is marked."""

Panels = dict[str, dict[str, list[tuple[float, float]]]]
"""The curves of each panel, by name."""


def write_curve(metrics_jsonl: Path, out: Path) -> None:
    """Draw a run's metrics as a PNG: one panel of losses, and one for each figure that is taken on held-out text.

    ``held_out/books@0.5/gap_closed`` is the curve books@0.5 in the panel gap_closed. The file appears whole or not at
    all.
    """
    from matplotlib.figure import Figure  # not before it is needed: it takes long

    panels = read_panels(metrics_jsonl)
    figure = Figure(figsize=(7, 2.8 * len(panels)), dpi=120, layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for (name, curves), panel in zip(panels.items(), axes, strict=True):
        for label, points in curves.items():
            steps, values = zip(*points, strict=True)
            panel.plot(steps, values, label=label, linewidth=1.4, marker="." if len(points) <= FEW else "")
        panel.set_ylabel(name.replace("_", " "))
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes[-1].set_xlabel("step")
    with files.replacing(out.parent, out.name) as (temporary,), temporary.open("wb") as file:
        figure.savefig(file, format="png")


def read_panels(metrics_jsonl: Path) -> Panels:
    """The curves of a run's metrics, by panel."""
    panels: Panels = {}
    for entry in read_metrics(metrics_jsonl):
        for name, value in entry.items():
            text, slash, kind = name.removeprefix(HELD_OUT).partition("/")
            if name in LOSS:
                panel, curve = LOSS[0], name
            elif name.startswith(HELD_OUT):
                panel, curve = (kind, text) if slash else (text, "held out")
            else:
                continue
            panels.setdefault(panel, {}).setdefault(curve, []).append((float(entry["step"]), float(value)))
    if not panels:
        raise FormatError(
            f"{metrics_jsonl}: expected lines with a step and a loss or held_out/... figures, found none."
        )
    return dict(sorted(panels.items(), key=lambda panel: panel[0] != LOSS[0]))
