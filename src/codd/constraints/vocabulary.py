"""What each token writes, in bytes: the bridge between automata over text and automata over tokens."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from codd.errors import InvalidConstraint

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes that each id writes; none for those that write no text, which a constraint never allows."""

    tokens: tuple[bytes, ...]
    strips_space: bool = False
    """Whether decoding leaves out a space that a text begins with, as with SentencePiece."""
    encode: Callable[[str], Sequence[int]] | None = field(default=None, repr=False)
    """The ids of a text, for templates."""

    @classmethod
    def of(cls, tokenizer: Any, size: int | None = None) -> "Vocabulary":
        """The vocabulary of a tokenizer, codd's or one of the library ``tokenizers``.

        It is byte-level BPE, or SentencePiece (BPE or unigram, with or without bytes), or one of single characters.
        Special and other added tokens write nothing, nor do ids up to ``size`` (the network's outputs) that the
        tokenizer lacks. Texts are what its ``decode`` gives. InvalidConstraint for tokenizers of other kinds, whose
        decoding is not a text for each token, one after the other (WordPiece).
        """
        backend: tokenizers.Tokenizer = getattr(tokenizer, "backend", tokenizer)  # codd's own holds one
        spelling = _Spelling(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None)
        written = {id: spelling.bytes_of(token) for token, id in backend.get_vocab(with_added_tokens=False).items()}
        written |= dict.fromkeys(backend.get_added_tokens_decoder(), b"")
        count = max(written, default=-1) + 1
        if size is not None and size < count and any(written.get(id) for id in range(size, count)):
            raise InvalidConstraint(f"the tokenizer has ids up to {count - 1}, but the network only {size} outputs.")
        tokens = tuple(written.get(id, b"") for id in range(count if size is None else size))
        return cls(tokens, spelling.strips_space, lambda text: backend.encode(text, add_special_tokens=False).ids)

    def __len__(self) -> int:
        """V, the number of token ids."""
        return len(self.tokens)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all tokens and of how they are joined: the key of compiled automata."""
        digest = hashlib.sha256(b"space" if self.strips_space else b"")
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    @cached_property
    def characters(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """The bytes of all tokens in a row, where each token begins, and its length."""
        lengths = np.array([len(token) for token in self.tokens], dtype=np.int64)
        return np.frombuffer(b"".join(self.tokens), np.uint8), np.cumsum(lengths) - lengths, lengths

    @cached_property
    def has_all_bytes(self) -> bool:
        """Whether there is a token for each single byte."""
        return {token[0] for token in self.tokens if len(token) == 1} == set(range(256))

    def text_of(self, ids: Sequence[int]) -> bytes:
        """What ids write, as the tokenizer decodes them."""
        written = b"".join(self.tokens[id] for id in ids)
        return written[1:] if self.strips_space and written.startswith(b" ") else written

    def spell(self, text: str, first: bool) -> list[int]:
        """The tokenizer's ids for a part of a text, or as few tokens as write it if its own do not fit.

        ``first``: whether the whole text begins here.
        """
        wanted = text.encode()
        ids = list(self.encode(text)) if self.encode is not None else []
        if (self.text_of(ids) if first else b"".join(self.tokens[id] for id in ids)) == wanted:
            return ids
        fewest = [0, *[len(wanted) + 1] * len(wanted)]  # tokens that write the text up to each byte
        last = [-1] * (len(wanted) + 1)  # and the last one of them
        longest = max(map(len, self._ids), default=0)
        for end in range(1, len(wanted) + 1):
            for begin in range(max(end - longest, 0), end):
                id = self._ids.get(wanted[begin:end])
                if id is not None and fewest[begin] + 1 < fewest[end]:
                    fewest[end], last[end] = fewest[begin] + 1, id
        if fewest[-1] > len(wanted):
            raise InvalidConstraint(f"no tokens of this vocabulary write {text!r:.80}.")
        best, end = [], len(wanted)
        while end:
            best.append(last[end])
            end -= len(self.tokens[last[end]])
        return best[::-1]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: id for id, token in enumerate(self.tokens) if token}  # SentencePiece has its bytes first


class _Spelling:
    """How a decoder turns tokens into bytes."""

    def __init__(self, decoder: Any):
        steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
        kinds = [step["type"] for step in steps]
        self._byte_level, self._as_is = kinds == ["ByteLevel"], kinds == ["Fuse"]
        self._fallback = "ByteFallback" in kinds
        self._drops_all = False
        self.strips_space = False
        if self._byte_level or self._as_is:
            return
        spaces = False
        for i, step in enumerate(steps):
            if step["type"] == "Metaspace" and step["replacement"] == "▁":
                spaces, self._drops_all = True, step["prepend_scheme"] != "never"
                self.strips_space = self._drops_all
            elif step["type"] == "Replace" and (step["pattern"], step["content"]) == ({"String": "▁"}, " "):
                spaces = True
            elif (step["type"], step.get("content"), step.get("start"), step.get("stop")) == ("Strip", " ", 1, 0):
                self.strips_space = spaces = spaces and "Fuse" in kinds[:i]  # of the text, not of each token
            elif step["type"] not in ("ByteFallback", "Fuse"):
                spaces = False
                break
        if not spaces:
            raise InvalidConstraint(
                "constraints need a byte-level or SentencePiece tokenizer; this one decodes by "
                f"{' + '.join(kinds) or None}, where the text of a token depends on its neighbours."
            )

    def bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            return bytes(_BYTES[c] for c in token) if all(c in _BYTES for c in token) else b""
        if self._as_is:
            return token.encode(errors="ignore")
        if self._fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._drops_all and token.count("▁") > 1:
            return b""  # at the beginning of a text, and only there, decoding leaves out all of its spaces
        return token.replace("▁", " ").encode(errors="ignore")


def _byte_alphabet() -> dict[str, int]:
    """The character of each byte in the byte-level alphabet."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    plain = {c: ord(c) for c in alphabet if ord(c) < 256}  # printable ones stand for themselves
    others = sorted(alphabet - set(plain))  # the rest follow in order from 256 on
    return plain | dict(zip(others, sorted(set(range(256)) - set(plain.values())), strict=True))


_BYTES = _byte_alphabet()
