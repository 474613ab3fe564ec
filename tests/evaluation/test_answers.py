"""Answers as they really come: fences missing, doubled, opened by the prompt; numbers with commas, dollars and dots."""

import pytest

from codd.evaluation.tasks.answers import cut, extract_code
from codd.evaluation.tasks.catalogue import TASKS, harness_task
from codd.evaluation.tasks.sandbox import Limits

CODE = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (CODE, CODE),
        (f"{CODE}\n```", CODE),  # the prompt opened the fence
        (f"{CODE}\n```\nThis adds two numbers.", CODE),
        (f"```python\n{CODE}\n```", CODE),
        (f"```\n{CODE}\n```\nmore", CODE),
        (f"```py\n{CODE}", CODE),  # never closed
        (f"  \n```python\n{CODE}\n```\n```python\nprint(1)\n```", CODE),
        (f"Here it is:\n```python\n{CODE}\n```\nDone.", CODE),
        (f"Here:\n```\n{CODE}\n```\nand\n```\nprint(1)\n```", CODE),
        (f"{CODE}\n```\nor\n```python\nx = 1\n```", f"{CODE}\n```\nor\n```\nx = 1"),  # odd: all before the last
        ("```pythonic = 1\n```", "pythonic = 1"),  # a word that only begins like a language
        ("", ""),
        ("```", ""),
        ("``` ```", " "),
    ],
)
def test_code_is_found_between_the_right_fences(text, wanted):
    assert extract_code(text) == wanted


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("a b c", [], "a b c"),
        ("a STOP b END", ["END", "STOP"], "a "),
        ("a", [""], "a"),
        ("Question: x", ["Question:"], ""),
        ("a</s>b", ["</s>"], "a"),
    ],
)
def test_text_is_cut_at_the_first_stop(text, stops, wanted):
    assert cut(text, stops) == wanted


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    (root / "gsm8k").mkdir()
    line = '{"question": "How many?", "answer": "They have 1,000 dollars.\\n#### 1,000"}\n'
    (root / "gsm8k" / "test.jsonl").write_text(line)
    return harness_task("gsm8k", root, "test", None, Limits())


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so it is\n#### 1000", 1, 1),
        ("so it is\n#### 1,000", 1, 1),
        ("so it is\n#### $1,000.", 0, 1),  # the strict pattern takes no dollar
        ("#### 1000\nor rather 7", 1, 0),  # the first after the marks, but the last of all
        ("The answer is 1000.", 0, 1),
        ("The answer is $1,000", 0, 1),
        ("1000 of them, 7", 0, 0),
        ("#### 1000.0", 0, 0),
        ("none at all", 0, 0),
        ("", 0, 0),
        ("####1000", 0, 1),  # the strict pattern wants a space
        ("#### -1000", 0, 0),
    ],
)
def test_gsm8k_numbers_are_extracted_as_the_protocol_says(gsm8k, text, strict, flexible):
    assert scores(gsm8k, text) == {"strict-match": strict, "flexible-extract": flexible}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("step\n#### 42", 1),
        ("#### 41\n#### 42", 1),  # the last counts
        ("#### 42\n#### 41", 0),
        ("#### $42", 1),
        ("42", 0),
        ("", 0),
    ],
)
def test_our_own_problems_count_the_number_after_the_last_marks(text, right):
    task = harness_task("word_problems", None, "test", 3, Limits())
    task.config.doc_to_target = "42"
    assert scores(task, text) == {"last-number": right}


def scores(task, text):
    """What each filter and the metric make of an answer."""
    doc = task.task_docs[0]
    found = {}
    for pipeline in task._filters:
        [instance] = (task.construct_requests(doc=doc, ctx="", metadata=(task.config.task, 0, 1)),)
        instance = instance[0] if isinstance(instance, list) else instance
        instance.resps = [text]
        pipeline.apply([instance])
        [value] = task.process_results(doc, [instance.filtered_resps[pipeline.name]]).values()
        found[pipeline.name] = value
    return found


def test_every_task_has_a_metric_or_a_judge():
    judged = {name for name, task in TASKS.items() if task.metric is None}
    assert judged == {"books_text", "wikitext_text"}
