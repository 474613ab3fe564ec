"""Renders chat templates in Jinja's immutable sandbox, and meters them: a template is a program from a stranger.

The sandbox keeps a template from the rest of Python, not from running for ever or filling the memory. So every loop,
call, operator, filter and comparison pays for what it is about to do, in units of about a nanosecond and a byte, out of
an allowance that grows with the conversation. What cannot be paid beforehand is not offered: filters and methods that
write many characters for few (``center``, ``format``, ``zfill``, ...).
"""

import functools
import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from contextvars import ContextVar
from datetime import datetime
from itertools import chain
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

LONGEST_SOURCE = 100_000
"""Characters of a template; published ones have up to 30,000."""
LONGEST = 10_000_000
"""Characters that a template may write."""
ALLOWANCE = 32_000_000
"""Units that every template has: a second or two, and a few hundred megabytes at most."""
STEP, NODE = 64, 4
"""Units of an item or of a turn of a loop (an operator or a filter costs two, a call four of them), and of each node of
the syntax tree that may run in it."""
DEEPEST = 50
"""How deep calls and values may be nested."""
MOST_BITS = 10_000
"""Of a whole number."""

_STRING_METHODS = set(
    """capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace
    istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip
    split splitlines startswith strip swapcase title upper""".split()  # noqa: SIM905 - a list has a word in each line
)
_FLAT = {"count", "d", "default", "first", "items", "last", "length", "map", "safe"}
_FLAT |= {"reject", "rejectattr", "select", "selectattr"}
"""Filters that look at a value from outside, or at its items one by one."""
_LISTING = {"join", "list", "max", "min", "reverse", "sort", "unique"}
"""Filters that look at all items of a list, or at all characters of a text."""
_OTHER = {"abs", "capitalize", "dictsort", "e", "escape", "float", "int"}
_OTHER |= {"lower", "replace", "string", "title", "trim", "upper"}
_COMPARING = {"==", "!=", "<", "<=", ">", ">=", "in", "lower", "upper"}
_COMPARING |= {"eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge"}
"""Tests that look at all of a value."""
WEIGHED, COPIED, STEPPED = "codd.weighed", "codd.copied", "codd.stepped"
"""Filters that `_Metering` puts into a template."""


class Refusal(Exception):
    """The template does not take this conversation, and says why."""


def render(template: str, variables: Mapping[str, Any] | None) -> str:
    """The text that a template writes; None for ``variables`` compiles it only.

    Raises Refusal, or whatever a broken or greedy template can; SecurityError where it leaves the sandbox or its
    allowance is spent.
    """
    if len(template) > LONGEST_SOURCE:
        raise SecurityError(f"it has more than {LONGEST_SOURCE:,} characters")
    token = _METER.set(_Meter(ALLOWANCE if variables is None else _allowance(variables)))
    try:
        compiled = _compile(template)
        text = "" if variables is None else compiled.render(variables)
    finally:
        _METER.reset(token)
    if len(text) > LONGEST:
        raise SecurityError(f"it writes more than {LONGEST:,} characters")
    return text


def _allowance(variables: Mapping[str, Any]) -> int:
    """Some templates visit all messages, or copy all that is written, at every message."""
    characters, count = len(json.dumps(variables)), len(variables["messages"])
    return ALLOWANCE + 64 * characters + 2 * count * (characters + 500 * count)


