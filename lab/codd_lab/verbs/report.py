"""``codd report``: an evaluation as one page."""

import argparse
import errno
import os
from pathlib import Path

from codd.cli import console

NAME = "report"
HELP = """\
Makes one HTML file of a run of codd eval: what it says of each circuit against the null circuit, tables, the frontier
of quality and cost, likelihoods, continued text, cost, ablation, samples side by side, settings and provenance. The
page needs nothing else: figures are inside, there is no script, and it can be printed. The figures are also written as
PNG files, into RUN_DIR/figures. Parts that the run does not have are named and left out.

Prints where the page is, and what the run says in a paragraph."""


def configure(parser: argparse.ArgumentParser) -> None:
    """A run, and where its page goes."""
    parser.epilog = """\
examples:
  codd report runs/mini
  codd report runs/mini --out mini.html --no-png
  codd report runs/mini --json | python -m json.tool"""
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="what codd eval --out was told")
    parser.add_argument("--out", metavar="FILE.html", type=Path, help="default: RUN_DIR/report.html")
    parser.add_argument("--no-png", action="store_true", help="write no PNG files")
    parser.add_argument(
        "--samples", type=console.number(int, 0), default=4, metavar="N", help="problems shown of a task (default: 4)"
    )
    parser.add_argument("--json", action="store_true", help="print the comparisons and the calls saved as JSON")


def run(args: argparse.Namespace) -> int:
    """Read, draw, write."""
    from codd_lab.report.render import PAGE, PICTURES, make_report, render, write_page, write_pictures
    from codd_lab.runs import Run

    found = Run(args.run)
    out: Path = args.out or args.run / PAGE
    if not out.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(out))
    with console.working("reading the run"):
        report = make_report(found, args.samples)
    with console.bar("drawing", len(report.charts) * (1 if args.no_png else 2)) as bar:
        text = render(report, bar.advance)
        pictures = [] if args.no_png else write_pictures(report, args.run / PICTURES, bar.advance)
    write_page(text, out)
    if args.json:
        console.as_json({"page": str(out), "figures": list(map(str, pictures)), **report.as_json()})
        return 0
    for sentence in [*report.findings, *report.missing]:
        console.out().print(console.one_line(sentence))
    console.fields(f"written: {out}", {"figures": f"{len(pictures)} PNG files"})
    return 0
