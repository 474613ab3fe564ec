"""Chat templates: published Jinja templates rendered in a sandbox, and the default of each family.

A template comes with a checkpoint, so it is foreign code. It runs in Jinja's immutable sandbox, and what it does counts
against a budget: passes of loops, calls of macros, and the characters and items that it builds.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from codd.errors import CoddError, FormatError

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
"""Our own small models: a system message stands in front of the first question."""

PLAIN = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)
"""Models that were never taught to converse (BERT, MDLM, SEDD): the contents, with blank lines between them."""

BUDGET = 100_000_000
"""What a template may spend in one run: 1 for each character or item that it builds, `STEP` for each pass of a loop."""
STEP = 1_000

Messages = Sequence[Mapping[str, str]] | str


def render(
    template: str,
    messages: Messages,
    *,
    special_tokens: Mapping[str, str] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The text of a conversation; ``messages`` that are one string are one message of the user.

    ``special_tokens`` ({"bos_token": ...}) become variables of the template. A template that is broken, leaves the
    sandbox or does not end gives a FormatError; one that refuses the conversation itself gives a CoddError.
    """
    code = compile_template(template)
    variables = {
        "messages": as_messages(messages),
        "add_generation_prompt": add_generation_prompt,
        "tools": None,
        "documents": None,
        **(special_tokens or {}),
    }
    sandbox = _Sandbox()
    try:
        return Template.from_code(sandbox, code, sandbox.make_globals(None)).render(variables)
    except CoddError:
        raise
    except SecurityError as error:
        raise FormatError(
            f"the chat template was stopped: {_one_line(error)}. Use another chat_template, or none."
        ) from error
    except Exception as error:  # a template may fail in every way that Python can
        raise FormatError(
            f"the chat template failed on this conversation ({type(error).__name__}: {_one_line(error)}). "
            "Use another chat_template, or none."
        ) from error


def compile_template(template: str, where: str = "the chat template") -> CodeType:
    """Compile a template, or raise a FormatError, beginning with ``where``, if it is not valid Jinja."""
    try:
        return _compile(template)
    except TemplateSyntaxError as error:
        raise FormatError(
            f"{where}: is not valid Jinja (line {error.lineno}: {_one_line(error)}). "
            "Correct it, or use another chat_template."
        ) from error
    except Exception as error:  # too deep for Python, for example
        raise FormatError(
            f"{where}: cannot be compiled ({type(error).__name__}: {_one_line(error)}). "
            "Correct it, or use another chat_template."
        ) from error


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


@lru_cache(maxsize=64)
def _compile(template: str) -> CodeType:
    sandbox = _Sandbox()
    tree = _Budgeted().visit(sandbox.parse(template))
    tree.set_environment(sandbox)
    return sandbox.compile(tree)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


class _GenerationBlock(Extension):
    """``{% generation %}``, with which published templates mark the answers for training: it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one run: what published templates expect to find, and what is left of the budget."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock])
        self.filters["tojson"] = _to_json
        self.filters["joined"] = lambda parts: self.concat(map(str, parts))
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now
        self.budget = BUDGET

    def spend(self, cost: int) -> None:
        self.budget -= max(0, cost)  # 'x' * -1 would give some back
        if self.budget < 0:
            raise SecurityError(
                f"it takes more than {BUDGET // STEP} passes of loops or builds more than {BUDGET} characters"
            )

    def step(self) -> bool:
        """Pay for a pass of a loop."""
        self.spend(STEP)
        return True

    def concat(self, parts: Iterable[str]) -> str:
        """Join what was written: by a macro, a recursive loop, a block that is assigned, and the whole template."""
        self.spend(STEP)
        kept = []
        for part in parts:
            self.spend(len(part))
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend(_size_of_result(operator, left, right))
        return super().call_binop(context, operator, left, right)


class _Budgeted(NodeTransformer):
    """Have a template pay for what Jinja offers no hook for: passes of loops, and the operator ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        # An attribute of the environment, unlike a variable, cannot be redefined by the template.
        step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None, lineno=node.lineno)
        if node.test is None:
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        else:  # a pass that fails the loop's own condition does not reach the body
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "joined", [], [], None, None, lineno=node.lineno)


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """About how many characters, items or bits an operation will make; 0 where that cannot be much."""
    numbers = isinstance(left, int), isinstance(right, int)
    if operator == "**":
        return int(left.bit_length() * right) if all(numbers) and abs(left) > 1 else 0
    if operator == "*" and numbers == (False, True):
        return _size(left) * int(right)
    if operator == "*" and numbers == (True, False):
        return int(left) * _size(right)
    return _size(left) + _size(right)


def _size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _refuse(message: object) -> str:
    raise CoddError(f"the chat template refuses this conversation: {_one_line(message)}.")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
