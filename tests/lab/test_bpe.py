import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codd.backbones import chat
from codd.backbones.tokenizer import Tokenizer
from codd.errors import CoddError
from codd_lab.pretraining.bpe import MINI_SPECIAL_TOKENS, train_bpe
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = [README, "What is 12 + 345? It's 357.\n\nDon't we'll they've"] * 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, vocab_size=700)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([id], skip_special_tokens=False) for id in tokenizer.encode(text)]


def test_special_tokens_have_the_first_ids_and_bytes_the_next(tokenizer):
    assert [tokenizer.token_to_id(token) for token in MINI_SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.special_ids == set(range(5))
    assert all(len(tokenizer.id_to_token(id) or "") == 1 for id in range(5, 5 + 256))
    assert tokenizer.vocab_size == 700
    assert tokenizer.chat_template == chat.MINI


def test_trained_twice_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        train_bpe(iter(TEXTS), vocab_size=600).save(tmp_path / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_default_size_is_an_upper_bound():
    assert 261 < train_bpe(["a few words"]).vocab_size < 300


@settings(max_examples=200, deadline=None)
@given(text=st.text())
@example("\0\r\n\t e\u0301 \u212b\U0010ffff" + " " * 40)
@example("नमस्ते 👩‍👩‍👧")
def test_every_text_survives(tokenizer, text):
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.special_ids.isdisjoint(ids)


def test_every_digit_is_a_token(tokenizer):
    assert pieces(tokenizer, " 12345") == [" ", "1", "2", "3", "4", "5"]
    learnt = json.loads(tokenizer.backend.to_str())["model"]["vocab"]
    assert not [token for token in learnt if len(token) > 1 and any(character.isdigit() for character in token)]


def test_words_are_cut_with_the_space_before_them():
    found = train_bpe(["the cat's here.\n\nthe\n    cat's"] * 3, vocab_size=300)
    assert pieces(found, "the cat's here.\n\nthe\n    cat's") == [
        *("the", " cat", "'s", " here", ".", "\n\n"),
        *("the", "\n", "   ", " cat", "'s"),
    ]


def test_special_tokens_in_the_texts_are_not_learnt():
    found = train_bpe(["<|mask|><|mask|> <|eos|>"] * 50, vocab_size=300)
    assert found.special_ids.isdisjoint(found.encode("<|mask|> <|eos|>", parse_special=False))
    assert found.encode("<|mask|>") == [1]


def test_a_vocabulary_holds_the_bytes():
    with pytest.raises(CoddError, match=r"vocab_size is 260, but .* alone are 261"):
        train_bpe(TEXTS, vocab_size=260)
