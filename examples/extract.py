r"""Extract fields of texts as JSON, with the bundled model or any checkpoint that codd loads.

    python examples/extract.py                                        # six shopping notes, the bundled model
    python examples/extract.py notes.txt --json                       # one text a line; one object a line
    python examples/extract.py --pattern '... (?P<total>\d+) ...'
    python examples/extract.py notes.txt --model PATH --schema SCHEMA.json

A pattern does both jobs: it is the constraint that the model writes under, and its named groups are the fields. {word}
in it stands for any word of the text, so that what is extracted cannot be invented. With --schema the model writes the
JSON itself; that is for models which have seen JSON.

What to expect of the bundled model: it has 27 million parameters and was trained on word problems only. The pattern is
therefore worded as it words its solutions, and lets it calculate on the way: of the six built-in notes, which it was
written for, all 30 numbers are right and 9 of 12 items. Expect less of others. Whatever it writes, the form is right.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import codd
from codd.constraints import JsonSchema, Regex

LINE = r"The (?P<item_{0}>{{word}}) cost (?P<pieces_{0}>[1-9]\d?) \* (?P<price_{0}>[1-9]\d?) = \d{{1,4}} dollars\.\n"
SUM = r"The sum is \d{1,4} \+ \d{1,4} = (?P<total>\d{1,4}) dollars\.\n#### \d{1,4}"
PATTERN = LINE.format(1) + LINE.format(2) + SUM
TEXTS = (
    "Mia goes shopping and gets 6 towels for $19 each and 5 notebooks for $22 each. How many dollars does she spend?",
    "Luis goes to a market and buys 3 lamps for $25 each and 12 candles for $4 each. How much does he pay in total?",
    "At the market, Tara buys 8 melons at $3 each and 14 apples at $2 each. How many dollars does she pay in all?",
    "Oscar orders 2 chairs for $45 each and 9 plates for $7 each. What is the total cost, in dollars?",
    "Our club needs 11 shirts at $16 each, and 4 balls for $21 each. How much is that in all?",
    "Rosa picked up 7 books for $13 each. She also bought 5 pens for $2 each. How much did she spend?",
)


def main() -> None:
    """Print the fields of every text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="one text a line (default: built-in texts)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--pattern", default=PATTERN, help="a regular expression with a named group for each field")
    how.add_argument("--schema", type=Path, help="a JSON schema of an object, which the model writes itself")
    parser.add_argument("--model", help="a folder, or the name of a hub repository (default: the bundled model)")
    parser.add_argument("--gen-length", type=int, default=96, metavar="N", help="tokens to write (default: 96)")
    parser.add_argument("--json", action="store_true", help="an object a line instead of a table")
    args = parser.parse_args()
    texts = [line for line in args.file.read_text().splitlines() if line.strip()] if args.file else TEXTS
    form = json.loads(args.schema.read_text()) if args.schema else args.pattern
    model, found = codd.load(args.model), list[dict[str, Any]]()
    for text in texts:
        found.append(extract(model, text, form, args.gen_length))
        if args.json:
            print(json.dumps(found[-1]), flush=True)
    if not args.json:
        table = Table("text", *found[0], show_lines=True)
        for text, row in zip(texts, found, strict=True):
            table.add_row(text, *(str(row.get(name, "")) for name in found[0]))
        Console().print(table)


def extract(model: codd.Model, text: str, form: str | dict[str, Any], gen_length: int) -> dict[str, Any]:
    """The fields of a text, by a pattern with named groups or the schema of an object; CoddError if nothing fits."""
    if isinstance(form, dict):
        [written] = model.generate(text, constraint=JsonSchema(form), gen_length=gen_length).texts or [""]
        return dict(json.loads(written))
    pattern = form.replace("{word}", f"(?:{'|'.join(sorted(set(re.findall(r'[a-z]{3,}', text))))})")
    [written] = model.generate(text, constraint=Regex(pattern), gen_length=gen_length).texts or [""]
    [matched] = re.finditer(f"^(?:{pattern})$", written)  # it always matches: that is what the constraint is for
    return {name: int(value) if value.isdigit() else value for name, value in matched.groupdict("").items()}


if __name__ == "__main__":
    main()
