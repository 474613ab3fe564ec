"""Chat templates: published Jinja templates rendered in a sandbox, and the default of each family.

A template comes with a checkpoint, so it is foreign code: unless it is one of those below, it is compiled and rendered
by another process (``chat_sandbox.py``) that has a limit on its memory and its time.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

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
"""Our own small models: a system message stands in front of the first question."""

PLAIN = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)
"""Models that were never taught to converse (BERT, MDLM, SEDD): the contents, with blank lines between them."""

OURS = frozenset({LLADA, CHATML, MINI, PLAIN})
"""The templates that take time in proportion to the conversation: this process renders them itself."""

SECONDS = 10.0
"""How long, by the clock, another template may take for one conversation."""

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
    variables = {
        "messages": as_messages(messages),
        "add_generation_prompt": add_generation_prompt,
        "tools": None,
        "documents": None,
        **(special_tokens or {}),
    }
    return _render(template, variables, "the chat template")


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
    outcome, text = (chat_sandbox.render if template in OURS else _helper.render)(template, variables)
    if outcome == "rendered":
        return text
    if outcome == "refused":
        raise CoddError(f"{where} refuses this conversation: {text}.")
    raise FormatError(f"{where}: {text}. Correct it, or use another chat_template.")


class _Helper:
    """The process that renders the templates of strangers: started for the first, stopped when this one ends."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin without a process; if there is one, it is left alone."""
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, variables: Mapping[str, Any] | None) -> tuple[str, str]:
        """As `chat_sandbox.render`; CoddError if the process cannot be had or the variables are no JSON."""
        try:
            request = json.dumps([SECONDS, template, variables]).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"expected messages of texts, numbers, lists and objects: {error}.") from error
        line = b""
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self.stop()
                    self._process = _start()
                    if not _exchange(self._process, b""):
                        raise CoddError(
                            f"the process that renders chat templates does not run: {self._process.args!r}."
                        )
                line = _exchange(self._process, request)
            finally:
                if not line:  # it died; or we are interrupted, and this answer must not be the next one
                    self.stop()
        if not line:
            limits = f"{SECONDS:g} seconds or {chat_sandbox.MEMORY // 2**20} MiB of memory"
            return "failed", f"was stopped: it takes more than {limits}, or it crashes Python"
        outcome, text = json.loads(line)
        return outcome, text

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()  # reaps it and closes the pipes


def _start() -> "subprocess.Popen[bytes]":
    """An interpreter that has its standard library and Jinja, and nothing of the user's settings and folders."""
    folders = {str(Path(str(package.__file__)).parents[1]) for package in (jinja2, markupsafe)}
    command = [sys.executable, "-I", "-S", chat_sandbox.__file__, *folders]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise CoddError(f"the process that renders chat templates did not start: {error}.") from error


def _exchange(process: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    """Send a request and wait for a line; nothing if the process dies."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except OSError:  # a broken pipe
        return b""
    line = process.stdout.readline()
    return line if line.endswith(b"\n") else b""


_helper = _Helper()
atexit.register(_helper.stop)
if hasattr(os, "register_at_fork"):  # two processes must not share a helper; Windows does not fork
    os.register_at_fork(after_in_child=_helper.reset)
