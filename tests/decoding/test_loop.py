import warnings
from types import MappingProxyType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import codd
from codd.backbones import mini
from codd.backbones.config import Config
from codd.circuits import HMM
from codd.decoding.loop import advance
from codd.decoding.options import HEAD_START, Options
from codd.decoding.runner import FullRecompute, HiddenStateRequest, pad_left
from codd.decoding.sequence import SequenceState, Step, generator_for, start_sequences
from codd.errors import CircuitSteppedAside, InvalidInput
from tests.support.tiny_models import (
    EOS,
    MASK,
    PAD,
    VOCAB,
    biased,
    filled_in,
    last,
    of,
    random_hmm,
    run,
    stated,
    tiny,
)

prompts_of_any_length = st.lists(st.lists(st.integers(0, MASK - 1), max_size=5), min_size=1, max_size=3)


class TestSchedule:
    @settings(max_examples=40, deadline=None)
    @given(
        prompts=prompts_of_any_length,
        gen_length=st.integers(1, 20),
        block_length=st.integers(1, 9),
        more=st.integers(0, 25),
        mode=st.sampled_from(["block", "full"]),
    )
    def test_any_lengths_and_any_number_of_steps(self, prompts, gen_length, block_length, more, mode):
        blocks = -(-gen_length // block_length) if mode == "block" else 1
        wanted = blocks + more
        steps = run(tiny(), prompts, gen_length=gen_length, block_length=block_length, steps=wanted, mode=mode)
        for i, prompt in enumerate(prompts):
            own = of(steps, i)
            assert len(own) == min(wanted, gen_length)
            ids = torch.tensor([*prompt, *[MASK] * gen_length])
            counts = []
            for number, step in enumerate(own):
                assert step.number == number
                assert (ids[step.positions] == MASK).all()
                changed = ids.clone()
                changed[step.positions] = step.tokens
                assert torch.equal(changed, step.ids)
                assert step.finished == (number == len(own) - 1)
                begin, end = step.window
                assert step.mask_ratio == pytest.approx(float((ids[begin:end] == MASK).float().mean()))
                if mode == "block":
                    assert (begin - len(prompt)) % block_length == 0
                    assert bool((step.positions >= begin).all() and (step.positions < end).all())
                counts.append(len(step.positions))
                ids = step.ids
            assert MASK not in ids.tolist()
            assert min(counts) >= 1
            if mode == "full":
                assert counts == sorted(counts, reverse=True)
                assert counts[0] - counts[-1] <= 1

    def test_remainders_go_to_the_early_blocks_and_the_early_steps(self):
        steps = run(tiny(), [[1]], gen_length=16, block_length=4, steps=10)
        blocks = [step.window[0] for step in steps]
        assert [blocks.count(begin) for begin in (1, 5, 9, 13)] == [3, 3, 2, 2]
        assert [len(step.positions) for step in steps] == [2, 1, 1, 2, 1, 1, 2, 2, 2, 2]

    def test_each_sequence_has_a_schedule_of_its_own(self):
        steps = run(tiny(), [[1, MASK, 2], [3]], gen_length=4, block_length=4, steps=None)
        assert len(of(steps, 0)) == 5
        assert len(of(steps, 1)) == 4


class TestWhatIsCommitted:
    @settings(max_examples=20, deadline=None)
    @given(prompts=prompts_of_any_length, steps=st.integers(2, 12))
    def test_the_best_tokens_of_the_surest_positions(self, prompts, steps):
        backbone = tiny()
        found = run(backbone, prompts, gen_length=12, block_length=6, steps=steps)
        for i, prompt in enumerate(prompts):
            ids = torch.tensor([*prompt, *[MASK] * 12])
            for step in of(found, i):
                logits = backbone(ids[None])[0].double()
                logits[:, MASK] = -torch.inf
                p = logits.softmax(-1)
                best = p.amax(-1)
                close = {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(step.scores.double(), best[step.positions], **close)
                torch.testing.assert_close(p[step.positions, step.tokens], best[step.positions], **close)
                assert (step.scores.diff() <= 0).all()
                begin, end = step.window
                left = [t for t in range(begin, end) if step.ids[t] == MASK]
                assert all(best[t] <= step.scores.min() + 1e-6 for t in left)
                ids = step.ids

    @pytest.mark.parametrize(
        ("order", "steps"),
        [("low_confidence", 8), ("margin", 4), ("entropy", 3), ("left_to_right", 10)],
    )
    @pytest.mark.parametrize("circuit", [None, HMM.neutral(3, 9)])
    @pytest.mark.parametrize("sampler", ["latent", "any_order"])
    def test_of_equals_the_leftmost_go_first(self, steps, order, circuit, sampler):
        options = {"gen_length": 8, "block_length": 8, "steps": steps, "remasking": order, "sampler": sampler}
        steps = run(stated(torch.zeros(9), 8), [[1, 2]], circuit=circuit, **options)
        if circuit is None or sampler == "any_order":
            torch.testing.assert_close(steps[0].scores, torch.full_like(steps[0].scores, 1 / 8))
        order = filled_in(steps)[2:]
        assert order == sorted(order)
        assert min(order) >= 0

    def test_random_order_is_random_and_the_seeds(self):
        def order(seed):
            return filled_in(run(tiny(), [[1]], gen_length=12, block_length=12, remasking="random", seed=seed))

        assert order(1) == order(1)
        assert len({tuple(order(seed)) for seed in range(5)}) == 5

    def test_the_mask_is_never_written_however_much_the_network_wants_it(self):
        bias = torch.zeros(VOCAB)
        bias[MASK] = 100.0
        wanting = biased(tiny(), bias)
        assert (wanting(torch.full((1, 9), MASK)).argmax(-1) == MASK).all()
        prompts = [[1, 2, 3], [4]]
        options = {"gen_length": 12, "block_length": 4, "steps": 6}
        with_bias, without = run(wanting, prompts, **options), run(tiny(), prompts, **options)
        for i in range(2):
            assert MASK not in last(with_bias, i)
            assert last(with_bias, i) == last(without, i)

    def test_banned_tokens_are_never_written(self):
        options = {"gen_length": 12, "block_length": 12, "steps": 4}
        written = set(last(run(tiny(), [[1]], **options))[1:])
        other = set(last(run(tiny(), [[1]], ban=written, **options))[1:])
        assert written
        assert not written & other

    def test_hooks_see_positions_and_sequence_and_change_logits(self):
        seen = []

        def only_seven(logits, positions, ids):
            seen.append((positions.tolist(), ids.tolist()))
            out = torch.full_like(logits, -torch.inf)
            out[:, 7] = 0
            return out

        steps = run(tiny(), [[1, 2]], gen_length=4, block_length=2, steps=2, hooks=[only_seven])
        assert last(steps) == [1, 2, 7, 7, 7, 7]
        assert seen == [([2, 3], [1, 2, *[MASK] * 4]), ([4, 5], [1, 2, 7, 7, MASK, MASK])]

    @pytest.mark.parametrize("value", [torch.nan, -torch.inf])
    @pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"mode": "full"}, {"preset": "reference"}])
    def test_logits_that_are_no_numbers_are_an_error(self, value, options):
        def spoil(logits, positions, ids):
            out = logits.clone()
            out[1] = value
            return out

        options = {"gen_length": 4, "block_length": 4, "steps": 1, "hooks": [spoil], **options}
        with pytest.raises(InvalidInput, match="sequence 0, position 2: the logits are NaN, or every token"):
            run(tiny(), [[1]], **options)

    def test_guidance_moves_away_from_what_is_said_without_the_prompt(self):
        backbone, prompt = tiny(), [1, 2, 3]
        step = run(backbone, [prompt], gen_length=4, block_length=4, steps=1, cfg_scale=1.5)[0]
        full = torch.tensor([[*prompt, *[MASK] * 4]])
        with_prompt, without = backbone(full)[0, 3:], backbone(torch.full_like(full, MASK))[0, 3:]
        logits = without + 2.5 * (with_prompt - without)
        logits[:, MASK] = -torch.inf
        assert step.ids[3:].tolist() == logits.argmax(-1).tolist()
        assert (
            step.ids[3:].tolist() != run(backbone, [prompt], gen_length=4, block_length=4, steps=1)[0].ids[3:].tolist()
        )


