import math
from dataclasses import replace
from pathlib import Path

import pytest

from codd.cli import main
from codd_lab.measures import (
    accuracy_under_parallelism,
    parallelism,
    summary,
    tokens_per_forward,
    tokens_per_second,
)
from codd_lab.report.render import make_report, render
from codd_lab.runs import Figures, Result, Run, Sample
from codd_lab.tasks.configs import EvalConfig
from codd_lab.tasks.templates import PromptTemplate
from tests.support.cli import printed_json
from tests.support.small_evaluations import whole_run


def sample(tokens: int, calls: int, seconds: float, correct: float = 1.0) -> Sample:
    return Sample(0, "", "", "", tokens, calls, seconds, 0, correct)


SAMPLES = [sample(30, 10, 1.0), sample(10, 10, 2.0), sample(80, 20, 1.0)]


def test_speeds():
    assert tokens_per_forward(SAMPLES) == 120 / 40  # not the mean of 3, 1 and 4
    assert tokens_per_second(SAMPLES) == 30  # the median of 30, 5 and 80
    assert tokens_per_forward([]) == tokens_per_second([sample(3, 0, 0.0)]) == 0


def test_area_by_hand():
    """1 x 80, then a trapezium of width 2 to 76, then one of width 1 to 78; 74.9 is 5.1 points below the first."""
    points = [(4.0, 78.0), (1.0, 80.0), (3.0, 76.0), (9.0, 74.9)]
    at = {y: y * math.exp(-3 * (1 - y / 80)) for y in (76.0, 78.0, 80.0)}
    wanted = 80 + 2 * (80 + at[76.0]) / 2 + 1 * (at[76.0] + at[78.0]) / 2
    assert accuracy_under_parallelism(points, 80.0) == pytest.approx(wanted)
    assert wanted == pytest.approx(80 + 80 + 65.41373 + (65.41373 + 72.36410) / 2, abs=1e-4)


def test_what_the_area_is_made_of():
    assert accuracy_under_parallelism([(2.5, 60.0)], 80.0) == 150  # a single point counts in full
    even = [(1.0, 80.0), (2.0, 80.0), (5.0, 80.0)]
    assert accuracy_under_parallelism(even, 80.0) == 5 * 80  # nothing lost: the plain area
    assert accuracy_under_parallelism(even, 100.0) < 5 * 80  # another way is better
    assert accuracy_under_parallelism([(1.0, 0.0), (2.0, 0.0)], 0.0) == 0
    dropped = [(1.0, 80.0), (2.0, 74.0), (3.0, 78.0)]
    assert accuracy_under_parallelism(dropped, 80.0) == accuracy_under_parallelism([dropped[0], dropped[2]], 80.0)
    within = [dropped[0], (2.0, 75.0), dropped[2]]
    assert accuracy_under_parallelism(within, 80.0) != accuracy_under_parallelism(dropped, 80.0)


def result(circuit: str, steps: int, accuracy: float | None, calls: int) -> Result:
    cell = EvalConfig("word_problems", circuit, {"steps": steps, "sampler": "any_order"})
    figures = Figures(None, accuracy, {}, 2, float(calls), 24.0, 0.5, {"batch": 4}, {})
    made = Result(**vars(figures), config=cell, folder=Path())
    made.__dict__["samples"] = [sample(24, calls, 0.5), sample(24, calls, 0.5)]
    return made


def test_summary_groups_paces_and_compares_with_the_best_of_the_task():
    found = summary([result("null", 8, 0.5, 8), result("null", 16, 0.6, 16), result("trained", 8, 0.8, 8)])
    assert [entry["tokens_per_forward"] for entry in found["speed"]] == [3.0, 1.5, 3.0]
    assert {entry["tokens_per_second"] for entry in found["speed"]} == {48.0}
    assert {entry["batch"] for entry in found["speed"]} == {4}
    null, trained = found["aup"]
    assert null["points"] == [[1.5, 60.0], [3.0, 50.0]]
    assert null["best"] == trained["best"] == pytest.approx(80)
    assert null["options"] == {"sampler": "any_order"}
    assert null["aup"] == pytest.approx(1.5 * 60)  # 50 is more than 5 points below 60
    assert trained["aup"] == pytest.approx(3 * 80)
    assert (null["null"], trained["null"]) == (None, null["aup"])


def test_a_circuit_has_the_null_circuit_of_its_own_settings_beside_it():
    pair = [result("null", 8, 0.5, 8), result("trained", 8, 0.8, 8)]
    worded = [replace_template(each, 0.25) for each in pair]
    assert [way.null for way in parallelism([*pair, *worded])] == [None, 150, None, 75]
    assert [way.null for way in parallelism([pair[1], worded[0]])] == [None, None]


def replace_template(made: Result, accuracy: float) -> Result:
    """The same under a prompt template, with another accuracy."""
    cell = replace(made.config, template=PromptTemplate("a", "{question}"))
    other = replace(made, config=cell, accuracy=accuracy)
    other.__dict__["samples"] = made.samples
    return other


def test_the_table_of_codd_eval_and_the_page_have_them(tmp_path, capsys):
    whole_run(tmp_path / "run")
    areas = printed_json(capsys, "eval", "--stage", "score", "--out", tmp_path / "run")["measures"]["aup"]
    found = {each["circuit"]: each for each in areas if each["split"] == "test"}
    assert main(["eval", "--stage", "score", "--out", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "TPF" in shown
    assert f"AUP {found['trained']['aup']:.1f} of 5 budgets, {found['null']['aup']:.1f} with the null" in shown
    page = " ".join(render(make_report(Run(tmp_path / "run"))).split())
    assert "Parallelism" in page
    assert "TPS, tokens per second" in page
    difference = found["trained"]["aup"] - found["trained"]["null"]
    assert f"<td>{found['trained']['aup']:.1f}</td>" in page
    assert f"<td>{difference:+.1f}</td>" in page


def test_continued_text_has_no_accuracy():
    found = summary([result("null", 8, None, 8)])
    assert found["aup"] == []
    assert len(found["speed"]) == 1
