"""Reading a saved circuit of any kind."""

from os import PathLike

import torch

from codd.circuits import storage
from codd.circuits.graph import Circuit
from codd.circuits.hmm import HMM
from codd.circuits.modulated import Modulated
from codd.errors import FormatError

_KINDS: dict[object, type[HMM] | type[Modulated] | type[Circuit]] = {x.kind: x for x in (HMM, Modulated, Circuit)}


def load_circuit(
    source: str | PathLike[str],
    *,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    check: bool = True,
) -> HMM | Modulated | Circuit:
    """Read a circuit of any kind; general ones are for the CPU only.

    Args:
        source: a folder that a circuit's ``save`` wrote, a repository of the hub ("user/name"), or a ``.jpc``.
        device: where the parameters shall be.
        revision: a branch, tag or commit of the hub.
        check: compare the digests that the files state.

    Raises:
        FormatError: the files are damaged, or of no circuit that is known.
    """
    config, tensors = storage.read_folder(source, device=device, revision=revision, check=check)
    stated = config.get("circuit")
    kind = _KINDS.get(stated) if isinstance(stated, str) else None
    if kind is None:
        raise FormatError(f"{source} holds a circuit of type {stated!r:.60}: known are {', '.join(map(repr, _KINDS))}")
    return kind.from_stored(config, tensors, str(source))
