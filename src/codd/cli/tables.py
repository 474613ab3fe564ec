"""Sections of text with a table, shown on a terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from codd.cli import console

Cell = str | tuple[str, str]
"""A text, or a text and its style as rich spells it."""


@dataclass(frozen=True)
class Section:
    """A title, paragraphs before and after, and a table whose first column holds names and the others numbers.

    ``prose``: the others hold texts instead, which are wrapped.
    """

    title: str
    before: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    after: Sequence[str] = ()
    prose: bool = False


def show(sections: Iterable[Section]) -> None:
    """Print sections to stdout, with tables as wide as the terminal allows."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    terminal = console.out()
    for section in sections:
        terminal.print(f"\n{section.title}", style="bold")
        for paragraph in section.before:
            terminal.print(paragraph)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=section.prose)
        for i, heading in enumerate(section.header):
            numbers = i > 0 and not section.prose
            table.add_column(heading, justify="right" if numbers else "left", ratio=1 if section.prose and i else None)
        for row in section.rows:
            table.add_row(*map(Text.assemble, row))
        terminal.print(table)
        for paragraph in section.after:
            terminal.print(paragraph)
