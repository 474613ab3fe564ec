"""``--ray N`` of verbs whose processes divide their work by rank: Ray starts them instead of torchrun."""

import argparse
import os
from collections.abc import Sequence

from codd.errors import InvalidInput, MissingDependency


def add_ray_argument(parser: argparse.ArgumentParser) -> None:
    """How many processes, if Ray is to start them."""
    parser.add_argument(
        "--ray", type=int, metavar="N", help="N processes of a Ray cluster share the work, as torchrun's would"
    )


def run_on_ray(args: argparse.Namespace, argv: Sequence[str]) -> int | None:
    """Run a command as ``--ray`` says, and its exit code; None if it was not given, or if Ray started this process."""
    processes = getattr(args, "ray", None)
    if processes is None or "RANK" in os.environ:
        return None
    if processes < 1:
        raise InvalidInput(f"--ray must be at least 1, found {processes}.")
    try:
        from codd.integrations import ray_ranks
    except ImportError as error:
        raise MissingDependency(f"--ray needs {error.name}: pip install 'codd-lm[ray]'.") from None
    from codd.cli import main

    return ray_ranks.run(main, argv, processes)
