"""Sections of text with a table, shown on a terminal or as a page that needs nothing else."""

from collections.abc import Iterable

from codd.cli import console
from codd.evaluation.page import Cell as Cell
from codd.evaluation.page import Section as Section
from codd.evaluation.page import page as page

_STYLES = {"good": "green", "bad": "red", "plain": "default", "faint": "dim"}


def show(sections: Iterable[Section]) -> None:
    """Print them."""
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
            table.add_row(
                *(
                    Text("\n").join(Text(part.text, style=_STYLES[part.tone]) for part in (cell, *cell.below))
                    for cell in row
                )
            )
        terminal.print(table)
        for paragraph in section.after:
            terminal.print(paragraph)
