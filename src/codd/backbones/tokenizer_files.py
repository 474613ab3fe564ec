"""The layouts in which tokenizers are published, and how each is read.

``tokenizer.json``, or ``vocab.json`` with ``merges.txt``, or ``vocab.txt``; beside it the configuration that names the
special tokens. No code of the checkpoint runs.
"""

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""How an added token is looked for in texts, as the files and the library name it."""
_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


class TokenizerFiles(NamedTuple):
    """A tokenizer as its files describe it."""

    backend: tokenizers.Tokenizer
    special: dict[str, str]
    """The named special tokens: {"mask_token": "<|mask|>", ...}."""
    chat_template: str | None


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


def read_files(folder: Path, special: Mapping[str, str], vocab_size: int | None = None) -> TokenizerFiles | None:
    """Read whatever layout a folder has; None if it has no tokenizer files at all.

    ``special`` are names for tokens that the files themselves do not name, ``vocab_size`` is the network's. FormatError
    if the files are damaged, contradict each other, or ask for much more than such a network can use.
    """
    if not any((folder / name).exists() for name in (*_VOCABULARIES, CONFIG_FILE)):
        return None
    config, older = _read_object(folder / CONFIG_FILE), _read_object(folder / SPECIAL_FILE)
    named = _named_tokens(folder, config, older)
    added = _added_tokens(folder, config, older, named)
    most = MAX_TOKENS if vocab_size is None else vocab_size + SPARE_TOKENS
    backend = _read_backend(folder, config, named, added, most)
    for name, token in special.items():
        if name not in named and backend.token_to_id(token) is not None:
            named[name] = added_token(token, special=True)
    _check_named(folder, backend, named)
    make_special(backend, named.values())
    return TokenizerFiles(
        backend, {name: token.content for name, token in named.items()}, _read_template(folder, config)
    )


def make_special(backend: tokenizers.Tokenizer, tokens: Iterable[AddedToken]) -> None:
    """Make tokens of the vocabulary special, so that they are recognised in texts; others are skipped."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = {token.content: token for token in tokens if token.content not in special}
    backend.add_special_tokens([token for text, token in missing.items() if backend.token_to_id(text) is not None])


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    return read_json_object(path) if path.exists() else {}


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    where = str(path) if path.exists() else f"{folder / CONFIG_FILE}: chat_template"
    template: object = read_text(path) if path.exists() else config.get("chat_template")
    if isinstance(template, list):
        template = _default_template(template, where)
    if template is None:
        return None
    if not isinstance(template, str):
        raise FormatError(f"{where}: expected a text or a list of them, found {type(template).__name__}.")
    chat.compile_template(template, where)
    return template


def _default_template(templates: Sequence[Any], where: str) -> object:
    try:
        return {entry["name"]: entry["template"] for entry in templates}.get("default")
    except (TypeError, KeyError) as error:
        raise FormatError(f'{where}: expected a list of {{"name": ..., "template": ...}}.') from error


def added_token(entry: str | Mapping[str, Any], *, special: bool) -> AddedToken:
    """A token from its entry in the files: its text, or an object with its text and flags."""
    fields = {"content": entry} if isinstance(entry, str) else entry
    special = bool(fields.get("special", special))
    defaults = {**dict.fromkeys(_FLAGS, False), "special": special, "normalized": not special}
    return AddedToken(fields["content"], **{flag: bool(fields.get(flag, defaults[flag])) for flag in _FLAGS})


def _is_token(entry: object) -> bool:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return isinstance(text, str) and text != ""


def _named_tokens(folder: Path, config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, AddedToken]:
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


def _check_named(folder: Path, backend: tokenizers.Tokenizer, named: dict[str, AddedToken]) -> None:
    for name in [name for name, token in named.items() if backend.token_to_id(token.content) is None]:
        if name in _USED:
            raise FormatError(
                f"{folder / CONFIG_FILE}: {name} is {named[name].content!r:.80}, which has no id. List it with its id "
                "under added_tokens_decoder, or set it to null."
            )
        del named[name]  # nothing here uses it


def _added_tokens(
    folder: Path, config: Mapping[str, Any], older: Mapping[str, Any], named: Mapping[str, AddedToken]
) -> dict[int, AddedToken]:
    """The tokens beside the vocabulary by id, from ``tokenizer_config.json`` or the older ``added_tokens.json``."""
    added = _added_by_config(folder / CONFIG_FILE, config.get("added_tokens_decoder") or {})
    ids = {token.content: id for id, token in added.items()}
    special = {token.content: token for token in named.values()}
    for entry in _other_special(folder / CONFIG_FILE, config) + _other_special(folder / SPECIAL_FILE, older):
        token = added_token(entry, special=True)
        special.setdefault(token.content, token)
    path = folder / ADDED_FILE
    for text, id in _read_object(path).items():
        if not _is_id(id):
            raise FormatError(f"{path}: the id of {text!r:.80} must be a whole number from 0, found {id!r:.80}.")
        if ids.get(text, id) != id or (id in added and added[id].content != text):
            raise FormatError(
                f"{path}: gives {text!r:.80} the id {id}, but {CONFIG_FILE} says otherwise. Remove the wrong one."
            )
        if id not in added:
            added[id] = special.get(text) or added_token(text, special=False)
            ids[text] = id
    return dict(sorted(added.items()))


