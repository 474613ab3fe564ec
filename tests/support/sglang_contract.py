"""SGLang's side of a diffusion algorithm, in small: what its 0.5.23 hands to an algorithm, and expects of it.

Written from a reading of its sources, for machines on which SGLang, which needs a GPU's packages, does not import. It
is not SGLang: what it leaves out (schedulers, KV caches, captured graphs) the algorithm does not see either.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor


@dataclass
class DllmConfig:
    algorithm_config: dict[str, Any]
    block_size: int
    mask_id: int
    algorithm: str = "CoDD"
    first_done_first_out_mode: bool = False


@dataclass
class ForwardBatch:
    input_ids: Tensor
    """The blocks of all requests in one row; algorithms write into this tensor."""
    batch_size: int
    dllm_prompt_mask: Tensor | None = None


class DllmAlgorithm:
    """The two loops of the engine: until all blocks of a batch are done, or one step a round with carried states."""

    def __init__(self, config: DllmConfig):
        self.block_size, self.mask_id = config.block_size, config.mask_id
        self.fdfo = config.first_done_first_out_mode

    def init_step_state(self, forward_batch: ForwardBatch) -> list[Any]:
        return [None] * forward_batch.batch_size

    def max_steps(self, block_size: int) -> int:
        return block_size + 1

    def step(self, forward_batch: ForwardBatch, full_logits: Tensor, states: list[Any]) -> list[bool]:
        raise NotImplementedError

    def run(self, forward: Callable[[Tensor], Tensor], batch: ForwardBatch, carried: list[Any] | None = None) -> Any:
        """``forward``: from (B * S,) ids to (B * S, V) logits."""
        if not self.fdfo:
            states = self.init_step_state(batch)
            for _ in range(self.max_steps(self.block_size)):
                if all(self.step(batch, forward(batch.input_ids), states)):
                    return True
            return False
        carried = carried or [None] * batch.batch_size
        fresh = self.init_step_state(batch) if None in carried else []
        states = [fresh[i] if state is None else state for i, state in enumerate(carried)]
        done = self.step(batch, forward(batch.input_ids), states)
        return done, [None if finished else state for finished, state in zip(done, states, strict=True)]


@dataclass
class Installed:
    algorithms: dict[str, type] = field(default_factory=dict)


def install(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Put the stand-in where `import sglang` finds it."""
    installed = Installed()
    names = ["sglang", "sglang.srt", "sglang.srt.dllm", "sglang.srt.dllm.algorithm", "sglang.srt.dllm.algorithm.base"]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []  # type: ignore[attr-defined] # a package
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules[names[3]].algo_name_to_cls = installed.algorithms  # type: ignore[attr-defined]
    modules[names[4]].DllmAlgorithm = DllmAlgorithm  # type: ignore[attr-defined]
    return installed
