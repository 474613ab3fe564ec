"""The layouts in which tokenizers are published, and how each is read.

``tokenizer.json``, or ``vocab.json`` with ``merges.txt``, or ``vocab.txt``; beside it the configuration that names the
special tokens. No code of the checkpoint runs.
"""

import base64
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from codd.backbones import chat
from codd.errors import CoddError, FormatError
from codd.files import brief, parse_json_object, read_json_object, read_text

FAST_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
VOCABULARY_FILE = "vocab.json"
MERGES_FILE = "merges.txt"
WORDS_FILE = "vocab.txt"
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"

# What the Qwen2 vocabularies were trained with: any other expression cuts text into pieces they have no merges for.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPARE_TOKENS, MAX_TOKENS = 1 << 14, 1 << 20
"""How many tokens a vocabulary may have beyond the network's, and where no network is known."""
MAX_GROWTH = 1024
"""How many times as long a text may become by rewriting it."""
MAX_WORD = 1000
"""Characters of a word that WordPiece looks up; the time for it grows with their square."""

_USED = ("mask_token", "eos_token", "pad_token", "bos_token", "unk_token")
NAMED = (*_USED, "cls_token", "sep_token")
_VOCABULARIES = (FAST_FILE, VOCABULARY_FILE, MERGES_FILE, WORDS_FILE)
_BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
_ESM = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>", "cls_token": "<cls>", "mask_token": "<mask>"}

Entry = dict[str, Any]
"""A token as ``tokenizer.json`` lists it: its text, and how it is looked for in texts."""


@contextmanager
def guarded(where: object, doing: str) -> Iterator[None]:
    """Turn what the library raises into a FormatError, panics too, which are no Exception.

    A panic is what becomes of a regular expression that takes more than ten million steps from one position of a text.
    """
    try:
        yield
    except CoddError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FormatError(
            f"{where}: tokenizers {tokenizers.__version__} cannot {doing} ({brief(error)}). Download the tokenizer "
            "again, or upgrade tokenizers."
        ) from error


def read_files(folder: Path, vocab_size: int | None) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None] | None:
    """The tokenizer of a folder, its named special tokens and its chat template; None if it has no tokenizer files.

    Any layout becomes the content of a ``tokenizer.json``, which the library reads. ``vocab_size`` is the network's.
    FormatError if the files are damaged, contradict each other, or ask for much more than such a network can use.
    """
    if not any((folder / name).exists() for name in (*_VOCABULARIES, CONFIG_FILE)):
        return None
    config, older = _read_object(folder / CONFIG_FILE), _read_object(folder / SPECIAL_FILE)
    named = _named_tokens(folder, config, older)
    added = _added_tokens(folder, config, older, named)
    most = MAX_TOKENS if vocab_size is None else vocab_size + SPARE_TOKENS
    backend = _build(*_read_content(folder, config, named, most), added, most)
    for name in [name for name, token in named.items() if backend.token_to_id(token["content"]) is None]:
        if name in _USED:
            raise FormatError(
                f"{folder / CONFIG_FILE}: {name} is {named[name]['content']!r:.80}, which has no id. List it with its "
                "id under added_tokens_decoder, or set it to null."
            )
        del named[name]  # nothing here uses it
    make_special(backend, named.values())
    return backend, {name: token["content"] for name, token in named.items()}, _read_template(folder, config)