def _other_special(path: Path, entries: Mapping[str, Any]) -> list[str | dict[str, Any]]:
    tokens = entries.get("additional_special_tokens") or []
    if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
        raise FormatError(f"{path}: additional_special_tokens must be a list of tokens, found {tokens!r:.80}.")
    return tokens


def _added_by_config(path: Path, entries: object) -> dict[int, AddedToken]:
    if not isinstance(entries, dict):
        raise FormatError(f"{path}: added_tokens_decoder must be an object, found {type(entries).__name__}.")
    added: dict[int, AddedToken] = {}
    seen: dict[str, int] = {}
    for key, entry in entries.items():
        known = key.isascii() and key.isdigit() and len(key) < 10
        if not known or not isinstance(entry, dict) or not _is_token(entry):
            wrong = f"{key!r:.80}: {entry!r:.80}"
            raise FormatError(f'{path}: added_tokens_decoder must map ids to {{"content": ...}}, found {wrong}.')
        id, token = int(key), added_token(entry, special=False)
        if token.content in seen or id in added:
            raise FormatError(
                f"{path}: added_tokens_decoder has {token.content!r:.80} ({id}) twice. Remove one of them."
            )
        added[id], seen[token.content] = token, id
    return added


def _is_id(id: object) -> bool:
    return type(id) is int and 0 <= id < 2**32


def _read_backend(
    folder: Path, config: Mapping[str, Any], named: dict[str, AddedToken], added: Mapping[int, AddedToken], most: int
) -> tokenizers.Tokenizer:
    if (folder / FAST_FILE).exists():
        return _read_fast(folder / FAST_FILE, added, most)
    if (folder / VOCABULARY_FILE).exists():
        return _read_byte_level(folder, config, added, most)
    if (folder / MERGES_FILE).exists():
        raise FormatError(f"{folder / VOCABULARY_FILE}: is missing beside {MERGES_FILE}. Download it too.")
    if (folder / WORDS_FILE).exists():
        return _read_word_pieces(folder, config, named, added, most)
    raise FormatError(
        f"{folder}: has a {CONFIG_FILE} but no vocabulary. Download {FAST_FILE}, or {VOCABULARY_FILE} and "
        f"{MERGES_FILE}, or {WORDS_FILE} too."
    )


def _max_bytes(most: int) -> int:
    """The largest size of a vocabulary file, in bytes: published ones take up to 130 a token, merges included."""
    return (1 << 20) + 512 * most


def _check_vocabulary(path: Path, vocabulary: object, more: int, most: int) -> None:
    """FormatError for more tokens, or larger ids, than a network can use: the library counts up to the largest id."""
    ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
    count = max(_length(vocabulary) + more, *(id + 1 for id in ids if type(id) is int), 0)
    _check_count(path, count, most, "tokens")


def _check_count(path: Path, count: int, most: int, what: str) -> None:
    if count > most:
        raise FormatError(f"{path}: has {count:,} {what}, more than the {most:,} that are of use to this model.")


def _check_bounds(path: Path, content: Mapping[str, Any], most: int) -> None:
    """FormatError for a ``tokenizer.json`` that would take time or memory out of all proportion to model or text."""
    model = content.get("model")
    if isinstance(model, dict):
        _check_vocabulary(path, model.get("vocab"), _length(content.get("added_tokens")), most)
        _check_count(path, _length(model.get("merges")), 8 * most, "merges")
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


def _read_fast(path: Path, added: Mapping[int, AddedToken], most: int) -> tokenizers.Tokenizer:
    """``tokenizer.json``; added tokens that the configuration describes too are as it says."""
    text = read_text(path, _max_bytes(most))
    content = parse_json_object(path, text)
    _check_bounds(path, content, most)
    listed = _listed_tokens(path, content.get("added_tokens"))
    wanted = listed | {id: _as_entry(id, token) for id, token in added.items()}
    _check_count(path, max(wanted, default=-1) + 1, most, "tokens")
    if wanted != listed:
        text = json.dumps(content | {"added_tokens": [entry for _, entry in sorted(wanted.items())]})
    with guarded(path, "read it"):
        backend = tokenizers.Tokenizer.from_str(text)
    _check_ids(path, backend, {id: entry["content"] for id, entry in wanted.items()})
    return backend


