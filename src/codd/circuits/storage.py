"""How every circuit is kept: a folder with ``circuit.safetensors`` and ``config.json``, here or on the hub.

The configuration is stored twice: as ``config.json``, for people and for the hub, and in the metadata of the
safetensors file, which is what a reader believes. So the atomic replacement of one file exchanges the whole circuit.
Digests are stored twice as well: ``config.json`` has that of the weights' file, and the metadata that of what the file
holds, so that a circuit whose ``config.json`` could not be replaced any more is told from a damaged one.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from codd import files
from codd.errors import FormatError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "circuit.safetensors"
PYJUICE_FILES = ("model.jpc", "pc_model.jpc")
"""Names under which PyJuice's circuits are published: by themselves, and beside their network."""
FORMAT = "codd-circuit"
FORMAT_VERSION = 1

_METADATA_KEY = "codd_config"
_RESERVED = ("format", "format_version", "tensors", "sha256")


_Kind = TypeVar("_Kind", bound="HubMixin")


class HubMixin(ABC):
    """``load``, for a circuit of any kind."""

    kind: ClassVar[str]
    """What the configuration says about a circuit of this class."""

    @classmethod
    @abstractmethod
    def from_stored(cls: type[_Kind], config: dict[str, Any], tensors: dict[str, Tensor], source: str) -> _Kind:
        """Make a circuit of what `read_folder` gives; `FormatError` says what is wrong with a damaged one."""

    @classmethod
    def load(
        cls: type[_Kind],
        source: str | os.PathLike[str],
        *,
        device: str | torch.device = "cpu",
        revision: str | None = None,
        check: bool = True,
    ) -> _Kind:
        """Read a saved circuit.

        Args:
            source: a folder that ``save`` wrote, a repository of the hub that holds one ("user/name"), or a ``.jpc``.
            device: where the parameters shall be.
            revision: a branch, tag or commit of the hub.
            check: compare the digests that the files state.

        Raises:
            FormatError: the circuit is of another kind, or its files are damaged.
        """
        config, tensors = read_folder(source, device=device, revision=revision, check=check)
        if (stated := config.get("circuit")) != cls.kind:
            raise FormatError(
                f"{source} holds a circuit of type {stated!r:.60}, expected {cls.kind!r}: use codd.load_circuit"
            )
        return cls.from_stored(config, tensors, str(source))


