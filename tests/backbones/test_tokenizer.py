import base64
import copy
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from codd.backbones import chat, tokenizer_files
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.tokenizer_files import QWEN2_SPLIT, split_then_bytes
from codd.errors import CoddError, FormatError
from codd_lab.pretraining.bpe import MINI_SPECIAL_TOKENS, train_bpe
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DREAM_ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")
SAMPLES = [README, "I'LL say 1234 things…\n\n  e\u0301", "  \t\r\n x<|im_start|>user<|mask|><|mask|>", ""]
FAST_TEXT = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\r\t'sS1é\u0301<|>")))
QUICK = settings(max_examples=100, deadline=None)


def trained(pre_tokenizer: Any, special: tuple[str, ...] = (), size: int = 500) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        [README],
        trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
        ),
    )
    return backend


def qwen2_backend() -> tokenizers.Tokenizer:
    backend = trained(split_then_bytes(QWEN2_SPLIT))
    backend.normalizer = normalizers.NFC()
    return backend


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / {
            "fast": "tokenizer.json",
            "config": "tokenizer_config.json",
            "vocabulary": "vocab.json",
            "merges": "merges.txt",
            "words": "vocab.txt",
            "special": "special_tokens_map.json",
            "added": "added_tokens.json",
            "template": "chat_template.jinja",
        }.get(name, name)
        if callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def read(folder: Path, **options: Any) -> Tokenizer:
    found = Tokenizer.from_folder(folder, **options)
    assert found is not None
    return found


def added_entry(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, **plain, "special": True, **flags}


def dream_config(first: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "DreamTokenizer",
        "added_tokens_decoder": {str(first + n): added_entry(text) for n, text in enumerate(DREAM_ADDED)},
        "mask_token": "<|mask|>",
        "eos_token": {"content": "<|endoftext|>", "lstrip": False},
        "pad_token": "<|endoftext|>",
        "bos_token": "<|beginoftext|>",
        "unk_token": None,
        "chat_template": chat.CHATML,
    }


@pytest.fixture(scope="module")
def dream(tmp_path_factory) -> Path:
    """A checkpoint in Dream's layout, and the same tokenizer as a fast file in ``fast`` beside it."""
    folder = tmp_path_factory.mktemp("dream")
    backend = qwen2_backend()
    backend.model.save(str(folder))
    config = dream_config(backend.get_vocab_size())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in DREAM_ADDED])
    write(folder / "fast", fast=backend.to_str(), config=config)
    return write(folder, config=config)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), ("<|endoftext|>",))
    backend.model.save(str(folder))
    write(folder / "fast", fast=backend.to_str())
    return folder


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "é", "The", ".", "e"]


@pytest.fixture
def bert(tmp_path) -> Path:
    return write(tmp_path / "bert", words="\n".join(WORDS) + "\n")


@pytest.fixture(scope="module")
def mini() -> Tokenizer:
    return train_bpe([README], vocab_size=500)


