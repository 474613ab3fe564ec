"""Sections of text, tables and figures as one HTML page that needs nothing else, on a screen or on paper."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Cell:
    """A text, and how good it is: 'good', 'bad', 'plain' or 'faint'; below it, lines with tones of their own.

    On a page there are also 'heat0' to 'heat5', for tables that are read as maps.
    """

    text: str
    tone: str = "plain"
    below: Sequence["Cell"] = ()


@dataclass(frozen=True)
class Section:
    """A title, paragraphs before and after, and a table whose first columns hold ``names`` and the others numbers.

    Without a header there is no table. ``prose``: the others hold texts instead, which are wrapped. ``figure``: HTML
    to go with it, on a page only. ``level`` 3 is a part of the section before, 4 a part of that.
    """

    title: str
    before: Sequence[str]
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    after: Sequence[str] = ()
    prose: bool = False
    figure: str = ""
    level: int = 2
    names: int = 1


HEAT = 6
"""How many colours a map has."""

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; overflow-wrap: anywhere; }
p, li { max-width: 52rem; } h1, h2, h3, h4 { line-height: 1.25; } h2 { margin-top: 2.5rem; } h3 { margin-top: 1.75rem; }
table { border-collapse: collapse; margin: 1rem 0; overflow-wrap: normal; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid #ddd;
         font-variant-numeric: tabular-nums; white-space: pre; vertical-align: top; }
th { vertical-align: bottom; white-space: pre-wrap; }
th:first-child, td:first-child, .names2 :is(th, td):nth-child(2), .names3 :is(th, td):nth-child(-n+3),
.names4 :is(th, td):nth-child(-n+4) { text-align: left; }
td:first-child, .names2 td:nth-child(2), .names3 td:nth-child(-n+3), .names4 td:nth-child(-n+4) {
  white-space: pre-wrap; min-width: 5.5rem; }
td div { font-size: .85em; }
.prose th, .prose td { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 7rem; }
.wide { overflow-x: auto; font-size: .94em; } svg { max-width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif; font-size: 13px; fill: currentColor; }
figure { margin: 1rem 0; } .panels { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: flex-start; }
figcaption { font-size: .9em; } nav ul { padding-left: 1.2rem; columns: 16rem; } nav a { color: inherit; }
.series0 { fill: #8a8f98; } .series1 { fill: #c9a227; } .series2 { fill: #2f7ed8; } .axis { stroke: currentColor; }
.good { color: #0a7a32; } .bad { color: #b3261e; } .faint { color: #6b6b6b; }
.heat0, .heat1, .heat2, .heat3, .heat4, .heat5 { padding: .3rem .5rem; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.heat1 { background: rgba(0, 114, 178, .1); } .heat2 { background: rgba(0, 114, 178, .2); }
.heat3 { background: rgba(0, 114, 178, .3); } .heat4 { background: rgba(0, 114, 178, .4); }
.heat5 { background: rgba(0, 114, 178, .5); }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; } th, td { border-color: #444; }
  .good { color: #5fd38a; } .bad { color: #ff8a80; } .faint { color: #9a9a9a; }
}
@media print {
  @page { margin: 14mm 12mm; }
  body { font-size: 9.5pt; max-width: none; margin: 0; padding: 0; color: #000; background: #fff; }
  nav { display: none; } h2, h3, h4 { break-after: avoid; } figure, tr { break-inside: avoid; }
  .panels { flex-wrap: nowrap; } .panels svg { max-width: 49%; }
  thead { display: table-header-group; } p { orphans: 3; widows: 3; }
  .wide { overflow: visible; font-size: 8pt; }
  table th, table td { border-color: #bbb; padding-right: .5rem; white-space: pre-wrap; }
  td { min-width: 0 !important; }
  .good { color: #0a7a32; } .bad { color: #b3261e; } .faint { color: #555; }
}
"""


def visible(text: str) -> str:
    """Text whose control and direction characters are shown as escapes: it may come from a model or from a file."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(text: str) -> str:
    """As HTML, in an element or in the quotes of an attribute."""
    return escape(visible(text))


def page(title: str, sections: Iterable[Section], *, contents: bool = False) -> str:
    """All of it as HTML, with no outside assets and no script. ``contents``: links to the sections come first."""
    listed = list(sections)
    body = "\n".join(_section(section, number) for number, section in enumerate(listed))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{shown(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<h1>{shown(title)}</h1>\n"
        f"{_contents(listed) if contents else ''}{body}\n</body>\n</html>\n"
    )


def _contents(sections: Sequence[Section]) -> str:
    items = "\n".join(
        f'<li><a href="#part{number}">{shown(section.title)}</a></li>'
        for number, section in enumerate(sections)
        if section.level == 2
    )
    return f"<nav><ul>\n{items}\n</ul></nav>\n"


def _section(section: Section, number: int) -> str:
    tag = f"h{section.level}"
    parts = [f'<{tag} id="part{number}">{shown(section.title)}</{tag}>']
    parts += [f"<p>{shown(paragraph)}</p>" for paragraph in section.before]
    if section.header:
        parts.append(_table(section))
    parts += [section.figure] if section.figure else []
    parts += [f"<p>{shown(paragraph)}</p>" for paragraph in section.after]
    return "\n".join(parts)


def _table(section: Section) -> str:
    kind = "prose" if section.prose else f"names{section.names}"
    header = "".join(f'<th scope="col">{shown(heading)}</th>' for heading in section.header)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in section.rows)
    return (
        f'<div class="wide"><table class="{kind}">\n<thead><tr>{header}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _cell(cell: Cell) -> str:
    below = "".join(f'<div class="{shown(part.tone)}">{shown(part.text)}</div>' for part in cell.below)
    return f'<td class="{shown(cell.tone)}">{shown(cell.text)}{below}</td>'
