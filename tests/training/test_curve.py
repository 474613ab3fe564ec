import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from codd.errors import FormatError
from codd.training.curve import read_panels, write_curve

LINES = [
    {"step": 0, "held_out/books/gap_closed": 0.0, "held_out/gsm8k/gap_closed": 0.01, "held_out/books/coupled": -3.0},
    {"step": 10, "loss": 3.5, "factorized": 3.6, "lr": 0.01, "rows_per_second": 100.0},
    {"step": 20, "loss": 3.25, "factorized": 3.6, "held_out/books/gap_closed": 0.3, "held_out/gsm8k/gap_closed": 0.2},
    {"step": 30, "loss": float("nan"), "factorized": 3.5, "held_out/books/coupled": -2.5, "held_out/gain": 1},
]


def write(path: Path, lines: list[dict], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)


def test_panels_are_the_losses_and_what_is_measured_on_held_out_text(tmp_path):
    """Half a line at the end is what a killed run was writing."""
    panels = read_panels(write(tmp_path / "metrics.jsonl", LINES, tail='{"step": 30, "lo'))
    assert list(panels) == ["loss", "gap_closed", "coupled", "gain"]
    assert list(panels["loss"]) == ["loss", "factorized"]
    assert panels["loss"]["factorized"] == [(10, 3.6), (20, 3.6), (30, 3.5)]
    assert panels["gap_closed"] == {"books": [(0, 0.0), (20, 0.3)], "gsm8k": [(0, 0.01), (20, 0.2)]}
    assert panels["gain"] == {"held out": [(30, 1.0)]}


def test_every_panel_is_drawn_and_an_older_picture_replaced(tmp_path):
    out = tmp_path / "pictures" / "curve.png"
    write_curve(write(tmp_path / "metrics.jsonl", LINES[1:2]), out)
    height, width = pixels(out).shape[:2]
    write_curve(write(tmp_path / "metrics.jsonl", LINES), out)
    assert pixels(out).shape[:2] == (4 * height, width)
    assert all((quarter < 0.9).any() for quarter in np.split(pixels(out)[..., :3], 4))
    assert [path.name for path in out.parent.iterdir()] == ["curve.png"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found none"),
        ('{"step": 1, "lr": 0.1}\n', "found none"),
        ('{"step": 1, "loss": 2}\nnonsense\n', "line 2 is not JSON"),
        ('{"loss": 2}\n', "line 1: is not an object with a step"),
        ("[1]\n", "line 1 is not a JSON object"),
        ('{"step": 1, "loss": "low"}\n', "line 1: 'loss' is 'low', not a number of a run"),
        ('{"step": 1, "loss": 1' + "0" * 400 + "}", "line 1: 'loss' is 1000"),
        (None, r"metrics\.jsonl: cannot be read \(No such file"),
    ],
)
def test_what_is_no_run_is_refused_and_the_old_picture_stays(tmp_path, text, words):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "curve.png").write_bytes(b"old")
    with pytest.raises(FormatError, match=words):
        write_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes() == b"old"


def test_matplotlib_is_not_loaded_before_something_is_drawn():
    code = "import sys, codd, codd.training.curve; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
