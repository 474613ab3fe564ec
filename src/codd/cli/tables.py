"""Sections of text with a table, shown on a terminal or as a page that needs nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from codd.cli import console


@dataclass(frozen=True)
class Cell:
    """A text, and how good it is: 'good', 'bad', 'plain' or 'faint'."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True)
class Section:
    """A title, sentences before and after, and a table whose first column holds names and the others numbers."""

    title: str
    before: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    after: Sequence[str] = ()


_STYLES = {"good": "green", "bad": "red", "plain": "default", "faint": "dim"}
_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #ddd;
         font-variant-numeric: tabular-nums; white-space: pre; }
th:first-child, td:first-child { text-align: left; }
.good { color: #0a7a32; } .bad { color: #b3261e; } .faint { color: #888; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; } th, td { border-color: #444; }
  .good { color: #5fd38a; } .bad { color: #ff8a80; }
}
"""


def show(sections: Iterable[Section]) -> None:
    """Print them."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    terminal = console.out()
    for section in sections:
        terminal.print(f"\n{section.title}", style="bold")
        for sentence in section.before:
            terminal.print(sentence)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, heading in enumerate(section.header):
            table.add_column(heading, justify="right" if i else "left")
        for row in section.rows:
            table.add_row(*(Text(cell.text, style=_STYLES[cell.tone]) for cell in row))
        terminal.print(table)
        for sentence in section.after:
            terminal.print(sentence)


def page(title: str, sections: Iterable[Section]) -> str:
    """The same as HTML, with no outside assets."""
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    header = "".join(f"<th>{escape(heading)}</th>" for heading in section.header)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in section.rows)
    return "\n".join(
        [
            f"<h2>{escape(section.title)}</h2>",
            *(f"<p>{escape(sentence)}</p>" for sentence in section.before),
            f"<table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>",
            *(f"<p>{escape(sentence)}</p>" for sentence in section.after),
        ]
    )


def _cell(cell: Cell) -> str:
    return f'<td class="{escape(cell.tone)}">{escape(cell.text)}</td>'