class TestHowMany:
    def test_threshold(self):
        backbone = tiny()
        steps = run(backbone, [[1, 2]], gen_length=16, block_length=8, threshold=0.3)
        assert any(len(step.positions) > 1 for step in steps)
        assert any(float(step.scores.min()) < 0.3 for step in steps)
        ids = torch.tensor([1, 2, *[MASK] * 16])
        for step in steps:
            logits = backbone(ids[None])[0].double()
            logits[:, MASK] = -torch.inf
            best = logits.softmax(-1).amax(-1)
            begin, end = step.window
            passed = {t for t in range(begin, end) if ids[t] == MASK and best[t] >= 0.3}
            if len(step.positions) == 1 and not passed:
                assert best[step.positions[0]] == max(best[t] for t in range(begin, end) if ids[t] == MASK)
            else:
                assert set(step.positions.tolist()) == passed
            ids = step.ids

    @pytest.mark.parametrize("blocks", ["fixed", "sliding"])
    def test_at_least_so_many_of_a_block_and_what_is_sure_beyond_it(self, blocks):
        told = {"gen_length": 24, "block_length": 8, "min_tokens": 3, "blocks": blocks}
        ids, beyond = [1, 2, *[MASK] * 24], 0
        for step in run(tiny(), [[1, 2]], threshold=0.2, **told):
            first = ids.index(MASK)
            start = 2 + (first - 2) // 8 * 8
            window = (start, start + 8) if blocks == "fixed" else (first, min(first + 8, 26))
            assert step.window == window
            written = dict(zip(step.positions.tolist(), step.scores.tolist(), strict=True))
            own = [position for position in written if position < start + 8]
            owed = 3 * (step.number + 1 - HEAD_START) - (24 - ids.count(MASK))
            assert len(own) >= min(max(1, min(owed, 3)), ids[start : start + 8].count(MASK))
            assert all(written[position] >= 0.2 for position in written.keys() - own)
            assert sum(score < 0.2 for score in written.values()) <= max(1, min(owed, 3))
            ids, beyond = step.ids.tolist(), beyond + len(written) - len(own)
        assert (beyond > 0) == (blocks == "sliding")
        assert len(run(tiny(), [[1, 2]], threshold=1.0, **told)) == HEAD_START + 9

    def test_a_threshold_of_one_or_zero(self):
        assert len(run(tiny(), [[1]], gen_length=8, block_length=8, threshold=1.0)) == 8
        assert len(run(tiny(), [[1]], gen_length=8, block_length=8, threshold=0.0)) == 1


