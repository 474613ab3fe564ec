"""The bundled model asked for very little."""

from pathlib import Path

import torch

import codd
from codd.distributed import DistributedContext
from codd_lab.runs import Run
from codd_lab.tasks.configs import EvalConfig
from codd_lab.tasks.runner import EvalSession
from tests.support.small_data import data as data

TINY = {"gen_length": 16, "block_length": 16, "steps": 2}
ASKED = 4


def session(folder: Path, root: Path | None, batch: int = 4) -> EvalSession:
    alone = DistributedContext(0, 1, torch.device("cpu"))
    return EvalSession(Run(folder, create=True), codd.load(circuit=None, device="cpu"), alone, root, batch)


def config(task: str, circuit: str = "none", **options) -> EvalConfig:
    return EvalConfig(task, circuit, {**TINY, **options}, problems=ASKED)
