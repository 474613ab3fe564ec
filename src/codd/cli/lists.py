"""Lists on the command line, the same in every verb: values with commas between them; a flag given again adds to them.

A value that holds a comma, such as a file's name, is quoted as in CSV. Texts for the model are never split: a flag for
them (``--stop``, ``--choice``) is given once for each.
"""

import argparse
import csv
from collections.abc import Callable
from typing import Any

ABOUT = """\
lists (NAME,..):
  values with commas between them, as in --data a.txt,b.txt; a flag given again adds to its list. A value that holds a
  comma is quoted as in CSV: --data '"a, b.txt"'. TEXT and NAME=VALUE are never split: give the flag once for each."""


def split(text: str) -> list[str]:
    """The values of a list; ArgumentTypeError if there is none."""
    try:
        [row] = csv.reader([text], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError):  # an open quote, a line break, or nothing at all
        row = []
    if not (words := [word.strip() for word in row if word.strip()]):
        raise argparse.ArgumentTypeError(f"expected values with commas between them, found {text!r}")
    return words


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type for argparse: a list whose values ``parse`` reads."""

    def read(text: str) -> list[Any]:
        return [parse(word) for word in split(text)]

    read.__name__ = (
        f"list of {getattr(parse, '__name__', 'values')}"  # argparse names it: "invalid list of float value"
    )
    return read


class Extend(argparse.Action):
    """Adds to what the flag gave before; what is given first takes the place of the default."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        """``values`` are those of one flag."""
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is self.default else before + values)


def add_list(parser: argparse._ActionsContainer, flag: str, parse: Callable[[str], Any] = str, **more: Any) -> None:
    """Add a flag that takes a list; ``more`` is for argparse."""
    metavar = f"{more.pop('metavar')},.."
    parser.add_argument(flag, action=Extend, type=listed(parse), metavar=metavar, **more)
