import json

import pytest

from codd_lab.report import figures
from codd_lab.report.render import make_report, render
from codd_lab.runs import Log, Run
from tests.support.mutations import failures
from tests.support.small_evaluations import add, judge, pattern, studies


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path / "run", create=True)
    for circuit in ("trained", "null"):
        add(run, "gsm8k", circuit, {"steps": 16}, correct=pattern(3, 5))
        judge(add(run, "books_text", circuit, {}, texts=["a b c", "d e"]), [3.0, 2.0], [3, 2], mauve=0.9)
    studies(run)
    return run


@pytest.mark.parametrize("name", ["cell.json", "result.json", "samples.jsonl", "judged.json", "gap.json", "cost.json"])
def test_a_run_is_reported_or_refused(run, name, monkeypatch):
    path = sorted(run.folder.rglob(name))[0]
    monkeypatch.setattr(figures, "svg", lambda chart: [])  # drawing is slow, and has tests of its own

    def load() -> None:
        report = make_report(run, 2)
        assert json.dumps(report.as_json(), allow_nan=False)
        render(report).encode()
        assert run.configs()

    assert failures(path, run.folder, load) == []
    load()


def test_answers_are_taken_up_or_refused(tmp_path):
    log = Log(tmp_path)
    log.add([{"key": f"k{n}", "text": "a b", "tokens": 3, "calls": 2, "seconds": 0.5, "seed": n} for n in range(5)])
    assert failures(log.path, tmp_path, lambda: Log(tmp_path).get("k1")) == []