class TestSeeds:
    OPTIONS = MappingProxyType(
        {"gen_length": 12, "block_length": 6, "steps": 4, "temperature": 1.0, "sampler": "latent"}
    )

    def test_the_seed_is_all(self):
        before = torch.random.get_rng_state()
        first = run(tiny(), [[1]], circuit=random_hmm(), seed=3, **self.OPTIONS)
        torch.manual_seed(99)
        second = run(tiny(), [[1]], circuit=random_hmm(), seed=3, **self.OPTIONS)
        assert last(first) == last(second)
        torch.random.set_rng_state(before)
        run(tiny(), [[1]], circuit=random_hmm(), seed=3, **self.OPTIONS)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert last(first) != last(run(tiny(), [[1]], circuit=random_hmm(), seed=4, **self.OPTIONS))

    def test_a_seed_for_each(self):
        steps = run(tiny(), [[1], [1], [1]], seed=[3, 4, 3], **self.OPTIONS)
        assert last(steps, 0) == last(steps, 2) != last(steps, 1)
        assert last(steps, 0) == last(run(tiny(), [[1]], seed=3, **self.OPTIONS))

    def test_different_prompts_do_not_share_their_noise(self):
        draws = [torch.rand(4, generator=generator_for(0, prompt)).tolist() for prompt in ([1], [2], [1, 2], [])]
        assert len({tuple(draw) for draw in draws}) == 4
        assert torch.rand(4, generator=generator_for(0, [1])).tolist() == draws[0]


