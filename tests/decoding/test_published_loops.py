"""``preset="reference"`` against what the published loops gave, family by family: the ids after every call."""

import functools
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import codd
from codd.backbones.kv_cache import CachedPass
from codd.decoding.loop import denoise
from codd.decoding.options import Options
from codd.decoding.published import bidirectional
from codd.decoding.runner import runner_for
from codd.decoding.sequence import StopCondition, start_sequences
from codd.errors import InvalidInput
from tests.support import FIXTURES
from tests.support.tiny_models import of
from tests.support.tiny_models import run as denoised

NUMBERS = {
    **{"llada": 8, "dream": 7, "dplm": 4, "a2d": 7},
    **{"sdar": 8, "fastdllm_v2": 8, "llada2": 7, "stable_diffcoder": 5, "nemotron_diffusion": 12},
}
"""How many cases the fixtures have."""
SAME = {
    **{name: name for name in ("gen_length", "steps", "block_length", "remasking", "cfg_scale", "top_p", "top_k")},
    **{name: name for name in ("threshold", "editing_threshold", "max_post_steps")},
    **{"max_new_tokens": "gen_length", "max_iter": "steps", "alg": "remasking", "block_size": "block_length"},
    "small_block_size": "block_length",
}
"""Our names for what the loops are told; of two for one thing the later counts."""
REMASKING = {"argmax": "logit", "vanilla": "low_confidence"}
WRITES = {"nemotron_diffusion": (1,)}
"""Calls of these kinds write tokens, elsewhere 1 and 3; one that fills or stores a block may add the next token."""


@functools.cache
def loaded(family: str, size: int | None = None, adapter: str | None = None) -> codd.Model:
    folder = FIXTURES / f"decode_{family}"
    return codd.load(folder, None, device="cpu", block_size=size, adapter=adapter, merge=adapter is None)


def cases() -> list[Any]:
    found = []
    for family in NUMBERS:
        told = json.loads((FIXTURES / f"decode_{family}" / "cases.json").read_text())
        for case in told if isinstance(told, list) else told["cases"]:
            found.append(pytest.param(family, case, id=f"{family}-{case.get('case') or case['name']}"))
    return found


def options_of(family: str, case: dict[str, Any]) -> dict[str, Any]:
    told = {own: case[name] for name, own in SAME.items() if case.get(name) is not None}
    if "sampling_strategy" in case:
        told |= {"gen_length": 0, "remasking": REMASKING[case["sampling_strategy"]]}
    if case.get("strategy") == "sequential":
        told["remasking"] = "left_to_right"
    if case.get("use_block_cache"):
        told["cache"] = "dual"
    mode = "speculative" if case.get("mode") == "linear_spec" else "full" if family == "dream" else "block"
    return {"mode": mode, "stop": bool(case.get("stop_ids")), **told}


