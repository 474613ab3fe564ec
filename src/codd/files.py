"""Files on this machine and on the hub: writing that a crash cannot leave half done, and finding a folder by name."""

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from codd.errors import FormatError, MissingDependency

MAX_BYTES = 1 << 24
"""Largest text or JSON file that a stranger may have written, unless its reader gives another limit."""
MAX_JSON = 1 << 26
"""Largest JSON file that codd itself writes, in bytes."""
MAX_DEPTH = 64
"""Largest depth of nested JSON."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def local_folder(path_or_hub_id: str | os.PathLike[str], wanted: Sequence[str], revision: str | None = None) -> Path:
    """A folder on this machine; one that is on the hub is downloaded first.

    ``wanted`` are the names (or patterns) of the files that are needed of it; ``revision`` (a branch, tag or commit)
    applies to the hub only.
    """
    path = Path(path_or_hub_id)
    try:
        if path.is_dir():
            return path
        if path.exists():
            raise FormatError(f"{path}: is a file. Give the folder that holds {' and '.join(wanted[:2])}.")
    except OSError as error:
        raise FormatError(f"{_short(path)}: cannot be looked at ({error.strerror}). Check the name.") from error
    if isinstance(path_or_hub_id, str) and _HUB_ID.fullmatch(path_or_hub_id):
        return _download(path_or_hub_id, wanted, revision)
    raise FormatError(f"{path}: there is no such folder, and this is not the name of a hub repository (user/name).")


def _download(repo_id: str, wanted: Sequence[str], revision: str | None) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependency("the hub needs the package huggingface_hub: pip install codd-lm[hub]") from error
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=list(wanted)))
    except Exception as error:  # the hub's own errors and, by its version, those of requests or httpx
        at = f" at revision {revision!r}" if revision else ""
        raise FormatError(
            f"{repo_id!r}: there is no such folder here, and the hub gave no such repository{at}: {brief(error)} "
            "Check the name and the connection, or give the path of a local folder."
        ) from error


def brief(error: BaseException) -> str:
    """An error of someone else's in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0][:300] if lines else "no details"
    return f"{type(error).__name__}: {text}"


def _short(path: Path) -> str:
    """A path, of which a name that is too long for the system shows its beginning only."""
    return text if len(text := str(path)) < 300 else f"{text[:300]}..."


def open_regular(path: Path, most: int | None = None) -> io.BufferedReader:
    """Open a file that a stranger may have made; FormatError unless it is a regular one, of at most ``most`` bytes.

    Reading a pipe would wait for ever, and a device has no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # too long a name, or a null byte in it
        reason = getattr(error, "strerror", None) or error
        raise FormatError(f"{_short(path)}: cannot be read ({reason}). Check its name and permissions.") from error
    found = os.fstat(descriptor)
    wrong = None
    if not stat.S_ISREG(found.st_mode):
        wrong = "cannot be read: it is no regular file, but a folder, pipe or device"
    elif most is not None and found.st_size > most:
        wrong = f"has {found.st_size:,} bytes, more than the {most:,} that such a file may have"
    if wrong is not None:
        os.close(descriptor)
        raise FormatError(f"{path}: {wrong}.")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a file that a stranger may have written; FormatError as `open_regular` has it."""
    with open_regular(path, most) as file:
        size = os.fstat(file.fileno()).st_size  # by which memory is taken; the file may have grown since it was opened
        return file.read(min(most, size))


@contextmanager
def open_safetensors(path: Path, device: str = "cpu") -> Iterator[Any]:
    """The handle of a safetensors file; FormatError for what is wrong with it, and unless it is a regular file."""
    open_regular(path).close()
    try:
        with safe_open(os.fspath(path), framework="pt", device=device) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{path}: is truncated, damaged or not a safetensors file ({brief(error)}). Download or save it again."
        ) from error


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a downloaded file; FormatError if it cannot be read, is too large, or is not UTF-8."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8 text ({error.reason}).") from error


def parse_json(where: Path | str, text: str) -> Any:
    """The JSON value of a text; ``where`` begins the message of a FormatError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 4,301 digits is a ValueError
        raise FormatError(f"{where} is not JSON ({brief(error)}).") from error


def parse_json_object(where: Path | str, text: str) -> dict[str, Any]:
    """The JSON object that a downloaded file holds as ``text``; FormatError if it holds anything else."""
    try:
        content = parse_json(f"{where}:", text)
    except FormatError as error:
        raise FormatError(f"{str(error).removesuffix('.')}; download it again.") from error
    if not isinstance(content, dict):
        raise FormatError(f"{where}: expected a JSON object, found {type(content).__name__}. Download it again.")
    _check_depth(where, content)
    return content


def _check_depth(where: Path | str, content: dict[str, Any]) -> None:
    """FormatError for nesting that would be too deep for Python's stack wherever it is shown, compared or written."""
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        values = (value for node in level for value in (node.values() if isinstance(node, dict) else node))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise FormatError(f"{where}: is nested more than {MAX_DEPTH} deep, as no such file is. Download it again.")


def read_json(path: Path) -> Any:
    """The JSON value of a whole file; FormatError if it cannot be read, is too large or is none."""
    return parse_json(f"{path}:", read_text(path, MAX_JSON))


def read_json_object(path: Path, most: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a downloaded file; FormatError if it cannot be read, is too large or holds anything else."""
    return parse_json_object(path, read_text(path, most))


def read_sealed(path: Path) -> dict[str, Any]:
    """The JSON object that `write_sealed` wrote; FormatError if it cannot be read, or was changed since."""
    fields = read_json_object(path, MAX_JSON)
    if fields.pop("sha256", None) != sha256_of_json(fields):
        raise FormatError(f"{path}: does not have its checksum: it was changed.")
    return fields


def cache_folder() -> Path:
    """Where codd keeps what it can make again; RuntimeError if the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "codd"


def sha256(path: Path) -> str:
    """The digest of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(value: object) -> str:
    """The digest of a JSON value, whatever the order of the keys in it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sha256_of(text: str, tensors: Mapping[str, Tensor]) -> str:
    """The digest of a text and of the bytes of contiguous tensors on the CPU, in the order of their names."""
    digest = hashlib.sha256(text.encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def write_sealed(path: Path, fields: Mapping[str, Any]) -> None:
    """A JSON object with its digest, that is on the disk when this returns."""
    sealed = {**fields, "sha256": sha256_of_json(fields)}
    write_text(path, json.dumps(sealed, indent=2) + "\n")


def sync_folder(folder: Path) -> None:
    """Make renames in it last through a power failure, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