class TestEnd:
    def test_a_sequence_ends_with_its_end_of_text(self):
        logits = torch.zeros(VOCAB)
        logits[EOS] = 5
        steps = run(stated(logits, MASK), [[1, 2]], gen_length=16, block_length=4, steps=16, stop_ids=frozenset({EOS}))
        assert len(steps) == 1
        assert last(steps) == [1, 2, EOS]
        assert steps[0].finished

    def test_not_before_all_that_precedes_it_is_written(self):
        """The end of text is surest at the right of the block; the left must be filled all the same."""

        def right_first(logits, positions, ids):
            out = torch.zeros_like(logits)
            out[:, 3] = 0.5
            for row, position in enumerate(positions.tolist()):
                if position == 6:
                    out[row, EOS] = 9.0
            return out

        options = {"gen_length": 12, "block_length": 6, "steps": None, "hooks": [right_first]}
        steps = run(tiny(), [[1, 2]], stop_ids=frozenset({EOS}), **options)
        assert steps[0].tokens.tolist() == [EOS]
        assert last(steps) == [1, 2, 3, 3, 3, 3, EOS]
        assert len(steps) == 5  # the rest of the block is not computed, nor are later blocks
        assert len(run(tiny(), [[1, 2]], stop_ids=frozenset({EOS}), stop=False, **options)) == 12

    def test_an_end_of_text_in_the_prompt_ends_nothing(self):
        steps = run(tiny(), [[EOS, 2]], gen_length=4, block_length=4, stop_ids=frozenset({EOS}), ban=[EOS])
        assert len(last(steps)) == 6

    def test_the_others_go_on(self):
        def first_only(logits, positions, ids):
            out = logits.clone()
            out[:, EOS] = 50.0 if ids[0] == 1 else -50.0
            return out

        steps = run(
            tiny(), [[1], [2]], gen_length=8, block_length=4, steps=8, hooks=[first_only], stop_ids=frozenset({EOS})
        )
        assert (len(of(steps, 0)), len(of(steps, 1))) == (1, 8)

    def test_the_reference_does_not_stop(self):
        logits = torch.zeros(VOCAB)
        logits[EOS] = 5
        options = {"gen_length": 8, "block_length": 4, "steps": 4, "preset": "reference"}
        assert len(run(stated(logits, MASK), [[1]], stop_ids=frozenset({EOS}), **options)) == 4


class TestInfilling:
    @pytest.mark.parametrize("mode", ["block", "full"])
    def test_masks_anywhere(self, mode):
        prompt = [MASK, 2, MASK, MASK, 5, 6, MASK]
        steps = run(tiny(), [prompt], gen_length=0, steps=None, mode=mode, block_length=3)
        assert len(steps) == 4
        found = last(steps)
        assert [found[i] for i in (1, 4, 5)] == [2, 5, 6]
        assert MASK not in found

    def test_blocks_are_counted_from_the_end_of_the_prompt(self):
        prompt = [1, MASK, 2, 3, 4, 5, MASK, 6]
        steps = run(tiny(), [prompt], gen_length=4, steps=None, block_length=3)
        assert [step.window for step in steps] == [(0, 2), (5, 8), (8, 11), (8, 11), (8, 11), (11, 12)]

    def test_the_circuit_sees_what_is_given_on_both_sides(self):
        """A circuit that only allows runs of one token: the mask between two 4s must be a 4."""
        emission = torch.full((VOCAB, VOCAB), -torch.inf).fill_diagonal_(0.0)
        runs = HMM(torch.zeros(VOCAB).log_softmax(0), torch.eye(VOCAB).log(), emission)
        for sampler in ("latent", "any_order"):
            steps = run(tiny(), [[4, MASK, 4]], circuit=runs, gen_length=0, block_length=3, sampler=sampler)
            assert last(steps) == [4, 4, 4]

    def test_nothing_to_fill(self):
        assert run(tiny(), [[1, 2]], gen_length=0) == []
        assert [step.sequence for step in run(tiny(), [[1, 2], [MASK]], gen_length=0)] == [1]


class NoBatches(FullRecompute):
    """A network whose device has memory for one sequence only."""

    def __call__(self, requests: list[HiddenStateRequest]) -> list[Tensor]:
        if len(requests) > 1:
            raise RuntimeError("out of memory")
        return super().__call__(requests)


