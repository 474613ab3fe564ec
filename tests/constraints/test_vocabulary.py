import random
import re

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from codd.backbones import Tokenizer
from codd.backbones.loading import BUNDLED
from codd.constraints import Choice, Regex, Vocabulary
from codd.errors import InvalidConstraint
from tests.support.generators import walk

TEXT = ["the cat sat on the mat. The Cat's 42 hats: naïve 日本語 🙂!", "a  b   c\n\tif x == 1:\n        return 'y'"] * 4


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<mask>"], show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    """As Llama's: spaces are ▁, one is put before the text, bytes stand in for characters that are not there."""
    letters = dict.fromkeys("".join(TEXT).replace(" ", "▁").replace("日", "").replace("🙂", ""))
    words = ["▁t", "he", "▁the", "at", "▁c", "▁cat", "▁▁", "▁▁▁▁", "na"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁", "c"), ("▁c", "at"), ("▁", "▁"), ("▁▁", "▁▁")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocab=vocabulary, merges=[*merges, ("n", "a")], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As T5's: unigrams, without bytes."""
    pieces = [("<unk>", 0.0), *((c, -6.0) for c in dict.fromkeys("".join(TEXT).replace(" ", "▁")))]
    pieces += [("▁the", -2.0), ("▁cat", -3.0), ("▁▁", -3.0), ("at", -3.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["<unk>"])
    return backend


MADE = {"byte-level": byte_level(), "SentencePiece": sentence_piece(), "Metaspace": metaspace()}
KNOWN = st.text(alphabet=sorted(set("".join(TEXT))))
BUNDLED_TOKENIZER = Tokenizer.from_folder(BUNDLED)
BUNDLED_VOCABULARY = Vocabulary.of(BUNDLED_TOKENIZER)


@pytest.mark.parametrize("kind", MADE)
@settings(max_examples=40)
@given(text=st.one_of(KNOWN, st.sampled_from(["  two", " one", "", "日本語", "the cat"])))
def test_the_bytes_of_a_text_are_its_own(kind, text):
    backend = MADE[kind]
    vocabulary = Vocabulary.of(backend)
    ids = backend.encode(text, add_special_tokens=False).ids
    if kind == "Metaspace":  # which loses a leading space itself, and has tokens of more spaces, which are not used
        assert b"" in [vocabulary.tokens[id] for id in ids] or vocabulary.text_of(ids).decode() == backend.decode(ids)
    else:
        assert vocabulary.text_of(ids).decode() == text
    assert kind == "byte-level" or vocabulary.strips_space


@settings(max_examples=60)
@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_the_bundled_tokenizer_writes_any_text(text):
    ids = BUNDLED_TOKENIZER.encode(text, parse_special=False)
    assert BUNDLED_VOCABULARY.text_of(ids).decode() == text


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("pattern", ["(the|cat| )+", r"(?s).{0,5}", "[日本語🙂 ]*", " ?the", "na(ï|i)ve"])
def test_decoded_texts_match(kind, pattern):
    backend, rng = MADE[kind], random.Random(0)
    automaton = Regex(pattern).compile(Vocabulary.of(backend))
    for _ in range(40):
        ids = walk(automaton, rng, 12)
        assert re.fullmatch(pattern, backend.decode(ids)), (ids, backend.decode(ids))


@pytest.mark.parametrize("kind", MADE)
def test_texts_are_accepted_as_the_tokenizer_writes_them(kind):
    backend = MADE[kind]
    vocabulary = Vocabulary.of(backend)
    for text in ("the cat", *([] if kind == "Metaspace" else [" the cat"]), "cat 42", "naïve 日本"):
        assert Choice([text]).compile(vocabulary).accepts(backend.encode(text, add_special_tokens=False).ids), text


def test_a_leading_space_is_lost_once_with_sentence_piece():
    backend = MADE["SentencePiece"]
    the, bare = (backend.token_to_id(token) for token in ("▁the", "he"))
    automaton = Regex("the").compile(Vocabulary.of(backend))
    assert automaton.accepts([the])
    assert automaton.accepts([backend.token_to_id("t"), bare])
    assert not automaton.accepts([backend.token_to_id("▁"), the])
    assert Regex(" the").compile(Vocabulary.of(backend)).accepts([backend.token_to_id("▁"), the])


def test_special_and_missing_ids_write_nothing():
    backend = MADE["byte-level"]
    vocabulary = Vocabulary.of(backend, size=400)
    assert len(vocabulary) == 400
    assert [vocabulary.tokens[backend.token_to_id(token)] for token in ("<mask>", "<tool>")] == [b"", b""]
    anything = Regex("(?s).*").compile(vocabulary)
    first = anything.table[anything.start, anything.classes]
    assert {id for id in range(400) if first[id] < 0} >= {
        backend.token_to_id("<mask>"),
        backend.token_to_id("<tool>"),
        399,
    }
    assert Vocabulary.of(Tokenizer(byte_level())).digest == Vocabulary.of(backend).digest != vocabulary.digest
    with pytest.raises(InvalidConstraint, match="only 100 outputs"):
        Vocabulary.of(backend, size=100)


def test_tokens_may_be_parts_of_characters():
    tokens = (b"\xf0\x9f", b"\x99\x82", b"\xf0", b"\x9f\x99", b"\x82a", b"a")
    automaton = Regex("🙂a").compile(Vocabulary(tokens))
    assert automaton.accepts([0, 1, 5])
    assert automaton.accepts([2, 3, 4])
    assert automaton.after([0, 3]) == -1
    assert automaton.after([1]) == -1


STRIPS_EACH = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), STRIPS_EACH, None])
def test_other_tokenizers_are_refused(decoder):
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(InvalidConstraint, match="byte-level or SentencePiece"):
        Vocabulary.of(backend)


def test_parts_of_a_text_are_spelt_by_the_tokenizer_or_in_few_tokens():
    backend = MADE["SentencePiece"]
    vocabulary = Vocabulary.of(backend)
    assert vocabulary.spell("the cat", first=True) == backend.encode("the cat").ids
    inner = vocabulary.spell("the cat", first=False)
    assert b"".join(vocabulary.tokens[id] for id in inner) == b"the cat"
    assert [backend.id_to_token(id) for id in inner] == ["t", "he", "▁cat"]
    with pytest.raises(InvalidConstraint, match="no tokens of this vocabulary write 'b'"):
        Vocabulary((b"a",)).spell("b", first=True)
