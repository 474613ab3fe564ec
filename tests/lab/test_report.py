import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from codd_lab.report.page import cut, visible
from codd_lab.report.quality import ACCURACY
from codd_lab.report.render import make_report, render, write_pictures
from codd_lab.report.tables import differing, on_test
from codd_lab.runs import Run
from codd_lab.tasks.tuning import best
from tests.support.small_evaluations import add, pattern, whole_run

EVIL = "</td></svg><script>alert('x')</script>\x1b[2J\x00\u202e & \"<b>\""


class Reader(HTMLParser):
    """Checks that tags are balanced, and keeps tables, texts and attributes."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("h2", "h3", "h4"):
            self.headings.append("")
        if tag == "tr":
            self.tables.setdefault(self.headings[-1], []).append([])
        if tag in ("td", "th"):
            self.tables[self.headings[-1]][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if set(self.open) & {"h2", "h3", "h4"}:
            self.headings[-1] += data
        if set(self.open) & {"td", "th"}:
            below = "|" if self.open[-1] == "div" else ""
            self.tables[self.headings[-1]][-1][-1] += below + data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("evaluation") / "mini")


@pytest.fixture(scope="module")
def report(run):
    return make_report(run)


@pytest.fixture(scope="module")
def text(report):
    return render(report)


@pytest.fixture(scope="module")
def reader(text):
    return read(text)


def test_the_page_is_whole_and_needs_nothing_else(text, reader):
    names = {name for name, _ in reader.attributes}
    assert not {"src", "onload", "onclick"} & names
    assert all((value or "").startswith("#") for name, value in reader.attributes if name == "href")
    assert "<script" not in text
    assert "@import" not in text
    assert all(style in text for style in ("@media print", "prefers-color-scheme: dark", ".names2 td:nth-child(2)"))
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", text))
    ids = [value for name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    linked = {(value or "")[1:] for name, value in reader.attributes if name == "href"}
    assert linked <= set(ids)


def test_the_sections_are_in_order(reader):
    titles = [
        "What this run says",
        "Right answers",
        "The frontier: quality against cost",
        "Likelihood",
        "Continued text",
    ]
    titles += ["Cost at equal steps", "Ablation: activation and circuit temperature", "Samples side by side"]
    titles += ["Settings and provenance"]
    assert [heading for heading in reader.headings if heading in titles] == titles


def row(table: list[list[str]], *wanted: str) -> dict[str, str]:
    [found] = [line for line in table if line[: len(wanted)] == list(wanted)]
    return dict(zip(table[0], found, strict=True))


def test_right_answers_as_by_hand(reader):
    found = row(reader.tables["word_problems"], "trained circuit", "any order", "8 steps")
    # 36 and 18 of 60 right, the 18 among the 36.
    assert found["right, %"] == "60.0|47.4 to 71.4"
    difference, interval, chance, verdict = found["against null, points"].split("|")
    assert difference == "+30.0"
    low, high = map(float, interval.split(" to "))
    assert 10 < low < 30 < high < 50
    assert chance == "p < 0.0001, Holm < 0.0001"
    assert verdict == "survives the control"
    assert found["gained / lost"] == "18 / 0"
    assert (found["calls"], found["tokens"], found["seconds"]) == ("8.0", "10.0", "0.44")
    null = row(reader.tables["word_problems"], "null circuit", "any order", "8 steps")
    assert null["right, %"].startswith("30.0")
    assert null["against null, points"] == "-"


def test_calls_saved_as_by_hand(report, reader):
    # Alone at 16 steps: 30 of 60. The trained circuit has 36 at 8 steps; the static one 21 at 8 and 33 at 16.
    found = {(each.way, each.target): each for each in report.savings if each.task == "word_problems"}
    trained = found["trained circuit, any order, by steps", "16 steps"]
    assert (trained.calls, trained.bound, trained.null) == (8, True, 16)
    static = found["static circuit, any order, by steps", "16 steps"]
    assert static.calls == pytest.approx(8 + 8 * (30 - 21) / (33 - 21))
    # Alone by threshold: 27 at 12 calls, 39 at 24.
    assert trained.threshold == pytest.approx(12 + 12 * (30 - 27) / (39 - 27))
    table = reader.tables["Calls for the accuracy of the network alone"]
    goal = "32 steps|70.0, 32.0 calls"
    [line] = [line for line in table if line[:2] == [goal, trained.way]]
    assert line[2:] == ["16.0", "-50%", "32.0", "-50%", "not reached", "-"]


def test_likelihood_text_and_cost(reader):
    gap = row(reader.tables["Gap closed"], "0.5")
    assert gap["trained circuit"] == "60.0%|55.0% to 65.0%"
    scores = row(reader.tables["Log-likelihood"], "1")
    assert scores["DCD (causal model and network)"] == "-2.900|-3.000 to -2.800"
    texts = row(reader.tables["books_text"], "trained circuit", "latent", "16 steps")
    assert texts["NLL"] == "2.950|2.850 to 3.050"
    assert texts["Rep-2, %"] == "10.0|9.0 to 11.0"
    assert texts["MAUVE to one token a step"] == "0.400|of 0.950"
    assert texts["MAUVE to true text"] == "0.200"
    true = row(reader.tables["books_text"], "true text")
    assert (true["NLL"], true["Rep-2, %"], true["MAUVE to true text"]) == ("2.500", "10.0|9.0 to 11.0", "-")
    assert texts["NLL against null"].startswith("-0.500|-0.500 to -0.500|p ")
    assert "SmolLM2-135M-Instruct, Q4_1 (4-bit)" in reader.text
    cost = row(reader.tables["Cost at equal steps"], "any order")
    assert (cost["seconds a sample"], cost["overhead"]) == ("1.200|1.190 to 1.210", "+20.0%|+19.0% to +21.0%")


def test_the_ablation_is_chosen_on_validation_and_measured_on_test(run, reader):
    title = "word_problems, validation: trained circuit, any order, 16 steps"
    assert reader.tables[title] == [
        ["activation", "0.2", "1"],
        ["0.5", "60.0", "70.0"],
        ["always", "60.0", "70.0|chosen"],
    ]
    found = row(
        reader.tables["word_problems: chosen on validation, measured on test"], "trained circuit, any order, 16 steps"
    )
    assert found["chosen settings"] == "activation always, circuit temperature 1"
    assert found["validation"].startswith("70.0|")
    assert found["test"].startswith("70.0|")
    assert found["test, against null"].startswith("+20.0|")
    assert not any("validation" in each for each in reader.tables["word_problems"][1])
    results = run.results()
    tuned = [each for each in results if each.config.split == "validation" and each.config.circuit == "trained"]
    chosen = best(tuned, ACCURACY.worth)
    assert chosen.config.options["circuit_temperature"] == 1.0
    match = on_test(chosen, [each for each in results if each.config.split == "test"])
    assert match is not None
    assert match.config.options == {"sampler": "any_order", "steps": 16}


def test_samples_are_those_that_differ_first(report, reader):
    pair = next(each for each in report.comparisons if each.result.config.task == "word_problems")
    # Null solves 0 to 17, the circuit 0 to 35.
    assert differing(pair, 4) == [18, 19, 20, 21]
    shown = reader.tables["word_problems, problem 18"]
    assert shown[1:3] == [["prompt", "How many? 18"], ["target", "18"]]
    ways = {line[0].split("|")[0]: line[1] for line in shown[3:]}
    assert ways["trained circuit, any order, 8 steps"] == "trained says 18|right (strict: 18)"
    assert ways["null circuit, any order, 8 steps"] == "null says 18|wrong (strict: 18)"
    assert "network alone, 8 steps" in ways


def test_everything_stored_is_told(run, reader):
    common = dict(line for line in reader.tables[f"Common to all {len(run.results())} cells"][1:])
    assert common["machine"] == "a chip, 2 cores"
    assert common["versions.torch"] == "2.9"
    assert common["settings.batch"] == "8"
    assert common["cell.seed"] == "0"
    own = dict(line for line in reader.tables["What differs between cells"][1:])
    assert len(own) == len(run.results())
    assert any("time: 2026-01-01 static" in each and "cell.options.steps: 8" in each for each in own.values())


def test_the_finding_is_made_of_the_comparisons(report, reader):
    assert len(report.comparisons) == 12
    said = " ".join(report.findings)
    assert said.startswith("12 comparisons of a circuit with the null circuit")
    assert "word_problems, trained circuit, any order: the gain survives the control at 8 steps (+30.0 points" in said
    assert all(sentence in reader.text for sentence in report.findings)
    assert report.missing == []
    assert json.loads(json.dumps(report.as_json()))["finding"] == said


def test_the_same_run_gives_the_same_bytes(run, text):
    assert render(make_report(Run(run.folder))) == text


def test_pictures_have_names_of_their_own(report, tmp_path):
    few = replace(report, charts=report.charts[:2])
    paths = write_pictures(few, tmp_path / "figures")
    assert len(paths) == len(set(paths)) == 2
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert len({chart.name for chart in report.charts}) == len(report.charts) == 6


def test_hostile_text_is_shown_and_does_nothing(tmp_path):
    run = Run(tmp_path / "run", create=True)
    add(run, "gsm8k", "trained", {}, correct=pattern(3, 4), texts=[EVIL] * 4, prompt=EVIL)
    add(run, "gsm8k", "null", {}, correct=pattern(1, 4), prompt=EVIL)
    ratios = [{"ratio": 0.5, "scores": {EVIL: {"mean": 1.0}, "factorized": {"mean": 0.5}}}]
    run.write_study("gap", {"settings": {EVIL: EVIL}, "data": {EVIL: {"ratios": ratios}}})
    text = render(make_report(run))
    text.encode()
    for forbidden in ("<script", "\x1b", "\x00", "\u202e"):
        assert forbidden not in text
    reader = read(text)
    assert "<script>alert('x')</script>\\x1b[2J\\x00\\u202e & \"<b>\"" in reader.text


def test_an_empty_run_says_what_is_missing(tmp_path):
    report = make_report(Run(tmp_path / "run", create=True))
    assert report.findings == [
        "Nothing to compare yet: no circuit has been scored beside the null circuit under identical settings "
        "(continued text is scored by codd eval --judge)."
    ]
    assert len(report.missing) == 6
    reader = read(render(report))
    assert "no likelihood by mask ratio" in reader.text
    assert report.charts == []


def test_parts_that_cannot_be_read_are_left_out(tmp_path):
    run = Run(tmp_path / "run", create=True)
    good = add(run, "gsm8k", "null", {}, correct=pattern(2, 4))
    torn = add(run, "gsm8k", "trained", {}, correct=pattern(2, 4))
    (torn.folder / "samples.jsonl").unlink()
    begun = run.config_folder(replace(good.config, seed=5))
    add(run, "mbpp_instruct", "null", {}, correct=[0.0]).folder.joinpath("samples.jsonl").write_text("")
    report = make_report(run)
    notes = " ".join(report.missing)
    assert f"{torn.folder.name}: left out, its samples cannot be read (FormatError" in notes
    assert f"Not finished: {begun.name}." in notes
    assert "it has no problems" in notes
    assert "gsm8k" in read(render(report)).tables


@pytest.mark.parametrize("data", [None, [], {"books": {}}, {"books": {"ratios": [{"scores": {}}]}}, "text"])
def test_a_study_that_is_not_as_expected_is_shown_as_stored(tmp_path, data):
    run = Run(tmp_path / "run", create=True)
    run.write_study("gap", {"settings": {"seed": 1}, "data": data})
    reader = read(render(make_report(run)))
    assert "not stored as expected" in reader.text
    assert ["seed", "1"] in reader.tables["Study: gap"]


def test_an_unknown_study_is_a_table(tmp_path):
    run = Run(tmp_path / "run", create=True)
    run.write_study("weather", {"settings": {"place": {"name": "sea"}}, "data": {"rain": [1, 2]}})
    table = read(render(make_report(run))).tables["Study: weather"]
    assert ["place.name", "sea"] in table
    assert json.loads(table[-1][1]) == {"rain": [1, 2]}


def test_scores_without_a_gap(tmp_path):
    run = Run(tmp_path / "run", create=True)
    ratios = [{"ratio": 1.0, "tokens": 3, "scores": {"factorized": {"mean": -2.0, "low": None, "high": None}}}]
    run.write_study("gap", {"data": {"books": {"blocks": 1, "ratios": ratios}}})
    reader = read(render(make_report(run)))
    assert "it needs the sequential score" in reader.text
    assert reader.tables["Log-likelihood"][1] == ["1", "3", "-2.000"]


def test_many_lines_are_drawn_by_sampler(tmp_path):
    run = Run(tmp_path / "run", create=True)
    for circuit in ("trained", "static", "null"):
        add(run, "gsm8k", circuit, {"sampler": "latent", "steps": 8}, correct=pattern(2, 4))
        for pace in ({"steps": 8}, {"threshold": 0.9}, {"entropy_budget": 0.5}):
            add(run, "gsm8k", circuit, {"sampler": "any_order", **pace}, correct=pattern(2, 4))
    add(run, "gsm8k", "none", {"steps": 8}, correct=pattern(2, 4))
    names = [chart.name for chart in make_report(run).charts]
    assert names == ["frontier-gsm8k-accuracy-any_order", "frontier-gsm8k-accuracy-latent"]


def test_visible_keeps_what_can_be_read():
    assert visible("a\n\tb ö 漢") == "a\n\tb ö 漢"
    assert visible("\x07\u200b\x7f\ud800") == "\\x07\\u200b\\x7f\\ud800"
    assert cut("x" * 12, 10) == "x" * 10 + " [... 2 more characters]"


def test_notes_of_the_author_are_shown_as_text(tmp_path):
    run = Run(tmp_path / "run", create=True)
    add(run, "gsm8k", "null", {"steps": 8}, correct=pattern(2, 4))
    (run.folder / "notes.txt").write_text("Four processes\nshared the GPU.\n\n<b>Second</b>\n")
    text = render(make_report(run))
    assert "Note: Four processes shared the GPU." in text
    assert "Note: &lt;b&gt;Second&lt;/b&gt;" in text