class TestUnforeseenErrors:
    KINDS = (
        {"temperature": 1.0, "seed": 4, "sampler": "latent"},
        {"sampler": "any_order", "threshold": 0.1},
        {"remasking": "random", "mode": "full"},
    )

    def sequences(self, *more: dict) -> list[SequenceState]:
        kinds = [Options.of(gen_length=8, block_length=8, **kind) for kind in (*self.KINDS, *more)]
        return [
            start_sequences(tiny(), [[number]], kind, mask_id=MASK, circuit=random_hmm())[0]
            for number, kind in enumerate(kinds)
        ]

    def texts(self, sequences: list[SequenceState]) -> list[list[int]]:
        return [state.ids.tolist() for state in sequences[: len(self.KINDS)]]

    def finish(self, runner: FullRecompute, sequences: list[SequenceState]) -> None:
        while unfinished := [state for state in sequences if not state.finished]:
            assert all(isinstance(outcome, Step) for outcome in advance(runner, unfinished))

    def expected(self) -> list[list[int]]:
        alone = self.sequences()
        for state in alone:
            self.finish(FullRecompute(tiny()), [state])
        return self.texts(alone)

    def test_one_of_the_batch_is_nobody_elses(self):
        def explode(logits, rows, ids):
            raise RuntimeError("boom")

        together = self.sequences({"hooks": [explode]}, {"hooks": [lambda *_: 1 / 0]})
        outcomes = advance(FullRecompute(tiny()), together)
        assert [type(outcome) for outcome in outcomes] == [Step, Step, Step, RuntimeError, ZeroDivisionError]
        assert [state.finished for state in together[2:]] == [False, True, True]
        self.finish(FullRecompute(tiny()), together)
        assert self.texts(together) == self.expected()

    def test_one_of_all_leaves_each_to_itself(self):
        """Alone, a sequence draws the numbers again that it had drawn in the batch."""
        together = self.sequences()
        self.finish(NoBatches(tiny()), together)
        assert self.texts(together) == self.expected()


class TestCircuit:
    def test_factorized_leaves_it_out(self):
        options = {"gen_length": 12, "block_length": 6, "steps": 4}
        left_out = run(tiny(), [[1]], circuit=random_hmm(), sampler="factorized", **options)
        assert not any(step.circuit for step in left_out)
        alone = last(run(tiny(), [[1]], **options))
        assert last(left_out) == alone != last(run(tiny(), [[1]], circuit=random_hmm(), **options))

    @pytest.mark.parametrize(
        ("activation", "on"), [(0.5, [0, 0, 1]), (0.51, [0, 1, 1]), (1.0, [0, 1, 1]), (2.0, [1] * 3)]
    )
    def test_activation_is_strict(self, activation, on):
        steps = run(tiny(), [[1]], circuit=random_hmm(), gen_length=4, block_length=4, steps=3, activation=activation)
        assert [step.mask_ratio for step in steps] == [1.0, 0.5, 0.25]
        assert [step.circuit for step in steps] == [bool(x) for x in on]

    def test_activation_is_each_sequences_own(self):
        prompts = [[MASK, MASK, MASK, MASK], [1, 2, 3, MASK]]
        steps = run(tiny(), prompts, circuit=random_hmm(), gen_length=0, block_length=4, steps=1, activation=0.5)
        assert [step.circuit for step in steps] == [False, True]

    @pytest.mark.parametrize("sampler", ["latent", "any_order"])
    @pytest.mark.parametrize("mode", ["block", "full"])
    def test_it_steps_aside_where_it_excludes_what_is_written(self, sampler, mode):
        """It only knows even tokens; one prompt has an odd one in the window."""
        table = torch.where(torch.arange(VOCAB) % 2 == 0, 0.0, -torch.inf).log_softmax(0)
        even = HMM(torch.zeros(1), torch.zeros(1, 1), table[None])
        options = {"gen_length": 4, "block_length": 4, "steps": 2, "sampler": sampler, "mode": mode}
        prompts = [[3, MASK], [2, MASK]]
        with pytest.warns(CircuitSteppedAside, match="sequence 0") as caught:
            steps = run(tiny(), prompts, circuit=even, **{**options, "gen_length": 0, "steps": 1})
        assert len(caught) == 1
        assert [step.circuit for step in steps] == [False, True]
        assert last(steps, 0) == last(run(tiny(), [prompts[0]], **{**options, "gen_length": 0, "steps": 1}))
        assert last(steps, 1)[1] % 2 == 0
        assert all(bool(step.scores.isfinite().all()) for step in steps)

    def test_it_steps_aside_when_nothing_it_allows_may_be_written(self):
        only = HMM(torch.zeros(1), torch.zeros(1, 1), torch.eye(VOCAB)[None, 5].log())
        with pytest.warns(CircuitSteppedAside):
            steps = run(tiny(), [[1]], circuit=only, gen_length=4, block_length=4, steps=2, ban=[5])
        assert 5 not in last(steps)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert last(run(tiny(), [[1]], circuit=only, gen_length=4, block_length=4, steps=2)) == [1, 5, 5, 5, 5]

    def test_one_of_fixed_length_reaches_back(self):
        fixed = random_hmm(3, length=5)
        steps = run(tiny(), [[1, 2, 3]], circuit=fixed, gen_length=6, block_length=4, steps=None)
        assert [step.window for step in steps] == [(2, 7)] * 4 + [(4, 9)] * 2
        assert all(step.circuit for step in steps)
        with pytest.raises(InvalidInput, match="block_length is 6, but the circuit has only 5"):
            run(tiny(), [[1]], circuit=fixed, gen_length=6, block_length=6)

    def test_a_general_circuit_decodes_as_the_hmm_that_it_is(self):
        hmm = random_hmm(2, window=4)
        for options in ({"sampler": "any_order"}, {"sampler": "any_order", "remasking": "entropy"}):
            settings_ = {"gen_length": 8, "block_length": 4, "steps": 4, **options}
            a = run(tiny(), [[1, 2]], circuit=hmm, **settings_)
            b = run(tiny(), [[1, 2]], circuit=hmm.as_circuit(4), **settings_)
            assert filled_in(a) == filled_in(b)
            assert last(a) == last(b)
        chosen = {"sampler": "latent", "gen_length": 8, "block_length": 4, "steps": 4}
        latent = run(tiny(), [[1, 2]], circuit=hmm.as_circuit(4), **chosen)
        assert all(step.circuit for step in latent)
        assert last(latent) == last(run(tiny(), [[1, 2]], circuit=hmm.as_circuit(4), **chosen))