@pytest.mark.parametrize(("family", "case"), cases())
def test_ids_after_every_call(family, case, monkeypatch):
    monkeypatch.setattr(bidirectional, "EPS", case.get("eps", bidirectional.EPS))
    name, mask = f"{case.get('case') or case['name']}.", case["mask_id"]
    found = load_file(FIXTURES / f"decode_{family}" / "cases.safetensors").items()
    given = {key.removeprefix(name): tensor.long() for key, tensor in found if key.startswith(name)}
    blocks = case.get("sampler") == "bd3lm" or family in ("sdar", "fastdllm_v2", "llada2", "stable_diffcoder")
    size = case.get("block_size", case.get("block_length")) if blocks else None
    backbone = loaded(family, size, case.get("adapter")).backbone
    assert backbone.special.mask == (None if family == "a2d" else mask)
    prompt, options = given["prompt_ids"].tolist(), Options.of(preset="reference", **options_of(family, case))
    stop = StopCondition(frozenset(case.get("stop_ids", ())))
    sequences = start_sequences(backbone, [prompt], options, mask_id=mask, stop=stop)
    thought = None
    if "max_thinking_tokens" in case:  # its loop puts the end of the thought there, before it reaches the block
        thought = len(prompt) + case["max_thinking_tokens"]
        sequences[0].ids[thought] = case["end_think_token_id"]
    steps = list(denoise(runner_for(backbone, sequences), sequences))
    states = given["states"].where(given["states"] >= 0, mask)  # -1: not there yet
    after, called = states[1:], torch.ones(len(states) - 1, dtype=torch.bool)
    if "calls" in given:
        writes = torch.isin(given["calls"][:, 0], torch.tensor(WRITES.get(family, (1, 3))))
        called = writes | (after != states[:-1]).any(-1)
    if options.mode == "block" and family == "nemotron_diffusion" and bool((given["states"][-1] < 0).any()):
        called[-1] = False  # what is cut at the end is no call of its own
    assert [step.number for step in steps] == list(range(int(called.sum())))
    for step, ids in zip(steps[:-1], after[called][:-1].tolist(), strict=True):
        own = step.ids.tolist()
        longest = max(len(own), len(ids))  # the originals differ in when they append masks
        own, ids = ([*each, *[mask] * (longest - len(each))] for each in (own, ids))
        if thought is not None and thought < longest and ids[thought] == mask:
            own[thought] = mask
        assert own == ids
    assert steps[-1].ids.tolist() == given["output_ids"].tolist()
    assert sum(len(step.edits.positions) for step in steps) == case.get("edits", 0)
    if "commit_step" in given:
        committed = torch.full_like(given["commit_step"], -1)
        for step in steps:
            committed[step.positions] = step.number
        assert torch.equal(committed, given["commit_step"])
    if "remasked" in case:
        assert sum(int((step.tokens == mask).sum()) for step in steps) == case["remasked"] > 0
        assert [step.settled for step in steps] == [0] * (len(steps) - 1) + [case["prompt_len"]]
    if options.mode == "speculative":
        checks = [step for step in steps if step.positions.min() == step.window[0] < step.window[1] - 1]
        assert [int((step.tokens != mask).sum()) for step in checks] == case["accepted"]


def test_no_case_is_missing():
    assert len(cases()) == sum(NUMBERS.values())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("sdar", {"steps": 4}),
        ("fastdllm_v2", {"threshold": 0.9, "block_length": 8}),
        ("llada2", {"steps": 32, "threshold": 0.95}),
        ("stable_diffcoder", {"steps": 16, "threshold": 0.95}),
    ],
)
def test_what_the_loops_do_by_default(family, options):
    told = {"preset": "reference", "gen_length": 16}
    out = [loaded(family).generate([[1, 2, 3, 4, 5]], **told, **more) for more in ({}, options)]
    assert torch.equal(out[0].sequences[0], out[1].sequences[0])
    assert out[0].steps == out[1].steps
    ours = loaded(family).generate([[1, 2, 3, 4, 5]], gen_length=16, threshold=0.2)
    assert ours.steps != out[0].steps


def test_the_published_loop_of_fast_dllm_forgets_a_prompt_of_one_block():
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [80, 71, 62, 53, 44, 35, 26, 17], []]
    steps = denoised(loaded("fastdllm_v2").backbone, prompts, preset="reference", gen_length=16)
    first, second, nothing = ([step.ids[len(p) :].tolist() for step in of(steps, i)] for i, p in enumerate(prompts))
    assert first == second == nothing
    assert len(first[-1]) == 17


@pytest.mark.parametrize("name", ["llada_moe", "illada"])
def test_bidirectional_families_follow_lladas(name):
    model = codd.load(FIXTURES / name, None, device="cpu")
    steps = list(model.denoise([[1, 2, 3]], preset="reference", gen_length=8, block_length=4, steps=4))
    assert [(step.window, len(step.positions)) for step in steps] == [((3, 7), 2)] * 2 + [((7, 11), 2)] * 2