class _Meter:
    """What a template may still spend."""

    def __init__(self, allowance: int):
        self.left, self.depth = allowance, 0

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise SecurityError("it takes more time or memory than a conversation of this length needs")

    def weigh(self, value: object, times: int = 1, depth: int = 0) -> None:
        """Pay for a look at all of a value, or for writing it; a text inside of another value is written escaped."""
        self.spend(STEP * times)
        if depth > DEEPEST:
            raise SecurityError(f"it nests values deeper than {DEEPEST}")
        if isinstance(value, str):
            self.spend(len(value) * times * (10 if depth else 1))
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise SecurityError(f"it makes a number of more than {MOST_BITS:,} bits")
        elif isinstance(value, Namespace):  # which may change after it was weighed, and hold itself
            raise SecurityError("a namespace can be no part of a value, nor compared or written")
        elif isinstance(value, dict):
            for item in chain(value, value.values()):
                self.weigh(item, times, depth + 1)
        elif isinstance(value, range):
            self.spend(STEP * len(value) * times)
        elif isinstance(value, list | tuple | KeysView | ValuesView | ItemsView):
            for item in value:
                self.weigh(item, times, depth + 1)

    def copied(self, value: Any) -> Any:
        """Pay for the memory of a new value, but not of those in it; those of a generator are paid one by one."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(STEP * len(value))
        elif isinstance(value, int):
            self.weigh(value)
        elif isinstance(value, Iterator):
            return self._by_item(value)
        return value

    def _by_item(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(STEP)
            yield value


_METER: ContextVar[_Meter] = ContextVar("meter of the template that is rendered")


class _Environment(ImmutableSandboxedEnvironment):
    """What published templates expect to find; operators and calls are metered here, as Jinja's sandbox lets us."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what was written."""
        meter = _METER.get()
        pieces = []
        for part in parts:
            meter.spend(STEP // 8 + len(part))
            pieces.append(part)
        return "".join(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of texts, only methods that can be paid for; none of numbers."""
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        return not isinstance(obj, int | float) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """No ``format``: it is refused like other methods of texts."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template."""
        meter = _METER.get()
        meter.spend(4 * STEP)
        if not isinstance(obj, Macro):  # which looks at nothing; what is in it pays for itself
            for value in (*args, *kwargs.values()):
                meter.weigh(value)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | list | tuple):
            meter.weigh(owner)
        if isinstance(owner, str) and "split" in obj.__name__:
            meter.spend(8 * len(owner))
        elif isinstance(owner, str) and obj.__name__ in _GROWTH:
            meter.spend(_joined(args[0], owner) if obj.__name__ == "join" else _replaced(owner, *args, **kwargs))
        if meter.depth >= DEEPEST:
            raise SecurityError(f"it nests calls deeper than {DEEPEST}")
        meter.depth += 1
        result = super().call(context, obj, *args, **kwargs)
        meter.depth -= 1
        return meter.copied(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator."""
        meter = _METER.get()
        meter.spend(2 * STEP)
        texts = [each for each in (left, right) if isinstance(each, str | list | tuple)]
        if operator == "*" and texts:
            times = right if texts[0] is left else left
            meter.spend(max(int(times), 0) * len(texts[0]) * (1 if isinstance(texts[0], str) else STEP))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MOST_BITS:
                raise SecurityError(f"it makes a number of more than {MOST_BITS:,} bits")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("it formats a text with %")
        return meter.copied(super().call_binop(context, operator, left, right))


def _replaced(text: object, old: object, new: object, count: int | None = None) -> int:
    return str(text).count(str(old)) * len(str(new))


def _joined(items: Any, d: object = "", attribute: object = None) -> int:
    return len(str(d)) * len(items) if isinstance(items, Sized) else 0


_GROWTH: dict[str, Callable[..., int]] = {"join": _joined, "replace": _replaced}
"""Units of filters that write more than they read."""


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that pays for what it looks at, and for what it makes."""
    contexts = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.spend(2 * STEP)
        context, (value, *more) = args[:contexts], args[contexts:]
        if name not in _FLAT:
            if isinstance(value, Iterator):
                value = list(value)
            if name in _LISTING and isinstance(value, str | range):
                meter.spend(STEP * len(value))
            first = value if name == "join" and isinstance(value, list | tuple) else (value,)
            for each in (*first, *more, *kwargs.values()):
                meter.weigh(each)
            if name in _GROWTH:
                meter.spend(_GROWTH[name](value, *more, **kwargs))
        return meter.copied(function(*context, value, *more, **kwargs))

    return run


class _Metering(NodeTransformer):
    """Puts into a template what Jinja has no hook for: turns of loops, calls of blocks, literals and comparisons."""

    def visit_For(self, node: nodes.For) -> Any:
        """Every turn pays for what may run in it, its condition for itself."""
        if node.test is not None:
            node.test = _filtered(node.test, STEPPED, nodes.Const(_count(node.test)))
        return self._stepped(node)

    def _stepped(self, node: Any) -> Any:
        turn = nodes.ExprStmt(_filtered(nodes.Const(None), STEPPED, nodes.Const(sum(map(_count, node.body)))))
        self.generic_visit(node)
        node.body = [turn, *node.body]
        return node

    visit_Macro = visit_CallBlock = visit_Block = _stepped  # every call pays, too

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """What is compared is weighed."""
        self.generic_visit(node)
        node.expr = _filtered(node.expr, WEIGHED)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, WEIGHED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """The operator ~ becomes the filter that does the same."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "join")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """A key is weighed, since it is hashed; a part of a text or list is a copy."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, COPIED)
        node.arg = _filtered(node.arg, WEIGHED)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """A key is weighed, since it is hashed."""
        self.generic_visit(node)
        node.key = _filtered(node.key, WEIGHED)
        return node


def _filtered(node: Any, name: str, *args: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const) and name == WEIGHED:
        return node
    return nodes.Filter(node, name, list(args), [], None, None)


def _count(node: nodes.Node) -> int:
    return 1 + sum(map(_count, node.iter_child_nodes()))


def _stepped(value: Any, count: int) -> Any:
    _METER.get().spend(STEP + NODE * count)
    return value


def _weighed(value: Any) -> Any:
    _METER.get().weigh(value)
    return value


@pass_context  # so that Jinja does not call it for constants when it compiles
def _written(context: Context, value: Any) -> Any:
    if not isinstance(value, str):
        _METER.get().weigh([value])
    return value


class _GenerationBlock(Extension):
    """``{% generation %}``, with which published templates mark the answers for training: it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        finalize=_written,
        optimized=False,  # nothing is computed before there is a meter
    )
    offered: dict[str, Any] = {name: environment.filters[name] for name in _FLAT | _LISTING | _OTHER}
    offered["tojson"] = _to_json
    environment.filters = {name: _metered(name, filter) for name, filter in offered.items()}
    environment.filters |= {WEIGHED: _weighed, COPIED: lambda value: _METER.get().copied(value), STEPPED: _stepped}
    tests: dict[str, Any] = environment.tests
    tests |= {name: _metered(name, tests[name]) for name in _COMPARING}
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    tree = _environment().parse(template)
    tree = _Metering().visit(tree)
    for node in tree.find_all(nodes.Node):
        node.set_environment(_environment())
    return _environment().from_string(tree)


def _refuse(message: object) -> str:
    raise Refusal(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise SecurityError("it formats the time with more than letters")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not."""
    if indent is not None:
        if not isinstance(indent, int) or indent > 16:
            raise SecurityError("it indents JSON by more than 16 spaces")
        _METER.get().weigh(value, max(indent, 0))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
