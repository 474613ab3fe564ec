"""``preset="reference"`` of block-causal families against what their published loops gave: ids after every call."""

import functools
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import codd
from codd.errors import InvalidInput
from tests.support import FIXTURES
from tests.support.tiny_models import of
from tests.support.tiny_models import run as denoised

FAMILIES = ("sdar", "fastdllm_v2", "llada2", "stable_diffcoder", "a2d")
TOLD = ("threshold", "steps", "editing_threshold", "max_post_steps")
DENOISE = (1, 3)
"""Calls of these kinds write tokens; a prefill (0) and one that stores a block (2) may add Fast-dLLM's next token."""


@functools.cache
def loaded(family: str, size: int | None = None) -> codd.Model:
    return codd.load(FIXTURES / f"decode_{family}", None, device="cpu", block_size=size)


def cases() -> list[Any]:
    found = []
    for family in FAMILIES:
        told = json.loads((FIXTURES / f"decode_{family}" / "cases.json").read_text())["cases"]
        found += [(family, case) for case in told if case.get("sampler") != "mdlm"]
    return [pytest.param(family, case, id=f"{family}-{case['case']}") for family, case in found]


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    told = {name: case[name] for name in TOLD if case.get(name) is not None}
    if case.get("use_block_cache"):
        told["cache"] = "dual"
    if case.get("strategy") == "sequential":
        told["remasking"] = "left_to_right"
    gen_length = case.get("gen_length", case.get("max_new_tokens"))
    size = case.get("small_block_size") or case.get("block_length") or case["block_size"]
    return {"gen_length": gen_length, "block_length": size, **told}


def padded(ids: Tensor, length: int, mask: int) -> list[int]:
    """With masks after it: the originals differ in when they append them."""
    return [*ids.tolist(), *[mask] * (length - len(ids))]


@pytest.mark.parametrize(("family", "case"), cases())
def test_ids_after_every_call(family, case):
    tensors = load_file(FIXTURES / f"decode_{family}" / "cases.safetensors")
    prompt, output, calls, states = (
        tensors[f"{case['case']}.{key}"].long() for key in ("prompt_ids", "output_ids", "calls", "states")
    )
    size = case.get("block_size", case.get("block_length"))
    backbone = loaded(family, size).backbone
    assert backbone.special.mask == (None if family == "a2d" else case["mask_id"])
    steps = denoised(
        backbone,
        [prompt.tolist()],
        mask_id=case["mask_id"],
        preset="reference",
        stop_ids=frozenset(case["stop_ids"]),
        stop=bool(case["stop_ids"]),
        **options_of(case),
    )
    after = states[1:].where(states[1:] >= 0, case["mask_id"])  # -1: not there yet
    before = torch.cat((states[:1].where(states[:1] >= 0, case["mask_id"]), after[:-1]))
    called = torch.isin(calls[:, 0], torch.tensor(DENOISE)) | (after != before).any(-1)
    expected = after[called]
    assert len(steps) == len(expected)
    for step, ids in zip(steps[:-1], expected[:-1], strict=True):
        longest = max(len(step.ids), len(ids))
        assert padded(step.ids, longest, case["mask_id"]) == padded(ids, longest, case["mask_id"])
    assert steps[-1].ids.tolist() == output.tolist()
    assert sum(len(step.edits.positions) for step in steps) == case.get("edits", 0)


def test_no_case_is_missing():
    assert len(cases()) == 8 + 8 + 7 + 5 + 4


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


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
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
    ],
)
def test_what_they_cannot_be_told(family, options, message):
    with pytest.raises(InvalidInput, match=message):
        loaded(family).generate([[1, 2]], preset="reference", **options)


def test_they_know_no_circuit():
    model = loaded("sdar").with_circuit("null")
    with pytest.raises(InvalidInput, match="knows no circuit"):
        model.generate([[1, 2]], preset="reference", gen_length=4)
    left_out = model.generate([[1, 2]], preset="reference", gen_length=4, sampler="factorized")
    assert (
        left_out.sequences[0].tolist()
        == loaded("sdar").generate([[1, 2]], preset="reference", gen_length=4).sequences[0].tolist()
    )
