import json

import pytest
from small_evaluations import add, judge, pattern, studies

from altered_texts import failures
from codd.evaluation.report.making import make_report
from codd.evaluation.runs import Log, Run


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path / "run", create=True)
    for circuit in ("trained", "null"):
        add(run, "gsm8k", circuit, {"steps": 16}, correct=pattern(3, 5))
        judge(add(run, "books_text", circuit, {}, texts=["a b c", "d e"]), [3.0, 2.0], [3, 2], mauve=0.9)
    studies(run)
    return run


@pytest.mark.parametrize("name", ["cell.json", "result.json", "samples.jsonl", "judged.json", "gap.json", "cost.json"])
def test_a_run_is_reported_or_refused(run, name):
    path = sorted(run.folder.rglob(name))[0]

    def load() -> None:
        assert json.dumps(make_report(run, 2).as_json(), allow_nan=False)
        assert run.cells()

    assert failures(path, run.folder, load) == []
    load()


def test_answers_are_taken_up_or_refused(tmp_path):
    log = Log(tmp_path)
    log.add([{"key": f"k{n}", "text": "a b", "tokens": 3, "calls": 2, "seconds": 0.5, "seed": n} for n in range(5)])
    assert failures(log.path, tmp_path, lambda: Log(tmp_path).get("k1")) == []