def _listed_tokens(path: Path, entries: object) -> dict[int, dict[str, Any]]:
    listed: dict[int, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not _is_token(entry):
            raise FormatError(f'{path}: added_tokens must be objects with "id" and "content", found {entry!r:.80}.')
        if entry["id"] in listed:
            raise FormatError(f"{path}: added_tokens has the id {entry['id']} twice. Download it again.")
        listed[entry["id"]] = entry
    return listed


def _as_entry(id: int, token: AddedToken) -> dict[str, Any]:
    return {"id": id, "content": token.content, **{flag: getattr(token, flag) for flag in _FLAGS}}


def _check_ids(path: Path, backend: tokenizers.Tokenizer, wanted: Mapping[int, str]) -> None:
    """Raise a FormatError if an added token got another id: the library numbers them by itself, without an error."""
    for id, text in wanted.items():
        actual = backend.token_to_id(text)
        if actual != id or backend.id_to_token(id) != text:
            raise FormatError(
                f"{path}: the added token {text!r:.80} should have the id {id}, but gets {actual}. Ids must be "
                f"distinct and follow the vocabulary without a gap: compare added_tokens with added_tokens_decoder in "
                f"{CONFIG_FILE}."
            )


def _with_added(
    path: Path, vocabulary: Mapping[str, int], added: Mapping[int, AddedToken], most: int
) -> dict[str, int]:
    """The vocabulary with the added tokens, each with exactly its stated id; FormatError if ids or texts repeat."""
    whole = dict(vocabulary)
    for id, token in added.items():
        if whole.setdefault(token.content, id) != id:
            raise FormatError(
                f"{path}: has {token.content!r:.80} as {whole[token.content]}, but it is listed as the added token "
                f"{id}. Correct added_tokens_decoder in {CONFIG_FILE}."
            )
    owners: dict[int, str] = {}
    for text, id in whole.items():
        if id in owners:
            raise FormatError(
                f"{path}: the id {id} is that of {owners[id]!r:.80} and of {text!r:.80}. Download it again."
            )
        owners[id] = text
    _check_vocabulary(path, whole, 0, most)
    return whole


def _read_byte_level(
    folder: Path, config: Mapping[str, Any], added: Mapping[int, AddedToken], most: int
) -> tokenizers.Tokenizer:
    """``vocab.json`` and ``merges.txt``: byte-level BPE with the pre-tokenizer of GPT-2 or of Qwen2."""
    path = folder / VOCABULARY_FILE
    vocabulary = read_json_object(path, _max_bytes(most))
    if wrong := [text for text, id in vocabulary.items() if not _is_id(id)]:
        raise FormatError(
            f"{path}: the id of {wrong[0]!r:.80} must be a whole number from 0, found {vocabulary[wrong[0]]!r:.80}."
        )
    merges = _read_merges(folder / MERGES_FILE, vocabulary, _max_bytes(most))
    whole = _with_added(path, vocabulary, added, most)
    backend = tokenizers.Tokenizer(models.BPE(vocab=whole, merges=merges))
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
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added.values()))
    return backend


def split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Split a text into the matches of a regular expression, then spell each in the byte-level alphabet."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _read_merges(path: Path, vocabulary: Mapping[str, int], most_bytes: int) -> list[tuple[str, str]]:
    if not path.exists():
        raise FormatError(f"{path}: is missing beside {VOCABULARY_FILE}. Download it too.")
    merges = []
    for number, line in enumerate(read_text(path, most_bytes).split("\n"), 1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise FormatError(
                f"{path}: line {number} must be two tokens with a space between them, found {line!r:.80}."
            )
        for text in (*parts, "".join(parts)):
            if text not in vocabulary:
                raise FormatError(
                    f"{path}: line {number} merges {line!r:.80}, but {VOCABULARY_FILE} has no {text!r:.80}: the two "
                    "files do not belong together. Download both again."
                )
        merges.append((parts[0], parts[1]))
    return merges


def _read_word_pieces(
    folder: Path, config: Mapping[str, Any], named: dict[str, AddedToken], added: Mapping[int, AddedToken], most: int
) -> tokenizers.Tokenizer:
    """``vocab.txt``: WordPiece. Special tokens that the files do not name are spelt as BERT's."""
    path = folder / WORDS_FILE
    vocabulary = _with_added(path, _read_words(path, _max_bytes(most)), added, most)
    for name, text in _BERT.items():
        if name not in named and text in vocabulary:
            named[name] = added_token(text, special=True)
    unknown = named["unk_token"].content if "unk_token" in named else _BERT["unk_token"]
    if unknown not in vocabulary:
        raise FormatError(f"{path}: has no {unknown!r:.80}, the token for what is unknown. Download it again.")
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=bool(config.get("clean_up_tokenization_spaces", True)))
    if "cls_token" in named and "sep_token" in named:
        backend.post_processor = _with_cls_and_sep(
            path, vocabulary, named["cls_token"].content, named["sep_token"].content
        )
    backend.add_tokens(list(added.values()))
    return backend


def _read_words(path: Path, most_bytes: int) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(read_text(path, most_bytes).removesuffix("\n").split("\n")):
        word = line.rstrip("\r")
        if word in vocabulary:
            raise FormatError(
                f"{path}: line {number + 1} repeats {word!r:.80} of line {vocabulary[word] + 1}. Download it again."
            )
        vocabulary[word] = number
    return vocabulary


def _with_cls_and_sep(
    path: Path, vocabulary: Mapping[str, int], first: str, last: str
) -> processors.TemplateProcessing:
    for text in (first, last):
        if text not in vocabulary:
            raise FormatError(f"{path}: has no {text!r:.80}, which belongs around each text. Download it again.")
    return processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
    )
