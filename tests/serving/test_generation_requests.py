"""Requests as sequences for the loop, compared with `codd.Model.generate` on the bundled model."""

from dataclasses import replace
from typing import Any

import pytest

import codd
from codd.decoding.options import Options
from codd.serving.detokenizer import Detokenizer
from codd.serving.errors import APIError
from codd.serving.prompts import (
    GenerationRequest,
    Limits,
    completion_generations,
    denoise_generations,
    inspection,
)
from codd.serving.schemas import CompletionRequest, DenoiseRequest, InspectRequest
from tests.support import FIXTURES

MODEL = codd.load(device="cpu")
assert MODEL.tokenizer is not None
MASK = MODEL.mask_id
ROOM = MODEL.backbone.max_length
assert ROOM is not None
LIMITS = Limits()
FEW = Limits(defaults=Options(gen_length=64, steps=4, block_length=16))
QUICK: dict[str, Any] = {"steps": 2, "temperature": 1.0, "seed": 3}


def denoise(**fields: Any) -> GenerationRequest:
    [found] = denoise_generations(DenoiseRequest.model_validate(fields), MODEL, LIMITS)
    return found


def complete(limits: Limits = LIMITS, **fields: Any) -> list[GenerationRequest]:
    return completion_generations(CompletionRequest.model_validate({"model": "m", **fields}), MODEL, limits)


def texts(generations: list[GenerationRequest]) -> list[str]:
    """What a server would answer, by the stream of steps."""
    found = []
    for generation in generations:
        detokenizer = Detokenizer(generation, MODEL)
        for step in MODEL.denoise([list(generation.ids)], generation.options):
            detokenizer.add(step.ids, step.finished)
        found.append(detokenizer.text)
    return found


def look(**fields: Any) -> Any:
    return inspection(InspectRequest.model_validate(fields), MODEL, LIMITS)


def test_masks_in_a_text_are_filled():
    text = "They were married in<|mask|><|mask|>, he said."
    wanted = MODEL.generate(text, gen_length=0, seed=1)
    generation = denoise(prompt=text, gen_length=0, seed=1)
    assert (generation.begin_text, texts([generation])) == (0, wanted.texts)
    assert generation.prompt_tokens(MASK) == len(generation.ids) - 2
    assert texts(complete(prompt=text, max_tokens=0, seed=1, echo=True)) == wanted.texts
    assert texts(complete(prompt=text, max_tokens=8, **QUICK)) == MODEL.generate(text, gen_length=8, **QUICK).texts


def test_every_choice_has_its_own_seed():
    generations = complete(prompt=["one", "two"], n=2, max_tokens=6, **QUICK)
    assert [(generation.choice, generation.options.seed) for generation in generations] == [(0, 3), (1, 4)] * 2
    assert all(generation.state.options == generation.options for generation in generations)
    for number in (0, 1):
        wanted = MODEL.generate(["one", "two"], gen_length=6, **{**QUICK, "seed": 3 + number}).texts
        assert texts(generations[number::2]) == wanted


@pytest.mark.parametrize("seed", [-(2**63), -7, 2**63 - 1])
def test_every_whole_number_is_a_seed(seed):
    generations = complete(prompt="one", n=2, max_tokens=4, steps=1, temperature=1, seed=seed)
    wanted = [MODEL.generate("one", gen_length=4, steps=1, temperature=1.0, seed=seed + i).texts for i in (0, 1)]
    assert [[text] for text in texts(generations)] == wanted


def test_a_suffix_is_written_up_to():
    [generation] = complete(prompt="It was a dark", suffix=" night.", max_tokens=3, seed=1)
    before, after = MODEL.tokenizer.encode("It was a dark"), MODEL.tokenizer.encode(" night.")
    assert list(generation.ids) == [*before, MASK, MASK, MASK, *after]
    [sequence] = MODEL.generate([list(generation.ids)], gen_length=0, seed=1).sequences
    assert texts([generation]) == [MODEL.tokenizer.decode(sequence[len(before) : len(before) + 3])]
    assert generation.prompt_tokens(MASK) == len(before) + len(after)
    assert complete(prompt="one", suffix="", max_tokens=3) == complete(prompt="one", max_tokens=3)