def make_special(backend: tokenizers.Tokenizer, tokens: Iterable[Entry]) -> None:
    """Make tokens of the vocabulary special, so that they are recognised in texts; others are skipped."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    known = {token["content"]: token for token in tokens if backend.token_to_id(token["content"]) is not None}
    backend.add_special_tokens([AddedToken(**token) for text, token in known.items() if text not in special])


def added_token(entry: str | Mapping[str, Any], *, special: bool) -> Entry:
    """A token from its entry in the files: its text, or an object with its text and flags."""
    fields = {"content": entry} if isinstance(entry, str) else entry
    special = bool(fields.get("special", special))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special, "special": special}
    return {"content": fields["content"], **{flag: bool(fields.get(flag, flags[flag])) for flag in flags}}


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    return read_json_object(path) if path.exists() else {}


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    where = str(path) if path.exists() else f"{folder / CONFIG_FILE}: chat_template"
    template: Any = read_text(path) if path.exists() else config.get("chat_template")
    if isinstance(template, list):
        try:
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        except (TypeError, KeyError) as error:
            raise FormatError(f'{where}: expected a list of {{"name": ..., "template": ...}}.') from error
    if template is None:
        return None
    if not isinstance(template, str):
        raise FormatError(f"{where}: expected a text or a list of them, found {type(template).__name__}.")
    chat.compile_template(template, where)
    return template


def _is_token(entry: object) -> bool:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return isinstance(text, str) and text != ""


def _named_tokens(folder: Path, config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Entry]:
    """The named special tokens; a null in the configuration overrides the older file."""
    named = {}
    for name in NAMED:
        file, entries = (CONFIG_FILE, config) if name in config else (SPECIAL_FILE, older)
        entry = entries.get(name)
        if entry is None:
            continue
        if not _is_token(entry):
            raise FormatError(
                f"{folder / file}: {name} must be a text or have one as its content, found {entry!r:.80}."
            )
        named[name] = added_token(entry, special=True)
    return named


def _added_tokens(
    folder: Path, config: Mapping[str, Any], older: Mapping[str, Any], named: Mapping[str, Entry]
) -> list[Entry]:
    """The tokens beside the vocabulary, by ``tokenizer_config.json`` and the older ``added_tokens.json``."""
    special = {token["content"] for token in named.values()}
    for file, fields in ((CONFIG_FILE, config), (SPECIAL_FILE, older)):
        others = fields.get("additional_special_tokens") or []
        if not isinstance(others, list) or not all(map(_is_token, others)):
            raise FormatError(
                f"{folder / file}: additional_special_tokens must be a list of tokens, found {others!r:.80}."
            )
        special |= {added_token(entry, special=True)["content"] for entry in others}
    stated = config.get("added_tokens_decoder") or {}
    if not isinstance(stated, dict):
        raise FormatError(f"{folder / CONFIG_FILE}: added_tokens_decoder must be an object, found {stated!r:.80}.")
    known = [(int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key, x) for key, x in stated.items()]
    listed = [{**entry, "id": id} if isinstance(entry, dict) else entry for id, entry in known]
    older_listed = _read_object(folder / ADDED_FILE).items()
    return [
        *_entries(folder / CONFIG_FILE, listed),
        *_entries(folder / ADDED_FILE, [{"content": x, "id": id, "special": x in special} for x, id in older_listed]),
    ]


def _entries(path: Path, listed: object) -> list[Entry]:
    """A file's list of added tokens, checked."""
    entries = listed if isinstance(listed, list) else []
    for entry in entries:
        id = entry.get("id") if isinstance(entry, dict) and _is_token(entry) else None
        if type(id) is not int or not 0 <= id < 2**32:
            raise FormatError(
                f"{path}: an added token must have a text and an id (a whole number from 0), found {entry!r:.80}."
            )
    return [{"id": entry["id"], **added_token(entry, special=False)} for entry in entries]


