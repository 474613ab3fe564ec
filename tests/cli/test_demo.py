import json
import math
from html.parser import HTMLParser

import pytest

from codd.circuits import Evidence
from codd.cli import demo, demo_model, main, tables
from codd.cli.tables import Cell, Section
from codd.decoding import load

SMALL = demo.Setting(tokens=300, states=8, length=4, batch=2, kept=64, repeats=1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(demo, "SETTING", SMALL)
    monkeypatch.setattr(demo_model, "AT_ONCE", (32,))


def results(capsys, *arguments: str) -> dict:
    assert main(["demo", "--json", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


@pytest.fixture
def columns(small, capsys):
    return results(capsys)["example"]["columns"]


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


def test_the_seed_decides_the_samples(small, capsys):
    first, again, other = (results(capsys, "--seed", seed)["example"] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_the_timing_at_full_size():
    found = demo.timing(0, demo.SETTING)
    assert found["setting"] == {"tokens": 8192, "states": 256, "length": 32, "batch": 8, "kept": 64, "repeats": 5}
    for way in ("dense", "sparse"):
        assert found[way]["log_partition_ms"] > 0
        assert found[way]["sample_ms"] > 0
    assert found["dense"]["error_nats"] < 1e-3
    assert found["sparse"]["error_nats"] < 0.1
    assert 0.98 < found["kept_mass"] < 1


def test_text(small, capsys):
    assert main(["demo"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    row = next(line for line in printed.out.splitlines() if "San York" in line)
    assert [cell for cell in row.split() if "%" in cell] == ["25.0%", "25.0%", "0.0%", "0.0%"]
    assert all(len(line) <= 80 for line in printed.out.splitlines() if "README" not in line)
    assert "codd convert" in printed.out


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


def test_the_page_is_whole_and_needs_nothing_else(small, capsys, tmp_path):
    path = tmp_path / "page.html"
    assert results(capsys, "--html", str(path))["example"]["sentence"] in path.read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {"src", "href", "style", "onload"} & set(tags.attributes)
    assert "url(" not in text
    assert "<script" not in text
    assert "25.0%" in text
    assert main(["demo", "--html", str(path)]) == 0
    assert f"written: {path}" in capsys.readouterr().out.replace("\n", "")


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


def test_the_bundled_model_answers_right_and_then_faster_and_wrong(monkeypatch):
    monkeypatch.setattr(demo_model, "AT_ONCE", (1, 16))
    slow, fast = demo_model.answers(load(device="cpu"))
    assert (slow["network_evaluations"], fast["network_evaluations"]) == (64, 4)
    assert slow["answer"] == demo_model.ANSWER
    assert slow["text"].endswith(f"#### {demo_model.ANSWER}")
    assert fast["answer"] != demo_model.ANSWER


def test_the_candidates_of_each_blank():
    places = demo_model.blanks(load(device="cpu"))
    assert len(places) == demo_model.SENTENCE.count(demo_model.BLANK) == 2
    for place in places:
        shares = [entry["probability"] for entry in place]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 1
        assert all(entry["word"] for entry in place)
