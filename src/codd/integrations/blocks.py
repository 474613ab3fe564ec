"""codd's denoising loop on blocks of tokens whose logits another engine computes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits import load_circuit
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.loop import advance
from codd.decoding.options import Options
from codd.decoding.runner import HiddenStateRequest
from codd.decoding.sequence import SequenceState, Step, plan_steps
from codd.errors import CoddError, InvalidInput

UNWRITTEN = -1
"""A masked position in our states. The engine's mask is a token that a prompt may hold."""
EXCLUDED = ("gen_length", "block_length", "mode", "preset", "cfg_scale", "cache", "refresh", "constraint", "hooks")
"""Options of the loop that are the engine's to decide, or that need more of the network than the logits of a block."""


class BlockDecoder:
    """Decides which tokens of a block to commit, from an engine's logits and a static circuit.

    Every block is a sequence of its own in the loop that `codd.Model.generate` runs, so samplers, orders and paces are
    the same; ``steps`` counts the network evaluations of one block.
    """

    def __init__(self, circuit: ProbabilisticCircuit | None, options: Options, *, mask_id: int):
        """``circuit`` None: the network alone. InvalidInput for a circuit that needs the network's hidden states."""
        if circuit is not None and circuit.feature_width is not None:
            raise InvalidInput(
                "this circuit is modulated by the network's hidden states, which this engine does not hand out. Train "
                "a static one: codd train RECIPE --set head.latents=false"
            )
        self.circuit, self.options, self.mask_id = circuit, options, mask_id

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], *, mask_id: int, block_size: int) -> "BlockDecoder":
        """From an engine's configuration: ``circuit`` (a folder, a hub id or None), and options of decoding by name.

        InvalidInput for unknown names, and for options that are not the block's.
        """
        given = {name: value for name, value in settings.items() if name != "circuit"}
        wrong = [name for name in given if name in EXCLUDED]
        if wrong:
            raise InvalidInput(f"{', '.join(wrong)}: cannot be set here, where another engine runs the network.")
        source = settings.get("circuit")
        circuit = None if source is None else load_circuit(source)
        if circuit is not None and circuit.length not in (None, block_size):
            raise InvalidInput(f"the circuit {source} has {circuit.length} positions, but a block has {block_size}.")
        return cls(circuit, Options.of(**given, gen_length=0, block_length=block_size, stop=False), mask_id=mask_id)

    def start(self, ids: Int[Tensor, " S"], given: Bool[Tensor, " S"], options: Options | None = None) -> SequenceState:
        """A block with its first step planned; masks at ``given`` positions are the prompt's, and stay. On the host.

        ``options``: its own, whose seed its draws are of; None: those of all blocks.
        """
        options = options or self.options
        generator = torch.Generator().manual_seed(options.seed if isinstance(options.seed, int) else 0)
        open_ids = torch.where((ids == self.mask_id) & ~given, UNWRITTEN, ids.long())
        state = SequenceState(open_ids, given, 0, UNWRITTEN, options, generator)
        state.begin(plan_steps(state))
        return state

    def ids(self, state: SequenceState) -> Int[Tensor, " S"]:
        """The block as the engine writes it, on the host."""
        return torch.where(state.ids == UNWRITTEN, self.mask_id, state.ids)

    def step(self, states: Sequence[SequenceState], logits: Float[Tensor, "B S V"]) -> list[Step | CoddError]:
        """One step of each block, none of them finished; ``states`` are changed.

        A block that cannot be stepped (its logits are NaN, for instance) has an error instead, is finished and keeps
        its masks; what is no fault of one block is raised. The host waits for the device once the work of all blocks is
        on its way.
        """
        logits = self._fitted(logits)
        if self.circuit is not None and self.circuit.device != logits.device:
            self.circuit = self.circuit.to(logits.device)
        banned = self._banned(logits)
        for state in states:
            state.circuit, state.banned = self.circuit, banned
        outcomes = advance(_EngineLogits(dict(zip(map(id, states), logits, strict=True))), states)
        for outcome in outcomes:
            if not isinstance(outcome, Step | CoddError):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Step | CoddError)]

    def give_up(self, state: SequenceState, logits: Float[Tensor, "S V"]) -> None:
        """Fill what is open of a block that failed in `step`: each place by its most probable token, NaN the least."""
        usable = self._fitted(logits[None])[0].float().nan_to_num(nan=torch.finfo(torch.float32).min)
        best = usable.index_fill(1, self._banned(logits), -torch.inf).argmax(-1).cpu()
        state.ids = torch.where(state.ids == UNWRITTEN, best, state.ids)

    def _banned(self, logits: Tensor) -> Int[Tensor, " N"]:
        """The tokens that are never written, on the logits' device."""
        return torch.tensor(sorted({self.mask_id, *self.options.ban}), device=logits.device)

    def _fitted(self, logits: Float[Tensor, "B S V"]) -> Float[Tensor, "B S W"]:
        """The logits of the circuit's tokens: engines pad vocabularies at the end."""
        if self.circuit is None:
            return logits
        wanted, found = self.circuit.vocab_size, logits.shape[-1]
        if found < wanted:
            raise InvalidInput(f"the circuit is over {wanted} tokens, the engine's logits over {found}: of two models.")
        return logits[..., :wanted]


class _EngineLogits:
    """Evaluates nothing: gives the loop the engine's logits where it asks for hidden states, and again by the head."""

    def __init__(self, logits: Mapping[int, Float[Tensor, "S V"]]):
        self._logits = logits

    def __call__(self, requests: Sequence[HiddenStateRequest]) -> list[Float[Tensor, "_ V"]]:
        return [self._logits[id(request.state)][slice(*request.span)] for request in requests]

    def logits(self, rows: Sequence[Float[Tensor, "_ V"]], mask_id: int) -> list[Float[Tensor, "_ V"]]:
        return [each.float() for each in rows]

    def admit(self, state: SequenceState) -> bool:
        return True

    def release(self, state: SequenceState) -> None:
        return None
