"""Texts of a run before a judge: our own causal model, which is small and here."""

import pytest

from codd.backbones.loading import BUNDLED
from codd_lab.runs import Run
from codd_lab.text.judge import load_judge
from codd_lab.text.verdicts import MOST, judge_run, to_be_judged
from tests.support.small_evaluations import add

CAUSAL = BUNDLED / "causal"
SENTENCES = ["He went out to the garden and sat down.", "She did not know what to say to him.", "The night was dark."]
TEXTS = SENTENCES * 7
JUMBLED = [" ".join(sorted(text.split(), key=len)) for text in TEXTS]


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

    def counted(self, prompts, texts, **named):
        asked.extend(zip(prompts, texts, strict=True))
        return plain(self, prompts, texts, **named)

    monkeypatch.setattr(type(judge), "assess", counted)
    assert len(to_be_judged(run)) == 3
    judge_run(run, judge)
    assert len(asked) == len(set(asked)) == 63  # 21 texts that two configs have, 21 others, and 21 true ones
    assert to_be_judged(run, judge.name) == []
    judge_run(run, judge)
    assert len(asked) == 63
    add(run, "books_text", "static", {"steps": 8, "temperature": 1.0}, texts=TEXTS)
    judge_run(run, judge)
    assert len(asked) == 63 + 21  # the texts are known from the files; true ones are not kept


def test_what_it_says(run, judge):
    judge_run(run, judge)
    found = {(r.config.circuit): r.judged for r in run.results() if r.judged}
    assert set(found) == {"none", "trained", "null"}
    assert found["trained"]["nats"] == found["none"]["nats"]
    value = {name: each["measures"]["nll"]["value"] for name, each in found.items()}
    assert value["trained"] < value["null"]
    assert found["null"]["judge"]["description"] == judge.description
    assert found["null"]["true"]["measures"]["nll"]["value"] > 0


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


def test_the_distance_to_true_text(tmp_path, judge):
    run = Run(tmp_path / "run", create=True)
    for circuit, texts in {"none": TEXTS, "null": JUMBLED}.items():
        add(run, "books_text", circuit, {"steps": 8}, texts=texts, targets=TEXTS)
    add(run, "books_text", "none", {"steps": 16}, texts=TEXTS[:19], targets=TEXTS[:19])
    judge_run(run, judge)
    found = {(result.config.circuit, result.problems): result.judged for result in run.results()}
    same, jumbled, few = (found[key] for key in (("none", 21), ("null", 21), ("none", 19)))
    assert same["true"]["mauve"] == pytest.approx(1)
    assert jumbled["true"]["mauve"] < 0.9
    assert jumbled["true"]["measures"] == same["measures"]
    assert "mauve" not in few["true"]


def test_true_text_and_samples_are_read_to_the_same_length(tmp_path, judge):
    run = Run(tmp_path / "run", create=True)
    longer = " ".join(f"word{n}" for n in range(60))
    add(run, "books_text", "none", {"steps": 8}, texts=[longer], targets=[f"{longer} and {longer}"])
    judge_run(run, judge)
    [found] = [result.judged for result in run.results()]
    assert found["tokens"] == [MOST]
    assert found["true"]["measures"] == found["measures"]


def test_each_order_has_its_own_reference(tmp_path, judge):
    run = Run(tmp_path / "run", create=True)
    for order in ("low_confidence", "random"):
        common = {"temperature": 1.0, "remasking": order}
        for seed in (0, 1):
            add(run, "books_text", "none", {"steps": 128, **common}, texts=TEXTS, calls=10.0, seed=seed)
        add(run, "books_text", "trained", {"steps": 8, **common}, texts=JUMBLED)
    judge_run(run, judge)
    references = {
        result.config.options["remasking"]: result.judged["mauve"]["reference"]
        for result in run.results()
        if result.config.circuit == "trained"
    }
    assert "random" in references["random"]
    assert "random" not in references["low_confidence"]
