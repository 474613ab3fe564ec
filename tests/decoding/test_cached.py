"""KV caches: exact on block-causal networks, and on others what they say they are."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import codd
from codd.backbones.kv_cache import CachedPass, KVCache
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding import Options
from codd.decoding.loop import denoise
from codd.decoding.runner import CachedRunner, FullRecompute, NetworkRunner, runner_for
from codd.decoding.sequence import Step, StopCondition, start_sequences
from codd.errors import InvalidInput
from tests.support import FIXTURES
from tests.support.tiny_models import MASK, modulated, random_hmm, tiny

BLOCK_CAUSAL = ("sdar", "fastdllm_v2", "llada2")
BIDIRECTIONAL = ("llada_mha", "llada_gqa_sharded", "dream_tied", "illada", "llada_moe", "bert", "modernbert")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [35, 8, 9, 7, 9, 3, 2, 3, 8, 4]]


@functools.cache
def backbone(name: str, size: int | None = None) -> codd.backbones.Backbone:
    return codd.load(FIXTURES / name, None, device="cpu", block_size=size).backbone


def mask_of(net: codd.backbones.Backbone) -> int:
    return net.vocab_size - 1 if net.special.mask is None else net.special.mask


def steps_of(
    net: codd.backbones.Backbone,
    prompts: list[list[int]],
    *,
    runner: NetworkRunner | None = None,
    circuit: ProbabilisticCircuit | None = None,
    stop: StopCondition | None = None,
    **told: Any,
) -> list[Step]:
    sequences = start_sequences(net, prompts, Options(**told), mask_id=mask_of(net), circuit=circuit, stop=stop)
    return list(denoise(runner or runner_for(net, sequences), sequences))


def written(steps: list[Step]) -> list[tuple[int, list[int], list[int]]]:
    return [(step.sequence, step.ids.tolist(), step.edits.positions.tolist()) for step in steps]


def random_ids(net: codd.backbones.Backbone, length: int, masked: slice) -> Tensor:
    ids = torch.randint(0, net.vocab_size - 10, (length,), generator=torch.Generator().manual_seed(length))
    ids[masked] = mask_of(net)
    return ids


class TestBlockCausal:
    """The cache is exact: the same ids as without one."""

    @pytest.mark.parametrize("family", BLOCK_CAUSAL)
    @pytest.mark.parametrize(
        "told",
        [
            {"threshold": 0.3},
            {"steps": 7, "temperature": 0.8, "seed": 5},
            {"entropy_budget": 3.0, "block_length": 4},
            {"threshold": 0.4, "editing_threshold": 0.3, "max_post_steps": 3},
            {"steps": 6, "cfg_scale": 0.7},
        ],
        ids=str,
    )
    def test_the_same_as_without(self, family, told):
        net = backbone(f"decode_{family}", 8)
        circuit = codd.HMM.random(4, net.vocab_size, 0, scale=2.0)
        for length, own in itertools.product(range(1, 10) if "threshold" in told else (1, 8, 9), (None, circuit)):
            if own is not None and length != 8:
                continue
            prompts = [list(range(2, 2 + length)), *PROMPTS[:1]]
            stop = StopCondition(frozenset({17, 40}))
            told = {"gen_length": 15, **told}
            with_cache, without = (
                steps_of(net, prompts, runner=runner, circuit=own, stop=stop, **told)
                for runner in (None, FullRecompute(net))
            )
            assert written(with_cache) == written(without)
            computed = sum(step.computed for step in with_cache)
            assert computed + sum(step.cached for step in with_cache) >= sum(step.computed for step in without)
            assert computed < 0.9 * sum(step.computed for step in without) or length == 1

    def test_masks_in_the_prompt_and_a_conditioned_circuit(self):
        """Which sees the states that the network gave, and reaches back into the block before."""
        net, circuit = backbone("decode_sdar", 4), modulated(random_hmm(length=6), scale=0.5)
        prompt = random_ids(net, 23, slice(5, 7)).tolist()
        prompt[14] = mask_of(net)
        conditioned = {"gen_length": 11, "steps": 6, "circuit": circuit, "block_length": 4}
        for own, prompts, told in (
            (net, [prompt], {"gen_length": 9, "threshold": 0.3}),
            (tiny(block_size=4), [[1, 2, 3], [4]], conditioned),
        ):
            found, wanted = (steps_of(own, prompts, runner=each, **told) for each in (None, FullRecompute(own)))
            assert written(found) == written(wanted)

    def test_a_finished_block_is_computed_once_more_and_then_no_more(self):
        net = backbone("decode_sdar", 4)
        steps = steps_of(net, [[1, 2, 3, 4, 5, 6, 7, 8, 9]], gen_length=11, steps=None)
        assert [(step.computed, step.cached) for step in steps[:3]] == [(12, 0), (4, 8), (4, 8)]
        assert [(step.computed, step.cached) for step in steps[3:7]] == [(8, 8), (4, 12), (4, 12), (4, 12)]
        assert [(step.computed, step.cached) for step in steps[7:]] == [(8, 12), (4, 16), (4, 16), (4, 16)]


class TestBidirectional:
    @pytest.mark.parametrize("name", BIDIRECTIONAL)
    @pytest.mark.parametrize("kind", ["prefix", "dual"])
    def test_a_pass_over_what_has_not_changed_gives_the_same_states(self, name, kind):
        """And so it would not if positions, masks or alignment were wrong."""
        net = backbone(name)
        ids = random_ids(net, 21, slice(8, 16))
        memory = KVCache(net.config.kv_shape, 3, 30, device=torch.device("cpu"), dtype=torch.float32)
        memory.memory.fill_(9.0)  # what was there before must not matter
        slot = torch.tensor([1])
        net.cached_states(ids[None], CachedPass(memory, slot, torch.arange(21)[None], 21))
        whole = net.states(ids[None])[0]
        begin, end = 8 - net.shift, 16 if kind == "dual" else 21
        part = CachedPass(memory, slot, torch.arange(begin, end)[None], 21)
        found = net.cached_states(ids[None, begin:end], part)[0]
        torch.testing.assert_close(found[net.shift :], whole[8:end], rtol=1e-4, atol=1e-4)
        assert bool((memory.memory[:, :, 1, :, 21:] == 9).all())
        assert bool((memory.memory[:, :, [0, 2]] == 9).all())

    @pytest.mark.parametrize("name", ["llada_mha", "dream_tied", "modernbert"])
    @pytest.mark.parametrize("kind", ["prefix", "dual"])
    def test_one_step_a_block_is_exact(self, name, kind):
        """The full pass that begins a block is the only one."""
        net = backbone(name)
        told = {"gen_length": 12, "block_length": 4, "steps": 3}
        assert written(steps_of(net, PROMPTS[:2], cache=kind, **told)) == written(steps_of(net, PROMPTS[:2], **told))

    def test_what_is_computed(self):
        net = backbone("llada_mha")
        told = {"gen_length": 8, "block_length": 4, "steps": None}
        length = len(PROMPTS[0]) + 8
        for kind, first, second in (("prefix", 8, 4), ("dual", 4, 4)):
            steps = steps_of(net, PROMPTS[:1], cache=kind, **told)
            assert [step.computed for step in steps] == [length, *[first] * 3, length, *[second] * 3]
            assert [step.computed + step.cached for step in steps] == [length] * 8
        steps = steps_of(net, PROMPTS[:1], cache="dual", refresh=2, **told)
        assert [step.computed for step in steps] == [length, 4, 4, length] * 2
        sliding = {**told, "remasking": "left_to_right", "threshold": 1.0, "blocks": "sliding"}
        for kind, first in (("prefix", [8, 7, 6]), ("dual", [5, 5, 5])):  # dual: the last token, and the window
            steps = steps_of(net, PROMPTS[:1], cache=kind, **sliding)
            assert [step.computed for step in steps] == [length, *first, length, 4, 3, 2]

    @pytest.mark.parametrize("kind", ["prefix", "dual"])
    def test_staleness_is_what_was_asked_for(self, kind):
        """The states of a step, worked out with the keys and values of the full pass put into an ordinary one."""
        net = backbone("llada_mha")
        told = {"gen_length": 8, "block_length": 8, "steps": None, "cache": kind}
        sequences = start_sequences(net, PROMPTS[:1], Options(**told), mask_id=mask_of(net))
        runner, ids = runner_for(net, sequences), [sequences[0].ids]
        for step in denoise(runner, sequences):
            ids.append(step.ids)
            if len(ids) == 4:
                break
        begin = len(PROMPTS[0])
        memory = KVCache(net.config.kv_shape, 1, len(ids[0]), device=torch.device("cpu"), dtype=torch.float32)
        everything = torch.arange(len(ids[0]))[None]
        net.cached_states(ids[0][None], CachedPass(memory, torch.tensor([0]), everything, len(ids[0])))
        stale = memory.memory[:, :, 0, :, :begin].clone()
        assert torch.equal(runner.memory.memory[:, :, 0, :, :begin], stale)
        net.cached_states(ids[2][None], CachedPass(memory, torch.tensor([0]), everything, len(ids[0])))
        assert not torch.allclose(memory.memory[1:, :, 0, :, :begin], stale[1:], atol=1e-3), "it should matter"

    @pytest.mark.parametrize("told", [{"steps": 4}, {"threshold": 0.2}], ids=str)
    @pytest.mark.parametrize("kind", ["prefix", "dual"])
    def test_full_mode_keeps_the_prompt(self, told, kind):
        net = tiny()
        circuit = random_hmm(length=6)
        steps = steps_of(net, [list(range(20))], mode="full", gen_length=8, cache=kind, circuit=circuit, **told)
        assert MASK not in steps[-1].ids.tolist()
        assert steps[0].computed == 28
        assert all(step.cached >= 14 and step.computed + step.cached == 28 for step in steps[1:])


class TestMemory:
    def test_is_taken_once_and_sequences_wait_for_it(self):
        net = backbone("llada_mha")
        told: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps": 4, "cache": "dual"}
        wanted = {step.sequence: step.ids.tolist() for step in steps_of(net, PROMPTS, **told)}
        sequences = start_sequences(net, PROMPTS, Options(**told), mask_id=mask_of(net))
        each = net.config.kv_shape.bytes_of(18, torch.float32)
        runner = runner_for(net, sequences, memory=2 * each)
        assert isinstance(runner, CachedRunner)
        assert (runner.memory.slots, runner.memory.length) == (2, 18)
        place = runner.memory.memory.data_ptr()
        steps = list(denoise(runner, sequences))
        assert {step.sequence: step.ids.tolist() for step in steps} == wanted
        assert [step.sequence for step in steps[:4]] == [0, 1, 0, 1]
        assert runner.free == 2
        assert runner.memory.memory.data_ptr() == place

    def test_guidance_takes_two_slots(self):
        net = backbone("llada_mha")
        told: dict[str, Any] = {"gen_length": 4, "steps": 2, "cache": "prefix", "cfg_scale": 0.5}
        sequences = start_sequences(net, PROMPTS[:2], Options(**told), mask_id=mask_of(net))
        runner = CachedRunner(net, slots=3, length=30)
        assert runner.admit(sequences[0])
        assert runner.admit(sequences[0]), "what it has is its own"
        assert runner.free == 1
        assert not runner.admit(sequences[1])
        runner.release(sequences[0])
        assert runner.free == 3
        assert runner.admit(sequences[1])

    def test_what_never_fits(self):
        net = backbone("llada_mha")
        sequences = start_sequences(net, PROMPTS, Options(gen_length=8, cache="dual"), mask_id=mask_of(net))
        with pytest.raises(InvalidInput, match="one sequence of 18 positions takes"):
            runner_for(net, sequences, memory=1000)
        exact = start_sequences(tiny(block_size=4), [[1, 2, 3]], Options(gen_length=8), mask_id=MASK)
        assert type(runner_for(tiny(block_size=4), exact, memory=1000)) is FullRecompute
        with pytest.raises(InvalidInput, match="a sequence of 15 positions that takes 1 slots does not fit"):
            CachedRunner(net, slots=1, length=12).admit(sequences[0])

    def test_what_another_run_holds_is_not_waited_for(self):
        net = backbone("llada_mha")
        options = Options(gen_length=8, steps=4, cache="dual")
        first, second = (start_sequences(net, PROMPTS[:1], options, mask_id=mask_of(net)) for _ in range(2))
        runner = CachedRunner(net, slots=1, length=30)
        next(iter(denoise(runner, first)))
        with pytest.raises(InvalidInput, match="held by sequences of another run"):
            next(iter(denoise(runner, second)))
        runner.release(first[0])
        assert len(list(denoise(runner, second))) == 4


class TestBatches:
    """As a GPU evaluates them: sequences of unequal lengths and numbers of rows in few passes."""

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("decode_sdar", {"threshold": 0.3}),
            ("decode_llada2", {"steps": 6, "cfg_scale": 0.7}),
            ("llada_gqa_sharded", {"cache": "prefix", "steps": 8}),
            ("llada_mha", {"cache": "dual", "steps": 8, "cfg_scale": 0.5, "refresh": 3}),
            ("dream_tied", {"cache": "dual", "threshold": 0.05, "min_tokens": 2, "blocks": "sliding"}),
            ("dream_tied", {"cache": "dual", "steps": 8}),
            ("modernbert", {"cache": "prefix", "steps": 8}),
        ],
        ids=str,
    )
    def test_the_same_as_one_by_one(self, name, told):
        net = backbone(name, 8 if name.startswith("decode") else None)
        told = {"gen_length": 16, "block_length": 8, **told}
        runner = CachedRunner(net, slots=6, length=40)
        runner.batched = True
        alone, together = (steps_of(net, PROMPTS, runner=each, **told) for each in (None, runner))
        assert written(together) == written(alone)
        assert [(step.computed, step.cached) for step in together] == [(step.computed, step.cached) for step in alone]

    @pytest.mark.parametrize("one_by_one", [False, True])
    def test_few_passes(self, one_by_one, monkeypatch):
        net, shapes = backbone("llada_mha"), list[tuple[int, ...]]()
        whole = net.cached_states
        monkeypatch.setattr(net, "cached_states", lambda ids, past: shapes.append(tuple(ids.shape)) or whole(ids, past))
        runner = CachedRunner(net, slots=3, length=40, one_by_one=one_by_one)
        runner.batched = True
        steps_of(net, PROMPTS, runner=runner, gen_length=8, block_length=5, steps=4, cache="dual")
        sizes = [((2, 16), (1, 32)), ((3, 8),), ((3, 8),), ((2, 16), (1, 32))]  # of 15, 10 and 18 positions, and of 5
        if one_by_one:
            sizes = [[(1, rows) for count, rows in each for _ in range(count)] for each in sizes]
        assert shapes == [size for each in sizes for size in each]

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU each sequence is evaluated by itself")
    @pytest.mark.parametrize("name", [*(f"decode_{family}" for family in BLOCK_CAUSAL), *BIDIRECTIONAL])
    def test_a_device_writes_what_the_host_writes(self, name):
        size = 8 if name.startswith("decode") else None
        told = {"gen_length": 16, "block_length": 8, "steps": 8, "cache": "prefix"}
        device = codd.load(FIXTURES / name, None, device="cuda", dtype=torch.float32, block_size=size).backbone
        wanted = written(steps_of(backbone(name, size), PROMPTS, **told))
        for _ in range(2):  # without graphs, then with them
            assert written(steps_of(device, PROMPTS, **told)) == wanted
