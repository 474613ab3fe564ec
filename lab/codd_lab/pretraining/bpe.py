"""Our own vocabulary: byte-level BPE, in which every digit stands alone and no text is unknown."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from codd.backbones import chat
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.tokenizer_files import split_then_bytes
from codd.errors import CoddError

MINI_SPECIAL_TOKENS = ("<|pad|>", "<|mask|>", "<|eos|>", "<|user|>", "<|assistant|>")

# English contractions; a word with the space before it; one digit; punctuation with the space before it; line breaks
# with what is blank before them; blanks, the last of which is left to the word that follows. Marks belong to letters,
# without which many scripts would fall apart.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

_MEANINGS = {"<|pad|>": "pad_token", "<|mask|>": "mask_token", "<|eos|>": "eos_token"}


def train_bpe(
    texts: Iterable[str], *, vocab_size: int = 8192, special_tokens: Sequence[str] = MINI_SPECIAL_TOKENS
) -> Tokenizer:
    """Train a vocabulary of at most ``vocab_size`` tokens; fewer if the texts give no more pairs to merge.

    The special tokens have the first ids, in the order given, and the 256 bytes the next. Nothing is normalised:
    every text survives encoding and decoding unchanged. The same texts give the same tokenizer.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = split_then_bytes(SPLIT)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check(backend.pre_tokenizer, special_tokens, vocab_size, smallest=len(alphabet) + len(special_tokens))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(
        backend,
        special={name: token for token, name in _MEANINGS.items() if token in special_tokens},
        chat_template=chat.MINI if set(MINI_SPECIAL_TOKENS) <= set(special_tokens) else None,
    )


def _check(
    splitter: pre_tokenizers.PreTokenizer, special_tokens: Sequence[str], vocab_size: int, smallest: int
) -> None:
    if vocab_size < smallest:
        raise CoddError(
            f"vocab_size is {vocab_size}, but the 256 bytes and the special tokens alone are {smallest}. Raise it."
        )
    if len(set(special_tokens)) < len(special_tokens):
        raise CoddError(f"special tokens must be distinct, found {', '.join(special_tokens)}.")
    for token in special_tokens:
        if len(splitter.pre_tokenize_str(token)) < 2:
            # Merges never cross a cut, so no text can turn into a token that the splitter cuts.
            raise CoddError(f"the special token {token!r} could occur as a word: put it into marks, like <|word|>.")
