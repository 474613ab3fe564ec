from dataclasses import replace

from codd_lab.report.tables import ablations
from codd_lab.runs import Run
from codd_lab.tasks.tuning import chosen
from tests.support.small_evaluations import add, pattern


def test_each_circuit_is_tuned_by_itself_and_tested_beside_its_control(tmp_path):
    run = Run(tmp_path / "run", create=True)
    right = {("trained", 1.0): 3, ("trained", 0.2): 5, ("null", 1.0): 4, ("null", 0.2): 2}
    results = [
        add(run, "a", circuit, {"steps": 8, "circuit_temperature": t}, correct=pattern(n, 8), split="validation")
        for (circuit, t), n in right.items()
    ]
    found = [(c.circuit, c.options["circuit_temperature"], c.split, c.problems) for c in chosen(results, problems=9)]
    assert found == [("trained", 0.2, "test", 9), ("null", 0.2, "test", 9), ("null", 1.0, "test", 9)]


def test_ties_go_to_the_temperature_nearest_to_1_then_the_highest_activation_as_in_the_report(tmp_path):
    run = Run(tmp_path / "run", create=True)
    grid = [(t, a) for t in (0.2, 0.9, 2.0) for a in (0.4, None, 0.7)]
    for t, a in grid:
        options = {"steps": 8, "circuit_temperature": t, "activation": a}
        add(run, "a", "null", options, correct=pattern(3 if t != 2.0 else 2, 4), split="validation")
    (config,) = chosen(run.results(), problems=None)
    assert (config.options["circuit_temperature"], config.options["activation"]) == (0.9, None)
    (table,) = ablations(run.results(), [])
    assert [result.config for result, _ in table["choices"]] == [replace(config, split="validation", problems=4)]


def test_budgets_are_not_tuned(tmp_path):
    run = Run(tmp_path / "run", create=True)
    results = [
        add(run, "a", "null", {"steps": n, "activation": a}, correct=pattern(2, 4), split="validation")
        for n in (8, 16)
        for a in (None, 0.5)
    ]
    found = chosen(results, problems=None)
    assert [(c.options["steps"], c.options["activation"]) for c in found] == [(8, None), (16, None)]
