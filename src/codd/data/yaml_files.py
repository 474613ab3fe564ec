"""YAML from files and flags that may be anyone's: recipes and prompt templates."""

import re
from pathlib import Path
from typing import Any

import yaml

from codd import files
from codd.errors import FormatError

LONGEST = 2**17
"""Bytes of a file: fifty times the longest recipe of ours."""


class _Loader(yaml.SafeLoader):
    """Plain values alone. With aliases, a few lines stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As of the base class, but an alias is an error."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases such as *name are not taken: write the value out")
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(  # before YAML 1.2 a number needed a point, and 1e-3 was a text
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+"), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """The value of a YAML (or JSON) file; FormatError if it is none, has aliases, or is longer than `LONGEST`."""
    return parse_yaml(files.read_text(path, LONGEST), f"{path}: is not YAML")


def parse_yaml(text: str, wrong: str) -> Any:
    """The value of a YAML text; ``wrong`` begins the message of a FormatError."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # of a value that is no date, number or base64 this parser raises whatever it met
        message = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise FormatError(f"{wrong}: {message[:300]}") from error
