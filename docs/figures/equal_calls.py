"""Draw what the circuit gains at equal network calls, from measured data: ``python docs/figures/equal_calls.py``.

Right answers are those of docs/runs/evaluation.jsonl (300 word problems, circuit of 1024 states), MAUVE is that of the
table in docs/results/text.md (150 passages, the shipped circuit).
"""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1]
ALONE, CIRCUIT = "#9a9a9a", "#00796b"
Bars = dict[int, tuple[float, float]]
"""By the number of calls: without and with the circuit."""


def right_answers() -> Bars:
    """Per cent of word problems by the steps of 128 tokens, null and trained circuit, any order."""
    found: dict[tuple[int, str], float] = {}
    for line in (DOCS / "runs/evaluation.jsonl").read_text().splitlines():
        run = json.loads(line)
        cell = run["cell"]
        options = cell["options"]
        asked = cell["task"] == "word_problems" and cell["problems"] == 300
        if asked and options == {"gen_length": 128, "sampler": "any_order", "steps": options.get("steps")}:
            found[options["steps"], cell["circuit"]] = 100 * run["accuracy"]
    return {steps: (found[steps, "null"], found[steps, "trained"]) for steps in (8, 16, 32, 64)}


def mauve() -> Bars:
    """MAUVE to true text by the calls for 128 tokens, the surest token first."""
    table = (DOCS / "results/text.md").read_text().split("## Continued text against true text")[1]
    table = table.split("| random |")[0]
    rows = re.findall(r"^\|[^|]*\| ([^|]+) \| (\d+) \|.*\| \**([\d.]+)\** \|$", table, re.MULTILINE)
    values = {(way, int(calls)): float(value) for way, calls, value in rows}
    return {calls: (values["network alone", calls], values["any order", calls]) for calls in (8, 16, 32)}


def draw(name: str, bars: Bars, label: str, form: str) -> None:
    """Pairs of bars with their values; wide enough for a phone, and with text that stays readable there."""
    plt.rcParams |= {"font.size": 13, "svg.fonttype": "path", "svg.hashsalt": "codd"}
    figure, axes = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
    for shift, way, colour, text in ((-0.2, 0, ALONE, "network alone"), (0.2, 1, CIRCUIT, "with the circuit")):
        places = [place + shift for place in range(len(bars))]
        drawn = axes.bar(places, [pair[way] for pair in bars.values()], 0.38, color=colour, label=text)
        axes.bar_label(drawn, fmt=form, padding=2)
    axes.set_xticks(range(len(bars)), [f"{calls} calls" for calls in bars])
    axes.set_ylabel(label)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    figure.savefig(DOCS / "figures" / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw("equal-calls-problems.svg", right_answers(), "right answers, %", "{:.0f}")
    draw("equal-calls-text.svg", mauve(), "MAUVE to true text", "{:.2f}")
