"""Our own loop on block-causal networks (absolute blocks, sub-blocks, infilling, circuits), and editing on any."""

import functools
import itertools
from typing import Any

import pytest
import torch

import codd
from codd.decoding import Options
from codd.decoding.inspect import inspect
from codd.decoding.loop import denoise
from codd.decoding.runner import FullRecompute, HiddenStateRequest
from codd.decoding.sequence import StopCondition, start_sequences
from codd.errors import InvalidInput
from tests.support import FIXTURES
from tests.support.tiny_models import MASK, last, modulated, random_hmm, run, stated, tiny

FAMILIES = ("sdar", "fastdllm_v2", "llada2")
SIZE = 4
PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13], [14]]
PACES: list[dict[str, Any]] = [{"steps": None}, {"steps": 6}, {"threshold": 0.15}, {"entropy_budget": 2.5}]


@functools.cache
def loaded(family: str, size: int | None = None) -> codd.Model:
    return codd.load(FIXTURES / f"decode_{family}", None, device="cpu", block_size=size)


def network(size: int = SIZE) -> codd.backbones.Backbone:
    return tiny(block_size=size)


class TestBlocks:
    @pytest.mark.parametrize("length", range(2 * SIZE + 1))
    def test_are_counted_from_the_first_token_of_the_text(self, length):
        steps = run(network(), [list(range(length))], gen_length=10, steps=None)
        first, end = length // SIZE, length + 10
        wanted = [(begin, min(end, begin + SIZE)) for begin in range(first * SIZE, end, SIZE)]
        assert list(dict.fromkeys(step.window for step in steps)) == wanted
        assert all(
            bool(((step.positions >= a) & (step.positions < b)).all()) for step in steps for a, b in [step.window]
        )
        assert len(last(steps)) == end
        assert MASK not in last(steps)

    @pytest.mark.parametrize("part", [1, 2, 4])
    def test_can_be_written_in_parts(self, part):
        steps = run(network(), [[1, 2, 3, 4, 5]], gen_length=9, block_length=part, threshold=0.2)
        windows = list(dict.fromkeys(step.window for step in steps))
        assert windows == [(begin, min(14, begin + part)) for begin in range(5 // part * part, 14, part)]

    def test_the_network_sees_the_whole_block_of_a_part(self):
        seen: list[int] = []

        class Watched(FullRecompute):
            def __call__(self, requests):
                seen.extend(len(request.ids) for request in requests)
                return super().__call__(requests)

        sequences = start_sequences(network(), [[1, 2, 3]], Options(gen_length=7, block_length=2), mask_id=MASK)
        windows = [step.window for step in denoise(Watched(network()), sequences)]
        assert seen == [min(10, -(-end // SIZE) * SIZE) for _, end in windows]

    def test_masks_in_the_prompt_come_first(self):
        prompt = [1, MASK, 3, 4, 5, 6, 7, 8, 9, MASK, MASK, 12]
        steps = run(network(), [prompt], gen_length=5, steps=None)
        assert list(dict.fromkeys(step.window for step in steps)) == [(0, 4), (8, 12), (12, 16), (16, 17)]
        found = torch.tensor(last(steps))
        given = torch.tensor(prompt) != MASK
        assert torch.equal(found[:12][given], torch.tensor(prompt)[given])

    def test_steps_that_nobody_gave_suffice_for_many_blocks(self):
        options = {"gen_length": 40, "sampler": "latent"}
        assert len(run(tiny(block_size=1), [[1]], circuit=random_hmm(), **options)) == 40
        with pytest.raises(InvalidInput, match="32 steps are not enough for 40 blocks"):
            run(tiny(block_size=1), [[1]], circuit=random_hmm(), steps=32, **options)

    def test_a_given_length_stays_and_the_usual_one_follows_the_network(self):
        [own] = start_sequences(network(), [[1]], Options(gen_length=8), mask_id=MASK)
        [given] = start_sequences(network(), [[1]], Options(gen_length=8, block_length=2), mask_id=MASK)
        [plain] = start_sequences(tiny(), [[1]], Options(gen_length=8), mask_id=MASK)
        assert [state.options.block_length for state in (own, given, plain)] == [4, 2, 32]


class Everything(FullRecompute):
    """Shows the network the whole sequence, later blocks included."""

    def __call__(self, requests):
        return super().__call__([request._replace(ids=request.state.ids) for request in requests])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_the_block_makes_no_difference(family):
    backbone = loaded(family, 8).backbone
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95]])
    whole, cut = backbone.states(ids), backbone.states(ids[:, :16])
    torch.testing.assert_close(whole[:, :16], cut, rtol=1e-5, atol=1e-5)
    texts = []
    for runner in (FullRecompute(backbone), Everything(backbone)):
        sequences = start_sequences(backbone, [[3, 1, 4, 1, 5]], Options(gen_length=16, threshold=0.3), mask_id=95)
        texts.append([step.ids.tolist() for step in denoise(runner, sequences)])
    assert texts[0] == texts[1]


class TestCircuits:
    @pytest.mark.parametrize("circuit", [random_hmm(), random_hmm(length=4), modulated(random_hmm(), scale=1.0)])
    @pytest.mark.parametrize("options", [{"threshold": 0.3}, {"sampler": "latent"}, {"entropy_budget": 2.0}])
    def test_have_a_say_in_every_step(self, circuit, options):
        steps = run(network(), PROMPTS[:2], circuit=circuit, gen_length=10, **options)
        assert all(step.circuit for step in steps)
        assert all(step.window[1] - step.window[0] == circuit.length for step in steps if circuit.length)
        assert not any(MASK in last(steps, i) for i in range(2))
        alone = run(network(), PROMPTS[:2], gen_length=10, **{**options, "sampler": "factorized"})
        assert [last(steps, i) for i in range(2)] != [last(alone, i) for i in range(2)]

    def test_the_first_window_has_the_end_of_the_prompt_as_evidence(self):
        """The joint threshold commits what the exact conditionals allow, given all that is known of the block."""
        circuit, prompt, threshold = random_hmm(), [1, 2, 3, 4, 5, 6], 0.25
        step = run(network(), [prompt], circuit=circuit, gen_length=2, threshold=threshold)[0]
        assert step.window == (4, 8)
        ids = torch.tensor([[5, 6, MASK, MASK]])
        logits = network()(torch.tensor([[*prompt, MASK, MASK]]))[:, 4:].clone()
        logits[..., MASK] = -torch.inf
        known = ids != MASK
        for k, (position, token, score) in enumerate(zip(step.positions - 4, step.tokens, step.scores, strict=True)):
            joint = codd.Coupled(circuit, logits=logits, tokens=ids, masked=~known)
            log_p = joint.marginals()[0]
            torch.testing.assert_close(log_p[position, token].exp(), score, rtol=1e-4, atol=1e-5)
            assert torch.isclose(score, log_p[~known[0]].exp().max(), rtol=1e-4)
            assert k == 0 or score >= threshold
            ids, known = ids.clone(), known.clone()
            ids[0, position], known[0, position] = token, True

    def test_shorter_than_the_networks_blocks(self):
        circuit = random_hmm(length=2)
        with pytest.raises(InvalidInput, match="block_length is 4, but the circuit has only 2 positions"):
            run(network(), [[1, 2]], circuit=circuit, gen_length=6)
        steps = run(network(), [[1, 2]], circuit=circuit, gen_length=6, block_length=2)
        assert [step.window for step in steps if not step.circuit] == []

    def test_one_that_reaches_beyond_the_block_gets_its_hidden_states(self):
        circuit = modulated(random_hmm(length=6), scale=1.0)
        steps = run(network(), [[1, 2]], circuit=circuit, gen_length=8)
        assert steps[0].window == (0, 6)
        assert all(step.circuit for step in steps)


def test_inspection_sees_what_the_loop_sees():
    backbone = network()
    model = codd.Model(backbone, random_hmm(), None, MASK)
    ids = [1, 2, 3, 4, 5, 6, MASK, MASK, MASK, MASK]
    found = inspect(model, ids, (4, 8), options=Options())
    [step, *_] = run(backbone, [ids[:6]], circuit=model.circuit, gen_length=4, steps=None)
    at = found.positions.tolist().index(int(step.positions[0]))
    assert int(found.joint.tokens[at, 0]) == int(step.tokens[0])
    torch.testing.assert_close(found.joint.probabilities[at, 0], step.scores[0])


def test_fast_dllm_sees_a_prompt_of_one_block():
    """Its published loop does not: see the preset."""
    model = loaded("fastdllm_v2")
    out = model.generate(
        [[1, 2, 3, 4, 5, 6, 7, 8], [80, 71, 62, 53, 44, 35, 26, 17]], gen_length=16, steps=None, stop=False
    )
    first, second = (ids.tolist() for ids in out.completions)
    assert first != second
    assert len(first) == len(second) == 16
    at = model.backbone.states(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, *[95] * 8]]))
    logits = model.backbone.masked_logits_from_states(at, mask_id=95)[0, 8]
    raw = model.backbone.network.states(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), torch.arange(8)[None])
    torch.testing.assert_close(model.backbone.network.logits(raw)[0, 7, :95], logits[:95], rtol=1e-4, atol=1e-4)