class TestFull:
    OPTIONS = MappingProxyType({"gen_length": 24, "mode": "full", "steps": 6})

    def test_the_window_covers_most_of_what_is_due(self):
        backbone, circuit = tiny(), random_hmm(window=6)
        ids = torch.tensor([1, *[MASK] * 24])
        for step in run(backbone, [[1]], circuit=circuit, **self.OPTIONS):
            logits = backbone(ids[None])[0].double()
            logits[:, MASK] = -torch.inf
            due = logits.softmax(-1).amax(-1).masked_fill(ids != MASK, -1).argsort(descending=True, stable=True)[:4]
            begin, end = step.window
            assert end - begin == 6
            covered = [int(((due >= u) & (due < u + 6)).sum()) for u in range(25 - 6 + 1)]
            inside = int(((due >= begin) & (due < end)).sum())
            assert inside == max(covered)
            away = {int(t) for t in due if not begin <= t < end}
            committed = step.positions.tolist()
            assert {t for t in committed if not begin <= t < end} == away
            assert len(committed) == 4
            for t in away:  # from the network alone
                assert step.ids[t] == logits[t].argmax()
            ids = step.ids

    def test_deferred_tokens_come_later_and_all_come(self):
        steps = run(tiny(), [[1]], circuit=random_hmm(window=6), outside="defer", **self.OPTIONS)
        assert len(steps) == 6
        for step in steps[:-1]:
            begin, end = step.window
            assert all(begin <= t < end for t in step.positions.tolist())
        assert any(len(step.positions) < 4 for step in steps)
        assert MASK not in last(steps)

    def test_the_ratio_is_the_windows_or_that_of_all_that_is_to_be_written(self):
        """The paper's full diffusion compares the whole sequence's share of masks; the prompt is not part of it."""
        prompt, differ = [1, 2, 3, 4, 5, 6, 7], 0
        for activation in (0.25, 0.5, 0.75):
            chosen = {"circuit": random_hmm(window=6), "activation": activation, **self.OPTIONS}
            for step in run(tiny(), [prompt], **chosen):
                assert step.circuit == (step.mask_ratio < activation)
            own = run(tiny(), [prompt], activation_scope="sequence", **chosen)
            assert [step.circuit for step in own] == [24 - 4 * step.number < 24 * activation for step in own]
            differ += sum(step.circuit != (step.mask_ratio < activation) for step in own)
        assert differ > 0

    def test_the_ratio_of_the_sequence_in_block_mode(self):
        options = {"gen_length": 8, "block_length": 4, "steps": 4, "activation": 0.6, "activation_scope": "sequence"}
        steps = run(tiny(), [[1, 2]], circuit=random_hmm(), **options)
        assert [step.mask_ratio for step in steps] == [1.0, 0.5, 1.0, 0.5]
        assert [step.circuit for step in steps] == [False, False, True, True]  # shares: 1, 0.75, 0.5, 0.25

    def test_a_window_with_too_few_targets_leaves_the_circuit_out(self):
        """The paper's condition: more than one of the tokens that are due stand in the window."""
        seen = set()
        for seed in range(4):
            chosen = {"circuit": random_hmm(window=4, seed=seed), "gen_length": 24, "mode": "full", "steps": 8}
            for targets in (1, 2, 3):
                ids = torch.tensor([seed, *[MASK] * 24])
                for step in run(tiny(), [[seed]], activation_targets=targets, **chosen):
                    logits = tiny()(ids[None])[0].double()
                    logits[:, MASK] = -torch.inf
                    sure = logits.softmax(-1).amax(-1).masked_fill(ids != MASK, -1)
                    due = sure.argsort(descending=True, stable=True)[:3]
                    covered = int(((due >= step.window[0]) & (due < step.window[1])).sum())
                    assert step.circuit == (covered >= targets)
                    seen.add((targets, step.circuit))
                    ids = step.ids
        assert seen == {(1, True), (2, True), (2, False), (3, True), (3, False)}

    def test_a_window_as_long_as_the_text(self):
        steps = run(tiny(), [[1]], circuit=random_hmm(window=60), **self.OPTIONS)
        assert {step.window for step in steps} == {(0, 25)}