def test_dplm_draws_above_temperature_0():
    """Nothing special is ever written, seeds differ, and the last step leaves no mask."""
    model, prompt = loaded("dplm"), [0, *[32] * 12, 2]
    told = {"preset": "reference", "gen_length": 0}
    runs = [model.generate([prompt], steps=6, temperature=1.0, seed=seed, **told) for seed in (1, 1, 2)]
    first, again, other = (run.sequences[0].tolist() for run in runs)
    assert first == again != other
    assert not {0, 1, 2, 24, 32} & {*first[1:-1], *other[1:-1]}
    assert model.generate([prompt], **told).steps == [500]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dplm", {"threshold": 0.9}, "threshold=0.9"),
    ("dplm", {"remasking": "origin"}, "knows no remasking='origin'"),
    ("llada", {"remasking": "logit", "mode": "full"}, "knows no remasking='logit'"),
    ("sdar", {"temperature": 0.5}, "temperature=0.5"),
    ("sdar", {"cfg_scale": 1.0}, "cfg_scale=1.0"),
    ("sdar", {"cache": "dual"}, "cache='dual'"),
    ("fastdllm_v2", {"cache": "prefix"}, "cache='prefix'"),
    ("sdar", {"editing_threshold": 0.9}, "editing_threshold=0.9"),
    ("sdar", {"block_length": 2}, "block_length 4, not 2"),
    ("sdar", {"remasking": "left_to_right", "threshold": 0.5}, "threshold=0.5"),
    ("fastdllm_v2", {"steps": 4}, "steps=4"),
    ("fastdllm_v2", {"remasking": "left_to_right"}, "left_to_right"),
    ("fastdllm_v2", {"gen_length": 7}, "gen_length 7"),
    ("llada2", {"steps": 4, "editing_threshold": 0.9}, "steps=4"),
    ("llada2", {"mode": "full"}, 'mode="full"'),
    ("stable_diffcoder", {"gen_length": 10}, "multiple of 4"),
    ("stable_diffcoder", {"gen_length": 8, "steps": 5}, "number of blocks"),
    ("stable_diffcoder", {"gen_length": 8, "steps": 4, "threshold": 0.9}, "give steps 8, as many as tokens, not 4"),
    ("nemotron_diffusion", {"gen_length": 8, "steps": 4}, "steps=4"),
    ("nemotron_diffusion", {"gen_length": 8, "temperature": 1.0}, "temperature=1.0"),
    ("nemotron_diffusion", {"gen_length": 10}, "a multiple of 8, not 10"),
    ("dream", {"gen_length": 8, "mode": "speculative", "steps": 8}, "networks with a causal mode"),
    *(
        (family, {"gen_length": 8, "circuit": "null", **more}, "knows no circuit")
        for family, more in (("sdar", {}), ("nemotron_diffusion", {}), ("dplm", {"sampler": "latent"}))
    ),
]


@pytest.mark.parametrize(("family", "options", "message"), REFUSED, ids=str)
def test_what_they_cannot_be_told(family, options, message):
    model = loaded(family).with_circuit(options.get("circuit"))
    told = {name: value for name, value in options.items() if name != "circuit"}
    prompt = [0, 7, model.mask_id, 2] if family == "dplm" else [1, 2]
    with pytest.raises(InvalidInput, match=message):
        model.generate([prompt], preset="reference", **({"gen_length": 0} if family == "dplm" else {}) | told)


def test_a_circuit_may_be_left_out():
    told = {"preset": "reference", "gen_length": 4}
    left_out = loaded("sdar").with_circuit("null").generate([[1, 2]], sampler="factorized", **told)
    assert torch.equal(left_out.sequences[0], loaded("sdar").generate([[1, 2]], **told).sequences[0])


