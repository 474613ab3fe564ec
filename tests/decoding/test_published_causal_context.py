"""``preset="reference"`` of Nemotron-Labs-Diffusion against what its published loops gave: ids after every call."""

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
from codd.decoding.runner import runner_for
from codd.decoding.sequence import StopCondition, start_sequences
from codd.errors import InvalidInput
from tests.support import FIXTURES
from tests.support.tiny_models import of
from tests.support.tiny_models import run as denoised

FOLDER = FIXTURES / "decode_nemotron_diffusion"
CASES = json.loads((FOLDER / "cases.json").read_text())["cases"]


@functools.cache
def loaded(adapter: str | None = None) -> codd.Model:
    return codd.load(FOLDER, None, device="cpu", adapter=adapter, merge=adapter is None)


def tensors_of(case: dict[str, Any]) -> dict[str, Tensor]:
    name = case["case"] + "."
    found = load_file(FOLDER / "cases.safetensors").items()
    return {key.removeprefix(name): tensor.long() for key, tensor in found if key.startswith(name)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_ids_after_every_call(case):
    given, backbone, mask = tensors_of(case), loaded(case.get("adapter")).backbone, case["mask_id"]
    prompt, speculative = given["prompt_ids"].tolist(), case["mode"] == "linear_spec"
    options = Options.of(
        preset="reference",
        mode="speculative" if speculative else "block",
        gen_length=case["max_new_tokens"],
        block_length=case["block_length"],
        threshold=case.get("threshold"),
        stop=bool(case["stop_ids"]),
    )
    stop = StopCondition(frozenset(case["stop_ids"]))
    sequences = start_sequences(backbone, [prompt], options, mask_id=mask, stop=stop)
    thought = None
    if "max_thinking_tokens" in case:  # its loop puts the end of the thought there, before it reaches the block
        thought = len(prompt) + case["max_thinking_tokens"]
        sequences[0].ids[thought] = case["end_think_token_id"]
    steps = list(denoise(runner_for(backbone, sequences), sequences))
    states = given["states"]
    after = states[1:].where(states[1:] >= 0, mask)  # -1: not there yet
    called = (given["calls"][:, 0] == 1) | (after != states[:-1].where(states[:-1] >= 0, mask)).any(-1)
    if not speculative and (states[-1] < 0).any():  # what is cut at the end is no call of its own
        called[-1] = False
    expected = after[called]
    assert len(steps) == len(expected)
    for found, ids in zip(steps[:-1], expected[:-1], strict=True):
        longest = max(len(found.ids), len(ids))
        padded = [*found.ids.tolist(), *[mask] * (longest - len(found.ids))]
        if thought is not None and thought < longest and ids[thought] == mask:
            padded[thought] = mask
        assert padded == [*ids.tolist(), *[mask] * (longest - len(ids))]
    assert steps[-1].ids.tolist() == given["output_ids"].tolist()
    if speculative:
        checks = [found for found in steps if found.positions.min() == found.window[0] < found.window[1] - 1]
        assert [int((found.tokens != mask).sum()) for found in checks] == case["accepted"]


def greedy(backbone: codd.backbones.Backbone, prompt: list[int], count: int) -> list[int]:
    """The causal network's own text, one token after the other, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(backbone.causal(torch.tensor([ids]))[0, -1].argmax()))
    return ids


@pytest.mark.parametrize("adapter", [None, "linear_spec_lora"])
def test_a_speculation_writes_what_the_causal_network_would(adapter):
    backbone, prompts = loaded(adapter).backbone, [[5, 17, 3, 3], [80], [7, 2, 9, 11, 40, 41, 42]]
    told = {"preset": "reference", "mode": "speculative", "gen_length": 12, "block_length": 6}
    steps = denoised(backbone, prompts, **told)
    for number, prompt in enumerate(prompts):
        own = of(steps, number)
        found = own[-1].ids.tolist()
        assert len(prompt) + 12 <= len(found) < len(prompt) + 18
        assert found == greedy(backbone, prompt, len(found) - len(prompt))
        for earlier in own:
            assert earlier.ids[: earlier.settled].tolist() == found[: earlier.settled]
        alone = denoised(backbone, [prompt], **told)
        assert [step.ids.tolist() for step in own] == [step.ids.tolist() for step in alone]


def test_an_adapter_that_is_kept_apart_is_for_denoising():
    backbone, plain, ids = loaded("linear_spec_lora").backbone, loaded().backbone, torch.tensor([[5, 17, 3, 90]])
    assert torch.equal(backbone.causal(ids), plain.causal(ids))
    assert not torch.allclose(backbone(ids), plain(ids), atol=1e-2)
    backbone.switch_adapter(False)
    assert torch.equal(backbone(ids), plain(ids))
    backbone.switch_adapter(True)


def test_blocks_of_our_own_loop_read_their_context_causally():
    """Each block's logits are those of two passes without a cache; its first token is the causal network's."""
    backbone, prompt, seen = loaded().backbone, [5, 17, 3, 3, 60], []

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


def after_causal_context(backbone: codd.backbones.Backbone, ids: list[int], begin: int) -> Tensor:
    cache, network = backbone.network.kv_cache(1, begin + 4), torch.tensor([ids])
    slots, places = torch.tensor([0]), torch.arange(begin + 4)[None]
    backbone.causal.cached_states(network[:, :begin], CachedPass(cache, slots, places[:, :begin], begin))
    past = CachedPass(cache, slots, places[:, begin:], begin + 4)
    return backbone.logits(backbone.cached_states(network[:, begin : begin + 4], past), network)[0]


def test_sequences_evaluated_together():
    """As an accelerator does it: rows are padded, causal passes and others are batches of their own."""
    backbone, prompts = loaded().backbone, [[5, 17, 3], [80], [7, 2, 9, 11, 40, 41, 42]]
    found = []
    for batched in (False, True):
        sequences = start_sequences(backbone, prompts, Options(gen_length=10, block_length=4, stop=False), mask_id=90)
        runner = runner_for(backbone, sequences)
        runner.batched = batched
        found.append([step.ids.tolist() for step in denoise(runner, sequences)])
    assert found[0] == found[1]


def test_a_circuit_acts_on_all_but_the_first_token():
    model = loaded().with_circuit(codd.HMM.random(3, loaded().backbone.vocab_size, seed=1, scale=2.0))
    steps = list(model.denoise([[5, 17, 3]], gen_length=8, block_length=4, steps=6, stop=False))
    assert [step.circuit for step in steps] == [False, True, True] * 2
    assert [step.window for step in steps] == [(3, 4), (3, 7), (3, 7), (7, 8), (7, 11), (7, 11)]
    null = loaded().with_circuit("null").generate([[5, 17, 3]], gen_length=8, stop=False)
    assert torch.equal(null.sequences[0], loaded().generate([[5, 17, 3]], gen_length=8, stop=False).sequences[0])
    assert null.circuit_steps == [null.steps[0] - 1]  # a block of 8


def test_everything_at_once_sees_both_sides():
    model = loaded()
    ids = torch.tensor([[5, 90, 3, 4]])
    logits = model.backbone(ids)[0, 1]
    logits[90] = -torch.inf
    out = model.generate(ids, gen_length=0, mode="full", steps=1)
    assert out.sequences[0].tolist() == [5, int(logits.argmax()), 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "reference", "steps": 4}, "steps=4"),
        ({"preset": "reference", "temperature": 1.0}, "temperature=1.0"),
        ({"preset": "reference", "gen_length": 10}, "a multiple of 8, not 10"),
        ({"mode": "speculative"}, 'give preset="reference"'),
    ],
)
def test_what_the_loops_cannot_be_told(options, message):
    with pytest.raises(InvalidInput, match=message):
        loaded().generate([[1, 2]], **{"gen_length": 8, **options})


def test_refusals():
    with pytest.raises(InvalidInput, match='sees nothing after a block that it writes: mode="full" fills them'):
        loaded().generate([[1, 90, 2]], gen_length=0)
    with pytest.raises(InvalidInput, match="knows no circuit"):
        loaded().with_circuit("null").generate([[1]], gen_length=8, preset="reference")
    dream = codd.load(FIXTURES / "decode_dream", None, device="cpu")
    with pytest.raises(InvalidInput, match="networks with a causal mode"):
        dream.generate([[1]], gen_length=8, mode="speculative", preset="reference", steps=8)
