"""PyJuice's circuits as they are published: a .jpc in a folder or repository is read wherever a circuit is named."""

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

import codd
from codd.circuits.storage import CONFIG_FILE, WEIGHTS_FILE
from codd.errors import CoddError, FormatError
from tests.support import FIXTURES

SOURCE = FIXTURES / "hmm" / "hmm_n16.jpc"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "codd" / "circuits"


@pytest.fixture
def published(tmp_path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    shutil.copy(SOURCE, folder / "model.jpc")
    return folder


def assert_same(hmm: object, other: codd.HMM) -> None:
    assert isinstance(hmm, codd.HMM)
    assert hmm.window == other.window
    ids = torch.randint(other.vocab_size, (3, 4), generator=torch.Generator().manual_seed(0))
    assert torch.equal(hmm.log_prob(ids), other.log_prob(ids))


@pytest.mark.parametrize("name", ["model.jpc", "pc_model.jpc"])
def test_a_folder_is_converted_once(published, cache, name):
    (published / "model.jpc").rename(published / name)
    (published / "config.json").write_text('{"model_type": "llada"}')  # of the network beside it
    expected = codd.HMM.from_pyjuice(SOURCE)
    assert_same(codd.load_circuit(published), expected)
    [kept] = cache.iterdir()
    before = (kept / WEIGHTS_FILE).stat().st_mtime_ns
    assert_same(codd.HMM.load(published), expected)
    assert_same(codd.load_circuit(published / name), expected)
    assert [kept] == list(cache.iterdir())
    assert (kept / WEIGHTS_FILE).stat().st_mtime_ns == before


@pytest.mark.parametrize("name", [WEIGHTS_FILE, CONFIG_FILE])
@pytest.mark.parametrize("content", [None, b"", b"{}", "half", "flipped", "edited"])
def test_a_damaged_conversion_is_made_again(published, cache, name, content):
    expected = codd.load_circuit(published)
    [kept] = cache.iterdir()
    good = {path.name: path.read_bytes() for path in kept.iterdir()}
    bytes_of = {
        "half": good[name][: len(good[name]) // 2],
        "flipped": good[name][:-3] + b"\1" + good[name][-2:],
        "edited": good[name].replace(b"hmm", b"hmn"),
    }
    (kept / name).unlink()
    if content is not None:
        (kept / name).write_bytes(bytes_of.get(content, content) if isinstance(content, str) else content)
    assert_same(codd.load_circuit(published), expected)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == good


def test_a_repository(published, monkeypatch):
    asked = []

    def download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision, allow_patterns))
        return str(published)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_same(codd.load_circuit("il18/llada-math-pc", revision="main"), codd.HMM.from_pyjuice(SOURCE))
    [(repo_id, revision, patterns)] = asked
    assert (repo_id, revision) == ("il18/llada-math-pc", "main")
    assert "model.jpc" in patterns


def test_a_circuit_of_ours_comes_first(published):
    ours = codd.HMM.random(3, 5, seed=1)
    ours.save(published)
    assert_same(codd.load_circuit(published), ours)


def test_another_file_is_another_circuit(published, cache):
    codd.load_circuit(published)
    shutil.copy(FIXTURES / "hmm" / "hmm_n12.jpc", published / "model.jpc")
    assert_same(codd.load_circuit(published), codd.HMM.from_pyjuice(FIXTURES / "hmm" / "hmm_n12.jpc"))
    assert len(list(cache.iterdir())) == 2


def test_malicious_files_are_refused_and_leave_nothing(published, cache):
    shutil.copy(next((FIXTURES / "malicious").glob("*.jpc")), published / "model.jpc")
    with pytest.raises(FormatError):
        codd.load_circuit(published)
    assert not cache.exists() or not list(cache.iterdir())


def test_where_nothing_can_be_kept(published, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    with pytest.raises(CoddError, match="XDG_CACHE_HOME"):
        codd.load_circuit(published)
