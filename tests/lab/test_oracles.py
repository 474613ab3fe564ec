"""A model that knows the answers gets all of them right, however an evaluation is run; one that guesses, chance."""

import copy
import math
import random
import sys
from dataclasses import replace

import pytest
import torch

from codd.backbones.chat import CHATML
from codd_lab.runs import Run
from codd_lab.tasks import sandbox
from tests.support import oracles
from tests.support.small_data import data
from tests.support.two_processes import run_in_two_processes

pytest.importorskip("lm_eval")
ROWS = 12
PROGRAM = ["-m", oracles.__name__]
TASKS = [*oracles.PUBLISHED, "word_problems"]
if sandbox.unavailable() is not None:
    TASKS.remove("mbpp_instruct")
ALL_RIGHT = dict.fromkeys(TASKS, 1.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return data(tmp_path_factory.mktemp("data"), ROWS)


@pytest.fixture(scope="module")
def oracle(root):
    return oracles.oracle(root)


def arguments(root, out, *more, tasks=TASKS, problems=10):
    asked = ["--tasks", ",".join(tasks), "--problems", str(problems), "--data", str(root)]
    small = ["--circuit", "none", "--gen-length", "16", "--steps", "2", "--device", "cpu", "--batch", "4"]
    return ["eval", *asked, *small, *more, "--out", str(out)]


def accuracies(out):
    return {result.config.task: result.accuracy for result in Run(out).results()}


def test_in_stages(root, oracle, tmp_path, monkeypatch):
    """Random numbers differ between them, as between processes, and where answers are made there is no lm-eval."""
    random.seed(1)
    assert oracles.run(oracle, arguments(root, tmp_path, "--stage", "prepare")) == 0
    random.seed(2)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "lm_eval", None)
        without.setitem(sys.modules, "codd.evaluation.harness", None)
        assert oracles.run(oracle, ["eval", "--stage", "answer", "--device", "cpu", "--out", str(tmp_path)]) == 0
    random.seed(3)
    monkeypatch.setattr(oracles.StandIn, "generate", lambda *args: pytest.fail("all was answered"))
    assert oracles.run(oracle, ["eval", "--stage", "score", "--data", str(root), "--out", str(tmp_path)]) == 0
    assert accuracies(tmp_path) == ALL_RIGHT


def test_resumed(root, oracle, tmp_path, monkeypatch):
    """Every third batch is cut off, and the run begun again."""
    plain, asked, lost = oracles.StandIn.generate, [], []

    def cut_off(self, prompts, options):
        asked.append(len(prompts))
        if len(asked) % 3 == 2:
            lost.append(len(prompts))
            raise KeyboardInterrupt
        return plain(self, prompts, options)

    monkeypatch.setattr(oracles.StandIn, "generate", cut_off)
    codes = []
    while 0 not in codes and len(codes) < 20:
        random.seed(len(codes))
        codes.append(oracles.run(oracle, arguments(root, tmp_path)))
    assert codes == [130] * len(lost) + [0]
    assert len(lost) >= len(TASKS)
    assert sum(asked) == 10 * len(TASKS) + sum(lost)  # only what was cut off was asked again
    assert accuracies(tmp_path) == ALL_RIGHT
    assert not list(tmp_path.rglob("answers.*"))


def test_in_two_processes(root, oracle, tmp_path):
    """They see the choices of GPQA in the order that this one sees."""
    two = tmp_path / "two"
    run_in_two_processes(*arguments(root, two), program=[*PROGRAM, "oracle", str(root)])
    assert accuracies(two) == ALL_RIGHT
    assert Run(two).results()[0].provenance["processes"] == 2
    assert oracles.run(oracle, arguments(root, tmp_path / "one")) == 0
    assert accuracies(tmp_path / "one") == ALL_RIGHT
    prompts = [[[s.prompt for s in result.samples] for result in Run(out).results()] for out in (tmp_path / "one", two)]
    assert prompts[0] == prompts[1]


def test_a_second_model_gets_prompts_in_its_own_chat_template(root, oracle, tmp_path):
    tokenizer = copy.deepcopy(oracle.tokenizer)
    tokenizer.chat_template = CHATML
    seen = []
    other = replace(oracle, tokenizer=tokenizer, reply=lambda prompt, seed: seen.append(prompt) or "7")
    for name, model in (("first", oracle), ("second", other)):
        stage = ["--model", name, "--stage", "prepare"]
        assert oracles.run(model, arguments(root, tmp_path, *stage, tasks=["gsm8k", "word_problems"])) == 0
    answer = ["eval", "--model", "second", "--stage", "answer", "--device", "cpu", "--out", str(tmp_path)]
    assert oracles.run(other, answer) == 0
    assert len(seen) == 20
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt in seen)


def test_a_token_that_the_tokenizer_lacks_stops_nothing(root, oracle, tmp_path, monkeypatch):
    """Networks have more outputs than their tokenizers have tokens."""
    plain, unknown = oracles.StandIn.generate, torch.tensor([oracle.tokenizer.vocab_size + 7])

    def padded(self, prompts, options):
        made = plain(self, prompts, options)
        return replace(made, sequences=[torch.cat([ids[:-1], unknown, ids[-1:]]) for ids in made.sequences])

    monkeypatch.setattr(oracles.StandIn, "generate", padded)
    assert oracles.run(oracle, arguments(root, tmp_path, tasks=["gsm8k", "word_problems"])) == 0
    assert accuracies(tmp_path) == {"gsm8k": 1.0, "word_problems": 1.0}


def test_guesses_score_chance(root, tmp_path):
    many = 240
    more = data(tmp_path / "data", many)
    guesser = oracles.guesser(root)
    [gpqa] = [task for task in TASKS if task.startswith("gpqa")]
    assert oracles.run(guesser, arguments(more, tmp_path / "gpqa", tasks=[gpqa], problems=many)) == 0
    four_deviations = 4 * math.sqrt(0.25 * 0.75 / many)
    assert abs(accuracies(tmp_path / "gpqa")[gpqa] - 0.25) < four_deviations
    others = [task for task in TASKS if task != gpqa]
    assert oracles.run(guesser, arguments(root, tmp_path / "others", tasks=others)) == 0
    assert accuracies(tmp_path / "others") == dict.fromkeys(others, 0.0)


def test_every_letter_is_right_about_as_often(root, tmp_path):
    """Choices are shuffled once, but shuffled: the right one is not always the last of the file."""
    many = 240
    more = data(tmp_path / "data", many)
    [gpqa] = [task for task in TASKS if task.startswith("gpqa")]
    assert oracles.run(oracles.oracle(more), arguments(more, tmp_path / "run", tasks=[gpqa], problems=many)) == 0
    [result] = Run(tmp_path / "run").results()
    assert result.accuracy == 1.0
    counts = [[sample.target for sample in result.samples].count(f"({letter})") for letter in "ABCD"]
    assert sum(counts) == many
    assert min(counts) > many / 4 - 4 * math.sqrt(many * 0.25 * 0.75)