@pytest.fixture(scope="module")
def mini_folder(mini, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mini")
    mini.save(folder)
    return folder


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    write(tmp_path, **{"config.json": {"model_type": "mini"}})
    assert Tokenizer.from_folder(tmp_path) is None
    assert Tokenizer.from_folder(str(tmp_path / "nothing")) is None


def test_dream_without_a_fast_file(dream):
    slow, fast = read(dream), read(dream / "fast")
    first = slow.vocab_size - len(DREAM_ADDED)
    assert [slow.token_to_id(text) for text in DREAM_ADDED] == list(range(first, first + len(DREAM_ADDED)))
    assert (slow.mask_id, slow.eos_id, slow.pad_id, slow.bos_id) == (first + 4, first, first, first + 3)
    assert "unk_token" not in slow.special_tokens
    assert slow.chat_template == chat.CHATML
    assert slow.vocab_size == fast.vocab_size
    assert slow.special_ids == fast.special_ids == set(range(first, first + len(DREAM_ADDED)))
    for text in SAMPLES:
        assert slow.encode(text) == fast.encode(text)
    assert slow.encode_chat("Hi") == fast.encode_chat("Hi")


@QUICK
@given(text=FAST_TEXT)
def test_dream_reads_as_its_fast_file(dream_pair, text):
    slow, fast = dream_pair
    ids = slow.encode(text)
    assert ids == fast.encode(text)
    assert slow.decode(ids, skip_special_tokens=False) == tokenizers.normalizers.NFC().normalize_str(text)


@pytest.fixture(scope="module")
def dream_pair(dream) -> tuple[Tokenizer, Tokenizer]:
    return read(dream), read(dream / "fast")


def test_gpt2_without_a_configuration(gpt2):
    slow, fast = read(gpt2), read(gpt2 / "fast")
    assert slow.mask_id is slow.eos_id is None
    assert slow.encode("e\u0301") != slow.encode("\u00e9")
    for text in SAMPLES:
        assert slow.encode(text) == fast.encode(text)


def test_gpt2_with_the_older_files(gpt2, tmp_path):
    size = read(gpt2).vocab_size
    folder = write(
        tmp_path,
        vocabulary=(gpt2 / "vocab.json").read_text(),
        merges=(gpt2 / "merges.txt").read_text(),
        config={"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
        special={
            "eos_token": {"content": "<|endoftext|>", "lstrip": False},
            "mask_token": "<mask>",
            "additional_special_tokens": ["<extra>"],
        },
        added={"<mask>": size, "<extra>": size + 1, "<plain>": size + 2},
    )
    tokenizer = read(folder)
    assert tokenizer.encode("<|endoftext|>") == [tokenizer.eos_id] == [0]
    assert tokenizer.mask_id == size
    assert tokenizer.special_ids == {0, size, size + 1}
    assert tokenizer.encode("<plain><extra>") == [size + 2, size + 1]
    assert tokenizer.encode("x") == read(gpt2).encode(" x")


def test_added_ids_may_leave_gaps_beside_a_vocabulary(dream, tmp_path):
    config = dream_config(700)
    folder = write(
        tmp_path,
        vocabulary=(dream / "vocab.json").read_text(),
        merges=(dream / "merges.txt").read_text(),
        config=config,
    )
    tokenizer = read(folder)
    assert (tokenizer.mask_id, tokenizer.vocab_size) == (704, 705)
    assert tokenizer.encode("a<|mask|>")[-1] == 704
    assert tokenizer.id_to_token(600) is None
    tokenizer.save(tmp_path / "again")
    again = read(tmp_path / "again")
    assert again.mask_id == 704
    assert again.encode(README + "<|mask|>") == tokenizer.encode(README + "<|mask|>")


def test_merges_may_begin_with_a_number_sign(tmp_path):
    vocabulary = {"#": 0, "##": 1, "!": 2, "#!": 3}
    folder = write(tmp_path, vocabulary=vocabulary, merges="#version: 0.2\r\n# #\r\n# !\r\n\r\n")
    assert read(folder).encode("###! #!") == [1, 3, 3]


def test_bert_by_its_words_alone(bert):
    tokenizer = read(bert)
    assert tokenizer.encode("The cats sat.") == [5, 6, 7, 8, 11]
    assert tokenizer.encode("The cats", add_special_tokens=True) == [2, 5, 6, 7, 3]
    assert tokenizer.encode("the [MASK] zebra") == [5, 4, 1]
    assert tokenizer.encode("é") == [12]
    assert tokenizer.decode([2, 5, 6, 7, 8, 11, 3]) == "the cats sat."
    assert (tokenizer.mask_id, tokenizer.pad_id, tokenizer.eos_id) == (4, 0, None)
    assert tokenizer.special_tokens["cls_token"] == "[CLS]"
    assert "[MASK]" in tokenizer.decode([4], skip_special_tokens=False)
    assert 4 not in tokenizer.encode("[MASK]", parse_special=False)


def test_bert_cased(bert):
    write(bert, config={"do_lower_case": False, "tokenizer_class": "BertTokenizer"})
    assert read(bert).encode("The the é") == [10, 5, 9]


def test_the_fast_file_counts_first(dream, mini, tmp_path):
    mini.save(tmp_path)
    write(tmp_path, vocabulary={"a": 0}, words="nonsense")
    assert read(tmp_path).encode(README) == mini.encode(README)


def test_truncation_and_padding_of_the_file_are_switched_off(mini, tmp_path):
    backend = tokenizers.Tokenizer.from_str(mini.backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    folder = write(tmp_path, fast=backend.to_str())
    assert read(folder).encode(README) == mini.encode(README)
    assert read(folder).encode_batch(["a", README]) == mini.encode_batch(["a", README])


def test_the_configuration_describes_tokens_of_the_fast_file(mini, tmp_path):
    size = mini.vocab_size
    entries = {"1": added_entry("<|mask|>", lstrip=True), str(size): added_entry("<|new|>", special=False)}
    folder = write(tmp_path, fast=mini.backend.to_str(), config={"added_tokens_decoder": entries})
    tokenizer = read(folder)
    assert tokenizer.encode("a  <|mask|>") == [*mini.encode("a"), 1]
    assert tokenizer.encode("<|new|>") == [size]
    assert tokenizer.special_ids == mini.special_ids


def test_tokens_that_are_named_become_special(mini, tmp_path):
    entries = {"1": added_entry("<|mask|>", special=False)}
    folder = write(
        tmp_path, fast=mini.backend.to_str(), config={"added_tokens_decoder": entries, "mask_token": "<|mask|>"}
    )
    assert read(folder).decode([1]) == ""
    assert 1 not in read(folder).encode("<|mask|>", parse_special=False)


def test_which_template_counts(mini, tmp_path):
    fast = mini.backend.to_str()
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert read(write(tmp_path, fast=fast, config={"chat_template": "C"}), chat_template="F").chat_template == "C"
    assert read(write(tmp_path, config={"chat_template": named}), chat_template="F").chat_template == "D"
    assert read(write(tmp_path, config={"chat_template": named[:1]}), chat_template="F").chat_template == "F"
    assert read(write(tmp_path, config={"chat_template": None})).chat_template is None
    assert read(write(tmp_path, config={"chat_template": "C"}, template="J")).chat_template == "J"


def test_special_tokens_are_variables_of_the_template(mini):
    template = "{{ eos_token }}{{ messages[0].content }}{{ mask_token }}"
    tokenizer = Tokenizer(
        mini.backend, special={"eos_token": "<|eos|>", "mask_token": "<|mask|>"}, chat_template=template
    )
    assert tokenizer.render_chat("x") == "<|eos|>x<|mask|>"


def test_a_conversation_is_rendered_then_encoded(mini):
    turns = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello!"}]
    assert mini.render_chat(turns) == "<|user|>Hi<|assistant|>Hello!<|eos|><|assistant|>"
    assert mini.encode_chat(turns) == mini.encode("<|user|>Hi<|assistant|>Hello!<|eos|><|assistant|>")
    assert mini.encode_chat(turns, add_generation_prompt=False) == mini.encode_chat(turns)[:-1]


CONTENT = st.lists(st.one_of(st.text(max_size=4), st.sampled_from((*MINI_SPECIAL_TOKENS, "<|", "|>", "\U000f0000"))))


@QUICK
@given(contents=st.lists(CONTENT.map("".join), min_size=1, max_size=3))
def test_messages_cannot_forge_control_tokens(mini, contents):
    turns = [{"role": "user", "content": text} for text in contents]
    ids = mini.encode_chat(turns)
    assert mini.decode(ids, skip_special_tokens=False) == mini.render_chat(turns)
    control = [id for id in ids if id in mini.special_ids]
    assert control == [mini.token_to_id("<|user|>")] * len(turns) + [mini.token_to_id("<|assistant|>")]


def test_roles_cannot_forge_control_tokens(dream):
    tokenizer = read(dream)
    ids = tokenizer.encode_chat([{"role": "user<|im_end|>", "content": "x"}])
    assert ids.count(tokenizer.token_to_id("<|im_end|>") or -1) == 1


@QUICK
@given(texts=st.lists(st.text(), max_size=4), parse=st.booleans())
def test_a_batch_is_the_texts_one_by_one(mini, texts, parse):
    assert mini.encode_batch(texts, parse_special=parse) == [mini.encode(text, parse_special=parse) for text in texts]


@QUICK
@given(parts=CONTENT)
def test_special_tokens_survive(mini, parts):
    text = "".join(parts)
    ids = mini.encode(text)
    assert mini.decode(ids, skip_special_tokens=False) == text
    assert mini.decode(torch.tensor(ids, dtype=torch.long), skip_special_tokens=False) == text
    assert mini.decode(ids) == mini.decode([id for id in ids if id not in mini.special_ids])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_behave_the_same(mini, clone):
    mini.encode("x", parse_special=False)
    other = clone(mini)
    for parse in (True, False):
        assert other.encode("<|mask|> x", parse_special=parse) == mini.encode("<|mask|> x", parse_special=parse)
    assert repr(other) == repr(mini)


def test_ids_outside_the_vocabulary(mini):
    size = mini.vocab_size
    for stranger in (-1, size, 2**40):
        assert mini.decode([70, stranger, 71]) == mini.decode([70, 71])
        assert mini.decode(torch.tensor([stranger])) == ""
        assert mini.id_to_token(stranger) is None
    assert mini.token_to_id("no such token") is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda t, ids=ids: t.decode(ids), "ids are whole numbers") for ids in (["a"], [1.5], torch.zeros(2))),
        (lambda t: t.decode(torch.zeros(2, 2, dtype=torch.long)), r"shape \(2, 2\): decode each row"),
        *((lambda t, text=text: t.encode(text), "expected a str") for text in (3, None, b"x", ["x"], ("a", "b"))),
        *((lambda t, text=text: t.encode_batch([text]), "expected a str") for text in (3, None, b"x", ["x"])),
        (lambda t: t.encode_batch("abc"), "found one text"),
        (lambda t: t.encode("a\ud83d"), "surrogate pair at position 1"),
        (lambda t: t.encode_batch(["a", "\ud83d"]), "text 1 has half"),
        (lambda t: Tokenizer(t.backend).render_chat("x"), "has no chat template"),
        (lambda t: Tokenizer(t.backend).encode_chat("x <|eos|>"), "has no chat template"),
        (
            lambda t: Tokenizer(t.backend, special={"mask_token": "[MASK]"}),
            r"mask_token is '\[MASK\]', which the vocabulary does not have",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_wrong_arguments_are_refused(mini, call, message):
    with pytest.raises(CoddError, match=message):
        call(mini)


@pytest.mark.parametrize("source", ["dream", "gpt2", "bert", "mini_folder"])
def test_what_is_saved_is_read_back(source, request, tmp_path):
    before = read(request.getfixturevalue(source))
    before.save(tmp_path / "new" / "folder")
    after = read(tmp_path / "new" / "folder")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert after.backend.to_str() == before.backend.to_str()
    assert after.special_tokens == before.special_tokens
    assert after.chat_template == before.chat_template
    assert after.vocab_size == before.vocab_size
    for text in SAMPLES:
        assert after.encode(text, add_special_tokens=True) == before.encode(text, add_special_tokens=True)


def test_saving_over_another_tokenizer_leaves_nothing_of_it(mini, tmp_path):
    write(tmp_path, template="other", special={"bos_token": "<s>"}, added={"<s>": 3}, config={"bos_token": "<s>"})
    mini.save(tmp_path)
    after = read(tmp_path)
    assert (after.special_tokens, after.chat_template) == (mini.special_tokens, mini.chat_template)


VOCABULARY = {"a": 0, "b": 1, "ab": 2}
PAIR: dict[str, Any] = {"vocabulary": VOCABULARY, "merges": "#version: 0.2\na b\n"}


def fast(**parts: Any) -> Callable[[Tokenizer], dict[str, Any]]:
    """The mini model's ``tokenizer.json`` with other parts."""
    return lambda mini: {"fast": {**json.loads(mini.backend.to_str()), **parts}}


def described(id: int, content: str) -> Callable[[Tokenizer], dict[str, Any]]:
    """The same file, and a configuration that describes a token."""
    config = {"added_tokens_decoder": {str(id): added_entry(content)}}
    return lambda mini: {"fast": mini.backend.to_str(), "config": config}


def twice(mini: Tokenizer) -> dict[str, Any]:
    """The same file with an id that two tokens have."""
    listed = json.loads(mini.backend.to_str())["added_tokens"]
    return fast(added_tokens=[*listed, {**listed[0], "content": "<|x|>"}])(mini)


def split_at(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def enormous(path: Path) -> None:
    """A file that takes no room on the disk."""
    path.touch()
    os.truncate(path, 1 << 40)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
WHOLE = {"Sequence": {"id": "A", "type_id": 0}}
CHARSMAP = base64.b64encode(bytes(4) + b"a" * 5000 + b"\0").decode()
RENUMBERED = r"tokenizer\.json: the added token .* should have the id \d+, but has"
MANY = r"has 17,00\d tokens, more than the 16,884 that are of use to this model"
"""Ids count like tokens: writing a vocabulary with one id of four billion takes the memory of four billion."""
LARGE = r"has 1,099,511,627,776 bytes, more than the 9,\d{3},\d{3}"
REFUSED: list[tuple[Any, str]] = [
    ({"fast": "{"}, r"tokenizer\.json: is not JSON"),
    ({"fast": "[]"}, r"tokenizer\.json: expected a JSON object, found list"),
    ({"fast": "{}"}, r"tokenizer\.json: tokenizers [\d.]+ cannot read it"),
    ({"fast": {"added_tokens": [3]}}, r"tokenizer\.json: an added token must have a text and an id"),
    ({"config": "{}"}, "has a tokenizer_config.json but no vocabulary"),
    ({"config": "nope", **PAIR}, r"tokenizer_config\.json: is not JSON"),
    ({"vocabulary": VOCABULARY}, r"merges\.txt: is missing beside vocab\.json"),
    ({"merges": "a b"}, r"vocab\.json: is missing beside merges\.txt"),
    ({**PAIR, "merges": "#version: 0.2\na b\nabc\n"}, r"vocab\.json: .* cannot read it .*invalid at line"),
    ({**PAIR, "merges": "a b c"}, r"vocab\.json: .* cannot read it .*invalid at line"),
    ({**PAIR, "merges": "a b\n\nb a"}, r"vocab\.json: .* cannot read it .*`ba` out of vocabulary"),
    ({**PAIR, "vocabulary": {**VOCABULARY, "c": 1}}, r"vocab\.json: the id 1 is that of 'b' and 'c'"),
    ({**PAIR, "vocabulary": {**VOCABULARY, "c": -1}}, r"vocab\.json: .* cannot read it"),
    ({**PAIR, "vocabulary": {**VOCABULARY, "c": True}}, r"vocab\.json: the id 1 is that of 'b' and 'c'"),
    ({**PAIR, "vocabulary": {**VOCABULARY, "c": [3]}}, "cannot make its tokenizer"),
    ({**PAIR, "config": {"tokenizer_class": "XTokenizer"}}, r"tokenizer_class is XTokenizer, whose rules"),
    ({"words": "[UNK]\na\na\n"}, r"vocab\.txt: has 'a' in more than one line"),
    ({"words": "a\nb\n"}, r"vocab\.txt: has no '\[UNK\]'"),
    ({"words": "[UNK]", "config": {"cls_token": "[C]", "sep_token": "[S]"}}, r"vocab\.txt: has no '\[C\]'"),
    ({**PAIR, "config": {"mask_token": "<m>"}}, r"tokenizer_config\.json: mask_token is '<m>', which has no id"),
    ({**PAIR, "config": {"mask_token": 3}}, r"tokenizer_config\.json: mask_token must be a text .* found 3"),
    ({**PAIR, "special": {"eos_token": {}}}, r"special_tokens_map\.json: eos_token must be a text"),
    ({**PAIR, "special": {"additional_special_tokens": 3}}, r"special_tokens_map\.json: additional_special_tokens"),
    ({**PAIR, "added": {"<m>": "3"}}, r"added_tokens\.json: an added token must have a text and an id"),
    ({**PAIR, "added": {"<m>": 1}}, r"vocab\.json: the id 1 is that of 'b' and '<m>'"),
    ({**PAIR, "added": {"ab": 7}}, r"vocab\.json: the added token 'ab' should have the id 7, but has 2"),
    ({**PAIR, "config": {"added_tokens_decoder": [1]}}, r"added_tokens_decoder must be an object, found \[1\]"),
    ({**PAIR, "config": {"added_tokens_decoder": {"x": {"content": "<m>"}}}}, "an added token must have"),
    ({**PAIR, "config": {"added_tokens_decoder": {"3": "<m>"}}}, "an added token must have"),
    (
        {**PAIR, "config": {"added_tokens_decoder": {"3": {"content": "<m>"}, "4": {"content": "<m>"}}}},
        "the added token '<m>' should have the id 4, but has 3",
    ),
    (
        {**PAIR, "config": {"added_tokens_decoder": {"3": {"content": "<m>"}}}, "added": {"<m>": 4}},
        "the added token '<m>' should have the id 4, but has 3",
    ),
    (
        {**PAIR, "config": {"added_tokens_decoder": {"3": {"content": "<m>"}}}, "added": {"<n>": 3}},
        "the id 3 is that of '<m>' and '<n>'",
    ),
    ({**PAIR, "config": {"chat_template": 3}}, r"tokenizer_config\.json: chat_template: expected a text"),
    ({**PAIR, "config": {"chat_template": ["x"]}}, "expected a list of"),
    ({**PAIR, "config": {"chat_template": "{% x"}}, r"tokenizer_config\.json: chat_template: is not valid Jinja"),
    ({**PAIR, "template": "{{"}, r"chat_template\.jinja: is not valid Jinja"),
    ({**PAIR, "merges": b"\xff\xfe"}, r"merges\.txt: is not UTF-8 text"),
    ({**PAIR, "merges": os.mkdir}, r"merges\.txt: cannot be read"),
    (described(900, "<|far|>"), RENUMBERED),
    (described(1, "<|other|>"), RENUMBERED),
    (described(7, "<|mask|>"), RENUMBERED),
    (twice, "should have the id 0, but has"),
    ({"words": "[UNK]", "config": {"added_tokens_decoder": {"9" * 5000: added_entry("x")}}}, "an added token must"),
    ({"words": "[UNK]", "config": {"added_tokens_decoder": {"1": [["x"] * 10_000]}}}, "an added token must"),
    ({"words": "[UNK]", "config": {"mask_token": {"x" * 10_000: 1}}}, "mask_token must be a text"),
    ({"words": "[UNK]", "config": {"additional_special_tokens": [1] * 10_000}}, "must be a list of tokens"),
    (fast(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 40}), r"normalizer makes texts up to 1\.1e"),
    (fast(normalizer={**REPLACE, "pattern": {"Regex": ""}, "content": "a" * 2000}), r"up to 2e\+03 times"),
    (fast(normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP}), r"up to 5e\+03 times"),
    (fast(normalizer={"type": "Prepend", "prepend": "a" * 5000}), r"up to 5e\+03 times"),
    (fast(decoder={"type": "Sequence", "decoders": [REPLACE] * 40}), "decoder makes texts"),
    (fast(post_processor={"type": "TemplateProcessing", "single": [WHOLE] * 5000}), "post_processor makes texts"),
    (fast(added_tokens=[{"id": n, **added_entry(f"<{n}>")} for n in range(17_000)]), "has 17,500 tokens, more than"),
    (fast(model={"type": "BPE", "vocab": {}, "merges": ["a b"] * 140_000}), "has 140,000 merges"),
    (fast(model={"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 10**9}), "expected at most 1000"),
    (fast(model={"type": "BPE", "vocab": {f"t{n}": n for n in range(17_000)}, "merges": []}), MANY),
    ({"vocabulary": {f"t{n}": n for n in range(17_000)}, "merges": ""}, MANY),
    ({"words": "\n".join(["[UNK]", *map(str, range(17_000))])}, MANY),
    ({"fast": {"model": {"type": "BPE", "vocab": {"a": 16_999}, "merges": []}}}, MANY),
    ({"vocabulary": {"a": 16_999}, "merges": ""}, MANY),
    ({"words": "[UNK]", "config": {"added_tokens_decoder": {"17000": {"content": "x"}}}}, MANY),
    ({"words": "[UNK]", "added": {"x": 16_999}}, MANY),
    *(({name: enormous}, LARGE) for name in ("fast", "words")),
    ({"vocabulary": enormous, "merges": ""}, LARGE),
    ({"vocabulary": {"a": 0}, "merges": enormous}, LARGE),
]
"""Files of a folder, and words of the error; the network has 500 tokens."""


@pytest.mark.parametrize(("files", "words"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_damaged_files_are_named(mini, files, words, tmp_path):
    folder = write(tmp_path, **(files(mini) if callable(files) else files))
    with pytest.raises(FormatError, match=words) as caught:
        Tokenizer.from_folder(folder, vocab_size=500)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_configuration_may_describe_nothing(tmp_path):
    assert read(write(tmp_path, **PAIR, config={"added_tokens_decoder": []})).encode("abab") == [2, 2]


def test_a_panic_of_the_library_is_our_error(mini, tmp_path):
    folder = write(tmp_path, **fast(pre_tokenizer=split_at("(a+)+$"))(mini))
    tokenizer = read(folder, chat_template=chat.PLAIN)
    bomb = "a" * 40 + "!"
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text, "a"]), tokenizer.encode_chat):
        with pytest.raises(CoddError, match=r"cannot encode .*PanicException.*retry-limit"):
            encode(bomb)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_published_rules_that_rewrite_texts_are_let_through(mini, tmp_path):
    """Of T5, Llama 2 and XLNet."""
    rules = [
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"\xd8\xb5" * 18).decode()},
        {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    files = fast(normalizer={"type": "Sequence", "normalizers": rules[1:]})(mini)
    assert read(write(tmp_path, **files), vocab_size=500).encode("a  b")
    assert math.prod(map(tokenizer_files._growth, rules)) == 72


@pytest.mark.parametrize(
    ("special", "around", "mask"),
    [
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], (2, 3), "[MASK]"),
        (["<cls>", "<pad>", "<eos>", "<unk>", "<null_1>", "<mask>"], (0, 2), "<mask>"),
    ],
)
def test_a_plain_list_of_residues(special, around, mask, tmp_path):
    """AntiBERTy's and ESM's: a vocab.txt of single capitals and nothing beside it, with or without spaces in texts."""
    residues = "ACDEFGHIKLMNPQRSTVWYX"
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *residues]))
    tokenizer = Tokenizer.from_folder(tmp_path)
    own = [len(special) + residues.index(letter) for letter in "EVQ"]
    assert tokenizer.encode("EVQ") == tokenizer.encode(" E V Q") == own
    assert tokenizer.encode(f"EV{mask}Q") == [*own[:2], special.index(mask), own[2]]
    assert tokenizer.encode("EVQ", add_special_tokens=True) == [around[0], *own, around[1]]
    assert tokenizer.decode([around[0], *own, around[1]]) == "EVQ"
    assert tokenizer.mask_id == special.index(mask)
    assert tokenizer.encode("e") == [next(id for id, word in enumerate(special) if "unk" in word.lower())]