def _read_content(
    folder: Path, config: Mapping[str, Any], named: dict[str, Entry], most: int
) -> tuple[Path, dict[str, Any]]:
    """The file of the vocabulary, and what stands or would stand in ``tokenizer.json``."""
    most_bytes = (1 << 20) + 512 * most  # published vocabularies take up to 130 bytes a token, merges included
    if (path := folder / FAST_FILE).exists():
        return path, parse_json_object(path, read_text(path, most_bytes))
    if (path := folder / VOCABULARY_FILE).exists():
        vocabulary, merges = read_json_object(path, most_bytes), folder / MERGES_FILE
        if not merges.exists():
            raise FormatError(f"{merges}: is missing beside {VOCABULARY_FILE}. Download it too.")
        lines = [line.rstrip("\r") for line in read_text(merges, most_bytes).split("\n")]
        model = {"vocab": vocabulary, "merges": [line for line in lines if line]}
        return path, _content(_byte_level(folder, config), model)
    if (folder / MERGES_FILE).exists():
        raise FormatError(f"{path}: is missing beside {MERGES_FILE}. Download it too.")
    if (path := folder / WORDS_FILE).exists():
        words = [line.rstrip("\r") for line in read_text(path, most_bytes).removesuffix("\n").split("\n")]
        if twice := [word for word, count in Counter(words).items() if count > 1]:
            raise FormatError(f"{path}: has {twice[0]!r:.80} in more than one line. Download it again.")
        for name, text in (*_BERT.items(), *_ESM.items()):
            if text in words:
                named.setdefault(name, added_token(text, special=True))
        vocabulary = {word: id for id, word in enumerate(words)}
        unknown = named["unk_token"]["content"] if "unk_token" in named else _BERT["unk_token"]
        rules = _word_pieces(path, config, named, vocabulary, unknown)
        return path, _content(rules, {"vocab": vocabulary, "unk_token": unknown})
    raise FormatError(
        f"{folder}: has a {CONFIG_FILE} but no vocabulary. Download {FAST_FILE}, or {VOCABULARY_FILE} and "
        f"{MERGES_FILE}, or {WORDS_FILE} too."
    )


def _content(rules: tokenizers.Tokenizer, model: Mapping[str, Any]) -> dict[str, Any]:
    """What ``tokenizer.json`` would have for some rules, with fields of the model."""
    content: dict[str, Any] = json.loads(rules.to_str())
    return {**content, "model": {**content["model"], **model}}


def _byte_level(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The rules of byte-level BPE with the pre-tokenizer of GPT-2 or of Qwen2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    kind = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if kind in ("Qwen2Tokenizer", "DreamTokenizer"):
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = split_then_bytes(QWEN2_SPLIT)
    elif kind == "GPT2Tokenizer":
        prefix = bool(config.get("add_prefix_space", False))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True)
    else:
        raise FormatError(
            f"{folder / CONFIG_FILE}: tokenizer_class is {kind}, whose rules are not known here; known are "
            f"GPT2Tokenizer, Qwen2Tokenizer and DreamTokenizer. Put its {FAST_FILE} into the folder."
        )
    return backend


def _word_pieces(
    path: Path, config: Mapping[str, Any], named: Mapping[str, Entry], vocabulary: Mapping[str, int], unknown: str
) -> tokenizers.Tokenizer:
    """BERT's rules; special tokens that the files do not name are spelt as BERT's or ESM's.

    A vocabulary of single characters, as of residues, is read character by character, and as it is written.
    """
    plain = [word for word in vocabulary if not (word[:1] + word[-1:] in ("[]", "<>") and len(word) > 1)]
    characters = all(len(word) == 1 for word in plain)
    ends = ("cls_token", "sep_token" if "sep_token" in named else "eos_token")
    around = [named[name]["content"] for name in ends] if named.keys() >= set(ends) else []
    for text in (unknown, *around):
        if text not in vocabulary:
            raise FormatError(f"{path}: has no {text!r:.80}, a token that texts need. Download it again.")
    backend = tokenizers.Tokenizer(models.WordPiece())
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=bool(config.get("clean_up_tokenization_spaces", True)))
    if characters:
        each = pre_tokenizers.Split(Regex("."), behavior="isolated")
        backend.normalizer, backend.decoder = normalizers.Strip(), decoders.Fuse()
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), each])
    if around:
        first, last = around
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {last} $B:1 {last}:1",
            special_tokens=[(text, vocabulary[text]) for text in around],
        )
    return backend