class TestCausalContext:
    """Nemotron-Labs-Diffusion: what precedes a block is read causally."""

    @pytest.mark.parametrize("adapter", [None, "linear_spec_lora"])
    def test_a_speculation_writes_what_the_causal_network_would(self, adapter):
        backbone, prompts = nemotron(adapter).backbone, [[5, 17, 3, 3], [80], [7, 2, 9, 11, 40, 41, 42]]
        told = {"preset": "reference", "mode": "speculative", "gen_length": 12, "block_length": 6}
        steps = denoised(backbone, prompts, **told)
        for number, prompt in enumerate(prompts):
            own = of(steps, number)
            found = own[-1].ids.tolist()
            assert len(prompt) + 12 <= len(found) < len(prompt) + 18
            greedy = list(prompt)  # the causal network's own text, one token after the other, without a cache
            while len(greedy) < len(found):
                greedy.append(int(backbone.causal(torch.tensor([greedy]))[0, -1].argmax()))
            assert found == greedy
            for earlier in own:
                assert earlier.ids[: earlier.settled].tolist() == found[: earlier.settled]
            alone = denoised(backbone, [prompt], **told)
            assert [step.ids.tolist() for step in own] == [step.ids.tolist() for step in alone]

    def test_an_adapter_that_is_kept_apart_is_for_denoising(self):
        backbone, plain = nemotron("linear_spec_lora").backbone, nemotron().backbone
        ids = torch.tensor([[5, 17, 3, 90]])
        assert torch.equal(backbone.causal(ids), plain.causal(ids))
        assert not torch.allclose(backbone(ids), plain(ids), atol=1e-2)
        backbone.switch_adapter(False)
        assert torch.equal(backbone(ids), plain(ids))
        backbone.switch_adapter(True)

    def test_blocks_of_our_own_loop_read_their_context_causally(self):
        """Each block's logits are those of two passes without a cache; its first token is the causal network's."""
        backbone, prompt, seen = nemotron().backbone, [5, 17, 3, 3, 60], []

        def look(logits: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
            seen.append((logits.clone(), positions.tolist(), ids.tolist()))
            return logits

        steps = denoised(backbone, [prompt], gen_length=12, block_length=4, steps=7, stop=False, hooks=[look])
        assert [len(step.positions) for step in steps] == [1, 2, 1, 1, 3, 1, 3]
        for logits, positions, ids in seen:
            begin = len(prompt) + (positions[0] - len(prompt)) // 4 * 4
            if positions == [begin]:
                wanted = backbone.causal(torch.tensor([ids[:begin]]))[0, -1:]
            else:
                wanted = after_causal_context(backbone, ids, begin)[torch.tensor(positions) - begin]
            others = torch.arange(logits.shape[1]) != 90
            torch.testing.assert_close(logits[:, others], wanted[:, others], rtol=0, atol=1e-4)

    def test_sequences_evaluated_together(self):
        """As an accelerator does it: rows are padded, causal passes and others are batches of their own."""
        backbone, prompts = nemotron().backbone, [[5, 17, 3], [80], [7, 2, 9, 11, 40, 41, 42]]
        options, found = Options(gen_length=10, block_length=4, stop=False), []
        for batched in (False, True):
            sequences = start_sequences(backbone, prompts, options, mask_id=90)
            runner = runner_for(backbone, sequences)
            runner.batched = batched
            found.append([step.ids.tolist() for step in denoise(runner, sequences)])
        assert found[0] == found[1]

    def test_a_circuit_acts_on_all_but_the_first_token(self):
        model = nemotron().with_circuit(codd.HMM.random(3, nemotron().backbone.vocab_size, seed=1, scale=2.0))
        steps = list(model.denoise([[5, 17, 3]], gen_length=8, block_length=4, steps=6, stop=False))
        assert [step.circuit for step in steps] == [False, True, True] * 2
        assert [step.window for step in steps] == [(3, 4), (3, 7), (3, 7), (7, 8), (7, 11), (7, 11)]
        null = nemotron().with_circuit("null").generate([[5, 17, 3]], gen_length=8, stop=False)
        assert torch.equal(null.sequences[0], nemotron().generate([[5, 17, 3]], gen_length=8, stop=False).sequences[0])
        assert null.circuit_steps == [null.steps[0] - 1]  # a block of 8

    def test_everything_at_once_sees_both_sides(self):
        ids = torch.tensor([[5, 90, 3, 4]])
        logits = nemotron().backbone(ids)[0, 1]
        logits[90] = -torch.inf
        out = nemotron().generate(ids, gen_length=0, mode="full", steps=1)
        assert out.sequences[0].tolist() == [5, int(logits.argmax()), 3, 4]
        with pytest.raises(InvalidInput, match='sees nothing after a block that it writes: mode="full" fills them'):
            nemotron().generate([[1, 90, 2]], gen_length=0)


def nemotron(adapter: str | None = None) -> codd.Model:
    return loaded("nemotron_diffusion", None, adapter)


def after_causal_context(backbone: codd.backbones.Backbone, ids: list[int], begin: int) -> Tensor:
    cache, network = backbone.network.kv_cache(1, begin + 4), torch.tensor([ids])
    slots, places = torch.tensor([0]), torch.arange(begin + 4)[None]
    backbone.causal.cached_states(network[:, :begin], CachedPass(cache, slots, places[:, :begin], begin))
    past = CachedPass(cache, slots, places[:, begin:], begin + 4)
    return backbone.logits(backbone.cached_states(network[:, begin : begin + 4], past), network)[0]
