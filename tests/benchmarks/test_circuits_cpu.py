import importlib.util
import io
import json

import pytest
import torch
from rich.console import Console

import circuits_cpu
from circuits_cpu import QUERIES, RIVALS, Problem, Settings, difference, render, run

TINY = Settings(states=4, tokens=20, length=5, batch=2, threads=1, rounds=2, burst=1, kept=8)


@pytest.fixture
def nobody(monkeypatch):
    """A machine on which no rival is installed."""
    modules = {module for rival in RIVALS.values() for module in rival.modules}
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in modules else find(name, *a))


def text(report):
    out = io.StringIO()
    Console(width=160, file=out).print(render(report))
    return out.getvalue()


def test_everyone_installed_agrees():
    report = json.loads(json.dumps(run(TINY)))
    assert list(report["queries"]) == list(QUERIES)
    assert set(report["absent"]) == {name for name, rival in RIVALS.items() if not circuits_cpu.installed(rival)}
    for query in report["queries"].values():
        for name, row in query["rows"].items():
            assert row["status"] in ("ok", "approximate"), (query["title"], name, row)
            assert row["ms"]["lower"] <= row["ms"]["median"] <= row["ms"]["upper"]
    shown = text(report)
    assert all(query["title"] in shown for query in report["queries"].values())


def test_absence_is_reported_and_nothing_is_imported(nobody, monkeypatch):
    monkeypatch.setattr(circuits_cpu, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    lines = []
    report = run(TINY, lines.append)
    assert set(report["absent"]) == set(RIVALS)
    assert "dynamax" not in report["versions"]
    shown = text(report)
    assert all(f"{name}: not installed (pip install {rival.source})" in shown for name, rival in RIVALS.items())
    assert "dynamax: not installed (pip install 'codd-lm[bench]')" in shown
    assert len(lines) == len(QUERIES)


def test_a_wrong_or_failing_rival_is_named_and_not_timed(nobody, monkeypatch):
    right = circuits_cpu.plain

    def wrong(problem):
        def fails():
            raise RuntimeError("no such luck")

        contenders = right(problem)
        contenders["smoother_tokens"] = circuits_cpu.Contender(lambda: torch.full((2, 5, 4), 0.25), lambda x: x)
        contenders["smoother"] = circuits_cpu.Contender(fails, lambda x: x)
        return contenders

    monkeypatch.setattr(circuits_cpu, "plain", wrong)
    report = run(TINY)
    for query, words in (("smoother_tokens", "a different answer"), ("smoother", "failed: RuntimeError: no such luck")):
        row = report["queries"][query]["rows"]["plain PyTorch"]
        assert words in row["status"]
        assert "ms" not in row
    assert "not timed" in text(report)


@pytest.mark.parametrize("query", QUERIES)
def test_plain_pytorch_agrees_closely(query):
    problem = Problem.of(TINY)
    mine, theirs = circuits_cpu.ours(problem)[query], circuits_cpu.plain(problem)[query]
    assert difference(query, problem, theirs.answer(theirs.call()), mine.answer(mine.call())) < 1e-5


def test_plain_paths_follow_the_posterior():
    problem = Problem.of(Settings(states=3, tokens=5, length=3, batch=1))
    many = problem.log_likelihoods.exp().expand(20_000, -1, -1)
    path = circuits_cpu.plain_path(*problem.probabilities[:2], many, torch.Generator().manual_seed(0))
    found = torch.nn.functional.one_hot(path, 3).double().mean(0)
    exact = circuits_cpu.ours(problem)["smoother"]
    torch.testing.assert_close(found, exact.answer(exact.call())[0].double(), atol=0.02, rtol=0)


def test_sparse_evidence_has_its_error_beside_it(nobody):
    report = run(TINY)
    assert report["sparse"]["error_nats"] > 0
    everything = run(Settings(**{**report["settings"], "kept": 20}))
    assert everything["sparse"]["mass_kept"] == pytest.approx(1)
    assert everything["sparse"]["error_nats"] < 1e-4
