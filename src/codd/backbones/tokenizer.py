"""Text to token ids and back: a checkpoint's tokenizer and its chat template.

No code of the checkpoint runs: the Rust library ``tokenizers`` does the work, chat templates are rendered in a sandbox.
"""

import json
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from jaxtyping import Int
from torch import Tensor

from codd.backbones import chat
from codd.backbones.tokenizer_files import (
    ADDED_FILE,
    CONFIG_FILE,
    FAST_FILE,
    NAMED,
    SPECIAL_FILE,
    TEMPLATE_FILE,
    added_token,
    guarded,
    make_special,
    read_files,
)
from codd.errors import CoddError, FormatError
from codd.files import replacing, write_text

_STAND_INS = range(0xF0000, 0xFFFFE)  # a plane that is private use throughout


class Tokenizer:
    """Encodes text to token ids and decodes them; knows the special tokens and the chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        """``special`` names tokens of the backend: {"mask_token": "<|mask|>", "eos_token": ...}.

        The backend is changed: its truncation and padding are switched off, and the tokens named become special tokens
        of it. FormatError if its vocabulary lacks one, or the chat template is not valid Jinja.
        """
        self.backend = backend
        """The tokenizer of the library ``tokenizers``, for what this class does not offer."""
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special or {})
        """The named special tokens: {"mask_token": "<|mask|>", ...}."""
        make_special(backend, [added_token(token, special=True) for token in self.special_tokens.values()])
        ids = {name: self._id_of(name, token) for name, token in self.special_tokens.items()}
        self.mask_id, self.eos_id, self.pad_id, self.bos_id = (
            ids.get(f"{name}_token") for name in ("mask", "eos", "pad", "bos")
        )
        self.mask_token = self.special_tokens.get("mask_token")
        """The mask token as texts spell it; None if there is none."""
        if chat_template is not None:
            chat.compile_template(chat_template)
        self.chat_template = chat_template
        self._known_ids = frozenset(backend.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self._known_ids, default=-1) + 1
        """One more than the largest id, added tokens included."""

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        *,
        chat_template: str | None = None,
        vocab_size: int | None = None,
    ) -> "Tokenizer | None":
        """The tokenizer of a checkpoint, or None if its folder has no tokenizer files at all.

        ``chat_template`` is the family's, for a checkpoint that has none; ``vocab_size`` is the network's. FormatError
        if the files are damaged, contradict each other, or are far larger than such a network can use.
        """
        with guarded(folder, "make its tokenizer"):
            found = read_files(Path(folder), vocab_size)
            return None if found is None else cls(found[0], special=found[1], chat_template=found[2] or chat_template)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens, named or not: those that ``skip_special_tokens`` skips."""
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of text that one token stands for, a tokenizer that drops or joins text aside."""
        return max((len(token.encode()) for token in self.backend.get_vocab(with_added_tokens=True)), default=0)

    def __repr__(self) -> str:
        """The size of the vocabulary and the named special tokens."""
        named = "".join(f", {name}={token!r}" for name, token in self.special_tokens.items())
        return f"Tokenizer(vocab_size={self.vocab_size}{named})"

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if it is not there."""
        id: int | None = self.backend.token_to_id(token)
        return id

    def id_to_token(self, id: int) -> str | None:
        """A token as the vocabulary spells it, None if there is no such id; ``decode`` gives text."""
        token: str | None = self.backend.id_to_token(id) if id in self._known_ids else None
        return token

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, as ``encode`` gives them."""
        return self.encode(text)

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """The ids of a text; ``add_special_tokens`` adds what the checkpoint puts around one ([CLS] and [SEP]).

        With ``parse_special=False`` a special token that is spelt out in the text is text like any other: use it for
        what a user typed.
        """
        return list(self._encode(text, add_special_tokens, parse_special).ids)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, parse_special: bool = True
    ) -> list[list[int]]:
        """The ids of many texts, in parallel; each as ``encode`` gives them."""
        if isinstance(texts, str):
            raise CoddError("expected a list of texts, found one text: use encode, or put it into a list.")
        for number, text in enumerate(texts):
            _check_text(text, f"text {number}")
        backend = self.backend if parse_special else self._literal_backend
        with guarded("the texts", "encode them"):
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int] | Int[Tensor, " length"], *, skip_special_tokens: bool = True) -> str:
        """The text of some ids; CoddError for ids that are not whole numbers.

        Networks may have more outputs than the vocabulary has tokens (embeddings are padded to a round size). Such an
        id stands for no text, as in the library ``tokenizers``.
        """
        if isinstance(ids, Tensor) and ids.ndim != 1:
            raise CoddError(
                f"expected the ids of one text, found a tensor of shape {tuple(ids.shape)}: decode each row."
            )
        try:
            whole = [operator.index(id) for id in (ids.tolist() if isinstance(ids, Tensor) else ids)]
        except TypeError as error:
            raise CoddError(f"ids are whole numbers ({error}).") from error
        with guarded("the ids", "decode them"):
            known = [id for id in whole if id in self._known_ids]
            return str(self.backend.decode(known, skip_special_tokens=skip_special_tokens))

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template tells the model of functions that it may call."""
        return re.search(r"\btools\b", self.chat_template or "") is not None

    def render_chat(
        self, messages: chat.Messages, *, add_generation_prompt: bool = True, tools: Sequence[Any] | None = None
    ) -> str:
        """The text of a conversation, with the control tokens spelt out; a string is one message of the user."""
        if self.chat_template is None:
            raise CoddError(
                "this tokenizer has no chat template: set its chat_template (codd.backbones.chat has some), or give "
                "the prompt as plain text."
            )
        return chat.render(self.chat_template, messages, self.special_tokens, add_generation_prompt, tools)

    def encode_chat(
        self, messages: chat.Messages, *, add_generation_prompt: bool = True, tools: Sequence[Any] | None = None
    ) -> list[int]:
        """The ids of a conversation. Control tokens come from the template only: in a message they are plain text.

        Args:
            messages: The conversation; a string is one message of the user.
            add_generation_prompt: Whether the answer is to follow.
            tools: Functions as JSON objects, of which the template tells the model if it knows the variable ``tools``.
        """
        plain, told = chat.as_messages(messages), json.dumps(tools, ensure_ascii=False)
        stand_ins = self._stand_ins([told, *(text for message in plain for text in message.values())])
        if not stand_ins:
            return self.encode(self.render_chat(plain, add_generation_prompt=add_generation_prompt, tools=tools))
        disguised = [{key: self._disguise(value, stand_ins) for key, value in message.items()} for message in plain]
        tools = json.loads(self._disguise(told, stand_ins))
        rendered = self.render_chat(disguised, add_generation_prompt=add_generation_prompt, tools=tools)
        return self._encode_disguised(rendered, {ord(fake): true for true, fake in stand_ins.items()})

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, each of them whole or not at all.

        What another tokenizer left in the folder and ``from_folder`` would read as well is removed.
        """
        folder = Path(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict.fromkeys(NAMED),
            **self.special_tokens,
            "chat_template": self.chat_template,
        }
        with replacing(folder, FAST_FILE, CONFIG_FILE) as (fast, named):
            write_text(fast, self.backend.to_str(pretty=True) + "\n")
            write_text(named, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        for stale in (TEMPLATE_FILE, SPECIAL_FILE, ADDED_FILE):
            (folder / stale).unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        """Without the second backend: pickling would forget what makes it different."""
        return {name: value for name, value in self.__dict__.items() if name != "_literal_backend"}

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to special tokens. A copy, since switching the one would disturb other threads."""
        with guarded("the tokenizer", "copy it"):
            backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _id_of(self, name: str, token: str) -> int:
        id: int | None = self.backend.token_to_id(token)
        if id is None:
            raise FormatError(
                f"{name} is {token!r:.200}, which the vocabulary does not have. Add it there, or leave it out."
            )
        return id

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> tokenizers.Encoding:
        _check_text(text, "the text")
        backend = self.backend if parse_special else self._literal_backend
        with guarded("the text", "encode it"):
            return backend.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _spellings(self) -> tuple[str, ...] | None:
        """What special tokens look like in a text; None if one of them is looked for in normalised text only."""
        tokens = [token for token in self.backend.get_added_tokens_decoder().values() if token.special]
        return None if any(token.normalized for token in tokens) else tuple(token.content for token in tokens)

    def _control_spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Where special tokens are spelt out in a text: id, start, end."""
        if self._spellings is not None and not any(spelling in text for spelling in self._spellings):
            return  # most texts: a look is cheaper than encoding them
        encoding = self._encode(text, add_special_tokens=False, parse_special=True)
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id in self.special_ids:
                yield id, start, end

    def _stand_ins(self, texts: Sequence[str]) -> dict[str, str]:
        """An unused character for each character of the control tokens that the texts spell out."""
        spelt = {text[at] for text in texts for _, start, end in self._control_spans(text) for at in range(start, end)}
        spelt = {character for character in spelt if not character.isspace()}  # templates trim
        taken = set(self.chat_template or "").union(*texts)
        free = (chr(code) for code in _STAND_INS if chr(code) not in taken)
        return dict(zip(sorted(spelt), islice(free, len(spelt)), strict=True))

    def _disguise(self, text: str, stand_ins: Mapping[str, str]) -> str:
        """The text with its control tokens spelt in stand-ins, so that the tokenizer does not recognise them."""
        characters = list(text)
        for _, start, end in self._control_spans(text):
            characters[start:end] = [stand_ins.get(character, character) for character in characters[start:end]]
        return "".join(characters)

    def _encode_disguised(self, rendered: str, undisguised: Mapping[int, str]) -> list[int]:
        """The ids of a rendered conversation: control tokens in it are the template's, all between them is text."""
        ids: list[int] = []
        done = 0
        for id, start, end in self._control_spans(rendered):
            ids += self.encode(rendered[done:start].translate(undisguised), parse_special=False)
            ids.append(id)
            done = end
        return ids + self.encode(rendered[done:].translate(undisguised), parse_special=False)


def _check_text(text: object, what: str) -> None:
    if not isinstance(text, str):
        raise CoddError(f"{what} is of type {type(text).__name__}; expected a str.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CoddError(
                f"{what} has half of a surrogate pair at position {error.start}, so that it is not Unicode text. "
                'Decode the source correctly, or with errors="replace".'
            ) from None
