"""Right answers against seconds: ways as they are written, what is left to do, and figures worked out by hand."""

import argparse
import json
import subprocess

import numpy as np
import pytest

import seconds
from codd.errors import InvalidInput

ARGS = argparse.Namespace(
    seed=5, model=None, device="cpu", dtype="float32", batch=2, threads=1, workers=1, busy=0, problems=5, out=None
)


def configs(*texts):
    return {name: config for text in texts for name, config in seconds.ways_from(text, ARGS)}


def test_a_slash_makes_ways_and_a_word_is_a_sampler():
    found = configs("none:steps=8/none", "a/folder:any_order,threshold=0.9/1,temperature=0/0.7", "trained")
    assert list(found)[:3] == ["none:steps=8", "none:steps=none", "a/folder:any_order,threshold=0.9,temperature=0"]
    assert [found[f"none:steps={steps}"].options["steps"] for steps in ("8", "none")] == [8, None]
    assert found["a/folder:any_order,threshold=1,temperature=0.7"].circuit == "a/folder"
    assert found["trained:"].options == {}
    assert len(found) == 7


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(InvalidInput, match="there is no option 'pace'"):
        configs("none:pace=3")


def test_ways_take_turns_and_what_is_answered_is_not_asked_again():
    ways = configs("none:steps=8", "none:steps=16")
    found = {name: {} for name in ways}
    found["none:steps=8"] = {0: seconds.Answer(True, 1, 1.0, 1.0)}
    tasks = [(task.name, list(task.numbers)) for task in seconds.missing(ARGS, ways, found)]
    first, second = ways
    assert tasks == [(first, [1]), (second, [0, 1]), (second, [2, 3]), (first, [2, 3]), (first, [4]), (second, [4])]


def answers(right, calls, cpu, wall):
    return {number: seconds.Answer(each, calls, cpu, wall) for number, each in enumerate(right)}


def test_a_file_is_gone_on_with_under_the_same_settings_only(tmp_path):
    args = argparse.Namespace(**{**vars(ARGS), "out": tmp_path / "found.json"})
    ways = configs("none:steps=8")
    found = {"none:steps=8": answers([True, False], 8, 0.5, 0.25)}
    seconds.write(args, ways, found)
    assert seconds.read(args, ways) == found
    assert json.loads(args.out.read_text())["settings"]["batch"] == 2
    args.batch = 3
    with pytest.raises(SystemExit, match="other settings"):
        seconds.read(args, ways)


@pytest.fixture
def made():
    """Alone 40% for 10 calls and 80% for 20 by threshold, 80% for 40 by steps; with the circuit 60% for 10."""
    ways = configs("none:threshold=0.5/0.9", "none:steps=40", "trained:any_order,threshold=0.9")
    rights = [2, 4, 4, 3]
    costs = [(10, 1.0, 0.5), (20, 2.0, 1.0), (40, 3.0, 2.0), (10, 1.2, 0.3)]
    rows = zip(ways, rights, costs, strict=True)
    found = {name: answers([number < right for number in range(5)], *cost) for name, right, cost in rows}
    return ways, found


def test_at_equal_right_answers(made):
    ways, found = made
    means = seconds.resampled({name: np.array([*each.values()], float) for name, each in found.items()})
    rules = seconds.rules_alone(ways, ways["trained:any_order,threshold=0.9"])
    assert sorted(map(len, rules)) == [1, 2]
    by_threshold = max(rules, key=len)
    assert seconds.need(by_threshold, means, 1, 0, 0.6) == pytest.approx(15)  # halfway between 10 and 20
    assert seconds.need(by_threshold, means, 1, 0, 0.9) == np.inf
    line = seconds.report(ways, seconds.in_common(found), "here").splitlines()[-1]
    assert line.startswith("| trained:any_order,threshold=0.9 | 60.0 | x1.50 (")
    assert "| x1.25 (" in line  # 1.5 CPU seconds over 1.2
    assert "| x2.50 (" in line  # 0.75 seconds over 0.3


def test_the_cost_of_a_call_is_compared_with_that_of_the_network_alone_at_the_same_pace(made):
    ways, found = made
    lines = seconds.report(ways, seconds.in_common(found), "here").splitlines()
    [line] = [line for line in lines if line.startswith("| trained") and line.count("|") == 8]
    assert line.endswith("| 120.0 / 30.0 (x1.20 / x0.60) |")  # alone at threshold 0.9: 100 and 50 ms
    assert "| -20.0 (" in line  # points, against 40 steps


def test_where_no_pace_alone_is_as_good_or_all_are_better(made):
    ways, found = made
    found["trained:any_order,threshold=0.9"] = answers([True] * 5, 10, 1.0, 1.0)
    assert "| 100.0 | not reached alone (" in seconds.report(ways, seconds.in_common(found), "")
    found["trained:any_order,threshold=0.9"] = answers([False] * 5, 10, 1.0, 1.0)
    assert "| 0.0 | at most x1.00 (x1.00 to x1.00) |" in seconds.report(ways, seconds.in_common(found), "")


def test_only_problems_that_all_ways_have_answered_count(made):
    ways, found = made
    del found["none:steps=40"][4]
    assert seconds.report(ways, seconds.in_common(found), "here").startswith("4 problems; here.")


def test_the_chart_has_a_line_for_each_rule(made):
    ways, found = made
    drawn = seconds.chart(ways, seconds.in_common(found), "title").panels
    assert [panel.x for panel in drawn] == ["calls a problem", "CPU s a problem", "wall s a problem"]
    lines = {curve.label: (curve.xs, [y.value for _, y in curve.points]) for curve in drawn[0].curves}
    assert lines == {
        "network alone, by threshold": ([10, 20], [40, 80]),
        "network alone, by steps": ([40], [80]),
        "trained circuit, any order, by joint threshold": ([10], [60]),
    }


def test_neighbours_are_busy_and_then_gone(monkeypatch):
    started, plain = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args: started.append(plain(*args)) or started[-1])
    with seconds.kept_busy(1):
        assert started[0].poll() is None
    assert started[0].poll() is not None
    assert len(started) == 1
