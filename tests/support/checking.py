"""Shapes and types of signatures, checked in the first calls of every function in every test.

Checking all calls takes as long as the tests themselves, and what calls a function a thousand times in one test calls
it alike. A function that is defined within another one is made anew in every call of that one, and making its checks
takes milliseconds: of these the first of every test is checked.
"""

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import jaxtyping

CALLS = 2
"""Of each function in each test."""

_jaxtyped = jaxtyping.jaxtyped
_test = 0
_made: set[CodeType] = set()
"""The functions within functions that were made in this test."""


def next_test() -> None:
    """Check the first calls of every function again."""
    global _test
    _test += 1
    _made.clear()


def first_calls(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """In place of ``jaxtyping.jaxtyped``, which jaxtyping's import hook puts on every function and class."""
    if function is None:
        return functools.partial(first_calls, typechecker=typechecker)
    if isinstance(function, classmethod | staticmethod):
        return type(function)(first_calls(function.__func__, typechecker=typechecker))
    if inspect.isfunction(function) and "<locals>" in function.__qualname__:
        if function.__code__ in _made:
            return function
        _made.add(function.__code__)
    if not inspect.isfunction(function):
        return _jaxtyped(function, typechecker=typechecker)
    checked, test, count = None, 0, 0  # the first call makes the checks: many are never called

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal checked, test, count
        if test != _test:
            test, count = _test, 0
        count += 1
        if count > CALLS:
            return function(*arguments, **named)
        if checked is None:
            checked = _jaxtyped(function, typechecker=typechecker)
        return checked(*arguments, **named)

    return call
