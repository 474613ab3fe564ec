import errno
import hashlib
import json
import os
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from codd import files
from codd.circuits.storage import CONFIG_FILE, PYJUICE_FILES, WEIGHTS_FILE, read_folder, write_folder
from codd.errors import FormatError, MissingDependency

CONFIG = {"kind": "hmm", "states": 3, "note": "päper", "nested": {"a": [1, 2.5, None, True]}}


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "initial": torch.rand(3, generator=generator),
        "transition": torch.rand(3, 3, generator=generator, dtype=torch.float64),
        "emission": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "half": torch.randn(2, generator=generator).half(),
        "ids": torch.arange(4),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(0, 3, 3),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "circuit", CONFIG, make_tensors())


def test_round_trip_is_bit_identical(tmp_path):
    tensors = make_tensors()
    tensors["emission"][0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    folder = write_folder(tmp_path / "new" / "circuit", CONFIG, tensors)
    assert names(folder) == [WEIGHTS_FILE, CONFIG_FILE]
    config, found = read_folder(folder)
    assert config == CONFIG
    assert_same(found, tensors)
    assert_same(read_folder(str(folder), device=torch.device("cpu"))[1], tensors)


def test_config_json_describes_the_weights(folder):
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config["format"] == "codd-circuit"
    assert config["format_version"] == 1
    assert config["sha256"] == hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    assert config["tensors"]["emission"] == {"shape": [3, 5], "dtype": "bfloat16"}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        described = json.loads(file.metadata()["codd_config"])
    own, of_the_file = described.pop("sha256"), config.pop("sha256")
    assert described == config
    assert own == files.sha256_of(json.dumps(described), make_tensors())
    assert own != of_the_file


def test_views_gradients_and_shared_memory_are_stored_by_value(tmp_path):
    base = torch.rand(4, 6, requires_grad=True)
    tensors = {"whole": base, "row": base[1], "transposed": base.T, "again": base, "wide": torch.ones(1).expand(5)}
    _, found = read_folder(write_folder(tmp_path, {}, tensors))
    assert_same(found, {name: tensor.detach() for name, tensor in tensors.items()})


def test_files_are_as_readable_as_other_new_files(folder):
    plain = folder.parent / "plain"
    plain.touch()
    assert {os.stat(folder / name).st_mode for name in (WEIGHTS_FILE, CONFIG_FILE)} == {plain.stat().st_mode}


@pytest.mark.parametrize("key", ["format", "format_version", "tensors", "sha256"])
def test_reserved_keys_are_refused(tmp_path, key):
    with pytest.raises(FormatError, match=key):
        write_folder(tmp_path / "x", {key: 1}, {})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("config", [{"x": object()}, {"x": float("nan")}])
def test_config_that_json_cannot_hold_leaves_nothing(tmp_path, config):
    with pytest.raises((TypeError, ValueError)):
        write_folder(tmp_path / "x", config, make_tensors())
    assert not (tmp_path / "x").exists()


def break_replace(monkeypatch, after: int) -> None:
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) > after:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("config", [CONFIG, {"kind": "new"}])
def test_kill_between_the_replaces_gives_the_new(folder, monkeypatch, config):
    break_replace(monkeypatch, 1)
    tensors = make_tensors(1) | {"extra": torch.ones(1)}
    with pytest.raises(KeyboardInterrupt):
        write_folder(folder, config, tensors)
    found_config, found = read_folder(folder)
    assert found_config == config
    assert_same(found, tensors)
    assert names(folder) == [WEIGHTS_FILE, CONFIG_FILE]


def test_kill_between_the_replaces_of_a_fresh_folder_does_not_look_complete(tmp_path, monkeypatch):
    break_replace(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path, CONFIG, make_tensors())
    with pytest.raises(FormatError, match=r"config\.json: is missing.*interrupted"):
        read_folder(tmp_path)
    assert names(tmp_path) == [WEIGHTS_FILE]


def fail_with(code: int):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("name", ["write_weights", "write_text", "sha256", "save_file", "os.fsync", "os.replace"])
def test_a_full_disk_or_forbidden_write_keeps_the_old(folder, monkeypatch, name, code):
    owner, attribute = (os, name.split(".")[1]) if "." in name else (files, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, fail_with(code))
        with pytest.raises(OSError, match=os.strerror(code)):
            write_folder(folder, {"kind": "new"}, make_tensors(1))
    config, found = read_folder(folder)
    assert config == CONFIG
    assert_same(found, make_tensors())
    assert names(folder) == [WEIGHTS_FILE, CONFIG_FILE]


def test_safetensors_own_write_error_is_an_oserror(tmp_path, monkeypatch):
    def save(tensors, path, metadata):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(files, "save_file", save)
    with pytest.raises(OSError, match=r"could not be written: .*No space"):
        write_folder(tmp_path, CONFIG, make_tensors())
    assert names(tmp_path) == []


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_flipped_bit_is_noticed(folder, interrupted):
    if interrupted:  # config.json is of the circuit before
        write_folder(folder.parent / "new", CONFIG, make_tensors(1))
        (folder.parent / "new" / WEIGHTS_FILE).replace(folder / WEIGHTS_FILE)
        assert_same(read_folder(folder)[1], make_tensors(1))
    flip(folder / WEIGHTS_FILE, -2)
    with pytest.raises(FormatError, match=r"circuit\.safetensors: is damaged: its bytes are not those that were saved"):
        read_folder(folder)
    assert read_folder(folder, check=False)[0] == CONFIG


