import contextlib
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from codd.circuits import HMM, Evidence
from codd.cli import demo, demo_comparison, demo_model, demo_words, figures, main, tables
from codd.cli.tables import Cell, Section
from codd.data.problems import problems
from codd.decoding import Options, load

BUNDLED = replace(load(device="cpu", circuit=None), circuit=HMM.random(4, 8192))
"""Loaded once, with a circuit that nobody trained."""
FEW = {"alone": Options(gen_length=16, threshold=0.5), "circuit": Options(gen_length=16, steps=2, sampler="any_order")}


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
def shown_once(tmp_path_factory) -> tuple[str, str]:
    """The JSON and the page of all that there is."""
    path, out = tmp_path_factory.mktemp("demo") / "page.html", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        shorten(patch)
        assert main(["demo", "--more", "--problems", "3", "--json", "--html", str(path)]) == 0
    return out.getvalue(), path.read_text(encoding="utf-8")


@pytest.fixture
def whole(shown_once) -> dict:
    return json.loads(shown_once[0])


def results(capsys, *arguments: str) -> dict:
    assert main(["demo", "--json", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


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
        assert way["settings"]["threshold"] == FEW[name].threshold
    assert found["ways"]["circuit"]["network_evaluations"] == 2


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


def test_rules_in_words():
    assert demo_comparison._rule(Options(threshold=0.97)) == "every token that is at least 97% probable"
    assert "less than 0.4 nats" in demo_comparison._rule(Options(entropy_budget=0.4))
    assert "128 places in 16 calls" in demo_comparison._rule(Options(steps=16))


def test_the_first_screen(small, capsys):
    assert main(["demo", "--problems", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert next(problems(1, split="test", seed=0)).question.split(".")[0] in " ".join(printed.out.split())
    assert "stands after ####" in printed.out
    assert "codd chat" in printed.out
    assert "codd demo --more" in printed.out
    assert "San York" not in printed.out


def test_more_with_a_circuit_that_did_not_come_with_the_model(small, capsys):
    assert main(["demo", "--problems", "1", "--more", "--circuit", "elsewhere"]) == 0
    printed = capsys.readouterr().out
    assert "stands after ####" in printed
    assert demo_model.FOREIGN in printed
    row = next(line for line in printed.splitlines() if "San York" in line)
    assert [cell for cell in row.split() if "%" in cell] == ["25.0%", "25.0%", "0.0%", "0.0%"]


def test_there_must_be_a_circuit(capsys):
    assert main(["demo", "--circuit", "none"]) == 1
    assert "--circuit must not be none" in capsys.readouterr().err


@pytest.fixture(scope="module")
def columns():
    return demo_words.example(0)["columns"]


def test_the_factorized_output_invents_cities(columns):
    probabilities = columns["factorized"]["probabilities"]
    assert len(probabilities) == 16
    assert {name: p for name, p in probabilities.items() if p} == {
        "San Diego": 0.25,
        "San York": 0.25,
        "New Diego": 0.25,
        "New York": 0.25,
    }
    assert columns["factorized"]["log_z"] == 0
    assert columns["factorized"]["diego_after_san"] == 0.5


def test_the_neutral_circuit_changes_nothing(columns):
    assert columns["neutral"]["probabilities"] == pytest.approx(columns["factorized"]["probabilities"], abs=1e-12)
    assert columns["neutral"]["diego_after_san"] == pytest.approx(0.5)
    assert columns["neutral"]["log_z"] == pytest.approx(math.log(1 / 16))


@pytest.mark.parametrize("name", ["circuit", "hmm"])
def test_the_circuit_allows_cities_that_exist(columns, name):
    column = columns[name]
    assert column["probabilities"]["San Diego"] == pytest.approx(0.5)
    assert column["probabilities"]["New York"] == pytest.approx(0.5)
    assert math.fsum(column["probabilities"].values()) == pytest.approx(1)
    assert column["samples"]["San Diego"] + column["samples"]["New York"] == demo_words.NUM_SAMPLES
    assert column["log_z"] == pytest.approx(math.log(0.25))
    assert column["diego_after_san"] == pytest.approx(1)


def test_the_samples_follow_the_probabilities(columns):
    for column in columns.values():
        assert sum(column["samples"].values()) == demo_words.NUM_SAMPLES
        for name, probability in column["probabilities"].items():
            deviation = math.sqrt(demo_words.NUM_SAMPLES * probability * (1 - probability))
            assert abs(column["samples"][name] - demo_words.NUM_SAMPLES * probability) <= 4 * deviation + 1e-6


def test_both_circuits_are_one_distribution():
    import torch

    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    torch.testing.assert_close(demo_words.city_mixture().log_prob(pairs), demo_words.city_hmm().log_prob(pairs))
    assert demo_words.city_hmm().log_partition(
        Evidence(missing=torch.ones(1, 2, dtype=torch.bool))
    ).item() == pytest.approx(0)


def test_the_seed_decides_the_samples():
    first, again, other = map(demo_words.example, (1, 1, 2))
    assert first == again
    assert first != other


class Tags(HTMLParser):
    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += [name for name, _ in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(whole, shown_once):
    text = shown_once[1]
    assert whole["example"]["sentence"] in text
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {"src", "href", "style", "onload"} & set(tags.attributes)
    assert "url(" not in text
    assert "<script" not in text
    assert "http" not in text
    assert text.count("<svg") == 3
    assert demo_model.PASSAGE in text
    assert "25.0%" in text


def test_the_page_escapes_everything():
    evil = "<script>alert('1')</script>\"&"
    row = [Cell(evil, tone=evil)]
    text = tables.page(evil, [Section(evil, before=[evil], header=[evil], rows=[row], after=[evil])])
    assert "<script" not in text
    assert 'class="&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&#34;&amp;"' in text


def test_a_page_that_cannot_be_written(capsys, tmp_path):
    assert main(["demo", "--html", str(tmp_path / "nowhere" / "page.html")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"codd: {tmp_path / 'nowhere' / 'page.html'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("option", "value"), [("--seed", "-1"), ("--seed", "x"), ("--seed", str(2**63)), ("--problems", "0")]
)
def test_numbers_that_are_none(option, value, capsys):
    assert main(["demo", option, value]) == 2
    assert option in capsys.readouterr().err


def test_three_columns(whole, capsys):
    found = whole["model"]
    assert list(found["columns"].values()) == list(demo_model.LABELS.values())
    assert [task["kind"] for task in found["tasks"]] == ["problem", "prose"]
    for task in found["tasks"]:
        for run in task["runs"]:
            assert run["circuit_evaluations"] == (0 if run["column"] == "factorized" else run["network_evaluations"])
    tables.show(demo_model.sections(found))
    assert "x trained circuit" in capsys.readouterr().out


def test_the_null_circuit_writes_what_the_network_writes(whole):
    [problem] = [task for task in whole["model"]["tasks"] if task["kind"] == "problem"]
    alone, null, _ = problem["runs"]
    assert (alone["column"], null["column"]) == ("factorized", "null")
    assert alone["text"] == null["text"]
    assert demo_model.control([problem])[0].startswith("The control holds")
    null["text"] += "!"
    assert demo_model.control([problem]) == ["The control fails: the null circuit changed 1 of 1 texts."]


def test_one_token_at_a_time_is_right_and_four_are_not(monkeypatch):
    monkeypatch.setattr(demo_model, "AT_ONCE", (1, 4))
    assert BUNDLED.tokenizer is not None
    task = demo_model.tasks(BUNDLED.tokenizer, seed=0)[0]
    contenders = {"factorized": replace(BUNDLED, circuit=None)}
    slow, fast = demo_model._attempt(task, contenders, lambda step: None)["runs"]
    assert (slow["network_evaluations"], fast["network_evaluations"]) == (40, 10)
    assert slow["answer"] == task["right"]
    assert fast["answer"] != task["right"]


def test_what_the_demo_costs():
    assert BUNDLED.tokenizer is not None
    todo = demo_model.tasks(BUNDLED.tokenizer, seed=0)
    assert [task["kind"] for task in todo] == ["problem"] * demo_model.NUM_PROBLEMS + ["prose"]
    calls = sum(-(-task["options"]["gen_length"] // k) for task in todo for k in task["at_once"])
    assert 3 * calls < 800


def run_of(column: str, answer: int | None, text: str = "text") -> dict:
    return {
        "column": column,
        "tokens_per_step": 4,
        "text": text,
        "answer": answer,
        "network_evaluations": 2,
        "seconds": 1,
    }


def test_right_and_wrong_are_marked():
    right, wrong, none = (demo_model.written(run_of("null", answer), 7) for answer in (7, 8, None))
    assert right.below[0] == Cell("right: 7", "good")
    assert wrong.below[0] == Cell("wrong: 8, not 7", "bad")
    assert none.below[0] == Cell("wrong: no answer, not 7", "bad")
    assert demo_model.written(run_of("null", None), None).below == [Cell("2 calls, 1.0 s", "faint")]


def test_right_answers_are_counted():
    problems = [{"right": 7, "runs": [run_of("factorized", 7), run_of("null", answer)]} for answer in (7, 8, None)]
    section = demo_model._score(problems, {"factorized": "a", "null": "b"})
    assert section.rows == [[Cell("4"), Cell("3 of 3", "good"), Cell("1 of 3")]]
    assert "3 short problems" in section.before[0]


def test_bars():
    drawn = figures.bars("<t>", ["a&b", "c"], {"one": [1.0, 0.0], "two": [0.5, 0.25]}, "{:.2f}".format)
    assert "<t>" not in drawn
    assert "a&amp;b" in drawn
    widths = [float(width) for width in re.findall(r'x="190" y="\d+" width="([\d.]+)"', drawn)][-4:]
    assert widths == [widths[0], widths[0] / 2, 0, widths[0] / 4]
    assert "http" not in drawn
    assert figures.bars("nothing", [], {}, str).startswith("<p>nothing")
