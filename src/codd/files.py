"""Files on this machine and on the hub: writing that a crash cannot leave half done, and finding a folder by name."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from codd.errors import FormatError, MissingDependency

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def local_folder(path_or_hub_id: str | os.PathLike[str], wanted: Sequence[str], revision: str | None = None) -> Path:
    """A folder on this machine; one that is on the hub is downloaded first.

    ``wanted`` are the names (or patterns) of the files that are needed of it; ``revision`` (a branch, tag or commit)
    applies to the hub only.
    """
    path = Path(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists():
        raise FormatError(f"{path}: is a file. Give the folder that holds {' and '.join(wanted[:2])}.")
    if isinstance(path_or_hub_id, str) and _HUB_ID.fullmatch(path_or_hub_id):
        return _download(path_or_hub_id, wanted, revision)
    raise FormatError(f"{path}: there is no such folder, and this is not the name of a hub repository (user/name).")


def _download(repo_id: str, wanted: Sequence[str], revision: str | None) -> Path:
    library = hub()
    try:
        return Path(library.snapshot_download(repo_id, revision=revision, allow_patterns=list(wanted)))
    except Exception as error:  # the hub's own errors and, by its version, those of requests or httpx
        at = f" at revision {revision!r}" if revision else ""
        raise FormatError(
            f"{repo_id!r}: there is no such folder here, and the hub gave no such repository{at}: {brief(error)} "
            "Check the name and the connection, or give the path of a local folder."
        ) from error


def hub() -> Any:
    """The hub's library, if it is installed."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependency("the hub needs the package huggingface_hub: pip install codd[hub]") from error
    return huggingface_hub


def brief(error: Exception) -> str:
    """An error of someone else's in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0][:300] if lines else "no details"
    return f"{type(error).__name__}: {text}"


def read_text(path: Path) -> str:
    """The text of a downloaded file; FormatError if it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8 text ({error.reason}). Download it again.") from error
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error


def parse_json_object(path: Path, text: str) -> dict[str, Any]:
    """The JSON object that a downloaded file holds as ``text``; FormatError if it holds anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not JSON ({brief(error)}). Download it again.") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(content).__name__}. Download it again.")
    return content


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a downloaded file; FormatError if it cannot be read or holds anything else."""
    return parse_json_object(path, read_text(path))


def sha256(path: Path) -> str:
    """The digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def standalone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, none of which shares its memory: safetensors takes no others."""
    alone: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in sorted(tensors.items()):  # the same tensors give the same bytes
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        alone[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return alone


@contextmanager
def replacing(folder: Path, *names: str) -> Iterator[list[Path]]:
    """Paths to write, which take the place of the named files when all are whole; an error changes nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f".{secrets.token_hex(4)}.tmp"
    temporary = [folder / f".{name}{suffix}" for name in names]
    try:
        yield temporary
        for path, name in zip(temporary, names, strict=True):
            os.replace(path, folder / name)
        sync_folder(folder)
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):  # the error that brought us here says more
                path.unlink(missing_ok=True)


def write_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file that is on the disk when this returns."""
    with path.open("xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {}))
        path.chmod(mode)  # safetensors makes files that only their owner can read; ours follow the umask
    except SafetensorError as error:
        raise OSError(f"{path}: could not be written: {error}") from error
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """A text file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in it last through a power failure, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
