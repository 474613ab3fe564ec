"""The processes of one run on a Ray cluster, each with the environment variables that torchrun would give it."""

import io
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported: nothing is reported to anybody

import ray

from codd.errors import InvalidInput

Main = Callable[[list[str]], int]
"""The command line: its arguments without the program, and the exit code."""


class Rank:
    """One process of the run."""

    def address(self) -> tuple[str, int]:
        """The address of its machine, and a port that is free there."""
        with socket.create_server(("", 0)) as free:
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, main: Main, argv: list[str], folder: str, environment: dict[str, str]) -> tuple[int, str]:
        """The exit code and what was printed to stdout; ``folder``: where relative paths begin."""
        os.environ.update(environment)
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        with redirect_stdout(io.StringIO()) as printed:
            code = main(argv)
        return code, printed.getvalue()


def run(main: Main, argv: Sequence[str], processes: int) -> int:
    """Run a command in several processes of a cluster, that of RAY_ADDRESS or one of this machine's own.

    Each has one GPU if there are enough, else none. Prints what they printed, and returns the first exit code that is
    not 0; the other processes are ended then. They must be able to import ``main``.
    """
    ray.init(include_dashboard=False, logging_level="ERROR")
    try:
        there = ray.cluster_resources()
        if there.get("CPU", 0) < processes:
            raise InvalidInput(f"--ray {processes} needs as many CPUs, and the cluster has {there.get('CPU', 0):g}.")
        worker = ray.remote(num_cpus=1, num_gpus=int(there.get("GPU", 0) >= processes))(Rank)
        ranks = [worker.remote() for _ in range(processes)]
        addresses = ray.get([rank.address.remote() for rank in ranks])
        host, port = addresses[0]
        common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        seen: Counter[str] = Counter()
        pending = []
        for number, (rank, (machine, _)) in enumerate(zip(ranks, addresses, strict=True)):
            environment = {**common, "RANK": str(number), "LOCAL_RANK": str(seen[machine])}
            seen[machine] += 1
            pending.append(rank.run.remote(main, list(argv), os.getcwd(), environment))
        while pending:
            [done, *_], pending = ray.wait(pending)
            code: int
            code, printed = ray.get(done)
            sys.stdout.write(printed)
            if code:
                return code
        return 0
    finally:
        ray.shutdown()