def test_an_echo_is_what_was_sent():
    answer, echoed = (texts(complete(prompt="one", echo=echo, max_tokens=4, **QUICK)) for echo in (False, True))
    assert echoed == ["one" + answer[0]]
    [generation] = complete(prompt=MODEL.tokenizer.encode("one two"), echo=True, max_tokens=4)
    assert generation.echo == "one two"


def test_the_usual_length_is_cut_to_the_room():
    assert complete(prompt=[5] * 10)[0].options.gen_length == 128
    assert complete(prompt=[5] * (ROOM - 9))[0].options.gen_length == 9
    assert complete(Limits(length=20), prompt=[5] * 12)[0].options.gen_length == 8
    assert complete(prompt=[5] * 10, suffix="one", max_tokens=None)[0].end_text == 10 + 128


def test_long_texts_get_the_usual_tokens_a_step():
    for fields, steps in [
        ({"max_tokens": None}, 4),
        ({"max_tokens": 32}, 4),
        ({}, 20),
        ({"block_length": 8}, 40),
        ({"mode": "full"}, 4),
        ({"threshold": 0.5}, None),
        ({"steps": None}, None),
        ({"suffix": "one"}, 21),  # blocks begin at the end
    ]:
        assert complete(FEW, **{"prompt": [5], "max_tokens": 320, **fields})[0].options.steps == steps


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"block_length": 4, "threshold": 0.97}),
        ({"block_length": 2}, {"block_length": 2}),
        ({"sampler": "latent"}, {"steps": 32}),
        ({"sampler": "latent", "gen_length": 129}, {"steps": 33}),  # a block for every four of 131 tokens
        ({"preset": "reference"}, {"steps": 4, "threshold": None}),
        ({"preset": "reference", "threshold": 0.9}, {"steps": 4, "threshold": 0.9}),
        ({"block_length": 3}, "block_length"),
        ({"mode": "full"}, "mode"),
        ({"preset": "reference", "temperature": 1.0}, "temperature"),
    ],
)
def test_a_block_causal_network_has_blocks_of_its_own(fields, expected):
    model = codd.load(FIXTURES / "decode_sdar", device="cpu")
    asked = DenoiseRequest.model_validate({"prompt": [5, 6], "gen_length": 16, **fields})
    if isinstance(expected, str):
        with pytest.raises(APIError) as found:
            denoise_generations(asked, model, LIMITS)
        assert (found.value.status, found.value.param) == (400, expected)
        return
    [generation] = denoise_generations(asked, model, LIMITS)
    options = generation.options
    assert {name: getattr(options, name) for name in expected} == expected
    assert not generation.state.finished


def test_without_a_tokenizer_only_ids_can_be_denoised():
    blind = replace(MODEL, tokenizer=None)
    asked = DenoiseRequest.model_validate({"prompt": [5, 6], "gen_length": 4})
    assert denoise_generations(asked, blind, LIMITS)[0].ids == (5, 6)
    with pytest.raises(APIError, match="no tokenizer"):
        denoise_generations(DenoiseRequest.model_validate({"prompt": "one"}), blind, LIMITS)
    with pytest.raises(APIError, match="no tokenizer"):
        completion_generations(CompletionRequest.model_validate({"model": "m", "prompt": [5]}), blind, LIMITS)


def test_an_inspection():
    asked = {"ids": [5, MASK, 6], "window": [1, 3], "candidates": 3, "tempering": "paper"}
    found = look(**asked)
    assert found.args == (MODEL, [5, MASK, 6], [1, 3])
    assert found.keywords["candidates"] == 3
    # the circuit acts, whatever a run does
    assert found.keywords["options"] == Options(tempering="paper", sampler="any_order")
