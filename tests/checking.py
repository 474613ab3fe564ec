"""Shapes and types of signatures, checked in the first calls of every function in every test.

Checking all calls takes as long as the tests themselves, and what calls a function a thousand times in one test calls
it alike.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping

CALLS = 4
"""Of each function in each test."""

_jaxtyped = jaxtyping.jaxtyped
_test = 0


def next_test() -> None:
    """Check the first calls of every function again."""
    global _test
    _test += 1


def first_calls(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """In place of ``jaxtyping.jaxtyped``, which jaxtyping's import hook puts on every function and class."""
    if function is None:
        return functools.partial(first_calls, typechecker=typechecker)
    if isinstance(function, classmethod | staticmethod):
        return type(function)(first_calls(function.__func__, typechecker=typechecker))
    checked = _jaxtyped(function, typechecker=typechecker)
    if not inspect.isfunction(function):
        return checked
    test = count = 0

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal test, count
        if test != _test:
            test, count = _test, 0
        count += 1
        return (checked if count <= CALLS else function)(*arguments, **named)

    return call
