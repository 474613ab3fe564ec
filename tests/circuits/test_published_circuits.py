"""PyJuice's circuits as they are published: a .jpc in a folder or repository is read wherever a circuit is named."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

import codd
from codd.errors import FormatError
from tests.support import FIXTURES

SOURCE = FIXTURES / "hmm" / "hmm_n16.jpc"


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
def test_a_file_and_a_folder(published, name):
    (published / "model.jpc").rename(published / name)
    (published / "config.json").write_text('{"model_type": "llada"}')  # of the network beside it
    expected = codd.HMM.from_pyjuice(SOURCE)
    for found in (codd.load_circuit(published), codd.HMM.load(published), codd.load_circuit(published / name)):
        assert_same(found, expected)
    with pytest.raises(FormatError, match="type 'hmm', expected 'modulated'"):
        codd.Modulated.load(published)


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
