import contextlib
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from codd.circuits import HMM, Evidence
from codd.cli import demo, demo_model, figures, main, tables
from codd.cli.tables import Cell, Section
from codd.decoding import load

BUNDLED = load(device="cpu", circuit=None)
"""Loaded once."""


def shorten(patch: pytest.MonkeyPatch) -> None:
    """A demo of few steps."""
    patch.setattr(demo, "load", lambda circuit: BUNDLED)
    patch.setattr(demo_model, "AT_ONCE", (20,))
    patch.setattr(demo_model, "NUM_PROBLEMS", 1)
    patch.setattr(demo_model, "QUESTION_LENGTH", 70)
    patch.setattr(demo_model, "PASSAGE_LENGTH", 20)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A demo of few steps, whose page does not end up in the repository."""
    monkeypatch.chdir(tmp_path)
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def shown_once(tmp_path_factory) -> tuple[str, str]:
    """The JSON and the page of one demo without a circuit."""
    path, out = tmp_path_factory.mktemp("demo") / "page.html", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        shorten(patch)
        assert main(["demo", "--json", "--html", str(path)]) == 0
    return out.getvalue(), path.read_text(encoding="utf-8")


@pytest.fixture
def whole(shown_once) -> dict:
    return json.loads(shown_once[0])


@pytest.fixture
def with_circuit(small, monkeypatch):
    model = replace(BUNDLED, circuit=HMM.random(4, 8192))
    monkeypatch.setattr(demo, "load", lambda circuit: model)


def results(capsys, *arguments: str) -> dict:
    assert main(["demo", "--json", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


@pytest.fixture(scope="module")
def columns():
    return demo.example(0)["columns"]


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
    assert column["samples"]["San Diego"] + column["samples"]["New York"] == demo.NUM_SAMPLES
    assert column["log_z"] == pytest.approx(math.log(0.25))
    assert column["diego_after_san"] == pytest.approx(1)


def test_the_samples_follow_the_probabilities(columns):
    for column in columns.values():
        assert sum(column["samples"].values()) == demo.NUM_SAMPLES
        for name, probability in column["probabilities"].items():
            deviation = math.sqrt(demo.NUM_SAMPLES * probability * (1 - probability))
            assert abs(column["samples"][name] - demo.NUM_SAMPLES * probability) <= 4 * deviation + 1e-6


def test_both_circuits_are_one_distribution():
    import torch

    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    torch.testing.assert_close(demo.city_mixture().log_prob(pairs), demo.city_hmm().log_prob(pairs))
    assert demo.city_hmm().log_partition(Evidence(missing=torch.ones(1, 2, dtype=torch.bool))).item() == pytest.approx(
        0
    )


def test_the_seed_decides_the_samples():
    first, again, other = map(demo.example, (1, 1, 2))
    assert first == again
    assert first != other


def test_text(small, capsys, tmp_path):
    assert main(["demo"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    row = next(line for line in printed.out.splitlines() if "San York" in line)
    assert [cell for cell in row.split() if "%" in cell] == ["25.0%", "25.0%", "0.0%", "0.0%"]
    assert all(len(line) <= 80 for line in printed.out.splitlines() if "README" not in line and "codd chat" not in line)
    assert "codd generate" in printed.out
    assert "codd chat" in printed.out
    assert "written: codd-demo.html" in printed.out
    assert (tmp_path / "codd-demo.html").is_file()


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
    assert text.count("<svg") == 2
    assert demo_model.PASSAGE in text
    assert "25.0%" in text


def test_the_page_escapes_everything():
    evil = "<script>alert('1')</script>\"&"
    row = [Cell(evil, tone=evil)]
    text = tables.page(evil, [Section(evil, before=[evil], header=[evil], rows=[row], after=[evil])])
    assert "<script" not in text
    assert 'class="&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&quot;&amp;"' in text


def test_a_page_that_cannot_be_written(small, capsys, tmp_path):
    assert main(["demo", "--html", str(tmp_path / "nowhere" / "page.html")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"codd: {tmp_path / 'nowhere' / 'page.html'}: No such file or directory\n"


@pytest.mark.parametrize("seed", ["-1", "x", str(2**63)])
def test_seeds_that_are_none(seed, capsys):
    assert main(["demo", "--seed", seed]) == 2
    assert "--seed" in capsys.readouterr().err


def without_seconds(found: dict) -> dict:
    runs = [run for task in found["tasks"] for run in task["runs"]]
    for part in (found, *runs):
        assert part.pop("seconds") > 0
    return found


def shown(capsys, found: dict) -> str:
    tables.show(demo.sections(found))
    return capsys.readouterr().out


def test_two_columns_without_a_circuit(whole, capsys):
    found = whole["model"]
    assert list(found["columns"]) == ["factorized", "null"]
    assert [task["kind"] for task in found["tasks"]] == ["problem", "prose"]
    printed = shown(capsys, whole)
    assert "This checkpoint has no circuit" in printed
    assert "trained circuit" not in printed


def test_three_columns_with_a_circuit(with_circuit, capsys):
    whole = results(capsys)
    found = whole["model"]
    assert list(found["columns"].values()) == list(demo_model.LABELS.values())
    for task in found["tasks"]:
        for run in task["runs"]:
            assert run["circuit_evaluations"] == (0 if run["column"] == "factorized" else run["network_evaluations"])
    printed = shown(capsys, whole)
    assert "This checkpoint has no circuit" not in printed
    assert "x trained circuit" in printed
    found = results(capsys, "--circuit", "elsewhere")["model"]
    assert found["columns"]["circuit"] == demo_model.FOREIGN


def test_the_null_circuit_writes_what_the_network_writes(whole):
    [problem] = [task for task in whole["model"]["tasks"] if task["kind"] == "problem"]
    alone, null = problem["runs"]
    assert (alone["column"], null["column"]) == ("factorized", "null")
    assert alone["text"] == null["text"]
    assert demo_model.control([problem])[0].startswith("The control holds")
    null["text"] += "!"
    assert demo_model.control([problem]) == ["The control fails: the null circuit changed 1 of 1 texts."]


def test_the_seed_decides_the_texts(with_circuit, capsys):
    first, again, other = (without_seconds(results(capsys, "--seed", seed)["model"]) for seed in ("1", "1", "2"))
    assert first == again
    assert first["tasks"][0]["prompt"] != other["tasks"][0]["prompt"]
    assert first["tasks"][1]["runs"] != other["tasks"][1]["runs"]


def test_one_token_at_a_time_is_right_and_four_are_not(monkeypatch):
    monkeypatch.setattr(demo_model, "AT_ONCE", (1, 4))
    assert BUNDLED.tokenizer is not None
    task = demo_model.tasks(BUNDLED.tokenizer, seed=0)[0]
    contenders = {"factorized": BUNDLED}
    slow, fast = demo_model._attempt(task, contenders, lambda step: None)["runs"]
    assert (slow["network_evaluations"], fast["network_evaluations"]) == (40, 10)
    assert slow["answer"] == task.right
    assert fast["answer"] != task.right


def test_what_the_demo_costs():
    assert BUNDLED.tokenizer is not None
    todo = demo_model.tasks(BUNDLED.tokenizer, seed=0)
    assert [task.kind for task in todo] == ["problem"] * demo_model.NUM_PROBLEMS + ["prose"]
    calls = sum(-(-task.options["gen_length"] // k) for task in todo for k in task.at_once)
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
    right, wrong, none = (demo_model._text(run_of("null", answer), 7) for answer in (7, 8, None))
    assert right.below[0] == Cell("right: 7", "good")
    assert wrong.below[0] == Cell("wrong: 8, not 7", "bad")
    assert none.below[0] == Cell("wrong: no answer, not 7", "bad")
    assert demo_model._text(run_of("null", None), None).below == [Cell("2 calls, 1.0 s", "faint")]


def test_right_answers_are_counted():
    problems = [{"right": 7, "runs": [run_of("factorized", 7), run_of("null", answer)]} for answer in (7, 8, None)]
    section = demo_model._score(problems, {"factorized": "a", "null": "b"})
    assert section.rows == [[Cell("4"), Cell("3 of 3", "good"), Cell("1 of 3")]]
    assert "3 short problems" in section.before[0]


def test_no_page(small, capsys, tmp_path, monkeypatch):
    results(capsys, "--no-html")
    monkeypatch.setattr(demo.os, "access", lambda path, mode: False)
    assert demo.page_path(None, wanted=True) is None
    assert "no page" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["demo", "--html", "x.html", "--no-html"]) == 2


def test_bars():
    drawn = figures.bars("<t>", ["a&b", "c"], {"one": [1.0, 0.0], "two": [0.5, 0.25]}, "{:.2f}".format)
    assert "<t>" not in drawn
    assert "a&amp;b" in drawn
    widths = [float(width) for width in re.findall(r'x="190" y="\d+" width="([\d.]+)"', drawn)][-4:]
    assert widths == [widths[0], widths[0] / 2, 0, widths[0] / 4]
    assert "http" not in drawn
    assert figures.bars("nothing", [], {}, str).startswith("<p>nothing")
