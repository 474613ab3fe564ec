"""Sections of text with a table, shown on a terminal or as a page that needs nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from codd.cli import console


@dataclass(frozen=True)
class Cell:
    """A text, and how good it is: 'good', 'bad', 'plain' or 'faint'; below it, lines with tones of their own."""

    text: str
    tone: str = "plain"
    below: Sequence["Cell"] = ()


@dataclass(frozen=True)
class Section:
    """A title, paragraphs before and after, and a table whose first column holds names and the others numbers.

    ``prose``: the others hold texts instead, which are wrapped. ``figure``: SVG to go with it, on a page only.
    """

    title: str
    before: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    after: Sequence[str] = ()
    prose: bool = False
    figure: str = ""


_STYLES = {"good": "green", "bad": "red", "plain": "default", "faint": "dim"}
_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #ddd;
         font-variant-numeric: tabular-nums; white-space: pre; }
th:first-child, td:first-child { text-align: left; }
.prose th, .prose td { text-align: left; vertical-align: top; white-space: pre-wrap; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
.series0 { fill: #8a8f98; } .series1 { fill: #c9a227; } .series2 { fill: #2f7ed8; } .axis { stroke: currentColor; }
.good { color: #0a7a32; } .bad { color: #b3261e; } .faint { color: #6b6b6b; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; } th, td { border-color: #444; }
  .good { color: #5fd38a; } .bad { color: #ff8a80; } .faint { color: #9a9a9a; }
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


def page(title: str, sections: Iterable[Section]) -> str:
    """The same as HTML, with no outside assets."""
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    kind = ' class="prose"' if section.prose else ""
    header = "".join(f"<th>{escape(heading)}</th>" for heading in section.header)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in section.rows)
    return "\n".join(
        [
            f"<h2>{escape(section.title)}</h2>",
            *(f"<p>{escape(paragraph)}</p>" for paragraph in section.before),
            f'<div class="wide"><table{kind}>\n<thead><tr>{header}</tr></thead>',
            f"<tbody>\n{rows}\n</tbody>\n</table></div>",
            section.figure,
            *(f"<p>{escape(paragraph)}</p>" for paragraph in section.after),
        ]
    )


def _cell(cell: Cell) -> str:
    below = "".join(f'<div class="{escape(part.tone)}">{escape(part.text)}</div>' for part in cell.below)
    return f'<td class="{escape(cell.tone)}">{escape(cell.text)}{below}</td>'
