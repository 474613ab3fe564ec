import hashlib
import re
from collections import Counter

import pytest

from codd_lab.problems import PATTERNS, Problem, extract_answer, generate, problems

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
NUMBER = re.compile(r"\d+")
WORDS = {"half": 2, "twice": 2, "third": 3, "quarter": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10, "dozen": 12}
WORDS |= {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
WORDS |= {"eleven": 11, "twelve": 12}
COMPUTE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


@pytest.fixture(scope="module")
def sample() -> list[Problem]:
    return list(problems(3000))


def equations(problem: Problem) -> list[tuple[int, str, int, int]]:
    return [(int(a), op, int(b), int(c)) for a, op, b, c in EQUATION.findall(problem.solution)]


def said(problem: Problem) -> set[int]:
    """The numbers that the question states, in digits or in words."""
    words = re.findall(r"[a-z]+", problem.question.lower())
    return {int(n) for n in NUMBER.findall(problem.question)} | {WORDS[word] for word in words if word in WORDS}


def test_a_problem_is_a_function_of_split_seed_and_index() -> None:
    assert list(problems(20, split="test", seed=3, start=5)) == [
        generate(index, split="test", seed=3) for index in range(5, 25)
    ]
    assert generate(7) == generate(7)
    assert len({generate(7).question, generate(7, seed=1).question, generate(7, split="test").question}) == 3


def test_the_splits_share_no_question(sample: list[Problem]) -> None:
    test = {problem.question for problem in problems(200, split="test")}
    assert len(test) == 200
    assert not test & {problem.question for problem in sample}


def test_every_equation_holds_and_the_last_one_gives_the_answer(sample: list[Problem]) -> None:
    for problem in sample:
        *lines, last = problem.solution.split("\n")
        found = equations(problem)
        assert len(found) == len(lines) == problem.steps, problem
        assert all(len(EQUATION.findall(line)) == 1 for line in lines), problem
        for a, op, b, c in found:
            assert COMPUTE[op](a, b) == c, problem
            assert op != "/" or a % b == 0, problem
        assert found[-1][3] == problem.answer, problem
        assert last == f"#### {problem.answer}"


def test_operands_are_in_the_question_or_computed_before(sample: list[Problem]) -> None:
    for problem in sample:
        known = said(problem)
        for a, _, b, c in equations(problem):
            assert {a, b} <= known, problem
            known.add(c)


def test_every_intermediate_result_is_used(sample: list[Problem]) -> None:
    for problem in sample:
        found = equations(problem)
        for i, (*_, result) in enumerate(found[:-1]):
            assert any(result in (a, b) for a, _, b, _ in found[i + 1 :]), problem


def test_numbers_stay_in_range(sample: list[Problem]) -> None:
    for problem in sample:
        assert all(1 <= int(n) <= 999 for n in NUMBER.findall(problem.question + problem.solution)), problem
        for a, op, b, _ in equations(problem):
            assert op != "*" or min(a, b) <= 12, problem
            assert op != "/" or b <= 12, problem


def test_only_a_distractor_is_not_used(sample: list[Problem]) -> None:
    for problem in sample:
        used = {n for a, _, b, _ in equations(problem) for n in (a, b)}
        unused = [n for n in NUMBER.findall(problem.question) if int(n) not in used]
        assert len(unused) == problem.distractor, problem
        assert not problem.distractor or unused[0] not in NUMBER.findall(problem.solution), problem


def test_texts_are_well_formed(sample: list[Problem]) -> None:
    for problem in sample:
        assert problem.question.endswith("?")
        assert 15 <= len(problem.question.split()) <= 110, problem
        for text in (problem.question, *problem.solution.split("\n")[:-1]):
            assert not re.search(r"[{}|\n]|  | [.,]|\.\.|\$\D", text), problem
            assert not re.search(r"[.?] [a-z]", text), problem
            assert text[0].isupper() or text[0].isdigit() or text[0] == "$", problem
            assert text[-1] in ".?", problem


def test_the_problems_are_diverse(sample: list[Problem]) -> None:
    count = len(sample)
    assert len(set(PATTERNS)) == len(PATTERNS) >= 30
    assert {problem.pattern for problem in sample} == set(PATTERNS)
    assert min(Counter(problem.pattern for problem in sample).values()) > count / len(PATTERNS) / 2
    steps = Counter(problem.steps for problem in sample)
    assert set(steps) == {2, 3, 4, 5, 6}
    assert all(0.17 < share / count < 0.23 for share in steps.values())
    signs = Counter(op for problem in sample for _, op, _, _ in equations(problem))
    assert all(signs[op] / signs.total() > 0.15 for op in "+-*/")
    assert 0.22 < sum(problem.distractor for problem in sample) / count < 0.28
    assert len({NUMBER.sub("#", problem.question) for problem in sample}) > 0.95 * count
    digits = Counter(len(n) for problem in sample for n in NUMBER.findall(problem.solution))
    assert all(digits[length] / digits.total() > 0.15 for length in (1, 2, 3))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So 2 + 3 = 5.\n#### 5", 5),
        ("#### 1,234", 1234),
        ("#### 7\nmore\n#### $18.", 18),
        ("####-3", -3),
        ("#### ", None),
        ("#### 7\n#### none", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


def test_answers_are_read_back(sample: list[Problem]) -> None:
    assert all(extract_answer(problem.solution) == problem.answer for problem in sample)


def test_the_test_split_is_frozen() -> None:
    # Results on the test problems can only be compared if they never change: a change of any text or draw shows here.
    assert generate(0, split="test") == Problem(
        question="A group of hikers takes 98 ounces of trail mix. The camp is 27 miles from the road. They now divide "
        "all the trail mix they have into 7 equal bags. Adam takes one of these bags and eats 7 ounces out of it. How "
        "many ounces are left in this bag?",
        solution="One bag has 98 / 7 = 14 ounces.\n14 - 7 = 7 ounces are left in this bag.\n#### 7",
        answer=7,
        steps=2,
        pattern="camping_and_hiking",
        distractor=True,
    )
    texts = "\n\n".join(f"{each.question}\n{each.solution}" for each in problems(40, split="test"))
    assert hashlib.sha256(texts.encode()).hexdigest() == (
        "e0b15ddad8368f51811017fefaaba2546e67ceee446b52a2d9e5a0c158825ea3"
    )
