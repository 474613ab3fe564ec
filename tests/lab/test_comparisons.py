import itertools

import numpy as np
import pytest

from codd.decoding.options import DEFAULT_THRESHOLD
from codd_lab.report.comparisons import SWAPS, Comparison, comparisons, few, findings, holm, swap_test, unpaired
from codd_lab.report.frontier import lines, reached, savings
from codd_lab.report.labels import budget, kind, p_value, varying
from codd_lab.report.quality import ACCURACY, NLL
from codd_lab.runs import Run
from tests.support.small_evaluations import add, judge, pattern


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run", create=True)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, and never less than the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_swapping_agrees_with_all_swaps():
    mine, theirs = np.array([1.0, 2.0, 4.0, 1.5, 2.5]), np.array([2.0, 2.5, 5.0, 3.0, 2.0])
    counts, others = np.array([2.0, 3.0, 4.0, 2.0, 3.0]), np.array([3.0, 2.0, 4.0, 2.0, 3.0])

    def gap(signs):
        swapped = np.array(signs)
        a, b = np.where(swapped, theirs, mine).sum(), np.where(swapped, mine, theirs).sum()
        return abs(a / np.where(swapped, others, counts).sum() - b / np.where(swapped, counts, others).sum())

    every = [gap(signs) for signs in itertools.product([False, True], repeat=5)]
    exact = np.mean([each >= gap([False] * 5) - 1e-12 for each in every])
    found = swap_test(mine, theirs, counts, others, np.random.default_rng(0))
    assert found == pytest.approx(exact, abs=0.03)
    assert swap_test(mine, mine, counts, counts, np.random.default_rng(0)) == 1.0


def test_a_gain_that_survives_and_one_that_is_none(run):
    for circuit, early, late in (("trained", 40, 31), ("null", 20, 30)):
        for steps, right in ((8, early), (32, late)):
            add(run, "word_problems", circuit, {"steps": steps}, correct=pattern(right, 60))
    first, second = comparisons(run.results())
    assert (first.gained, first.lost, first.problems) == (20, 0, 60)
    assert first.difference == pytest.approx(100 / 3)
    assert first.p == pytest.approx(2 / 2**20)
    assert first.adjusted == pytest.approx(4 / 2**20)
    assert (first.verdict, second.verdict) == ("gain", "no difference")
    summary, said = findings([first, second])
    assert "2 comparisons" in summary
    assert "1 shows a gain, 0 a loss, 1 no difference" in summary
    assert said.startswith(
        "word_problems, trained circuit, any order: the gain survives the control at 8 steps (+33.3 points"
    )
    assert said.endswith("there is no difference that 60 problems could show.")
    assert "32 steps (+1.7 points" in said


def test_a_loss_is_said_plainly(run):
    add(run, "gsm8k", "trained", {"steps": 32}, correct=pattern(5, 40))
    add(run, "gsm8k", "null", {"steps": 32}, correct=pattern(25, 40))
    [found] = comparisons(run.results())
    assert found.verdict == "loss"
    summary, said = findings([found])
    assert summary.endswith("it shows a loss.")
    assert "does worse than the control at 32 steps (-50.0 points" in said


def test_many_comparisons_weaken_a_gain(run):
    for number in range(10):
        right = 26 if number == 0 else 20  # 6 of 6: p 1/32
        add(run, "gsm8k", "trained", {"steps": number + 1}, correct=pattern(right, 40))
        add(run, "gsm8k", "null", {"steps": number + 1}, correct=pattern(20, 40))
    found = comparisons(run.results())
    assert found[0].p == pytest.approx(1 / 32)
    assert found[0].adjusted == pytest.approx(10 / 32)
    assert found[0].verdict == "weak gain"
    assert "does not survive the correction for 10 comparisons" in findings(found)[1]


def test_texts_are_compared_by_their_judge(run):
    for circuit, lift in (("trained", 0.0), ("null", 1.0)):
        cell = add(run, "books_text", circuit, {}, texts=["a"] * 12)
        judge(cell, [20 + i % 3 + 10 * lift for i in range(12)], [10] * 12)
    [found] = comparisons(run.results())
    assert found.unit == "nats a token"
    assert (found.difference, found.low, found.high) == pytest.approx((-1, -1, -1))
    assert found.verdict == "gain"
    assert found.p is not None
    assert 1 / (SWAPS + 1) <= found.p < 0.005


