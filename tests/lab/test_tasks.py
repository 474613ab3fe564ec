"""Four problems of every task through the harness, resumed, in stages, and over two processes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import codd
from codd.backbones import chat
from codd.data.text_files import json_lines
from codd.distributed import DistributedContext
from codd.errors import FormatError, InvalidInput
from codd.evaluation.answering import problem_seed
from codd.evaluation.continuations import ScoringRequest, score_continuations
from codd.evaluation.harness import CoddLM, request_key
from codd_lab.runs import Log, Run
from codd_lab.tasks import catalogue, passages, sandbox
from codd_lab.tasks.catalogue import TASKS
from codd_lab.tasks.configs import EvalConfig
from codd_lab.tasks.runner import EvalSession, answer_config, default_length, prepare_config, run_config
from tests.support.small_data import data

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402 only where it is installed
from lm_eval.api.registry import get_model  # noqa: E402

TINY = {"gen_length": 16, "block_length": 16, "steps": 2}
ASKED = 4
HEADER = "<|start_header_id|>%s<|end_header_id|>\n\n"
BEGUN = "\n```python\n"
CONFINED = pytest.mark.skipif(sandbox.unavailable() is not None, reason=str(sandbox.unavailable()))


def session(folder: Path, root: Path | None, batch: int = 4) -> EvalSession:
    alone = DistributedContext(0, 1, torch.device("cpu"))
    return EvalSession(Run(folder, create=True), codd.load(circuit=None, device="cpu"), alone, root, batch)


def config(task: str, circuit: str = "none", **options) -> EvalConfig:
    return EvalConfig(task, circuit, {**TINY, **options}, problems=ASKED)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    return session(tmp_path_factory.mktemp("run") / "run", root)


@pytest.mark.parametrize(
    "task", ["gsm8k", "minerva_math500", "gpqa_main_generative_n_shot", "word_problems", "books_text"]
)
def test_four_problems_of_each_task(run, task):
    result = run_config(config(task), run)
    assert result.problems == ASKED
    assert result.metric == TASKS[task].metric
    assert run.model.circuit is None
    assert torch.is_grad_enabled()
    assert [sample.doc_id for sample in result.samples] == list(range(ASKED))
    assert all(sample.calls == 2 for sample in result.samples if sample.tokens == 16)
    assert (result.accuracy is None) == (result.metric is None)  # test_oracles.py says what it is
    assert len({sample.seed for sample in result.samples}) == ASKED
    told = json.loads((result.folder / "result.json").read_text())
    assert told["provenance"]["versions"]["lm_eval"]
    assert told["settings"]["options"]["gen_length"] == 16
    assert told["settings"]["system"] == TASKS[task].system


def test_nothing_is_said_of_git_outside_a_repository(root, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run_config(config("word_problems"), session(tmp_path / "run", root)).problems == ASKED
    assert "fatal" not in capfd.readouterr().err


@CONFINED
def test_a_hostile_program_fails_its_problem_and_nothing_else(run, tmp_path):
    """Answers as a model might write them stand in the log; everything else is the real path."""
    marker = tmp_path / "keep"
    marker.write_text("here")
    answers = [
        "def add(x):\n    return x + 0\n```",
        "while True: pass",
        f"import os\nos.remove({str(marker)!r})\ndef add(x): return x + 2",
        "def add(x):\n    return x + 3\n```\nThat adds three.",
    ]
    wanted = replace(config("mbpp_instruct"), seed=1)
    prepare_config(wanted, run)
    [path] = (run.run.folder / "requests").glob("mbpp_instruct-test-4-*.jsonl")
    requests = [line for _, line in json_lines(path)]
    cost = {"tokens": 9, "calls": 2, "seconds": 0.1, "seed": 0}
    lines = [{"key": r["key"], "text": text, **cost} for r, text in zip(requests, answers, strict=True)]
    Log(run.run.config_folder(wanted)).add(lines)
    limited = type(run)(run.run, run.model, run.context, run.data, 4, sandbox.Limits(seconds=3.0, cpu_seconds=2.0))
    result = run_config(wanted, limited)
    assert result.correct == [1, 0, 0, 1]
    assert marker.read_text() == "here"
    assert requests[0]["prompt"].endswith("<|assistant|>```python")


def test_an_answer_does_not_depend_on_the_batch(run, tmp_path, root):
    wanted = config("word_problems", temperature=1.0)
    found = [run_config(wanted, session(tmp_path / str(batch), root, batch)) for batch in (1, 3)]
    assert [sample.text for sample in found[0].samples] == [sample.text for sample in found[1].samples]


def test_answers_of_another_device_are_waited_for(tmp_path, root):
    elsewhere = session(tmp_path / "run", root)
    wanted = replace(config("gsm8k"), device="cuda")
    with pytest.raises(InvalidInput, match="4 of 4 answers are not there yet"):
        run_config(wanted, elsewhere)
    prepare_config(wanted, elsewhere)
    with pytest.raises(InvalidInput, match="was prepared for cuda"):
        answer_config(wanted, elsewhere)


def test_a_circuit_trained_anew_under_the_same_name_is_not_mixed_with_the_old_one(tmp_path, root):
    path = str(tmp_path / "circuit")
    ran = partial(run_config, config("word_problems", path))
    codd.HMM.random(2, 8192, seed=0).save(path)
    first, again = (ran(session(tmp_path / "run", root)) for _ in range(2))
    assert first.samples == again.samples
    codd.HMM.random(2, 8192, seed=1).save(path)
    with pytest.raises(InvalidInput, match="begun with another circuit"):
        ran(session(tmp_path / "run", root))


def test_published_tasks_are_found_without_looking_through_all_of_them():
    """Which takes lm-eval four seconds; elsewhere than in their folders they would be found all the same."""
    published = {name for name, task in TASKS.items() if task.harness and task.config is None}
    assert set(catalogue._FOLDERS) == published
    for name, folder in catalogue._FOLDERS.items():
        assert name in catalogue._manager(folder).all_subtasks


@pytest.fixture(scope="module")
def lm():
    return CoddLM(codd.load(device="cpu"), **TINY)


class TestAdapter:
    def test_loglikelihood_is_the_joint_one(self, lm):
        pairs = [("The sea was", " calm and grey"), ("One and one is ", "two"), ("", "Hello")]
        asked = [Instance("loglikelihood", {}, pair, i, ("t", i, 1)) for i, pair in enumerate(pairs)]
        found = lm.loglikelihood(asked)
        ids = lm.tokenizer.encode("The sea was"), lm.tokenizer.encode("The sea was calm and grey")
        [alone] = score_continuations(lm.model, [ScoringRequest(ids[0], ids[1][len(ids[0]) :])], lm.options)
        assert found[0][0] == pytest.approx(alone.log_prob, abs=1e-3)
        assert all(score < 0 for score, _ in found)

    def test_rolling_covers_every_token_once(self, lm):
        text = "The sea was calm. " * 40  # longer than half of the model
        [whole] = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0, ("t", 0, 1))])
        ids, half = lm.tokenizer.encode(text), 192
        pieces = [ScoringRequest(ids[max(0, i - half) : i], ids[i : i + half]) for i in range(0, len(ids), half)]
        assert len(pieces) > 1
        assert whole == pytest.approx(
            sum(s.log_prob for s in score_continuations(lm.model, pieces, lm.options)), rel=1e-4
        )

    def test_stop_strings_and_end_marks(self, lm):
        [text] = lm.generate_until([Instance("generate_until", {}, ("x", {"until": ["e", "a"]}), 0, ("t", 0, 1))])
        assert "e" not in text
        assert "a" not in text

    @pytest.mark.parametrize(
        ("template", "before", "begun"),
        [
            (chat.MINI, "<|user|>Hi<|assistant|>", "```python"),
            (chat.LLADA, f"<|startoftext|>{HEADER % 'user'}Hi<|eot_id|>{HEADER % 'assistant'}", "```python"),
            (chat.CHATML, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", BEGUN),  # it trims nothing
        ],
    )
    def test_an_answer_that_was_begun_is_left_open_as_the_template_writes_it(
        self, lm, monkeypatch, template, before, begun
    ):
        monkeypatch.setattr(lm.tokenizer, "chat_template", template)
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": BEGUN}]
        assert lm.apply_chat_template(talk, add_generation_prompt=False) == before + begun
        assert lm.apply_chat_template(talk[:1]) == before

    def test_the_harness_knows_it_by_name(self):
        assert get_model("codd") is CoddLM

    def test_keys_tell_requests_apart(self):
        one, two = (Instance("generate_until", {}, (text, {}), 0, ("t", 0, 1)) for text in "ab")
        assert request_key(one) != request_key(two)
        assert problem_seed(0, 1, 0) != problem_seed(1, 0, 0)


def test_a_prompt_that_does_not_fit_keeps_its_end():
    lm = CoddLM(codd.load(circuit=None, device="cpu"), gen_length=380, steps=1, block_length=32)
    assert len(lm._answerer._encode("word " * 100)) == 4
    lm = CoddLM(codd.load(circuit=None, device="cpu"), gen_length=384, steps=1)
    with pytest.raises(InvalidInput, match="leaves no room"):
        lm._answerer._encode("word")


def test_lengths_follow_the_paper_where_the_model_has_room():
    model = codd.load(circuit=None, device="cpu")
    assert default_length("gsm8k", model) == 128
    assert TASKS["gsm8k"].gen_length == 512


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (config("gsm8kk"), InvalidInput, r"no task 'gsm8kk'.*gsm8k"),
        (config("gsm8k"), FormatError, r"gsm8k/test.jsonl: there is no such file"),
        (config("gpqa_main_generative_n_shot"), FormatError, "GPQA's authors ask"),
        (config("text:other.txt"), FormatError, r"other.txt: there is no such file"),
        (replace(config("minerva_math500"), split="validation"), InvalidInput, "has no split 'validation'"),
    ],
)
def test_errors_name_what_is_missing(run, tmp_path, wanted, error, message):
    here = type(run)(Run(tmp_path / "run", create=True), run.model, run.context, tmp_path, 4)
    with pytest.raises(error, match=message):
        run_config(wanted, here)


def test_passages_are_the_same_for_every_count(root, monkeypatch):
    few, more = (passages.passages("books", root, count) for count in (3, 6))
    assert more[:3] == few
    assert all(20 <= len(found.prefix.split()) <= 80 for found in more)
    assert all(len(found.continuation.split()) == passages.CONTINUED for found in more)
    assert all(found.continuation[0].isspace() for found in more)
    with pytest.raises(FormatError, match="fewer than the 999"):
        passages.passages("books", root, 999)
    monkeypatch.setattr(passages, "MOST_CHARACTERS", 500)
    with pytest.raises(FormatError, match=r"books/test\.jsonl\.xz: holds more than 500 characters"):
        passages.passages("books", root, 3)


def test_passages_of_a_file_of_ones_own(run, root):
    paragraphs = [" ".join(f"word{number}" for number in range(k, k + 260)) for k in range(8)]
    (root / "mine.txt").write_text("\n\n".join(paragraphs))
    result = run_config(config("text:mine.txt"), run)
    assert (result.problems, result.metric, result.accuracy) == (ASKED, None, None)
    assert all(sample.prompt.startswith("word") and sample.target.split() for sample in result.samples)