class TestInput:
    def test_nothing_need_be_asked(self):
        empty = run(tiny(), [[], []], gen_length=4, block_length=2)
        assert last(empty, 0) == last(empty, 1)
        assert len(last(empty)) == 4
        assert last(run(tiny(), [[], [5]], gen_length=4, block_length=2)) == last(empty)
        assert run(tiny(), []) == []

    @pytest.mark.parametrize("mode", ["block", "full"])
    def test_nothing_written_means_nothing_to_edit(self, mode):
        """A prompt without masks, an empty one above all, needs no evaluation."""
        assert run(tiny(), [[], [5]], gen_length=0, mode=mode, editing_threshold=0.5) == []

    def test_pad_left(self):
        ids, valid = pad_left([[1, 2, 3], [], torch.tensor([4])], 9, torch.device("cpu"))
        assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [9, 9, 4]]
        assert valid.tolist() == [[True] * 3, [False] * 3, [False, False, True]]
        ids, valid = pad_left([], 9, torch.device("cpu"))
        assert ids.shape == valid.shape == (0, 0)


class TestStream:
    def test_steps_come_one_by_one_and_need_no_gradient(self):
        stream = codd.Model(tiny(), None, None, MASK).denoise([[1]], gen_length=4, steps=None)
        first = next(stream)
        assert int((first.ids == MASK).sum()) == 3
        kept = first.ids.clone()
        with torch.enable_grad():
            rest = list(stream)
        assert len(rest) == 3
        assert torch.equal(first.ids, kept)
        assert not any(step.scores.requires_grad for step in rest)

    def test_bfloat16_logits_give_float32_scores(self):
        network = mini.build(
            Config({"vocab_size": 9, "width": 8, "layers": 1, "heads": 2, "mlp_width": 8, "mask_token_id": 8}, "a test")
        )
        to_half = {"hooks": [lambda logits, positions, ids: logits.bfloat16()]}
        for circuit in (None, HMM.neutral(2, 9)):
            step = run(network.requires_grad_(False), [[1]], circuit=circuit, gen_length=4, steps=1, **to_half)[0]
            assert step.scores.dtype == torch.float32


def test_padding_is_not_seen():
    assert PAD not in last(run(tiny(), [[1], [1, 2, 3, 4, 5]], gen_length=4, ban=[PAD]))


def test_an_unforeseen_error_ends_a_run():
    with pytest.raises(ZeroDivisionError):
        run(tiny(), [[1], [2]], gen_length=4, hooks=[lambda *_: 1 / 0])
