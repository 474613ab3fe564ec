"""The small parts of the loops, each against the plainest way to say the same."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from codd.decoding import Options, schedule
from codd.decoding.options import Keywords
from codd.decoding.published.schedule import centred_window, diffusion_times, revealed
from codd.decoding.ranking import (
    Noise,
    by_priority,
    choose_tokens,
    entropy,
    keep_top_k,
    keep_top_p,
    margin,
    priority,
    token_probability,
)
from codd.decoding.samplers import sample_factorized
from codd.decoding.schedule import best_window
from codd.errors import InvalidInput, shown
from tests.support.published_oracle import fits, target_window

MANY = settings(max_examples=150, deadline=None)
dues = st.lists(st.booleans(), min_size=1, max_size=24)
lengths = st.integers(1, 12)

NOISE = Noise.drawn(64, torch.Generator().manual_seed(0))


class TestBestWindow:
    @MANY
    @given(due=dues, length=lengths)
    def test_it_covers_as_many_as_any(self, due, length):
        length = min(length, len(due))
        covered = [sum(due[begin : begin + length]) for begin in range(len(due) - length + 1)]
        begin = int(best_window(torch.tensor(due), length))
        assert covered[begin] == max(covered)

    @MANY
    @given(due=dues, length=lengths)
    def test_of_the_first_ones_in_a_row_it_is_the_middle_one(self, due, length):
        length = min(length, len(due))
        covered = [sum(due[begin : begin + length]) for begin in range(len(due) - length + 1)]
        first = last = covered.index(max(covered))
        while last + 1 < len(covered) and covered[last + 1] == max(covered):
            last += 1
        assert int(best_window(torch.tensor(due), length)) == (first + last) // 2

    @pytest.mark.parametrize(
        ("places", "length", "begin"),
        [
            ([10], 4, 8),  # 7, 8, 9, 10 cover it; of an even number the earlier middle
            ([10], 5, 8),
            ([0], 4, 0),
            ([19], 4, 16),
            ([3, 4, 15, 16], 4, 2),  # two places are equally good: the first
            ([2, 9, 10], 8, 5),  # 2 to 9 cover two of them, though not the same two
            ([2, 9], 8, 2),  # which no window centred on either does
            ([], 4, 8),
        ],
    )
    def test_examples(self, places, length, begin):
        due = torch.zeros(20, dtype=torch.bool)
        due[places] = True
        assert int(best_window(due, length)) == begin

    def test_a_window_longer_than_the_sequence_begins_with_it(self):
        assert int(best_window(torch.tensor([False, True]), 5)) == 0

    @settings(max_examples=50, deadline=None)
    @given(rows=st.lists(st.lists(st.booleans(), min_size=11, max_size=11), min_size=1, max_size=5), length=lengths)
    def test_many_at_once(self, rows, length):
        together = best_window(torch.tensor(rows), length)
        assert together.tolist() == [int(best_window(torch.tensor(row), length)) for row in rows]


class TestReferenceWindow:
    @MANY
    @given(due=dues, length=lengths)
    def test_it_is_the_oracles(self, due, length):
        length = min(length, len(due))
        targets = {place for place, wanted in enumerate(due) if wanted}
        assert centred_window(torch.tensor(due), length) == target_window(targets, len(due), length)

    @pytest.mark.parametrize(
        ("places", "length", "found"),
        [
            ([], 8, (0, 0)),
            ([1], 8, (0, 1)),
            ([29], 8, (22, 1)),
            ([10, 17], 8, (6, 1)),  # seven apart: never covered together
            ([10, 13], 8, (6, 2)),
            ([10, 14], 8, (10, 2)),  # only around the second
            ([4, 5, 20, 21], 8, (0, 2)),  # the first of equals
        ],
    )
    def test_examples(self, places, length, found):
        due = torch.zeros(30, dtype=torch.bool)
        due[places] = True
        assert centred_window(due, length) == found


class TestSpread:
    @given(total=st.integers(0, 200), parts=st.integers(1, 40))
    def test_all_of_it_evenly_and_early(self, total, parts):
        found = schedule.spread(total, parts)
        assert len(found) == parts
        assert sum(found) == total
        assert found == sorted(found, reverse=True)
        assert found[0] - found[-1] <= 1

    def test_published_example(self):
        assert schedule.spread(32, 12) == [3] * 8 + [2] * 4
        assert schedule.spread(3, 5) == [1, 1, 1, 0, 0]


some_masks = st.lists(st.integers(1, 40), min_size=1, max_size=12)


class TestShare:
    @MANY
    @given(masks=some_masks, more=st.integers(0, 300))
    def test_every_block_gets_one_and_none_more_than_it_can_use(self, masks, more):
        steps = len(masks) + more
        found = schedule.divide_steps(steps, masks)
        assert len(found) == len(masks)
        assert sum(found) == min(steps, sum(masks))
        assert all(1 <= own <= mask for own, mask in zip(found, masks, strict=True))

    @MANY
    @given(masks=some_masks, more=st.integers(0, 300))
    def test_more_masks_never_get_fewer_and_of_equals_the_earlier_gets_more(self, masks, more):
        found = schedule.divide_steps(len(masks) + more, masks)
        for a in range(len(masks)):
            for b in range(len(masks)):
                if masks[a] > masks[b] or (masks[a] == masks[b] and a < b):
                    assert found[a] >= found[b]

    @MANY
    @given(masks=some_masks, more=st.integers(0, 300))
    def test_nobody_is_a_whole_step_from_its_share_unless_everybody_must_have_one(self, masks, more):
        steps = min(len(masks) + more, sum(masks))
        due = [steps * mask / sum(masks) for mask in masks]
        assume(min(due) >= 1)
        assert all(abs(own - part) < 1 for own, part in zip(schedule.divide_steps(steps, masks), due, strict=True))

    @given(blocks=st.integers(1, 12), size=st.integers(1, 20), more=st.integers(0, 100))
    def test_equal_blocks_differ_by_one_at_most_and_the_early_ones_have_it(self, blocks, size, more):
        steps = blocks + more
        assert schedule.divide_steps(steps, [size] * blocks) == schedule.spread(min(steps, blocks * size), blocks)

    @given(masks=some_masks, fewer=st.integers(1, 12))
    def test_too_few_steps(self, masks, fewer):
        steps = max(0, len(masks) - fewer)
        with pytest.raises(InvalidInput, match=f"{steps} steps are not enough for {len(masks)} blocks"):
            schedule.divide_steps(steps, masks)


class TestTimes:
    @pytest.mark.parametrize(
        ("steps", "first", "between", "last"),
        [(256, 1, 2, 3), (128, 3, 4, 5), (64, 7, 8, 9)],
    )
    def test_published_counts(self, steps, first, between, last):
        """Spec 3.1, for 512 tokens."""
        assert self.counts(512, steps) == [first, *[between] * (steps - 2), last]

    @pytest.mark.parametrize("length", [4, 16, 32, 100, 512])
    def test_as_many_steps_as_tokens_begin_with_none(self, length):
        assert self.counts(length, length)[0] == 0

    @MANY
    @given(masks=st.integers(0, 200), steps=st.integers(1, 60))
    def test_all_are_revealed_and_not_one_twice(self, masks, steps):
        counts = self.counts(masks, steps)
        assert sum(counts) == masks
        assert min(counts) >= 0

    def test_they_go_from_one_to_eps(self):
        assert diffusion_times(3) == pytest.approx([1.0, 0.667, 0.334, 0.001])

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
        order = priority(rule, self.ROWS, self.ROWS.argmax(-1), uniforms)
        assert by_priority(order).tolist() == wanted

    def test_confidence_is_that_of_the_proposed_token(self):
        tokens = torch.tensor([2, 0, 1, 1])
        torch.testing.assert_close(token_probability(self.ROWS, tokens), torch.tensor([0.1, 0.6, 0.45, 0.25]))

    @given(values=st.lists(st.integers(0, 3), max_size=40))
    def test_of_equals_the_leftmost(self, values):
        found = by_priority(torch.tensor(values, dtype=torch.float32)).tolist()
        assert found == sorted(range(len(values)), key=lambda i: (-values[i], i))

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
        order = priority(rule, log_p, scores.argmax(-1), None)
        assert order.isfinite().all()
        assert by_priority(order).tolist() == [1, 0, 2]

    def test_the_margin_of_the_only_token(self):
        assert margin(torch.zeros(3, 1)).tolist() == [1, 1, 1]
        torch.testing.assert_close(margin(self.ROWS), torch.tensor([0.1, 0.4, 0.0, 0.3]))

    @pytest.mark.parametrize("rule", ["low_confidence", "margin", "entropy"])
    def test_scores_in_bfloat16_are_ranked_in_float32(self, rule):
        scores = (4 * torch.randn(12, 50, generator=torch.Generator().manual_seed(0))).bfloat16()
        options = Options(remasking=rule)
        found = sample_factorized(scores, 5, options, NOISE.at(slice(len(scores))))
        wanted = sample_factorized(scores.float(), 5, options, NOISE.at(slice(len(scores))))
        assert found.scores.dtype == torch.float32
        assert torch.equal(found.scores, wanted.scores)
        assert torch.equal(found.rows, wanted.rows)
        p = scores.double().softmax(-1)
        torch.testing.assert_close(found.scores.double(), p[found.rows, found.tokens], rtol=1e-5, atol=0)

    def test_how_many_are_kept(self):
        scores = log_rows([0.9, 0.1], [0.6, 0.4], [0.95, 0.05], [0.8, 0.2])
        assert sample_factorized(scores, 3, Options(), NOISE.at(slice(len(scores)))).keep.tolist() == [
            True,
            True,
            True,
            False,
        ]
        above = sample_factorized(scores, None, Options(threshold=0.7), NOISE.at(slice(len(scores))))
        assert above.rows[above.keep].tolist() == [2, 0, 3]
        none_above = sample_factorized(scores, None, Options(threshold=0.99), NOISE.at(slice(len(scores))))
        assert none_above.rows[none_above.keep].tolist() == [2]
        # entropies in order: 0.199, 0.325, 0.500, 0.673
        for budget, kept in [(0.0, 1), (0.19, 1), (0.3, 1), (0.53, 2), (1.03, 3), (1.8, 4)]:
            assert (
                int(
                    sample_factorized(
                        scores, None, Options(entropy_budget=budget), NOISE.at(slice(len(scores)))
                    ).keep.sum()
                )
                == kept
            )


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

    def test_nothing_is_left_out_by_default(self):
        scores = torch.randn(3, 7)
        for found in (
            keep_top_p(scores, None),
            keep_top_p(scores, 1.0),
            keep_top_k(scores, None),
            keep_top_k(scores, 7),
        ):
            assert torch.equal(found, scores)

    def test_the_most_probable_always_stays(self):
        assert kept(keep_top_p(torch.tensor([[1.0, 5.0, 2.0]]), 0.0)[0]) == {1}

    def test_what_is_excluded_already_stays_so(self):
        scores = torch.tensor([[1.0, -math.inf, 3.0, -math.inf]])
        assert kept(keep_top_p(scores, 0.999)[0]) == {0, 2}
        assert kept(keep_top_k(scores, 3)[0]) == {0, 2}


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
        wanted = np.array(softmax([x if v in allowed else -math.inf for v, x in enumerate(tempered)]))
        counts = tokens.bincount(minlength=vocab)
        assert fits(counts, wanted)
        assert not fits(counts, np.array(softmax((row / (temperature + 0.5)).tolist())))

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

    @pytest.mark.parametrize("vocab", [5, 300])
    def test_of_no_row_none(self, vocab):
        assert choose_tokens(torch.zeros(0, vocab), torch.zeros(0), 1.0, None, 0.9).shape == (0,)

    def test_each_row_by_its_own_number(self):
        scores = log_rows([0.25, 0.5, 0.25], [0.5, 0.25, 0.25])
        for first, second, wanted in [(0.1, 0.9, [0, 2]), (0.3, 0.4, [1, 0]), (0.8, 0.6, [2, 1])]:
            assert choose_tokens(scores, torch.tensor([first, second]), 1.0, None, None).tolist() == wanted


REFERENCE = {"preset": "reference"}


@pytest.mark.usefixtures("as_users_run_it")
class TestOptions:
    @pytest.mark.parametrize(
        "given_",
        [
            {"gen_length": -1},
            {"gen_length": 1.5},
            {"gen_length": True},
            {"gen_length": "8"},
            {"block_length": 0},
            {"block_length": -4},
            {"block_length": 2.0},
            {"steps": 0},
            {"steps": -1},
            {"steps": 1.5},
            {"mode": "sideways"},
            {"mode": ""},
            {"remasking": "confidence"},
            {"remasking": "topprob"},
            {"remasking": "origin"},
            {"sampler": "gibbs"},
            {"sampler": None},
            {"tempering": "other"},
            {"outside": "forget"},
            {"preset": "upstream"},
            {"temperature": -0.1},
            {"temperature": math.inf},
            {"temperature": math.nan},
            {"temperature": 10**400},
            {"temperature": 10**5000},
            {"seed": 10**5000},
            {"ban": [10**5000]},
            {"temperature": 1e39},
            {"temperature": 1e-30, **REFERENCE},
            {"gen_length": 10**400},
            {"block_length": 2**31},
            {"steps": 10**6, **REFERENCE},
            {"mode": torch.zeros(2)},
            {"top_p": -0.1},
            {"top_p": 1.1},
            {"top_p": math.nan},
            {"top_k": 0},
            {"top_k": -1},
            {"top_k": 2.5},
            {"cfg_scale": -2.0},
            {"cfg_scale": math.inf},
            {"cfg_scale": 1e10},
            {"cfg_scale": math.nan},
            {"circuit_temperature": 0.0},
            {"circuit_temperature": -1.0},
            {"circuit_temperature": 3e-39},
            {"circuit_temperature": 1e39},
            {"circuit_temperature": math.inf},
            {"circuit_temperature": math.nan},
            {"activation": -0.1},
            {"activation": math.nan},
            {"threshold": -0.1},
            {"threshold": 1.5},
            {"threshold": math.nan},
            {"entropy_budget": -1.0},
            {"entropy_budget": math.nan},
            {"entropy_budget": 1.0, "threshold": 0.5},
            {"steps": 8, "threshold": 0.5},
            {"steps": 8, "entropy_budget": 0.5},
            {"hooks": len},
            {"hooks": 5},
            {"hooks": ["no function"]},
            {"stop": ""},
            {"stop": [1]},
            {"stop": None},
            {"remasking": []},
            {"editing_threshold": -0.1},
            {"editing_threshold": 1.1},
            {"max_post_steps": -1},
            {"max_post_steps": 10**4},
            {"max_post_steps": None},
            {"threshold": 0.5, "entropy_budget": 0.5, **REFERENCE},
            {"entropy_budget": 0.5, **REFERENCE},
            {"sampler": "any_order", **REFERENCE},
            {"tempering": "paper", **REFERENCE},
            {"outside": "defer", **REFERENCE},
            {"activation_scope": "sequence", **REFERENCE},
            {"activation_targets": 2, **REFERENCE},
            {"activation_scope": "block"},
            {"activation_targets": 0},
        ],
        ids=shown,
    )
    def test_what_makes_no_sense_is_named(self, given_):
        with pytest.raises(InvalidInput, match=rf"\b{next(iter(given_))}\b"):
            Options.of(**given_)

    @pytest.mark.parametrize(
        "given_",
        [
            {"gen_length": None},
            {"block_length": None},
            {"cfg_scale": -0.5},  # the message asks for 0 or more; what is less is ignored
            {"temperature": "hot"},
            {"top_p": "most"},
            {"seed": 1.5},
            {"seed": None},
            {"ban": 3},
        ],
        ids=str,
    )
    def test_what_makes_no_sense_either(self, given_):
        with pytest.raises(InvalidInput, match=rf"\b{next(iter(given_))}\b"):
            Options.of(**given_)

    def test_what_can_be_read_only_once(self):
        with pytest.raises(InvalidInput, match="ban must be a list of ids"):
            Options.of(ban=(token for token in (1, 2)))

    @pytest.mark.parametrize("name", ["lenght", "alg", "Seed"])
    def test_what_does_not_exist_is_named_with_all_that_does(self, name):
        with pytest.raises(InvalidInput, match=rf"no option '{name}'.*gen_length.*circuit_temperature.*seed"):
            Options.of(**{name: 1})

    @pytest.mark.parametrize(
        "given_",
        [
            {},
            {"gen_length": 0},
            {"steps": None, "gen_length": 0},
            {"top_p": 0.0},
            {"top_p": 1.0},
            {"threshold": 0.0},
            {"threshold": 1.0},
            {"activation": 0.0},
            {"activation": 1.5},
            {"entropy_budget": 0.0},
            {"circuit_temperature": 0.0, **REFERENCE},
            {"remasking": "topprob", **REFERENCE},
            {"remasking": "origin", **REFERENCE},
        ],
        ids=str,
    )
    def test_what_makes_sense(self, given_):
        found = Options.of(**given_)
        for name, value in given_.items():
            assert getattr(found, name) == value

    def test_other_names_of_the_same_order(self):
        assert Options(remasking="maskgit_plus").remasking == "low_confidence"
        assert Options(remasking="topk_margin").remasking == "margin"

    def test_changes_are_checked_too(self):
        assert Options().changed(steps=3).steps == 3
        with pytest.raises(InvalidInput, match="steps"):
            Options().changed(steps=0)


def test_the_keywords_are_the_options():
    fields = {field.name: field.type for field in dataclasses.fields(Options)}
    assert list(Keywords.__annotations__) == list(fields)
    for name, kind in Keywords.__annotations__.items():
        assert kind == fields[name], name