def split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split a text into the matches of a regular expression, then spell each in the byte-level alphabet."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _build(path: Path, content: dict[str, Any], added: list[Entry], most: int) -> tokenizers.Tokenizer:
    """The library's tokenizer; tokens that the configuration describes, too, are as it says."""
    listed = _entries(path, content.get("added_tokens"))
    entries = {entry["id"]: entry for entry in reversed(added + listed)}
    if path.name != FAST_FILE:  # so that the ids of added tokens may leave gaps
        vocabulary = content["model"]["vocab"]
        for entry in added:
            vocabulary.setdefault(entry["content"], entry["id"])
        if twice := [id for id, count in Counter(vocabulary.values()).items() if count > 1]:
            texts = " and ".join(repr(text)[:80] for text, id in vocabulary.items() if id == twice[0])
            raise FormatError(f"{path}: the id {twice[0]} is that of {texts:.200}. Download it again.")
    content = {**content, "added_tokens": [entry for _, entry in sorted(entries.items())]}
    _check_bounds(path, content, most)
    with guarded(path, "read it"):
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    for entry in added + listed:  # the library numbers them by itself, without an error
        id, text = entry["id"], entry["content"]
        if backend.token_to_id(text) != id or backend.id_to_token(id) != text:
            raise FormatError(
                f"{path}: the added token {text!r:.80} should have the id {id}, but has {backend.token_to_id(text)}, "
                f"and {id} is {backend.id_to_token(id)!r:.80}. Ids must be distinct and follow the vocabulary without "
                f"a gap: compare added_tokens, added_tokens_decoder in {CONFIG_FILE} and {ADDED_FILE}."
            )
    return backend


def _check_bounds(path: Path, content: Mapping[str, Any], most: int) -> None:
    """FormatError for a ``tokenizer.json`` that would take time or memory out of all proportion to model or text."""
    model = content.get("model")
    if isinstance(model, dict):
        vocabulary = model.get("vocab")
        ids = vocabulary.values() if isinstance(vocabulary, dict) else ()  # the library counts up to the largest
        tokens = _length(vocabulary) + _length(content.get("added_tokens"))
        tokens = max(tokens, *(id + 1 for id in ids if type(id) is int), 0)
        for what, count, limit in (("tokens", tokens, most), ("merges", _length(model.get("merges")), 8 * most)):
            if count > limit:
                raise FormatError(
                    f"{path}: has {count:,} {what}, more than the {limit:,} that are of use to this model."
                )
        longest = model.get("max_input_chars_per_word", 0)
        if isinstance(longest, int) and longest > MAX_WORD:
            raise FormatError(f"{path}: max_input_chars_per_word is {longest}; expected at most {MAX_WORD}.")
    for name in ("normalizer", "post_processor", "decoder"):
        if (growth := math.prod(map(_growth, _objects(content.get(name))))) > MAX_GROWTH:
            raise FormatError(
                f"{path}: its {name} makes texts up to {growth:.3g} times as long; codd stops at {MAX_GROWTH}."
            )


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | dict) else 0


def _objects(part: object) -> Iterator[dict[str, Any]]:
    """Every object in a part of ``tokenizer.json``, however deep."""
    if isinstance(part, dict):
        yield part
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _objects(value)


def _growth(rule: Mapping[str, Any]) -> float:
    """At most how many times as long a rule makes a text."""
    if "pattern" in rule and "content" in rule:  # by the fields: the library does not insist on the type's name
        replaced = rule["pattern"].get("String") if isinstance(rule["pattern"], dict) else None
        grown = float(_length(rule["content"]))
        return max(1.0, grown / _length(replaced)) if replaced else 1 + grown
    if "precompiled_charsmap" in rule:  # a trie with its size before it, then the replacements
        stored = base64.b64decode(rule["precompiled_charsmap"] or "")
        return float(max(1, *map(len, stored[4 + int.from_bytes(stored[:4], "little") :].split(b"\0"))))
    return float(max(1, *(_length(rule.get(name)) for name in ("prepend", "single", "ids"))))
