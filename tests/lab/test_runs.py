import json

import pytest

from codd.errors import FormatError, InvalidInput
from codd_lab.provenance import provenance
from codd_lab.runs import Log, Run, compared, control_of
from codd_lab.tasks.configs import EvalConfig
from tests.support.small_evaluations import add, pattern


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(InvalidInput, match="holds something else"):
        Run(tmp_path, create=True)
    with pytest.raises(FormatError, match="no folder of an evaluation"):
        Run(tmp_path)
    with pytest.raises(InvalidInput, match="is a file"):
        Run(tmp_path / "thesis.txt", create=True)
    Run(tmp_path / "new", create=True)
    assert Run(tmp_path / "new").results() == []


def test_results_come_back(tmp_path):
    run = Run(tmp_path / "run", create=True)
    made = add(run, "gsm8k", "trained", {"steps": 8}, correct=pattern(3, 5))
    [found] = Run(tmp_path / "run").results()
    assert found.config == made.config
    assert found.accuracy == pytest.approx(0.6)
    assert found.correct == [1, 1, 1, 0, 0]
    assert found.samples[1].prompt == "How many? 1"
    assert run.result(made.config.with_circuit("null")) is None
    assert run.configs() == [made.config]


def test_the_control_is_the_null_circuit_under_identical_settings(tmp_path):
    run = Run(tmp_path / "run", create=True)
    trained = add(run, "gsm8k", "trained", {"steps": 8}, correct=pattern(4, 6))
    null = add(run, "gsm8k", "null", {"steps": 8}, correct=pattern(2, 6))
    other = add(run, "gsm8k", "null", {"steps": 16}, correct=pattern(6, 6))
    everything = run.results()
    found = control_of(trained, everything)
    assert found is not None
    assert found.config == null.config
    assert control_of(null, everything) is None
    assert control_of(other, everything) is None
    assert compared(trained, found).gained == 2
    fewer = add(run, "gsm8k", "none", {"steps": 8}, correct=pattern(2, 5))
    with pytest.raises(InvalidInput, match="not about the same problems"):
        compared(trained, fewer)


def test_a_log_survives_a_kill_in_the_middle_of_a_line(tmp_path):
    log = Log(tmp_path)
    log.add([{"key": "a", "text": "one"}, {"key": "b", "text": "two"}])
    with (tmp_path / "answers.0.jsonl").open("a") as file:
        file.write('{"key": "c", "te')
    again = Log(tmp_path)
    assert again.get("b") == {"key": "b", "text": "two"}
    assert again.get("c") is None
    again.add([{"key": "c", "text": "three"}])
    assert Log(tmp_path).get("c") == {"key": "c", "text": "three"}


def test_processes_write_to_files_of_their_own_and_read_all(tmp_path):
    Log(tmp_path, 0).add([{"key": "a"}])
    Log(tmp_path, 1).add([{"key": "b"}])
    assert Log(tmp_path, 0).get("b") == {"key": "b"}
    assert {path.name for path in tmp_path.iterdir()} == {"answers.0.jsonl", "answers.1.jsonl"}


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "answers.0.jsonl").write_text('{"key": "a"}\n{"key": \n{"key": "b"}\n')
    with pytest.raises(FormatError, match="line 2 is not JSON"):
        Log(tmp_path)


def test_a_foreign_result_is_named(tmp_path):
    run = Run(tmp_path / "run", create=True)
    folder = run.config_folder(EvalConfig("gsm8k"))
    (folder / "result.json").write_text(json.dumps({"cell": {"task": "gsm8k"}, "colour": "red"}))
    with pytest.raises(FormatError, match=r"result\.json: unknown field colour"):
        run.results()


def test_provenance_can_be_written_and_says_where():
    found = json.loads(json.dumps(provenance("cpu", "torch.float32")))
    assert found["dtype"] == "float32"
    assert found["device"] == "cpu"
    assert found["versions"]["torch"]
    assert found["machine"].endswith("cores")
    assert {"time", "command", "python", "revision", "threads", "processes"} <= set(found)


def test_folders_of_earlier_versions_are_read(tmp_path):
    """Their files call a configuration a cell, and so do ours."""
    folder = tmp_path / "run" / "cells" / "gsm8k-null-8_steps-any_order-eb19b3d2"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "codd-evaluation.json").write_text('{"format": 1}')
    config = {"task": "gsm8k", "circuit": "null", "options": {"steps": 8}, "problems": 1, "split": "test", "seed": 0}
    config |= {"model": None, "dtype": "float32", "device": "cpu"}
    figures = {"metric": "exact_match,strict", "accuracy": 1.0, "metrics": {}, "problems": 1, "calls": 8.0}
    figures |= {"tokens": 3.0, "seconds": 0.5, "settings": {}, "provenance": {}}
    (folder / "cell.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps({"cell": config, **figures}))
    run = Run(tmp_path / "run")
    assert run.configs() == [EvalConfig("gsm8k", "null", {"steps": 8}, problems=1)]
    [result] = run.results()
    assert (result.config, result.accuracy) == (run.configs()[0], 1.0)
