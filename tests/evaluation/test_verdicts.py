"""Texts of a run before a judge: our own causal model, which is small and here."""

from pathlib import Path

import pytest
from small_evaluations import add

from codd.evaluation.runs import Run
from codd.evaluation.text.judge import load_judge
from codd.evaluation.text.verdicts import judge_run, to_be_judged

CAUSAL = Path(__file__).parents[2] / "models" / "causal"
SENTENCES = ["He went out to the garden and sat down.", "She did not know what to say to him.", "The night was dark."]
TEXTS = SENTENCES * 7
JUMBLED = [" ".join(sorted(text.split(), key=len)) for text in TEXTS]

pytestmark = pytest.mark.skipif(not CAUSAL.is_dir(), reason="models/causal is not here")


@pytest.fixture(scope="module")
def judge():
    return load_judge(CAUSAL, device="cpu")


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run", create=True)
    common = {"temperature": 1.0}
    add(made, "books_text", "none", {"steps": 128, **common}, texts=TEXTS, calls=10.0)
    add(made, "books_text", "trained", {"steps": 8, **common}, texts=TEXTS)
    add(made, "books_text", "null", {"steps": 8, **common}, texts=JUMBLED)
    add(made, "gsm8k", "null", {"steps": 8}, correct=[1.0, 0.0])
    return made


def test_every_text_is_judged_once(run, judge, monkeypatch):
    asked = []
    plain = type(judge).assess

    def counted(self, prompts, texts, progress=None):
        asked.extend(zip(prompts, texts, strict=True))
        return plain(self, prompts, texts, progress)

    monkeypatch.setattr(type(judge), "assess", counted)
    assert len(to_be_judged(run)) == 3
    judge_run(run, judge)
    assert len(asked) == len(set(asked)) == 63  # 21 texts that two cells have, 21 others, and 21 true ones
    assert to_be_judged(run, judge.name) == []
    judge_run(run, judge)
    assert len(asked) == 63
    add(run, "books_text", "static", {"steps": 8, "temperature": 1.0}, texts=TEXTS)
    judge_run(run, judge)
    assert len(asked) == 63 + 21  # the texts are known from the files; true ones are not kept


def test_what_it_says(run, judge):
    judge_run(run, judge)
    found = {(r.cell.circuit): r.judged for r in run.results() if r.judged}
    assert set(found) == {"none", "trained", "null"}
    assert found["trained"]["nats"] == found["none"]["nats"]
    value = {name: each["measures"]["nll"]["value"] for name, each in found.items()}
    assert value["trained"] < value["null"]
    assert found["null"]["judge"]["description"] == judge.description
    assert found["null"]["true_nll"] > 0


def test_the_distance_needs_two_samples_of_the_reference(run, judge):
    judge_run(run, judge)
    assert all("mauve" not in (result.judged or {}) for result in run.results())
    options = {"steps": 128, "temperature": 1.0}
    again = add(run, "books_text", "none", options, texts=TEXTS[::-1], calls=10.0, seed=1)
    judge_run(run, judge)
    found = {result.folder.name: result.judged for result in run.results() if result.judged}
    reference = found[again.folder.name]["mauve"]["reference"]
    assert "mauve" not in found[reference]
    assert sum("mauve" in each for each in found.values()) == 3
    assert all(each["mauve"]["texts"] == 21 for name, each in found.items() if name != reference)
