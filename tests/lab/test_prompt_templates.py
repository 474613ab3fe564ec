"""Several prompt templates of a task in one run: each with its control, and their spread."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from codd.cli import main
from codd.errors import FormatError, InvalidInput
from codd_lab.measures import template_spreads
from codd_lab.report.render import make_report, render
from codd_lab.runs import Result, Run
from codd_lab.tasks import catalogue, sandbox
from codd_lab.tasks.configs import EvalConfig
from codd_lab.tasks.templates import BUILT_IN, PromptTemplate, built_in, chosen_templates, read_templates
from tests.support import oracles
from tests.support.small_data import data
from tests.support.small_evaluations import add, pattern

SMALL = ["--gen-length", "16", "--steps", "2", "--device", "cpu", "--problems", "3"]
MINE = """
- name: shout
  text: "LISTEN! {question} {not a place}"
  system: You are loud.
- {name: twice, text: "{question}\\n{question}"}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return data(tmp_path_factory.mktemp("data"), 3)


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    return path


def prompts(result: Result) -> list[str]:
    return [sample.prompt for sample in result.samples]


def test_an_oracle_gets_all_right_under_every_template_of_every_task(root, mine, tmp_path):
    pytest.importorskip("lm_eval")
    tasks = [*oracles.PUBLISHED, "word_problems"]
    if sandbox.unavailable() is not None:
        tasks.remove("mbpp_instruct")
    (root / "my.jsonl").write_text(json.dumps({"question": "What is 3 times 3?", "answer": 9}) + "\n")
    asked = ["--tasks", ",".join(tasks), "--task-file", str(root / "my.jsonl"), "--data", str(root)]
    names = ",".join([*BUILT_IN, str(mine)])
    out = ["--circuit", "none", "--templates", names, *SMALL, "--out", str(tmp_path / "run")]
    assert oracles.run(oracles.oracle(root), ["eval", *asked, *out]) == 0
    results = Run(tmp_path / "run").results()
    assert len(results) == 6 * (len(tasks) + 1)
    assert {result.accuracy for result in results} == {1.0}
    for task in (*tasks, "my"):
        shown = {tuple(prompts(result)) for result in results if result.config.task == task}
        own = prompts(next(each for each in results if (each.config.task, each.config.template) == (task, None)))
        assert len(shown) >= 5  # plain is what word problems and files are asked by themselves
        assert "LISTEN!" not in own[0]
    loud = [result for result in results if result.config.template and result.config.template.name == "shout"]
    assert all("LISTEN! " in text and "{not a place}" in text for result in loud for text in prompts(result))
    assert {result.settings["system"] for result in loud} == {"You are loud."}
    gsm8k = next(each for each in loud if each.config.task == "gsm8k")
    assert "Answer:" not in prompts(gsm8k)[0]  # the question alone, not the harness's prompt around it
    spreads = template_spreads(results)
    assert {value for spread in spreads for value in spread.figures.values()} == {100.0}


