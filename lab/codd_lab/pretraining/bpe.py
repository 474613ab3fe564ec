"""Our own vocabulary: byte-level BPE, in which every digit stands alone and no text is unknown."""

from collections.abc import Iterable

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


def train_bpe(texts: Iterable[str], *, vocab_size: int = 8192) -> Tokenizer:
    """Train a vocabulary of at most ``vocab_size`` tokens; fewer if the texts give no more pairs to merge.

    `MINI_SPECIAL_TOKENS` have the first ids, and the 256 bytes the next; no text turns into a special token, since the
    splitter cuts all of them. Nothing is normalised: every text survives encoding and decoding unchanged. The same
    texts give the same tokenizer.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = split_then_bytes(SPLIT)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(MINI_SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise CoddError(
            f"vocab_size is {vocab_size}, but the 256 bytes and the special tokens alone are {smallest}. Raise it."
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(MINI_SPECIAL_TOKENS),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    special = dict(zip(("pad_token", "mask_token", "eos_token"), MINI_SPECIAL_TOKENS, strict=False))
    return Tokenizer(backend, special=special, chat_template=chat.MINI)
