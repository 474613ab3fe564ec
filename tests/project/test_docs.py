"""The documents speak of code that exists: names resolve, links lead somewhere, options are listed."""

import importlib
import math
import re
from pathlib import Path

import pytest

from codd.decoding.options import DEFAULTS, OPTIONS, RULE, OptionInfo, default_in_words
from tests.support import ROOT

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    ROOT / "benchmarks" / "README.md",
    ROOT / "lab" / "README.md",
]
NAME = re.compile(r"\bcodd(?:_lab)?(?:\.[A-Za-z_]\w*)+")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def resolve(name: str) -> object:
    """The object that a dotted name stands for; AttributeError if there is none."""
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ModuleNotFoundError:
                raise AttributeError(f"there is no {name}") from None
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.stem != "CHANGELOG"], ids=lambda path: path.name)
def test_names_of_our_code_resolve(path):
    for name in sorted(set(NAME.findall(path.read_text()))):
        resolve(name)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path):
    broken = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]
    assert not broken


def test_the_tree_names_files_that_exist():
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "tree.md").read_text())
    there = {
        part for room in ("src/codd", "lab/codd_lab") for path in (ROOT / room).rglob("*.py") for part in names(path)
    }
    assert len(named) > 40
    assert not set(named) - there


def names(path: Path) -> list[str]:
    """The ends of a path by which the tree may call it."""
    return ["/".join(path.parts[i:]) for i in range(len(path.parts))]


def test_a_name_that_does_not_exist_is_found():
    with pytest.raises(AttributeError, match=r"codd\.decoding\.course"):
        resolve("codd.decoding.course")


def describe_values(info: OptionInfo) -> str:
    """What an option takes, for the table in docs/decoding.md."""
    if info.kind == "choice":
        values = ", ".join(f'`"{choice}"`' for choice in info.choices)
    elif info.kind == "count":
        values = f"whole, {info.low:g} or more"
    elif info.kind == "number":
        values = f"{info.low:g} or more" if info.high == math.inf else f"{info.low:g} to {info.high:g}"
    else:
        values = {
            "ids": "ids",
            "hooks": "functions",
            "constraint": "a language",
            "verifier": "a causal model, a folder",
            "stop": "`True`, `False`, a text, texts",
            "seed": "whole, or one a prompt",
        }[info.kind]
    return values + (", `None`" if info.optional else "")


def option_row(name: str, info: OptionInfo) -> str:
    cells = (
        f"`{name}`",
        default_in_words(name) if name in RULE else f"`{getattr(DEFAULTS, name)!r}`".replace("'", '"'),
        describe_values(info),
        info.help.replace("null:", "None:"),
        "yes" if info.circuit else "",
    )
    return "| " + " | ".join(cells) + " |"


def test_the_table_of_options_is_what_the_code_says():
    rows = "\n".join(option_row(name, info) for name, info in OPTIONS.items())
    assert f"|\n{rows}\n\n" in (ROOT / "docs" / "decoding.md").read_text(), f"docs/decoding.md should say:\n{rows}"
