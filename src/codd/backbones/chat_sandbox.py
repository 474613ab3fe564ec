"""Renders chat templates in Jinja's immutable sandbox; run as a program, does so for another process, within limits.

The sandbox keeps a template from the rest of Python, not from running for ever or filling the memory: any operator,
filter or method of a string can, and already when Jinja compiles it. So a stranger's template is rendered by a process
of its own (``chat.py`` keeps it), which imports nothing but Jinja, and which the system stops where a limit is passed.
"""

import sys

if __name__ == "__main__":
    sys.path += sys.argv[1:]  # an isolated interpreter knows the standard library only: these hold Jinja

import contextlib
import faulthandler
import json
import signal
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 * 2**20
"""Bytes of address space that the process may have, the interpreter's own included; macOS does not enforce it."""
LONGEST = 10_000_000
"""Characters that a template may write."""


def render(template: str, variables: Mapping[str, Any] | None) -> tuple[str, str]:
    """("rendered", text), or "refused" by the template or "failed", and why; None for ``variables`` compiles only.

    MemoryError is the one error that is raised: there may not be the memory to say so.
    """
    try:
        compiled = _compile(template)
        text = "" if variables is None else compiled.render(variables)
    except _Refusal as refusal:
        return "refused", _one_line(refusal)
    except TemplateSyntaxError as error:
        return "failed", f"is not valid Jinja (line {error.lineno}: {_one_line(error)})"
    except SecurityError as error:
        return "failed", f"was stopped: {_one_line(error)}"
    except MemoryError:
        raise
    except Exception as error:  # a template may fail in every way that Python can
        return "failed", f"failed ({type(error).__name__}: {_one_line(error)})"
    return ("rendered", text) if len(text) <= LONGEST else ("failed", f"writes more than {LONGEST:,} characters")


class _Refusal(Exception):
    """The template does not take this conversation, and says why."""


class _GenerationBlock(Extension):
    """``{% generation %}``, with which published templates mark the answers for training: it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """What published templates expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    return _environment().from_string(template)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


def _refuse(message: object) -> str:
    raise _Refusal(message)


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


def _serve() -> None:
    """Answer requests, lines of JSON [seconds, template, variables], until there are no more; die of what is too much.

    The watchdog is a thread without Python in it: it ends the process even in the midst of one long operation.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    # Windows has no such limits, and those of an administrator may be lower already.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        seconds, template, variables = json.loads(line)
        faulthandler.dump_traceback_later(seconds, exit=True)
        answer = json.dumps(render(template, variables))
        faulthandler.cancel_dump_traceback_later()
        print(answer, flush=True)


if __name__ == "__main__":
    _serve()
