"""From what users type to ids: texts, conversations, id lists, or lists of these."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from codd.backbones import Tokenizer
from codd.backbones.chat import PLAIN
from codd.errors import InvalidInput

FOREIGN_MASKS = ("<|mask|>", "[MASK]", "<mask>", "<|mdm_mask|>", "<|MASK|>", "[M]")
"""How models, and people, write masks."""

Ids: TypeAlias = Sequence[int] | Tensor
Conversation: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Ids | Conversation
Prompts: TypeAlias = str | Tensor | Sequence[Prompt] | Conversation


def encode_prompts(
    prompts: Prompts, tokenizer: Tokenizer | None, *, chat: bool | None, whole: bool = False
) -> list[list[int]]:
    """The ids of each prompt: a text, ids, or a conversation (a list of messages); or a list of such.

    ``chat`` says whether a text is a question to be put into the chat template; None: if the model has one, and the
    text has no masks to be filled. ``whole``: nothing is put after the text, so it gets its own beginning and end.
    """
    return [_encode(prompt, tokenizer, chat, whole) for prompt in _listed(prompts)]


def _listed(prompts: Prompts) -> list[Any]:
    """One prompt as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor):
        return list(prompts) if prompts.ndim == 2 else [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        raise InvalidInput(
            f"prompts must be a text, a list of texts, of id lists or of messages; found {type(prompts).__name__}."
        )
    each = list(prompts)
    if each and isinstance(each[0], Mapping):
        return [each]
    if each and isinstance(each[0], int):
        raise InvalidInput(
            "prompts must be a text, a list of texts, or a list of id lists; found a list of numbers. "
            "Put one prompt's ids into a list: [ids]."
        )
    return each


def _encode(prompt: Any, tokenizer: Tokenizer | None, chat: bool | None, whole: bool) -> list[int]:
    if isinstance(prompt, Tensor):
        if prompt.ndim != 1 or prompt.is_floating_point():
            raise InvalidInput(f"a prompt of ids must be one row of whole numbers, found {tuple(prompt.shape)}.")
        return [int(token) for token in prompt.tolist()]
    if isinstance(prompt, str):
        return _encode_text(prompt, _required(tokenizer), chat, whole)
    if not isinstance(prompt, Sequence):
        raise InvalidInput(f"a prompt must be a text, ids or a conversation, found {type(prompt).__name__}.")
    if prompt and isinstance(prompt[0], Mapping):
        return _required(tokenizer).encode_chat(prompt)
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise InvalidInput(f"a prompt of ids must hold whole numbers only ({error}).") from None


def _encode_text(text: str, tokenizer: Tokenizer, chat: bool | None, whole: bool) -> list[int]:
    mask = tokenizer.mask_token
    if chat is None:
        chat = can_chat(tokenizer) and not (mask is not None and mask in text)
    return tokenizer.encode_chat(text) if chat else tokenizer.encode(text, add_special_tokens=whole)


def can_chat(tokenizer: Tokenizer) -> bool:
    """Whether the model was trained with a chat template."""
    return tokenizer.chat_template not in (None, PLAIN)


def check_masks(prompts: Prompts, ids: Sequence[Sequence[int]], tokenizer: Tokenizer | None, mask_id: int) -> None:
    """Raise InvalidInput for a prompt that is to be filled (gen_length 0) and has no mask; name the model's own."""
    named = None if tokenizer is None else tokenizer.mask_token
    mask = f"the id {mask_id}" if named is None else repr(named)
    for number, (prompt, encoded) in enumerate(zip(_listed(prompts), ids, strict=True)):
        if mask_id in encoded:
            continue
        other = next((each for each in FOREIGN_MASKS if isinstance(prompt, str) and each in prompt), None)
        found = "" if other is None else f"; {other!r} is plain text to this model"
        raise InvalidInput(
            f"prompt {number} has no mask to fill{found}: with gen_length=0 put {mask} where a token is wanted, or "
            "give a gen_length to go on after the prompt."
        )


def _required(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InvalidInput("this checkpoint has no tokenizer, so it cannot read text: give ids, [[...], [...]].")
    return tokenizer