def test_circuits_without_digests_of_their_own(folder):
    """As codd 1 wrote them: the digest is in config.json alone, or nowhere."""
    tensors, path = make_tensors(), folder / CONFIG_FILE
    config = json.loads(path.read_text())
    described = {key: value for key, value in config.items() if key != "sha256"}
    save_file(files.standalone(tensors), folder / WEIGHTS_FILE, metadata={"codd_config": json.dumps(described)})
    with pytest.raises(FormatError, match="is damaged"):
        read_folder(folder)
    for stated in ({"sha256": files.sha256(folder / WEIGHTS_FILE)}, {}):
        path.write_text(json.dumps({**described, **stated}))
        assert_same(read_folder(folder)[1], tensors)


def removed(name: str):
    return lambda folder: (folder / name).unlink()


def cut_off(name: str, size: int):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def piped(name: str):
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def holding(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def edited(**changes: object):
    def change(folder: Path) -> None:
        path = folder / CONFIG_FILE
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def saved(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None):
    return lambda folder: save_file(tensors, folder / WEIGHTS_FILE, metadata=metadata)


def with_tensors(change):
    """Other tensors than those that the metadata lists."""

    def save(folder: Path) -> None:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            metadata = file.metadata()
        tensors = {name: tensor.clone() for name, tensor in make_tensors().items()}
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE, metadata=metadata)

    return save


FUTURE = {"codd_config": json.dumps({"format": "codd-circuit", "format_version": 9})}
TEXTS = ("[]", "3", "null", '"x"', "[" * 100_000, "{nan}", "\ud800")
BROKEN = [
    (removed(CONFIG_FILE), "config.json: is missing"),
    (removed(WEIGHTS_FILE), "circuit.safetensors: is missing"),
    *((cut_off(WEIGHTS_FILE, size), "circuit.safetensors: is truncated") for size in (0, 7, 41, 500, -1)),
    *((cut_off(CONFIG_FILE, size), "config.json: is not JSON") for size in (0, 7, 200, -3)),
    (piped(CONFIG_FILE), "config.json: cannot be read"),
    (piped(WEIGHTS_FILE), "circuit.safetensors: is missing"),
    *((holding(WEIGHTS_FILE, x), "not a safetensors file") for x in (b"not a file", b"\x80\x04.", b"\xff" * 64)),
    (saved({"weight": torch.ones(2)}, None), "something else"),
    (saved({"weight": torch.ones(2)}, {"format": "pt"}), "something else"),
    (saved({}, FUTURE), "metadata.*version 9"),
    (edited(format=None), "not of a codd circuit"),
    (edited(format="other"), "not of a codd circuit"),
    *((edited(format_version=x), "no format_version") for x in (None, "1", True)),
    (edited(format_version=2), "version 2.*Upgrade codd"),
    (edited(tensors=None), "does not list its tensors"),
    (edited(tensors=[1]), "does not list its tensors"),
    (edited(states=4), "was changed after"),
    (edited(tensors={}), "was changed after"),
    *((holding(CONFIG_FILE, text.encode(errors="surrogatepass")), "config.json") for text in TEXTS),
    (with_tensors(lambda tensors: tensors.pop("ids")), r"lacks the tensor\(s\) ids"),
    (with_tensors(lambda tensors: tensors.update(b=torch.ones(2))), r"has the tensor\(s\) b"),
    (with_tensors(lambda tensors: tensors.update(ids=torch.arange(5))), r"'shape': \[5\]"),
    (with_tensors(lambda tensors: tensors.update(ids=torch.ones(4).double())), "float64"),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN)
def test_a_damaged_folder_is_refused(folder, damage, words):
    damage(folder)
    with pytest.raises(FormatError, match=words):
        read_folder(folder)


def test_no_such_folder_and_not_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout may have a neighbour of the name ../b
    for path in (
        tmp_path / "nothing",
        str(tmp_path / "nothing"),
        "nothing",
        "a/b/c",
        "a//b",
        "../b",
        Path("user/name"),
    ):
        with pytest.raises(FormatError, match="no such folder, and this is not"):
            read_folder(path)


def test_a_file_is_not_a_folder(folder):
    with pytest.raises(FormatError, match="is a file"):
        read_folder(folder / CONFIG_FILE)


def test_unknown_hub_id_offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        FormatError, match=r"'codd-tests/no-such': there is no such folder here.*LocalEntryNotFoundError"
    ):
        read_folder("codd-tests/no-such", revision="main")


@pytest.mark.parametrize("error", [ConnectionError("unreachable"), ValueError("odd"), RuntimeError()])
def test_errors_of_the_hub_are_wrapped(monkeypatch, error):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FormatError, match=type(error).__name__) as caught:
        read_folder("user/name")
    assert caught.value.__cause__ is error


def test_a_hub_id_is_downloaded(monkeypatch, folder):
    asked = {}

    def download(repo_id, **kwargs):
        asked.update(repo_id=repo_id, **kwargs)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config, found = read_folder("user/name", revision="v1")
    assert config == CONFIG
    assert_same(found, make_tensors())
    names = [CONFIG_FILE, WEIGHTS_FILE, *PYJUICE_FILES]
    assert asked == {"repo_id": "user/name", "revision": "v1", "allow_patterns": names}


def test_a_local_folder_comes_before_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    write_folder("user/name", CONFIG, make_tensors())
    assert read_folder("user/name")[0] == CONFIG


def test_missing_hub_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"pip install codd-lm\[hub\]"):
        read_folder("user/name")
