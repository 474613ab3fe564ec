"""Renders chat templates in Jinja's immutable sandbox within limits: a template is a program from a stranger.

The sandbox keeps a template from the rest of Python, not from running for ever or filling the memory. So every turn of
a loop, call, operator, filter and comparison pays for what it reads and writes, in units of about a nanosecond and a
byte, out of an allowance that grows with the conversation. What cannot be paid beforehand is not offered: filters and
methods that write many characters for few (``center``, ``format``, ``zfill``, ...).
"""

import functools
import json
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from itertools import chain
from typing import Any, cast

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE, MAX_TEXT = 100_000, 10_000_000
"""Characters of a template (published ones have up to 30,000), and of what it writes."""
MAX_BITS = 10_000
"""At most, in a whole number."""
ALLOWANCE = 32_000_000
"""Units that every template has: a second or two, and a few hundred megabytes at most."""
STEP, NODE = 64, 4
"""Units of an item, an operator or a turn of a loop, and of each node of the syntax tree that may run in the turn."""

_METHODS = set(
    """capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace
    istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip
    split splitlines startswith strip swapcase title upper""".split()  # noqa: SIM905 - a list has a word in each line
)
"""Methods of texts that are offered."""
_SHALLOW = {"count", "d", "default", "first", "items", "last", "length", "map", "safe"}
_SHALLOW |= {"reject", "rejectattr", "select", "selectattr"}
"""Filters that look at a value from outside, or at its items one by one."""
_FILTERS = _SHALLOW | {"abs", "capitalize", "dictsort", "e", "escape", "float", "int", "join", "list", "lower", "max"}
_FILTERS |= {"min", "replace", "reverse", "sort", "string", "title", "trim", "unique", "upper"}
_COMPARING = {"==", "!=", "<", "<=", ">", ">=", "in", "lower", "upper"}
_COMPARING |= {"eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge"}
"""Tests that look at all of a value."""


class Refusal(Exception):
    """The template does not take this conversation, and says why."""


def render(template: str, variables: Mapping[str, Any] | None) -> str:
    """The text that a template writes; None for ``variables`` compiles it only.

    Raises Refusal, or whatever a broken or greedy template can; SecurityError where it leaves the sandbox or its
    allowance is spent.
    """
    if len(template) > MAX_SOURCE:
        raise SecurityError(f"it has more than {MAX_SOURCE:,} characters")
    token = _METER.set(_Meter())
    try:
        compiled = _compile(template)
        if variables is None:
            return ""
        characters, count = len(json.dumps(variables)), len(variables["messages"])
        # Some templates visit all messages, or copy all that is written, at every message.
        _METER.get().left += 64 * characters + 2 * count * (characters + 500 * count)
        text = compiled.render(variables)
    finally:
        _METER.reset(token)
    if len(text) > MAX_TEXT:
        raise SecurityError(f"it writes more than {MAX_TEXT:,} characters")
    return text


class _Meter:
    """What a template may still spend."""

    left = ALLOWANCE

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise SecurityError("it takes more time or memory than a conversation of this length needs")

    def weigh(self, value: Any, *, deep: bool = True, inside: bool = False) -> Any:
        """Pay for a look at a value, and with ``deep`` at all that is in it; text ``inside`` may be escaped."""
        self.spend(STEP)
        if isinstance(value, str):
            self.spend(len(value) * (10 if inside else 1))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise SecurityError(f"it makes a number of more than {MAX_BITS:,} bits")
        elif isinstance(value, Namespace) and deep:  # which may change after it was weighed, and hold itself
            raise SecurityError("a namespace can be no part of a value, nor compared or written")
        elif isinstance(value, range | list | tuple | dict | KeysView | ValuesView | ItemsView):
            self.spend(STEP * len(value))
            if deep and not isinstance(value, range):
                for item in chain(value, value.values()) if isinstance(value, dict) else value:
                    self.weigh(item, inside=True)
        return value

    def pay(self, name: str, *values: Any) -> None:
        """Pay for what a filter, test or method looks at, and beforehand for texts that it repeats."""
        for value in values:
            self.weigh(value, deep=name not in _SHALLOW)
        if name in ("join", "replace"):
            self.spend(len(str(values[0])) * max((len(str(each)) for each in values[1:]), default=0))


_METER: ContextVar[_Meter] = ContextVar("meter of the template that is rendered")