def write_folder(folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write a circuit; a folder that holds one already holds either the old or the new one at every moment.

    ``config`` is anything JSON can hold. The format, its version, and the names, shapes and dtypes of the tensors are
    added to it.
    """
    if clash := [key for key in _RESERVED if key in config]:
        raise FormatError(f"the configuration may not have the keys {', '.join(clash)}: the format uses them itself.")
    folder = Path(folder)
    tensors = files.standalone(tensors)
    described = {"format": FORMAT, "format_version": FORMAT_VERSION, **config, "tensors": _describe(tensors)}
    digest = files.sha256_of(json.dumps(described, allow_nan=False), tensors)
    metadata = {_METADATA_KEY: json.dumps({**described, "sha256": digest})}

    # Both files are complete on the disk before either takes its place: a full disk changes nothing.
    with files.replacing(folder, WEIGHTS_FILE, CONFIG_FILE) as (weights, config_file):
        files.write_weights(weights, tensors, metadata)
        files.write_text(config_file, json.dumps({**described, "sha256": files.sha256(weights)}, indent=2) + "\n")
    return folder


def read_folder(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    check: bool = True,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors as they were given to ``write_folder``; see `HubMixin.load`.

    A PyJuice file, or a folder or repository that holds one and no circuit of ours, is converted; nothing of it is run.
    FormatError if the files are damaged.
    """
    path = Path(path_or_hub_id)
    if path.suffix == ".jpc" and not path.is_dir():
        given, tensors = _read_pyjuice(path)
    else:
        folder = local_folder(path_or_hub_id, revision)
        published = [folder / name for name in PYJUICE_FILES if (folder / name).is_file()]
        ours = not published or (folder / WEIGHTS_FILE).exists()
        given, tensors = _read_circuit(folder, check) if ours else _read_pyjuice(published[0])
    return given, {name: tensor.to(device) for name, tensor in tensors.items()}


def _read_circuit(folder: Path, check: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = _read_config(folder / CONFIG_FILE)
    described, tensors = _read_weights(folder / WEIGHTS_FILE)
    if check:
        _check_digests(folder, config, described, tensors)
    return {key: value for key, value in described.items() if key not in _RESERVED}, tensors


def _read_pyjuice(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from codd.circuits.hmm import HMM  # which is kept by this module

    hmm = HMM.from_pyjuice(path)
    return hmm.description(), hmm.stored()


def local_folder(path_or_hub_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a circuit on this machine, downloaded from the hub if it is there."""
    return files.local_folder(path_or_hub_id, (CONFIG_FILE, WEIGHTS_FILE, *PYJUICE_FILES), revision)


def _describe(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in tensors.items()
    }


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FormatError(
            f"{path}: is missing, so that this is not a circuit, or the writing of it was interrupted. "
            "Give the folder of a saved circuit, or save it again."
        )
    return _parse_config(files.read_text(path), str(path))


def _parse_config(text: str, where: str) -> dict[str, Any]:
    config = files.parse_json_object(where, text)
    version = config.get("format_version")
    if config.get("format") != FORMAT:
        wrong = f'is not of a codd circuit; expected an object with "format": "{FORMAT}".'
    elif type(version) is not int or version < 1:
        wrong = f"has no format_version; expected a number from 1 to {FORMAT_VERSION}."
    elif version > FORMAT_VERSION:
        wrong = f"has format version {version}, but this codd reads versions up to {FORMAT_VERSION}. Upgrade codd."
    elif not isinstance(config.get("tensors"), dict):
        wrong = "does not list its tensors. Download or save the circuit again."
    else:
        return config
    raise FormatError(f"{where}: {wrong}")


def _read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration in the metadata, and all tensors."""
    if not path.is_file():
        raise FormatError(f"{path}: is missing. Give the folder of a saved circuit, or download it again.")
    with files.open_safetensors(path) as file:
        text = (file.metadata() or {}).get(_METADATA_KEY)
        if text is None:
            raise FormatError(f"{path}: is a safetensors file of something else; expected one that codd wrote.")
        names = file.keys()  # a method of the file, which is no dict
        described, tensors = _parse_config(text, f"{path} (metadata)"), {n: file.get_tensor(n) for n in names}
    listed, stored = described["tensors"], _describe(tensors)
    if missing := sorted(listed.keys() - stored.keys()):
        raise FormatError(f"{path}: lacks the tensor(s) {', '.join(missing)} that its configuration lists.")
    if unknown := sorted(stored.keys() - listed.keys()):
        raise FormatError(f"{path}: has the tensor(s) {', '.join(unknown)} that its configuration does not list.")
    for name, found in stored.items():
        if listed[name] != found:
            raise FormatError(f"{path}: tensor {name} is {found}, but its configuration says {listed[name]!r:.200}.")
    return described, tensors


def _check_digests(folder: Path, config: dict[str, Any], described: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Weights that changed are an error, and so is a configuration that was edited by hand.

    A configuration that an interrupted overwrite left behind is none: the weights are what their own metadata says.
    """
    plain, own_plain = ({k: v for k, v in fields.items() if k != "sha256"} for fields in (config, described))
    stated, own = config.get("sha256"), described.get("sha256")
    if stated == files.sha256(folder / WEIGHTS_FILE):
        if plain != own_plain:
            raise FormatError(
                f"{folder / CONFIG_FILE}: was changed after the circuit was saved, and no longer agrees with the copy "
                f"in {WEIGHTS_FILE}, which counts. Undo the change, or save the circuit again with the configuration "
                "wanted."
            )
    elif (stated, own) != (None, None) and own != files.sha256_of(json.dumps(own_plain), tensors):
        raise FormatError(
            f"{folder / WEIGHTS_FILE}: is damaged: its bytes are not those that were saved, by their sha256. "
            "Download or save the circuit again, or load it with check=False."
        )
