"""Write word problems to a file that recipes and ``codd cache`` read: ``python -m codd_lab.problems --help``."""

import argparse
from pathlib import Path

from codd_lab.problems import write_problems


def main() -> None:
    """Write a file as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m codd_lab.problems", description=__doc__)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--split", choices=["train", "test"], default="train", help="no problem is in both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a .jsonl or .jsonl.xz file")
    args = parser.parse_args()
    write_problems(args.out, args.count, split=args.split, seed=args.seed)


if __name__ == "__main__":
    main()
