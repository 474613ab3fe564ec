"""Every query of an HMM on the CPU, side by side with plain PyTorch and other libraries: prints times and ratios."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from rivals import Settings, render, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Settings):
        convert = float if field.name == "sharpness" else int
        parser.add_argument(f"--{field.name}", type=convert, default=field.default)
    parser.add_argument("--json", type=Path, help="also write the report here")
    options = vars(parser.parse_args())
    out: Path | None = options.pop("json")
    console = Console()
    with console.status("preparing") as status:
        report = run(Settings(**options), status.update)
    console.print(render(report))
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
