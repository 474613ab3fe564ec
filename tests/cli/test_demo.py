import contextlib
import io
import json
import math
from dataclasses import replace

import pytest

from codd.circuits import HMM
from codd.cli import demo, demo_comparison, demo_model, demo_words, main, tables
from codd.cli.tables import Cell
from codd.decoding import Options, load
from codd_lab.problems import problems
from tests.support.cli import printed_json, refused

BUNDLED = replace(load(device="cpu", circuit=None), circuit=HMM.random(4, 8192))
"""Loaded once, with a circuit that nobody trained."""
FEW = {"alone": Options(gen_length=16, entropy_budget=9.0), "circuit": Options(gen_length=16, threshold=1e-6)}


def shorten(patch: pytest.MonkeyPatch) -> None:
    """A demo of few steps."""
    patch.setattr(demo, "load", lambda circuit: BUNDLED)
    patch.setattr(demo_comparison, "OPTIONS", FEW)
    patch.setattr(demo_model, "AT_ONCE", (20,))
    patch.setattr(demo_model, "NUM_PROBLEMS", 1)
    patch.setattr(demo_model, "QUESTION_LENGTH", 70)
    patch.setattr(demo_model, "PASSAGE_LENGTH", 20)


@pytest.fixture
def small(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def printed_once() -> str:
    """The JSON of all that there is."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        shorten(patch)
        assert main(["demo", "--more", "--problems", "3", "--json"]) == 0
    return out.getvalue()


@pytest.fixture
def whole(printed_once) -> dict:
    return json.loads(printed_once)


def results(capsys, *arguments: str) -> dict:
    return printed_json(capsys, "demo", *arguments)


def without_seconds(found: object) -> object:
    if isinstance(found, dict):
        return {key: without_seconds(value) for key, value in found.items() if "seconds" not in key}
    return [without_seconds(value) for value in found] if isinstance(found, list) else found


def test_both_ways_solve_the_same_problems_and_are_counted(whole):
    found = whole["comparison"]
    assert len(found["problems"]) == 3
    assert [each["right"] for each in found["problems"]] == [p.answer for p in problems(3, split="test", seed=0)]
    for name, way in found["ways"].items():
        runs = [problem["runs"][name] for problem in found["problems"]]
        assert way["right"] == sum(run["answer"] == p["right"] for run, p in zip(runs, found["problems"], strict=True))
        for cost in demo_comparison.COSTS:
            assert way[cost] == pytest.approx(sum(run[cost] for run in runs) / 3)
            assert way[cost] > 0
        assert all(
            run["circuit_evaluations"] == (run["network_evaluations"] if name == "circuit" else 0) for run in runs
        )
        assert way["settings"] == json.loads(json.dumps(FEW[name].as_json()))
    assert found["ways"]["circuit"]["network_evaluations"] == 1


def test_the_seed_decides(small, capsys):
    first, again, other = (
        without_seconds(results(capsys, "--seed", seed, "--problems", "1")["comparison"]) for seed in ("1", "1", "2")
    )
    assert first == again
    assert first["problems"][0]["question"] != other["problems"][0]["question"]


def test_no_problem_is_begun_when_the_time_is_over(small, monkeypatch, capsys):
    monkeypatch.setattr(demo_comparison, "SECONDS", -1)
    assert len(results(capsys)["comparison"]["problems"]) == 1
    assert len(results(capsys, "--problems", "2")["comparison"]["problems"]) == 2


def test_the_bundled_circuit_needs_fewer_calls():
    found = demo_comparison.compare(load(device="cpu"), seed=0, count=1)
    alone, circuit = (found["ways"][name]["network_evaluations"] for name in ("alone", "circuit"))
    assert circuit < alone


def way(right: int, calls: float, seconds: float) -> dict:
    return {"right": right, "network_evaluations": calls, "seconds": seconds, "cpu_seconds": seconds}


@pytest.mark.parametrize(
    ("circuit", "p", "said"),
    [
        ((9, 5, 1), 1.0, "The same number of right answers in 2.00 times fewer network calls and 1.50 times less time"),
        ((9, 8, 3), 1.0, "The same number of right answers in 1.25 times fewer network calls and 2.00 times more time"),
        ((7, 20, 1.5), 0.01, "Fewer right answers (7, not 9) in 2.00 times more network calls and the same time"),
        ((10, 10, 1.45), 0.04, "More right answers (10, not 9) in the same number of network calls and the same time"),
        (
            (8, 5, 1.5),
            0.5,
            "As many right answers, up to chance (8, not 9), in 2.00 times fewer network calls and the same time",
        ),
    ],
)
def test_the_headline_says_what_was_counted(circuit, p, said):
    assert demo_comparison.headline({"alone": way(9, 10, 1.5), "circuit": way(*circuit)}, p) == said


def test_what_costs_more_is_no_gain():
    cells = demo_comparison._ratios({"alone": way(9, 10, 1.5), "circuit": way(9, 5, 3)})
    assert cells == [Cell("ratio"), Cell(""), Cell("x2.00", "good"), Cell("x0.50", "bad"), Cell("x0.50", "bad")]


def test_the_first_screen(small, capsys):
    assert main(["demo", "--problems", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert next(problems(1, split="test", seed=0)).question.split(".")[0] in " ".join(printed.out.split())
    assert "stands after ####" in printed.out
    assert "less than 9 nats, each by itself" in " ".join(printed.out.split())
    assert "codd chat" in printed.out
    assert "codd demo --more" in printed.out
    assert "San York" not in printed.out


def test_more_with_a_circuit_that_did_not_come_with_the_model(small, capsys):
    assert main(["demo", "--problems", "1", "--more", "--circuit", "elsewhere"]) == 0
    printed = capsys.readouterr().out
    assert "stands after ####" in printed
    assert demo_model.FOREIGN in printed
    row = next(line for line in printed.splitlines() if "San York" in line)
    assert [cell for cell in row.split() if "%" in cell] == ["25.0%", "25.0%", "0.0%"]


def test_there_must_be_a_circuit(capsys):
    assert "--circuit must not be none" in refused(capsys, "demo", "--circuit", "none")


@pytest.fixture(scope="module")
def columns():
    return demo_words.example(0)["columns"]


def test_the_factorized_output_invents_cities(columns):
    probabilities = columns["factorized"]["probabilities"]
    assert len(probabilities) == 16
    cities = {"San Diego", "San York", "New Diego", "New York"}
    assert {name: p for name, p in probabilities.items() if p} == dict.fromkeys(cities, 0.25)
    assert columns["factorized"]["log_z"] == 0


def test_the_neutral_circuit_changes_nothing(columns):
    assert columns["neutral"]["probabilities"] == pytest.approx(columns["factorized"]["probabilities"], abs=1e-12)
    assert columns["neutral"]["log_z"] == pytest.approx(math.log(1 / 16))


def test_the_circuit_allows_cities_that_exist(columns):
    column = columns["circuit"]
    assert column["probabilities"]["San Diego"] == pytest.approx(0.5)
    assert column["probabilities"]["New York"] == pytest.approx(0.5)
    assert math.fsum(column["probabilities"].values()) == pytest.approx(1)
    assert column["samples"]["San Diego"] + column["samples"]["New York"] == demo_words.NUM_SAMPLES
    assert column["log_z"] == pytest.approx(math.log(0.25))


def test_the_samples_follow_the_probabilities(columns):
    for column in columns.values():
        assert sum(column["samples"].values()) == demo_words.NUM_SAMPLES
        for name, probability in column["probabilities"].items():
            deviation = math.sqrt(demo_words.NUM_SAMPLES * probability * (1 - probability))
            assert abs(column["samples"][name] - demo_words.NUM_SAMPLES * probability) <= 4 * deviation + 1e-6
    again, other = demo_words.example(0), demo_words.example(1)
    assert again["columns"] == columns != other["columns"]


@pytest.mark.parametrize(
    ("option", "value"), [("--seed", "-1"), ("--seed", "x"), ("--seed", str(2**63)), ("--problems", "0")]
)
def test_numbers_that_are_none(option, value, capsys):
    assert main(["demo", option, value]) == 2
    assert option in capsys.readouterr().err


def test_three_columns(whole, capsys):
    found = whole["model"]
    assert list(found["columns"].values()) == list(demo_model.LABELS.values())
    assert [task["prompt"] == demo_model.PASSAGE for task in found["tasks"]] == [False, True]
    for task in found["tasks"]:
        for name, run in task["runs"]["20"].items():
            assert run["circuit_evaluations"] == (0 if name == "factorized" else run["network_evaluations"])
    tables.show(demo_model.sections(found))
    assert "x trained circuit" in capsys.readouterr().out


def test_the_null_circuit_writes_what_the_network_writes(whole):
    problem = whole["model"]["tasks"][0]
    runs = problem["runs"]["20"]
    assert runs["factorized"]["text"] == runs["null"]["text"]
    assert demo_model.control([problem]).startswith("The control holds")
    runs["null"]["text"] += "!"
    assert demo_model.control([problem]) == "The control fails: the null circuit changed 1 of 1 texts."


def test_one_token_at_a_time_is_right_and_four_are_not(monkeypatch):
    monkeypatch.setattr(demo_model, "AT_ONCE", (1, 4))
    assert BUNDLED.tokenizer is not None
    task = demo_model.tasks(BUNDLED.tokenizer, seed=0)[0]
    contenders = {"factorized": replace(BUNDLED, circuit=None)}
    runs = demo_model.attempt(task, contenders, lambda step: None)["runs"]
    slow, fast = (runs[at_once]["factorized"] for at_once in (1, 4))
    assert (slow["network_evaluations"], fast["network_evaluations"]) == (40, 10)
    assert slow["answer"] == task["right"]
    assert fast["answer"] != task["right"]


def test_what_the_demo_costs():
    assert BUNDLED.tokenizer is not None
    todo = demo_model.tasks(BUNDLED.tokenizer, seed=0)
    assert [task["right"] is None for task in todo] == [False] * demo_model.NUM_PROBLEMS + [True]
    calls = sum(-(-task["options"]["gen_length"] // k) for task in todo for k in task["at_once"])
    assert 3 * calls < 800


def run_of(answer: int | None) -> dict:
    return {"text": "text", "answer": answer, "network_evaluations": 2, "seconds": 1}


def test_right_and_wrong_are_marked():
    right, wrong, none = (demo_model.written(run_of(answer), 7) for answer in (7, 8, None))
    assert right.below[0] == Cell("right: 7", "good")
    assert wrong.below[0] == Cell("wrong: 8, not 7", "bad")
    assert none.below[0] == Cell("wrong: no answer, not 7", "bad")
    assert demo_model.written(run_of(None), None).below == [Cell("2 calls, 1.0 s", "faint")]


def test_right_answers_are_counted():
    problems = [{"right": 7, "runs": {4: {"factorized": run_of(7), "null": run_of(answer)}}} for answer in (7, 8, None)]
    section = demo_model.score(problems, {"factorized": "a", "null": "b"})
    assert section.rows == [[Cell("4"), Cell("3 of 3", "good"), Cell("1 of 3")]]
    assert "3 short problems" in section.before[0]
