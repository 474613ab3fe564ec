"""Chat templates: published Jinja templates rendered in its immutable sandbox, and the default of each family.

A template comes with a checkpoint, so it is foreign code: the sandbox keeps it from the rest of Python. It does not
keep it from running for ever or from filling the memory; what it writes is bounded.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from codd.errors import CoddError, FormatError, InvalidInput

MAX_SOURCE, MAX_TEXT = 100_000, 10_000_000
"""Characters of a template (published ones have up to 30,000), and of what it writes."""

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
    leaves the sandbox or writes too much gives a FormatError; one that refuses the conversation itself a CoddError.
    """
    own = {"messages": as_messages(messages), "add_generation_prompt": add_generation_prompt}
    variables = {**own, "tools": tools, "documents": None, **(special_tokens or {})}
    try:
        plain = json.loads(json.dumps(variables))  # nothing that has methods of its own
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"expected messages of texts, numbers, lists and objects: {error}.") from error
    where = "the chat template"
    try:
        return _written(_compiled(template), plain)
    except _Refusal as refusal:
        raise CoddError(f"{where} refuses this conversation: {_one_line(refusal)}.") from refusal
    except Exception as error:  # a template may fail in every way that Python can
        raise _failure(error, where) from error


def compile_template(template: str, where: str = "the chat template") -> None:
    """Raise a FormatError, beginning with ``where``, if a template is not valid Jinja or cannot be compiled."""
    try:
        _compiled(template)
    except Exception as error:
        raise _failure(error, where) from error


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


class _Refusal(Exception):
    """The template does not take this conversation, and says why."""


class _GenerationBlock(Extension):
    """``{% generation %}``, with which published templates mark the answers for training: it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """What published templates expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        optimized=False,  # nothing is computed when a checkpoint is loaded
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    if len(template) > MAX_SOURCE:
        raise SecurityError(f"it has more than {MAX_SOURCE:,} characters")
    return _environment().from_string(template)


def _written(template: Template, variables: Mapping[str, Any]) -> str:
    parts, left = [], MAX_TEXT
    for part in template.generate(variables):
        left -= len(part)
        if left < 0:
            raise SecurityError(f"it writes more than {MAX_TEXT:,} characters")
        parts.append(part)
    return "".join(parts)


def _refuse(message: object) -> str:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not; ``options``: indent, separators and sort_keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _failure(error: Exception, where: str) -> FormatError:
    if isinstance(error, TemplateSyntaxError):
        why = f"is not valid Jinja (line {error.lineno}: {_one_line(error)})"
    elif isinstance(error, SecurityError):
        why = f"was stopped: {_one_line(error)}"
    else:
        why = f"failed ({type(error).__name__}: {_one_line(error)})"
    return FormatError(f"{where}: {why}. Correct it, or use another chat_template.")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