class _Environment(ImmutableSandboxedEnvironment):
    """What published templates expect to find; operators, calls and keys are metered here."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        return "".join(_METER.get().weigh(part) for part in parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """A text's methods that are metered are safe; a number has none that is."""
        if isinstance(obj, str):
            return attr in _METHODS
        return not isinstance(obj, int | float) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """No ``format``: it is refused like other methods of texts."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _METER.get().weigh(argument))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter, owner = _METER.get(), getattr(obj, "__self__", None)
        meter.spend(4 * STEP)
        owners = [owner] if isinstance(owner, str | list | tuple) else []
        if not isinstance(obj, Macro):  # which looks at nothing; what is in it pays for itself
            meter.pay(getattr(obj, "__name__", ""), *owners, *args, *kwargs.values())
        return meter.weigh(super().call(context, obj, *args, **kwargs), deep=False)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        meter.spend(2 * STEP)
        for one, times in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(one, str | list | tuple) and isinstance(times, int):
                meter.spend(max(times, 0) * len(one) * (1 if isinstance(one, str) else STEP))
        if operator == "**" and isinstance(left, int) and left.bit_length() * abs(right) > MAX_BITS:
            raise SecurityError(f"it makes a number of more than {MAX_BITS:,} bits")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("it formats a text with %")
        return meter.weigh(super().call_binop(context, operator, left, right), deep=False)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that pays for what it looks at, and for what it makes."""
    contexts = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter, context, (value, *more) = _METER.get(), args[:contexts], args[contexts:]
        if name not in _SHALLOW and isinstance(value, Iterator | range):
            value = list(value)
        meter.pay(name, value, *more, *kwargs.values())
        return meter.weigh(function(*context, value, *more, **kwargs), deep=False)

    return run


class _Metering(NodeTransformer):
    """Puts into a template what Jinja has no hook for: turns of loops, calls of blocks, slices and comparisons."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.Compare):
            node.expr = _filtered(node.expr, "codd.weighed")
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, "codd.weighed")
        elif isinstance(node, nodes.Concat):
            node.nodes = [_filtered(each, "codd.weighed") for each in node.nodes]
        elif isinstance(node, nodes.Pair):
            node.key = _filtered(node.key, "codd.weighed")
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filtered(node, "codd.copied")
        elif isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
            if isinstance(node, nodes.For) and node.test is not None:
                test = cast(nodes.Expr, node.test)  # typed as any node
                node.test = _filtered(test, "codd.stepped", nodes.Const(_count(test)))
            count = nodes.Const(sum(map(_count, node.body)))
            node.body = [nodes.ExprStmt(_filtered(nodes.Const(None), "codd.stepped", count)), *node.body]
        return node


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, list(args), [], None, None)


def _count(node: nodes.Node) -> int:
    return 1 + sum(map(_count, node.iter_child_nodes()))


def _stepped(value: Any, count: int) -> Any:
    _METER.get().spend(STEP + NODE * count)
    return value


@pass_context  # so that Jinja does not call it for constants when it compiles
def _written(context: Context, value: Any) -> Any:
    return value if isinstance(value, str) else _METER.get().weigh(value, inside=True)


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
    offered: dict[str, Any] = {**{name: environment.filters[name] for name in _FILTERS}, "tojson": _to_json}
    environment.filters = {name: _metered(name, each) for name, each in offered.items()}
    environment.filters["codd.weighed"] = lambda value: _METER.get().weigh(value)
    environment.filters["codd.copied"] = lambda value: _METER.get().weigh(value, deep=False)
    environment.filters["codd.stepped"] = _stepped
    tests: dict[str, Any] = environment.tests
    tests |= {name: _metered(name, tests[name]) for name in _COMPARING}
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    tree = _Metering().visit(_environment().parse(template))
    for node in tree.find_all(nodes.Node):
        node.set_environment(_environment())
    return _environment().from_string(tree)


def _refuse(message: object) -> str:
    raise Refusal(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise SecurityError("it formats the time with more than letters")
    return datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not; ``options``: separators and sort_keys."""
    separators = options.get("separators") or ()
    if (indent or 0) > 16 or len("".join(separators)) > 16 or options.keys() - {"separators", "sort_keys"}:
        raise SecurityError("it writes JSON with more than 16 spaces or characters between values")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
