"""Two processes that find each other as torchrun's do, without torchrun: it would import PyTorch a third time."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import TCPStore

from tests.support import PYTHONPATH


def run_in_two_processes(*arguments: str, threads: int = 1, program: Sequence[str] = ("-m", "codd")) -> tuple[str, str]:
    """Run a Python program with these arguments twice, as ranks 0 and 1; all that they wrote to stdout and stderr."""
    # Kept here, as torchrun keeps it: a port that was free may be taken before another process opens it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "CUDA_VISIBLE_DEVICES": ""}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": str(threads), "PYTHONPATH": PYTHONPATH}

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, *program, *arguments]
        # Of two ranks the second waits for the first, and would wait half an hour for one that has failed.
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(start, range(2)))
    stdout, stderr = ("".join(getattr(each, name) for each in done) for name in ("stdout", "stderr"))
    assert [each.returncode for each in done] == [0, 0], stderr
    return stdout, stderr