class TestEditing:
    """On bidirectional networks and block-causal ones."""

    @pytest.mark.parametrize("size", [None, SIZE])
    @pytest.mark.parametrize("circuit", [None, random_hmm()], ids=["alone", "joint"])
    @pytest.mark.parametrize("pace", PACES, ids=str)
    def test_follows_its_definition(self, size, circuit, pace):
        backbone, threshold, most = tiny(block_size=size), 0.2, 3
        options = {"gen_length": 7, "editing_threshold": threshold, "max_post_steps": most, **pace}
        options |= {} if size else {"block_length": 4}
        edited, total = 0, 0
        for prompt in PROMPTS[:2]:
            steps = run(backbone, [prompt], circuit=circuit, **options)
            ids = torch.tensor([*prompt, *[MASK] * 7])
            given, passes = ids != MASK, 0
            for number, step in enumerate(steps):
                begin, end = step.window
                visible = ids if size is None else ids[: -(-end // size) * size]
                logits = backbone.masked_logits_from_states(backbone.states(visible[None]), mask_id=MASK)[0]
                best = logits.softmax(-1).max(-1)
                wanted = [
                    (at, int(best.indices[at]))
                    for at in range(begin, end)
                    if not given[at] and ids[at] != MASK and best.indices[at] != ids[at] and best.values[at] > threshold
                ]
                assert list(zip(step.edits.positions.tolist(), step.edits.tokens.tolist(), strict=True)) == wanted
                torch.testing.assert_close(step.edits.scores, best.values[step.edits.positions])
                only = not bool((ids[begin:end] == MASK).any())
                passes = passes + 1 if only else 0
                assert passes <= most
                assert only == (len(step.positions) == 0)
                next_block = number + 1 == len(steps) or steps[number + 1].window != step.window
                assert next_block == (only and (not wanted or passes == most))
                ids = ids.clone()
                ids[step.positions] = step.tokens
                ids[step.edits.positions] = step.edits.tokens
                assert torch.equal(ids, step.ids)
                edited += len(wanted)
                total += only
            assert MASK not in ids.tolist()
        assert edited
        assert total

    def test_ends_when_a_pass_changes_nothing(self):
        logits = torch.zeros(9)
        logits[2] = 5.0
        steps = run(stated(logits, 8), [[1]], gen_length=8, block_length=4, steps=None, editing_threshold=0.5)
        assert [len(step.positions) for step in steps] == [1, 1, 1, 1, 0] * 2
        assert not any(len(step.edits.positions) for step in steps)

    def test_all_passes_after_the_masks_can_be_left_out(self):
        told = {"gen_length": 10, "block_length": 5, "editing_threshold": 0.0, "steps": 4}
        assert len(run(tiny(), [[1, 2]], max_post_steps=0, **told)) == 4
        assert len(run(tiny(), [[1, 2]], max_post_steps=2, **told)) > 4

    @pytest.mark.parametrize("mode", ["block", "full"])
    def test_what_is_banned_or_given_stays_out_of_it(self, mode):
        banned = tuple(range(3, 19))
        prompt = [1, MASK, 2, MASK]
        told = {"gen_length": 8, "block_length": 4, "steps": 3 if mode == "block" else 1, "mode": mode}
        steps = run(tiny(), [prompt], ban=banned, editing_threshold=0.0, **told)
        assert sum(len(step.edits.positions) for step in steps)
        for step in steps:
            assert not set(step.ids[torch.tensor([1, *range(3, len(step.ids))])].tolist()) & set(banned)
            assert (int(step.ids[0]), int(step.ids[2])) == (1, 2)
            assert not set(step.edits.tokens.tolist()) & {*banned, MASK}

    def test_nothing_that_may_still_change_is_settled_or_ends_a_sequence(self):
        """A stop token that is edited away does not stop; one that stays ends the sequence with its block."""
        told = {"gen_length": 16, "block_length": 8, "editing_threshold": 0.2, "threshold": 0.1}
        free = run(tiny(), [[1, 2]], **told)
        for step in free:
            begin, _ = next((later.window for later in free if later.number == step.number + 1), (18, 18))
            assert step.settled == begin
        lost = {
            token for before, after in itertools.pairwise(free) for token in before.ids[after.edits.positions].tolist()
        } - set(last(free))
        assert lost
        assert last(run(tiny(), [[1, 2]], stop_ids=frozenset(lost), **told)) == last(free)
        kept = last(free)[4]
        stopped = run(tiny(), [[1, 2]], stop_ids=frozenset({kept}), **told)
        first = last(free).index(kept, 2)
        assert last(stopped) == last(free)[: first + 1]
        assert len(stopped) == len([step for step in free if step.window[0] == 2])


def test_requests_begin_where_the_network_does():
    """A runner gives states of the positions asked for, also where leading ones are not shown."""
    [state] = start_sequences(network(), [[1, 2, 3, 4]], Options(gen_length=4), mask_id=MASK, stop=StopCondition())
    ids = torch.tensor([MASK] * 4)
    state.unseen = 4
    [found] = FullRecompute(network())([HiddenStateRequest(state, ids, (5, 8))])
    assert torch.equal(found, network().states(ids[None])[0, 1:])
