"""Chat templates: published Jinja templates rendered in a sandbox, and the default of each family.

A template comes with a checkpoint, so it is foreign code (`codd.backbones.chat_sandbox`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError

from codd.backbones import chat_sandbox
from codd.errors import CoddError, FormatError, InvalidInput

LLADA = (
    "{% for message in messages %}"
    "{% if loop.first %}<|startoftext|>{% endif %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>{{ '\\n\\n' }}{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}"
)
"""LLaDA-Instruct: it always ends with the header of the answer, whatever ``add_generation_prompt`` says."""

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}{{ '\\n' }}{{ message['content'] }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
"""Dream-Instruct and the Qwen family; no system message is made up where none is given."""

MINI = (
    "{% set pending = namespace(system='') %}"
    "{% for message in messages %}"
    "{% set content = message['content'] | trim %}"
    "{% if message['role'] == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('a system message may only come first') }}{% endif %}"
    "{% set pending.system = content %}"
    "{% elif message['role'] == 'user' %}"
    "<|user|>{% if pending.system %}{{ pending.system }}{{ '\\n\\n' }}{% endif %}{{ content }}"
    "{% set pending.system = '' %}"
    "{% elif message['role'] == 'assistant' %}"
    "{% if pending.system %}{{ raise_exception('a user message must follow the system message') }}{% endif %}"
    "<|assistant|>{{ content }}<|eos|>"
    "{% else %}"
    "{{ raise_exception('the roles are system, user and assistant, not ' ~ message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if pending.system %}{{ raise_exception('a user message must follow the system message') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Our own small models: a system message precedes the first question."""

PLAIN = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)
"""Models that were never taught to converse (BERT, MDLM, SEDD): the contents, with blank lines between them."""

Messages = Sequence[Mapping[str, str]] | str


def render(
    template: str,
    messages: Messages,
    special_tokens: Mapping[str, str] | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
) -> str:
    """The text of a conversation; ``messages`` that are one string are one message of the user.

    ``special_tokens`` ({"bos_token": ...}) and ``tools`` become variables of the template. A template that is broken,
    leaves the sandbox or does too much gives a FormatError; one that refuses the conversation itself gives a CoddError.
    """
    own = {"messages": as_messages(messages), "add_generation_prompt": add_generation_prompt}
    return _render(template, {**own, "tools": tools, "documents": None, **(special_tokens or {})}, "the chat template")


def compile_template(template: str, where: str = "the chat template") -> None:
    """Raise a FormatError, beginning with ``where``, if a template is not valid Jinja or cannot be compiled."""
    _render(template, None, where)


def as_messages(messages: Messages) -> list[dict[str, str]]:
    """The messages as dictionaries with a role and a content, both of them text; CoddError if they are not."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not messages:
        raise CoddError("the conversation is empty: give at least one message.")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise CoddError(f"message {number} is of type {type(message).__name__}; expected role and content.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise CoddError(
                    f'message {number} has no text under "{key}"; expected {{"role": "user", "content": "..."}}.'
                )
    return [dict(message) for message in messages]


def _render(template: str, variables: Mapping[str, Any] | None, where: str) -> str:
    try:
        plain = None if variables is None else json.loads(json.dumps(variables))  # nothing that has methods of its own
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"expected messages of texts, numbers, lists and objects: {error}.") from error
    try:
        return chat_sandbox.render(template, plain)
    except chat_sandbox.Refusal as refusal:
        raise CoddError(f"{where} refuses this conversation: {_one_line(refusal)}.") from refusal
    except Exception as error:  # a template may fail in every way that Python can
        if isinstance(error, TemplateSyntaxError):
            why = f"is not valid Jinja (line {error.lineno}: {_one_line(error)})"
        elif isinstance(error, SecurityError):
            why = f"was stopped: {_one_line(error)}"
        else:
            why = f"failed ({type(error).__name__}: {_one_line(error)})"
        raise FormatError(f"{where}: {why}. Correct it, or use another chat_template.") from error


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
