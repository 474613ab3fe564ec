"""Constraints on the command line: a regular expression, a JSON schema, choices or a template."""

import argparse
from pathlib import Path

from codd import files
from codd.constraints import After, Choice, JsonSchema, Regex, Template
from codd.constraints.languages import Expressed
from codd.decoding.options import Constraint
from codd.errors import FormatError, InvalidInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """At most one of them."""
    group = parser.add_argument_group("constraint", "what the text is; exact, whatever the sampler and the order")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--regex", metavar="PATTERN", help="a text that Python's re.fullmatch matches")
    one.add_argument("--json-schema", metavar="SCHEMA", help="JSON that is valid under a schema: a file, or its text")
    one.add_argument("--choice", action="append", metavar="TEXT", help="one of some texts: give it once for each")
    one.add_argument("--template", metavar="TEXT", help="fixed text with slots, as in 'Name: [MASK:8], age: [MASK:2]'")
    group.add_argument("--after", metavar="TEXT", help="free text first, then this, then what the constraint says")


def from_arguments(args: argparse.Namespace) -> Constraint | None:
    """The one that was given, if any."""
    found = _language(args)
    if args.after is None:
        return found
    if not isinstance(found, Expressed):
        raise InvalidInput("--after goes with --regex, --json-schema or --choice, which says what follows it.")
    return After(args.after, found)


def _language(args: argparse.Namespace) -> Constraint | None:
    if args.regex is not None:
        return Regex(args.regex)
    if args.json_schema is not None:
        return JsonSchema(_schema(args.json_schema))
    if args.choice is not None:
        return Choice(args.choice)
    return None if args.template is None else Template(args.template)


def _schema(given: str) -> str:
    """The schema itself begins with a brace; anything else is the name of a file."""
    if given.lstrip().startswith(("{", "true", "false")):
        return given
    try:
        return files.read_text(Path(given))
    except FormatError as error:
        raise InvalidInput(f"--json-schema {error} Give a file, or the schema.") from error
