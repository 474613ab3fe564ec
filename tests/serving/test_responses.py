import json
import math

import codd
from codd.backbones import Tokenizer
from codd.serving.encoding import DONE, sse_event, to_json
from codd.serving.responses import TokenPieces, step_event

MODEL = codd.load(device="cpu")
assert MODEL.tokenizer is not None
PIECES = TokenPieces(MODEL)


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