def test_the_control_is_run_under_the_same_templates_and_in_stages(mine, tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    asked = ["--tasks", "word_problems", "--templates", f"terse,{mine}", "--circuit", "static", *SMALL, *out]
    assert main(["eval", *asked, "--stage", "prepare"]) == 0
    mine.unlink()  # the run keeps the templates
    assert main(["eval", "--stage", "answer", "--device", "cpu", *out]) == 0
    assert main(["eval", "--stage", "score", *out]) == 0
    results = Run(tmp_path / "run").results()
    told = {(result.config.circuit, result.config.template.name): prompts(result) for result in results}
    assert set(told) == {(circuit, name) for circuit in ("static", "null") for name in ("terse", "shout", "twice")}
    assert all(told["static", name] == told["null", name] for name in ("terse", "shout", "twice"))
    assert len({tuple(texts) for texts in told.values()}) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "over 3 templates: mean" in shown
    assert "template twice" in shown


def templated(run: Run, circuit: str, name: str | None, right: int) -> Result:
    """A finished configuration of ten problems under a template of this name."""
    plain = add(run, "word_problems", circuit, {"steps": 8, "sampler": "any_order"}, correct=pattern(right, 10))
    if name is None:
        return plain
    config = replace(plain.config, template=PromptTemplate(name, f"{name}: {{question}}"))
    result = replace(plain, config=config, folder=run.config_folder(config))
    run.write_result(result, plain.samples)
    return result


def spreads(folder: Path, rows: dict[str | None, tuple[int, int]]):
    run = Run(folder, create=True)
    for name, (trained, null) in rows.items():
        if name is not None:
            templated(run, "trained", name, trained)
            templated(run, "null", name, null)
    for circuit, right in zip(("trained", "null"), rows[None], strict=True):  # last: `add` writes over it
        templated(run, circuit, None, right)
    return run, {spread.config.circuit: spread for spread in template_spreads(run.results())}


def test_spread_by_hand(tmp_path):
    _, found = spreads(tmp_path, {None: (7, 6), "a": (4, 2), "b": (10, 9)})
    trained, null = found["trained"], found["null"]
    assert trained.accuracies == pytest.approx({"default": 70, "a": 40, "b": 100})
    assert trained.figures == pytest.approx({"mean": 70, "low": 40, "high": 100})
    assert trained.differences == pytest.approx({"default": 10, "a": 20, "b": 10})
    assert (trained.same_sign, trained.verdict) == (True, "above the null circuit under all templates")
    assert null.figures["mean"] == pytest.approx(170 / 3)
    assert (null.differences, null.same_sign, null.verdict) == ({}, None, "-")
    assert json.loads(json.dumps(trained.as_json()))["same_sign"] is True


@pytest.mark.parametrize(("own", "same"), [((5, 6), False), ((6, 6), False), ((7, 6), True)])
def test_the_sign_must_be_that_of_all(tmp_path, own, same):
    run, found = spreads(tmp_path, {None: own, "a": (4, 2)})
    assert found["trained"].same_sign is same
    page = " ".join(render(make_report(run)).split())
    assert ("the sign changes with the template" in page) is not same
    assert "template a" in page


def test_one_template_has_no_spread_and_no_control_no_sign(tmp_path):
    run = Run(tmp_path, create=True)
    templated(run, "trained", "a", 5)
    assert template_spreads([result for result in run.results() if result.config.template]) == []
    [spread] = template_spreads(run.results())
    assert spread.same_sign is None
    assert "not known" in spread.verdict


def test_a_template_makes_another_configuration():
    plain = EvalConfig("gsm8k", "null", {"steps": 8})
    worded = replace(plain, template=PromptTemplate("a", "{question}"))
    assert worded.slug.startswith("gsm8k-null-8_steps-a-")
    assert EvalConfig.from_json(worded.as_json()) == worded
    assert worded != plain


def test_any_other_task_of_the_harness_has_its_whole_prompt_for_the_question():
    pytest.importorskip("lm_eval")
    from lm_eval.api.task import ConfigurableTask

    rows = catalogue._as_dataset({"test": [{"q": "Why", "choices": ["a", "b"]}]})
    common = {"task": "x", "test_split": "test", "custom_dataset": lambda **_: rows, "doc_to_target": "{{q}}"}
    asking = ConfigurableTask(config={**common, "output_type": "generate_until", "doc_to_text": "Q: {{q}}?"})
    catalogue._use_template(asking, PromptTemplate("a", "Say it. {question}"), None)
    assert asking.doc_to_text({"q": "Why"}) == "Say it. Q: Why?"
    asking.doc_to_text = lambda doc, *_: 1  # the number of a choice, as some tasks of likelihoods have it
    catalogue._use_template(asking, PromptTemplate("a", "Say it. {question}"), None)
    with pytest.raises(InvalidInput, match="asks no question in text"):
        asking.doc_to_text({"q": "Why"})


def test_built_in_wordings_say_how_the_answer_must_end():
    assert built_in("default", "gsm8k") is None
    assert built_in("plain", "gsm8k").text == "{question}"
    assert "####" in built_in("terse", "gsm8k").text
    assert "boxed{ANSWER}" in built_in("step-by-step", "minerva_math500").text
    assert "(A)" in built_in("step-by-step", "my", "letter").text
    assert "final answer" in built_in("terse", "my", "regex:x").text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not YAML"),
        ("[&a {name: a, text: '{question}'}, *a]", "is not YAML: aliases such as *name are not taken"),
        ("[" + " " * 2**17 + "]", "more than the 131,072 that such a file may have"),
        ("{}", "expected a list of templates"),
        ("[]", "expected a list of templates"),
        ("[{name: a, text: b}]", "template 1: the template 'a' lacks {question}"),
        ("[{name: a}]", "template 1: lacks the field text"),
        ("[{name: a, text: '{question}', role: b}]", "unknown field role; there are name, text, system"),
        ("[{name: a/b, text: '{question}'}]", "must be of letters"),
        ("[{name: default, text: '{question}'}]", "is that of the task's own prompt"),
    ],
)
def test_wrong_files(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_text(content)
    with pytest.raises(FormatError, match=re.escape(message)):
        read_templates(path)


def test_files_may_be_json(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"name": "a", "text": "{question}"}]))
    assert chosen_templates([str(path), "default"], "gsm8k") == [PromptTemplate("a", "{question}"), None]


def test_a_changed_template_needs_another_name(mine, tmp_path, capsys):
    asked = ["eval", "--tasks", "word_problems", "--templates", str(mine), "--circuit", "none", *SMALL]
    assert main([*asked, "--stage", "prepare", "--out", str(tmp_path / "run")]) == 0
    mine.write_text(MINE.replace("LISTEN", "HEAR"))
    assert main([*asked, "--stage", "prepare", "--out", str(tmp_path / "run")]) == 1
    assert "under another template 'shout'" in " ".join(capsys.readouterr().err.split())
