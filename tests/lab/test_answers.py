"""Answers as they really come: fences missing, doubled, opened by the prompt; numbers with commas, dollars and dots."""

import pytest

from codd.errors import InvalidInput
from codd.evaluation.answering import cut
from codd_lab.tasks.answers import MARKED_NUMBER, answer_rule, default_rule, extract_code
from codd_lab.tasks.catalogue import TASKS, harness_task
from codd_lab.tasks.configs import EvalConfig
from codd_lab.tasks.sandbox import Limits

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
    return harness_task(EvalConfig("gsm8k"), root, Limits())


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
    assert (MARKED_NUMBER.read(text) == "42") == bool(right)


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


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("last-number", "3 and 4 make 7.", "7"),
        ("last-number", "It costs $1,250.50, not less", "1250.5"),
        ("last-number", "5 - 7 = -2", "-2"),
        ("last-number", "between 3-4", "4"),
        ("last-number", "-0.0", "0"),
        ("last-number", "version v2 of x", None),
        ("letter", "(A) is wrong, so (B). A look shows it.", "B"),
        ("letter", "The answer is C", "C"),
        ("letter", "C. I think A bird in the hand", "C"),
        ("letter", "so A", "A"),
        ("letter", "none of them", None),
        ("exact", " Paris.\n", "paris"),
        ("exact", "New York", "new york"),
        ("regex:answer is (\\w+)", "The answer is yes. No, the answer is NO", "no"),
        ("regex:\\d+ km", "12 km or 13 km", "13 km"),
        ("regex:answer is (\\w+)", "who knows", None),
    ],
)
def test_answers_are_read_by_rule(rule, text, answer):
    assert answer_rule(rule).read(text) == answer


def test_rules_that_cannot_be_used():
    with pytest.raises(InvalidInput, match="there is no answer rule 'first'; give last-number, letter"):
        answer_rule("first")
    with pytest.raises(InvalidInput, match="has no regular expression"):
        answer_rule("regex:(")


@pytest.mark.parametrize(
    ("answers", "rule"),
    [(["7", "-1,000.5"], "last-number"), (["A", "(D)"], "letter"), (["7", "A"], "exact"), (["Paris"], "exact")],
)
def test_the_default_rule_fits_all_answers(answers, rule):
    assert default_rule(answers) == rule
