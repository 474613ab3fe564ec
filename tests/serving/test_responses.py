import json
import math

import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import codd
from codd.backbones import Tokenizer
from codd.decoding import Step
from codd.serving.encoding import DONE, sse_event, to_json
from codd.serving.responses import OpenAIFormat, TokenPieces, Usage, step_event

TIMES = {"seconds": 0.5, "queued_seconds": 0.25}
USAGE = Usage(prompt_tokens=3, completion_tokens=4, steps=2, circuit_steps=1, computed=5, cached=3, **TIMES)
MODEL = codd.load(device="cpu")
assert MODEL.tokenizer is not None
PIECES = TokenPieces(MODEL)


def formatted(chat: bool, include_usage: bool = False) -> OpenAIFormat:
    return OpenAIFormat("id-1", 1_700_000_000, "mini", chat, include_usage)


def test_json_is_ascii_and_has_no_nan():
    odd = {"a": [math.nan, 1.0, (math.inf, -math.inf)], "b": "é\u2028\ud800"}
    found = to_json(odd)
    assert found.isascii()
    assert json.loads(found) == {"a": [None, 1.0, [None, None]], "b": "é\u2028\ud800"}
    assert to_json({"a": 1}) == b'{"a":1}'


def test_events_are_one_line_each():
    assert sse_event({"a": "b\nc\r\n"}) == b'data: {"a":"b\\nc\\r\\n"}\n\n'
    assert sse_event({}, "step") == b"event: step\ndata: {}\n\n"
    assert DONE == b"data: [DONE]\n\n"


def test_a_completion_is_what_openai_reads():
    body = json.loads(to_json(formatted(chat=False).full([("one", "stop", None), ("two", "length", None)], USAGE)))
    found = Completion.model_validate(body)
    assert [(c.index, c.text, c.finish_reason) for c in found.choices] == [(0, "one", "stop"), (1, "two", "length")]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 4, 7)
    assert body["usage"]["codd"] == {"steps": 2, "circuit_steps": 1, "computed": 5, "cached": 3, **TIMES}
    assert found.object == "text_completion"


def test_a_chat_completion_is_what_openai_reads():
    found = ChatCompletion.model_validate(formatted(chat=True).full([("one", "stop", None)], USAGE), strict=True)
    assert found.choices[0].message.content == "one"
    assert found.choices[0].message.role == "assistant"
    assert (found.object, found.model, found.created) == ("chat.completion", "mini", 1_700_000_000)


def test_chunks_of_a_chat():
    made = formatted(chat=True, include_usage=True)
    chunks = [made.first_chunk(1), made.text_chunk(1, "one"), made.last_chunk(1, "length"), made.usage_chunk(USAGE)]
    found = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert [chunk.choices[0].delta.role for chunk in found[:3]] == ["assistant", None, None]
    assert [chunk.choices[0].delta.content for chunk in found[:3]] == ["", "one", None]
    assert [chunk.choices[0].finish_reason for chunk in found[:3]] == [None, None, "length"]
    assert {chunk.choices[0].index for chunk in found[:3]} == {1}
    assert [chunk["usage"] if chunk else 0 for chunk in chunks[:3]] == [None] * 3
    assert found[3].choices == []
    assert found[3].usage is not None
    assert found[3].usage.total_tokens == 7


def test_chunks_of_a_completion():
    made = formatted(chat=False)
    assert made.first_chunk(0) is None
    assert made.usage_chunk(USAGE) is None
    assert "usage" not in made.text_chunk(0, "one")
    chunk = made.text_chunk(0, "one")
    assert chunk["choices"] == [{"index": 0, "text": "one", "logprobs": None, "finish_reason": None}]
    [choice] = Completion.model_validate(made.last_chunk(0, "stop")).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")


def test_pieces_of_bytes():
    ids = MODEL.tokenizer.encode("one two 👩")
    found = PIECES([*ids, MODEL.mask_id, MODEL.backbone.special.eos])
    assert found[:2] == [MODEL.tokenizer.decode([ids[0]]), " two"]
    assert found[-2:] == [None, "<|eos|>"]
    assert "\ufffd" in "".join(filter(None, found[2:-2]))
    assert PIECES(ids) == PIECES(ids)


def test_pieces_of_words():
    """As they look in the middle of a text: a decoder drops the space before a word, and shows ##, at its beginning."""
    backend = _word_pieces()
    found = TokenPieces(codd.Model(MODEL.backbone, None, backend, 0))
    assert found([0, 1, 2, 3, 99]) == [None, " play", "ing", ".", "<99>"]
    blind = TokenPieces(codd.Model(MODEL.backbone, None, None, 0))
    assert blind([0, 7]) == [None, "<7>"]


def _word_pieces() -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models

    words = {"[MASK]": 0, "play": 1, "##ing": 2, ".": 3}
    backend = tokenizers.Tokenizer(models.WordPiece(words, unk_token="."))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend, special={"mask_token": "[MASK]"})


def test_the_events_of_a_run():
    [ids] = MODEL.encode("one")
    for step in MODEL.denoise([ids], gen_length=2, steps=1):
        found = step_event(step, PIECES)
        assert found["positions"] == step.positions.tolist()
        assert found["pieces"] == [MODEL.tokenizer.decode([token]) or "<|eos|>" for token in found["tokens"]]
        assert (found["length"], found["window"], found["finished"]) == (len(step.ids), list(step.window), True)


def test_a_score_that_is_none_is_null():
    at = torch.tensor([1])
    step = Step(0, 0, at, at, torch.tensor([math.nan]), 0.5, False, (0, 2), torch.tensor([5, 1]), True, 2)
    assert json.loads(sse_event(step_event(step, PIECES), "step").split(b"data: ")[1])["scores"] == [None]