def test_without_a_control_nothing_is_said(run):
    add(run, "gsm8k", "trained", {}, correct=pattern(5, 10))
    results = run.results()
    assert comparisons(results) == []
    assert "Nothing to compare yet" in findings([])[0]
    [said] = unpaired(results, [])
    assert said.startswith("No null circuit under identical settings")
    assert said.endswith(f"beside: gsm8k, trained circuit, any order, joint sliding threshold {DEFAULT_THRESHOLD:g}.")
    assert few(["a", "b", "c"]) == "a; b; c"
    assert few(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"


def test_other_problems_are_no_control(run):
    add(run, "gsm8k", "trained", {}, correct=pattern(5, 10))
    other = add(run, "gsm8k", "null", {}, correct=pattern(5, 10))
    lines_of = (other.folder / "samples.jsonl").read_text().splitlines()
    (other.folder / "samples.jsonl").write_text("\n".join(lines_of[1:]) + "\n")
    results = run.results()
    assert comparisons(results) == []
    assert len(unpaired(results, [])) == 1


@pytest.mark.parametrize(
    ("p", "said"), [(0.00001, "p < 0.0001"), (0.0021, "p 0.002"), (0.034, "p 0.034"), (1.0, "p 1")]
)
def test_chance_in_words(p, said):
    assert p_value(p) == said


def test_reaching_by_hand():
    calls, right = [8.0, 16.0, 32.0], [40.0, 60.0, 70.0]
    assert reached(calls, right, 50.0, ACCURACY) == 12
    assert reached(calls, right, 60.0, ACCURACY) == 16
    assert reached(calls, right, 65.0, ACCURACY) == 24
    assert reached(calls, right, 30.0, ACCURACY) == 8, "never beyond the first point"
    assert reached(calls, right, 71.0, ACCURACY) is None
    assert reached([], [], 1.0, ACCURACY) is None
    assert reached(calls, [3.0, 2.0, 1.0], 1.5, NLL) == 24
    assert reached(calls, [50.0, 40.0, 60.0], 55.0, ACCURACY) == 28, "a line may fall first"


def test_savings_against_null_and_adaptive_decoding(run):
    paces = {"none": (40, 50, 60), "null": (40, 50, 60), "trained": (50, 60, 60)}
    for circuit, rights in paces.items():
        how = {} if circuit == "none" else {"sampler": "any_order"}
        for steps, right in zip((8, 16, 32), rights, strict=True):
            add(run, "gsm8k", circuit, {**how, "steps": steps}, correct=pattern(right, 100), calls=float(steps))
    for threshold, calls, right in ((0.5, 6.0, 40), (0.9, 12.0, 55)):
        add(run, "gsm8k", "none", {"threshold": threshold}, correct=pattern(right, 100), calls=calls)
    drawn = lines(run.results(), ACCURACY)
    assert [(line.config.circuit, line.kind, len(line.results)) for line in drawn] == [
        ("none", "steps", 3),
        ("none", "threshold", 2),
        ("trained", "steps", 3),
        ("null", "steps", 3),
    ]
    eight, sixteen, most = savings(run.results(), ACCURACY)
    assert (sixteen.target, sixteen.value, sixteen.network) == ("16 steps", 50, 16)
    assert (sixteen.calls, sixteen.bound) == (8, True)
    assert (sixteen.null, sixteen.threshold) == pytest.approx((16, 10))
    assert (most.calls, most.bound, most.null) == (16, False, 32)
    assert most.threshold is None
    assert most.has_threshold
    assert eight.calls == 8


def test_ways_are_named_by_what_varies(run):
    cells = [
        add(run, "gsm8k", "trained", {"threshold": 0.9, "sampler": "any_order"}, correct=[1.0]).config,
        add(run, "gsm8k", "none", {"threshold": 0.9}, correct=[1.0]).config,
        add(run, "gsm8k", "trained", {"entropy_budget": 0.5, "activation": 0.5}, correct=[1.0]).config,
        add(run, "gsm8k", "trained", {"steps": None}, correct=[1.0]).config,
    ]
    assert [kind(cell) for cell in cells] == ["joint threshold", "threshold", "entropy budget", "steps"]
    assert [budget(cell) for cell in cells] == [
        "joint threshold 0.9",
        "threshold 0.9",
        "entropy budget 0.5",
        "one token a step",
    ]
    assert varying(cells) == ["activation"]
    assert varying(cells[:2]) == [], "the network alone does not heed it"


def test_a_comparison_is_plain_json(run):
    add(run, "gsm8k", "trained", {}, correct=pattern(5, 10))
    add(run, "gsm8k", "null", {}, correct=pattern(4, 10))
    [found] = comparisons(run.results())
    assert isinstance(found, Comparison)
    told = found.as_json()
    assert told["difference"] == pytest.approx(10)
    assert (told["gained"], told["lost"], told["holm"], told["verdict"]) == (1, 0, 1.0, "no difference")
