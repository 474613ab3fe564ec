"""The small parts of the loops, each against the plainest way to say the same."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from codd.decoding import Options
from codd.decoding.options import OTHER_NAMES, Keywords
from codd.decoding.published.bidirectional import centred_window, diffusion_times, revealed
from codd.decoding.samplers import (
    Noise,
    best_window,
    by_priority,
    choose_tokens,
    entropy,
    keep_top_k,
    keep_top_p,
    margin,
    priority,
    sample_factorized,
    token_probability,
)
from codd.decoding.sequence import divide_steps, spread
from tests.support.enumeration import fits
from tests.support.published_oracle import target_window

MANY = settings(max_examples=150, deadline=None)
dues = st.lists(st.booleans(), min_size=1, max_size=24)
lengths = st.integers(1, 12)

NOISE = Noise.drawn(64, torch.Generator().manual_seed(0))


@MANY
@given(due=dues, length=lengths)
def test_the_window_is_the_middle_of_the_first_row_of_those_that_cover_most(due, length):
    size = min(length, len(due))
    covered = [sum(due[begin : begin + size]) for begin in range(len(due) - size + 1)]
    first = last = covered.index(max(covered))
    while last + 1 < len(covered) and covered[last + 1] == max(covered):
        last += 1
    assert best_window(torch.tensor(due), length) == (first + last) // 2


@MANY
@given(due=dues, length=lengths)
def test_the_published_window_is_the_oracles(due, length):
    length = min(length, len(due))
    targets = {place for place, wanted in enumerate(due) if wanted}
    assert centred_window(torch.tensor(due), length) == target_window(targets, len(due), length)


@given(total=st.integers(0, 200), parts=st.integers(1, 40))
def test_what_is_spread_is_spread_evenly_and_early(total, parts):
    found = spread(total, parts)
    assert len(found) == parts
    assert sum(found) == total
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= 1


some_masks = st.lists(st.integers(1, 40), min_size=1, max_size=12)


class TestShare:
    @MANY
    @given(masks=some_masks, more=st.integers(0, 300))
    def test_shares_are_proportional(self, masks, more):
        """At least one each, none more than it can use; more masks never get fewer, and of equals the earlier more."""
        steps = len(masks) + more
        found = divide_steps(steps, masks)
        assert len(found) == len(masks)
        assert sum(found) == min(steps, sum(masks))
        assert all(1 <= own <= mask for own, mask in zip(found, masks, strict=True))
        for a in range(len(masks)):
            for b in range(len(masks)):
                if masks[a] > masks[b] or (masks[a] == masks[b] and a < b):
                    assert found[a] >= found[b]
        due = [min(steps, sum(masks)) * mask / sum(masks) for mask in masks]
        if min(due) >= 1:
            assert all(abs(own - part) < 1 for own, part in zip(found, due, strict=True))

    @given(blocks=st.integers(1, 12), size=st.integers(1, 20), more=st.integers(0, 100))
    def test_equal_blocks_differ_by_one_at_most_and_the_early_ones_have_it(self, blocks, size, more):
        steps = blocks + more
        assert divide_steps(steps, [size] * blocks) == spread(min(steps, blocks * size), blocks)


class TestTimes:
    @pytest.mark.parametrize(
        ("steps", "first", "between", "last"),
        [(256, 1, 2, 3), (128, 3, 4, 5), (64, 7, 8, 9)],
    )
    def test_published_counts(self, steps, first, between, last):
        """Spec 3.1, for 512 tokens."""
        assert self.counts(512, steps) == [first, *[between] * (steps - 2), last]

    @MANY
    @given(masks=st.integers(0, 200), steps=st.integers(1, 60))
    def test_all_are_revealed_and_not_one_twice(self, masks, steps):
        counts = self.counts(masks, steps)
        assert sum(counts) == masks
        assert min(counts) >= 0

    def counts(self, masks: int, steps: int) -> list[int]:
        times, left, found = diffusion_times(steps), masks, []
        for i in range(steps):
            found.append(revealed(left, times[i], times[i + 1], i == steps - 1))
            left -= found[-1]
        return found


def log_rows(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


class TestOrders:
    ROWS = log_rows([0.5, 0.4, 0.1], [0.6, 0.2, 0.2], [0.45, 0.45, 0.1], [0.55, 0.25, 0.2])

    @pytest.mark.parametrize(
        ("rule", "wanted"),
        [
            ("low_confidence", [1, 3, 0, 2]),
            ("margin", [1, 3, 0, 2]),
            ("entropy", [0, 2, 1, 3]),
            ("left_to_right", [0, 1, 2, 3]),
            ("random", [3, 0, 1, 2]),
        ],
    )
    def test_which_comes_first(self, rule, wanted):
        uniforms = torch.tensor([0.3, 0.2, 0.1, 0.9])
        noise = Noise(uniforms, uniforms, uniforms)
        assert sample_factorized(self.ROWS, 4, Options(remasking=rule), noise).rows.tolist() == wanted

    def test_confidence_is_that_of_the_proposed_token(self):
        tokens = torch.tensor([2, 0, 1, 1])
        torch.testing.assert_close(token_probability(self.ROWS, tokens), torch.tensor([0.1, 0.6, 0.45, 0.25]))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_the_entropy_of_what_is_certain_is_zero(self, dtype):
        log_p = torch.tensor([[0, -math.inf, -math.inf], [-math.inf, -math.inf, 0]], dtype=dtype)
        assert entropy(log_p).tolist() == [0, 0]
        p = torch.tensor([[0.5, 0.5, 0.0]])
        assert entropy(p.log()).tolist() == pytest.approx([math.log(2)])

    @pytest.mark.parametrize("rule", ["low_confidence", "margin", "entropy"])
    def test_excluded_tokens_give_numbers(self, rule):
        scores = torch.tensor([[3.0, -math.inf, 1.0], [-math.inf, 2.0, -math.inf], [0.0, 0.0, -math.inf]])
        log_p = scores.log_softmax(-1)
        order = priority(rule, log_p, scores.argmax(-1))
        assert order.isfinite().all()
        assert by_priority(order).tolist() == [1, 0, 2]

    def test_the_margin_of_the_only_token(self):
        assert margin(torch.zeros(3, 1)).tolist() == [1, 1, 1]
        torch.testing.assert_close(margin(self.ROWS), torch.tensor([0.1, 0.4, 0.0, 0.3]))

    @pytest.mark.parametrize("rule", ["low_confidence", "margin", "entropy"])
    def test_scores_in_bfloat16_are_ranked_in_float32(self, rule):
        scores = (4 * torch.randn(12, 50, generator=torch.Generator().manual_seed(0))).bfloat16()
        options = Options(remasking=rule, steps=None)
        found = sample_factorized(scores, 5, options, NOISE.at(slice(len(scores))))
        wanted = sample_factorized(scores.float(), 5, options, NOISE.at(slice(len(scores))))
        assert found.scores.dtype == torch.float32
        assert torch.equal(found.scores, wanted.scores)
        assert torch.equal(found.rows, wanted.rows)
        p = scores.double().softmax(-1)
        torch.testing.assert_close(found.scores.double(), p[found.rows, found.tokens], rtol=1e-5, atol=0)

    def test_how_many_are_kept(self):
        scores = log_rows([0.9, 0.1], [0.6, 0.4], [0.95, 0.05], [0.8, 0.2])

        def rows(count=1, **options):
            due = torch.tensor(options.pop("due")) if "due" in options else None
            found = sample_factorized(scores, count, Options(**options), NOISE.at(slice(len(scores))), due=due)
            return found.rows[found.keep].tolist()

        assert rows(3, steps=None) == rows(threshold=0.7) == rows(2, threshold=0.7) == [2, 0, 3]
        assert rows(3, threshold=0.99) == [2, 0, 3]
        assert rows(threshold=0.99) == [2]
        due = [False, True, False, True]
        assert rows(threshold=0.92, due=due) == rows(entropy_budget=0.7, due=due) == [3, 2]
        assert rows(2, threshold=0.92, due=due) == rows(3, threshold=0.92, due=due) == [3, 1, 2]
        assert rows(entropy_budget=0.5, due=due) == [3]
        # entropies in order: 0.199, 0.325, 0.500, 0.673
        for budget, kept in [(0.0, 1), (0.19, 1), (0.3, 1), (0.53, 2), (1.03, 3), (1.8, 4)]:
            assert len(rows(entropy_budget=budget)) == kept


coarse = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=20)
"""Scores with ties."""


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(x) for x in row]
    return [w / math.fsum(weights) for w in weights]


def naive_top_p(row: list[float], p: float) -> set[int]:
    shares, total, kept = softmax(row), 0.0, set()
    for token in sorted(range(len(row)), key=lambda v: -row[v]):
        kept.add(token)
        total += shares[token]
        if total > p:
            break
    return kept


def on_the_edge(row: list[float], p: float) -> bool:
    """Whether rounding decides how many tokens stay."""
    return bool((abs(np.cumsum(sorted(softmax(row), reverse=True)) - p) < 1e-4).any())


def kept(row: torch.Tensor) -> set[int]:
    return set((row > -math.inf).nonzero()[:, 0].tolist())


class TestFilters:
    @MANY
    @given(row=coarse, p=st.floats(0, 1))
    def test_top_p(self, row, p):
        scores = torch.tensor([[9.0] * len(row), row])
        found = keep_top_p(scores, p)[1]
        if p < 1:
            assume(not on_the_edge(row, p))
            assert kept(found) == naive_top_p(row, p)
        assert torch.equal(found[found > -math.inf], scores[1][found > -math.inf])

    @MANY
    @given(row=coarse, k=st.integers(1, 25))
    def test_top_k(self, row, k):
        scores = torch.tensor([row[::-1], row])
        found = keep_top_k(scores, k)[1]
        least = sorted(row, reverse=True)[min(k, len(row)) - 1]
        assert kept(found) == {token for token, score in enumerate(row) if score >= least}
        assert torch.equal(found[found > -math.inf], scores[1][found > -math.inf])

    def test_at_the_edges(self):
        scores = torch.randn(3, 7)
        for found in (
            keep_top_p(scores, None),
            keep_top_p(scores, 1.0),
            keep_top_k(scores, None),
            keep_top_k(scores, 7),
        ):
            assert torch.equal(found, scores)
        assert kept(keep_top_p(torch.tensor([[1.0, 5.0, 2.0]]), 0.0)[0]) == {1}
        excluded = torch.tensor([[1.0, -math.inf, 3.0, -math.inf]])
        assert kept(keep_top_p(excluded, 0.999)[0]) == kept(keep_top_k(excluded, 3)[0]) == {0, 2}


class TestChoose:
    @given(rows=st.lists(st.lists(st.integers(-9, 9), min_size=6, max_size=6), min_size=1, max_size=4))
    def test_without_temperature_the_best_whatever_the_filters(self, rows):
        scores = torch.tensor(rows, dtype=torch.float32)
        for filters in ((None, None), (1, None), (3, 0.5)):
            assert choose_tokens(scores, None, 0.0, *filters).tolist() == [row.index(max(row)) for row in rows]

    @pytest.mark.parametrize("vocab", [9, 300])
    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p"),
        [(1.0, None, None), (0.5, None, None), (2.0, None, 0.8), (1.5, 4, None), (2.0, 6, 0.7)],
    )
    def test_frequencies(self, vocab, temperature, top_k, top_p):
        generator = torch.Generator().manual_seed(vocab)
        row = 2 * torch.randn(vocab, generator=generator, dtype=torch.float64)
        many = 4000
        tokens = choose_tokens(row.expand(many, -1), torch.rand(many, generator=generator), temperature, top_k, top_p)
        tempered = (row / temperature).tolist()
        allowed = set(sorted(range(vocab), key=lambda v: -tempered[v])[: top_k or vocab])
        if top_p is not None:
            allowed = naive_top_p([x if v in allowed else -math.inf for v, x in enumerate(tempered)], top_p)
        wanted = torch.tensor(softmax([x if v in allowed else -math.inf for v, x in enumerate(tempered)]))
        counts = tokens.bincount(minlength=vocab)
        assert fits(counts, wanted)
        assert not fits(counts, torch.tensor(softmax((row / (temperature + 0.5)).tolist())))

    @given(
        seed=st.integers(0, 10**6),
        temperature=st.sampled_from([5e-324, 3e-39, 1e-30, 1e-8, 1.0, 999.0, 1e39]),
        vocab=st.sampled_from([5, 300]),
        top_k=st.sampled_from([None, 1, 4]),
        top_p=st.sampled_from([None, 0.0, 0.7, 1.0]),
        scale=st.sampled_from([0.0, 1.0, 1e10, 1e37]),
    )
    def test_any_finite_setting_gives_an_allowed_token(self, seed, temperature, vocab, top_k, top_p, scale):
        generator = torch.Generator().manual_seed(seed)
        scores = scale * torch.randn(9, vocab, generator=generator)
        excluded = torch.rand(9, vocab, generator=generator) < 0.5
        excluded[:, 2] = False
        excluded[:, -1] = True
        uniforms = torch.rand(9, generator=generator)
        uniforms[:2] = torch.tensor([0.0, 1 - 2**-24])
        tokens = choose_tokens(scores.masked_fill(excluded, -torch.inf), uniforms, temperature, top_k, top_p)
        assert not bool(excluded.gather(-1, tokens[:, None]).any())

    def test_each_row_by_its_own_number(self):
        scores = log_rows([0.25, 0.5, 0.25], [0.5, 0.25, 0.25])
        for first, second, wanted in [(0.1, 0.9, [0, 2]), (0.3, 0.4, [1, 0]), (0.8, 0.6, [2, 1])]:
            assert choose_tokens(scores, torch.tensor([first, second]), 1.0, None, None).tolist() == wanted


REFERENCE = {"preset": "reference"}


@pytest.mark.usefixtures("as_users_run_it")
class TestOptions:
    def test_a_length_may_be_given_as_elsewhere(self):
        assert Options.of(max_new_tokens=7) == Options().changed(max_new_tokens=7) == Options(gen_length=7)

    def test_what_makes_sense(self):
        plain = ("gen_length", 0), ("top_p", 0.0), ("top_p", 1.0), ("threshold", 0.0), ("threshold", 1.0)
        for name, value in (*plain, ("activation", 0.0), ("activation", 1.5), ("entropy_budget", 0.0)):
            assert getattr(Options.of(**{name: value}), name) == value
        for name, value in (("circuit_temperature", 0.0), ("remasking", "topprob"), ("remasking", "origin")):
            assert getattr(Options.of(**{name: value}, **REFERENCE), name) == value

    def test_other_names_of_the_same_order(self):
        assert Options(remasking="maskgit_plus").remasking == "low_confidence"
        assert Options(remasking="topk_margin").remasking == "margin"


def test_the_keywords_are_the_options():
    fields = {field.name: field.type for field in dataclasses.fields(Options)}
    assert [name for name in Keywords.__annotations__ if name not in OTHER_NAMES] == list(fields)
    for name, kind in Keywords.__annotations__.items():
        assert kind == fields[OTHER_NAMES.get(name, name)], name
