"""What is sent while masks are filled in any order, compared with what `codd.Model.text` says of the whole."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

import codd
from codd.decoding.options import Options
from codd.decoding.sequence import first_stop
from codd.serving.detokenizer import Detokenizer
from codd.serving.prompts import GenerationRequest
from tests.support import FIXTURES

MODEL = codd.load(device="cpu")
assert MODEL.tokenizer is not None
assert MODEL.mask_id is not None
EOS = MODEL.backbone.special.eos
assert EOS is not None
QUICK = settings(max_examples=80, deadline=None)
ODD = "ab .,'👩\u200d🚀🇨🇭日本語é\u0301\ufffd"
TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(ODD)), max_size=20)


def word_pieces(count: int = 120) -> codd.Model:
    """The masked language model among the fixtures, with so many word pieces for its 120 outputs."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *".,!?'", "n't", "'s", "do", "not", "it", "the", "日"]
    words += [*letters, *(f"##{letter}" for letter in letters)]
    words += [f"word{n}" for n in range(count - len(words))]
    backend = tokenizers.Tokenizer(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    special = {"mask_token": "[MASK]", "pad_token": "[PAD]", "eos_token": "[SEP]"}
    found = codd.load(FIXTURES / "bert", device="cpu", mask_id=4)
    return replace(found, tokenizer=codd.Tokenizer(backend, special=special))


WORD_PIECES = word_pieces()
[STATE] = MODEL.start([[5]], Options(gen_length=1))  # of a run that is not taken


def planned(prompt: Sequence[int], length: int, model: codd.Model = MODEL, **fields) -> GenerationRequest:
    begin = 0 if model.mask_id in prompt else len(prompt)
    return GenerationRequest(
        **{"state": STATE, "ids": tuple(prompt), "options": Options(gen_length=length), "begin_text": begin, **fields}
    )


def deltas(
    generation: GenerationRequest, whole: Sequence[int], model: codd.Model = MODEL, seed: int = 0, portion: int = 1
) -> list[str]:
    """What is sent if the masks become ``whole`` in a random order, some at a time."""
    detokenizer = Detokenizer(generation, model)
    given = [*generation.ids, *[model.mask_id] * (len(whole) - len(generation.ids))]
    places = [place for place, token in enumerate(given) if token == model.mask_id]
    random.Random(seed).shuffle(places)
    found, ids = [], torch.tensor(given)
    for first in range(0, len(places), portion):
        ids = ids.clone()
        for place in places[first : first + portion]:
            ids[place] = whole[place]
        found.append(detokenizer.add(ids, first + portion >= len(places)))
        assert detokenizer.text == "".join(found)
        if detokenizer.finished:
            break
    assert detokenizer.finished
    assert detokenizer.add(ids, True) == ""
    return found


def one_by_one(answer: Sequence[int], **fields: Any) -> list[str]:
    """What is sent if an answer is written from the left, and is not said to be done."""
    detokenizer = Detokenizer(planned([5], len(answer), **fields), MODEL)
    found, ids = [], torch.tensor([5, *[MODEL.mask_id] * len(answer)])
    for place, token in enumerate(answer, start=1):
        ids[place] = token
        found.append(detokenizer.add(ids, False))
    assert detokenizer.add(ids, True) == ""
    return found


def text_of(generation: GenerationRequest, whole: Sequence[int], model: codd.Model = MODEL) -> str:
    return model.text(torch.tensor(whole), generation.ids)


@QUICK
@given(text=TEXTS, seed=st.integers(0, 99), portion=st.integers(1, 4))
def test_the_deltas_are_the_text(text, seed, portion):
    prompt, answer = MODEL.tokenizer.encode("one "), MODEL.tokenizer.encode(text, parse_special=False)
    if answer:
        generation = planned(prompt, len(answer))
        found = deltas(generation, [*prompt, *answer], seed=seed, portion=portion)
        assert "".join(found) == text_of(generation, [*prompt, *answer]) == text


@QUICK
@given(answer=st.lists(st.integers(5, 300), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_the_deltas_are_the_text_of_bytes_that_are_none(answer, seed):
    generation = planned([5], len(answer))
    assert "".join(deltas(generation, [5, *answer], seed=seed)) == text_of(generation, [5, *answer])


@QUICK
@given(answer=st.lists(st.integers(0, 119).filter(lambda t: t != 4), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_the_deltas_are_the_text_of_word_pieces(answer, seed):
    for prompt in ([30], []):
        generation = planned(prompt, len(answer), WORD_PIECES)
        found = deltas(generation, [*prompt, *answer], WORD_PIECES, seed=seed)
        assert "".join(found) == text_of(generation, [*prompt, *answer], WORD_PIECES)


@QUICK
@given(seed=st.integers(0, 99), portion=st.integers(1, 3))
def test_the_whole_text_is_sent_if_the_prompt_had_masks(seed, portion):
    whole = MODEL.tokenizer.encode("Zoë met 👩‍🚀 in Zürich, of all places.")
    prompt = [MODEL.mask_id if place in (3, 4, 5, 9) else token for place, token in enumerate(whole[:-3])]
    generation = planned(prompt, 3)
    found = deltas(generation, whole, seed=seed, portion=portion)
    assert "".join(found) == text_of(generation, whole) == "Zoë met 👩‍🚀 in Zürich, of all places."


def test_characters_are_sent_whole():
    answer = MODEL.tokenizer.encode("a👩b")
    assert len(answer) > 3
    assert [delta for delta in one_by_one(answer) if delta] == ["a", "👩", "b"]


def test_the_middle_of_an_infilling():
    before, middle, after = map(MODEL.tokenizer.encode, ("one", " two three", " four"))
    ids = [*before, *[MODEL.mask_id] * len(middle), *after]
    generation = planned(ids, 0, begin_text=len(before), end_text=len(before) + len(middle))
    for seed in range(5):
        assert "".join(deltas(generation, [*before, *middle, *after], seed=seed)) == " two three"


def test_an_echo_comes_first_and_once():
    whole = [5, *MODEL.tokenizer.encode(" one two")]
    assert deltas(planned([5], 2, echo="zero"), whole, seed=1)[-1] in ("zero one two", " two")
    assert "".join(deltas(planned([5], 2, echo="zero", stops=(" one",)), whole)) == "zero"


@QUICK
@given(
    text=st.text(alphabet="ab ", min_size=1, max_size=14),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 99),
    portion=st.integers(1, 5),
)
def test_a_text_ends_before_the_first_stop_however_it_came(text, stops, seed, portion):
    answer = MODEL.tokenizer.encode(text)
    generation = planned([5], len(answer), stops=tuple(stops))
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    wanted = text
    if ends:
        wanted = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    assert "".join(deltas(generation, [5, *answer], seed=seed, portion=portion)) == wanted


def test_a_stop_ends_the_run_early():
    answer = MODEL.tokenizer.encode(" one two three four")
    detokenizer = Detokenizer(planned([5], len(answer), stops=(" thr",)), MODEL)
    ids = torch.tensor([5, *[MODEL.mask_id] * len(answer)])
    ids[1:4] = torch.tensor(answer[:3])
    assert (detokenizer.add(ids, False), detokenizer.finished, detokenizer.reason, detokenizer.tokens) == (
        " one two",
        True,
        "stop",
        3,
    )


def test_what_may_become_a_stop_is_held_back():
    answer = MODEL.tokenizer.encode(" one two three")
    assert one_by_one(answer, stops=(" two four",)) == [" one", "", " two three"]
    held = Detokenizer(planned([5], 2, stops=(" two four",)), MODEL)
    assert held.add(torch.tensor([5, *answer[:2]]), False) == " one"
    assert held.add(torch.tensor([5, *answer[:2]]), True) == " two"


def test_a_stop_in_what_was_given_does_not_count():
    whole = MODEL.tokenizer.encode("one. two. three.")
    at = len(MODEL.tokenizer.encode("one. two"))
    prompt = [*whole[: at - 1], MODEL.mask_id, *whole[at:]]
    assert "".join(deltas(planned(prompt, 0, stops=(".",)), whole)) == "one. two"


def test_the_first_stop_is_the_one_that_is_complete_first():
    assert first_stop("xabcd", ["abcd", "bc"]) == 2
    assert first_stop("xabcd", ["bc", "abc"]) == 1
    assert first_stop("abab", ["ab"], 1) == 2
    assert first_stop("ab", ["c"]) is None


@pytest.mark.parametrize(
    ("last", "options", "reason"),
    [
        (EOS, Options(), "stop"),
        (7, Options(), "length"),
        (EOS, Options(stop=False), "length"),
        (EOS, Options(preset="reference"), "length"),
    ],
)
def test_why_a_text_ends(last, options, reason):
    detokenizer = Detokenizer(planned([5], 2, options=options), MODEL)
    text = detokenizer.add(torch.tensor([5, *MODEL.tokenizer.encode(" one"), last]), True)
    assert detokenizer.reason == reason
    assert text == " one" + MODEL.tokenizer.decode([last])
    assert detokenizer.tokens == 2


def test_what_may_still_be_edited_is_not_sent():
    [ids] = MODEL.encode("What is 7 + 8?")
    options = Options(gen_length=32, block_length=8, editing_threshold=0.05, threshold=0.05, stop=False)
    detokenizer = Detokenizer(planned(ids, 32, options=options), MODEL)
    steps = list(MODEL.denoise([ids], options))
    assert sum(len(step.edits.positions) for step in steps)
    whole = MODEL.text(steps[-1].ids, ids)
    for step in steps:
        detokenizer.add(step.ids, step.finished, step.settled)
        assert whole.startswith(detokenizer.text)
    assert detokenizer.text == whole
    early = Detokenizer(planned(ids, 32, options=options), MODEL)
    assert "".join(early.add(step.ids, step.finished) for step in steps) != whole  # what it is for


def test_a_decoder_that_takes_back_what_it_said_is_waited_for():
    backend = tokenizers.Tokenizer(models.WordLevel({"[M]": 0, "a": 1, "'": 2, "s": 3, "b": 4}, unk_token="a"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("'s", "S")])
    model = replace(MODEL, tokenizer=codd.Tokenizer(backend, special={"mask_token": "[M]"}), mask_id=0)
    whole = [1, 1, 2, 3, 4]
    generation = planned([1], 4, model)
    ids = torch.tensor([1, 1, 2, 0, 0])
    detokenizer = Detokenizer(generation, model)
    assert detokenizer.add(ids, False) == "a'"
    ids[3] = 3
    assert detokenizer.add(ids, False) == ""
    detokenizer.add(torch.tensor(whole), True)
    assert len(detokenizer.text) == len(text_of(generation, whole, model))


def test_without_a_tokenizer_there_is_no_text():
    detokenizer = Detokenizer(planned([5], 2), replace(MODEL, tokenizer=None))
    assert (detokenizer.add(torch.tensor([5, 6, 7]), True), detokenizer.tokens, detokenizer.reason) == ("", 2, "length")


def test_ids_that_the_tokenizer_lacks_stand_for_no_text():
    """Of a network with more outputs than its tokenizer has tokens: generated, and streamed."""
    model = word_pieces(100)
    assert model.tokenizer.vocab_size == 100 < model.backbone.vocab_size
    made = model.generate([[6, 7, 8]] * 4, gen_length=16, steps=4, temperature=1.0, seed=[0, 1, 2, 3], stop=False)
    written = [ids.tolist() for ids in made.completions]
    assert any(token >= 100 for ids in written for token in ids)
    assert made.texts == [model.tokenizer.decode([token for token in ids if token < 100]) for ids in written]
    for sequence, text in zip(made.sequences, made.texts, strict=True):
        whole = sequence.tolist()
        sent = deltas(planned([6, 7, 8], len(whole) - 3, model), whole, model, seed=1)
        assert "".join(sent) == text
