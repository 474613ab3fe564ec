"""The templates of HTML pages: one file each, with nothing from outside and no script; hostile text stays text."""

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

LONGEST = 2500
"""Characters of a text that are shown."""


def visible(text: str) -> str:
    """Text whose control and direction characters are shown as escapes: it may come from a model or from a file."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def cut(text: str, longest: int = LONGEST) -> str:
    """The beginning of a long text, and how many characters are left out."""
    return text if len(text) <= longest else f"{text[:longest]} [... {len(text) - longest} more characters]"


def _printed(value: Any) -> str:
    return value if isinstance(value, Markup) else visible(str(value))


@cache
def template(name: str) -> Template:
    """A template of this package. All it prints is made visible and escaped, but for `Markup`."""
    environment = Environment(
        loader=PackageLoader("codd_lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cut"] = cut
    return environment.get_template(name)
