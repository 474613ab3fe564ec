import json
from pathlib import Path

import pytest
import torch

from codd.circuits import HMM, Evidence
from codd.cli import main
from tests.support import FIXTURES
from tests.support.cli import refused

SOURCE = FIXTURES / "hmm" / "hmm_n16.jpc"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_round_trip(tmp_path, capsys):
    assert main(["convert", str(SOURCE), str(tmp_path / "a" / "circuit"), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    report = json.loads(printed.out)
    written, source = HMM.load(tmp_path / "a" / "circuit"), HMM.from_pyjuice(SOURCE)
    assert torch.equal(written.log_initial, source.log_initial)
    assert torch.equal(written.log_transition, source.log_transition)
    assert torch.equal(written.log_emission, source.log_emission)
    folder = tmp_path / "a" / "circuit"
    assert report == {
        "input": str(SOURCE),
        "output": str(folder),
        "num_states": 16,
        "vocab_size": 50,
        "window": 8,
        "homogeneous": True,
        "emission_dtype": "float32",
        "bytes_in": SOURCE.stat().st_size,
        "bytes_out": sum(path.stat().st_size for path in folder.iterdir()),
        "pickle_executed": False,
    }


def test_bfloat16_is_smaller_and_close(tmp_path, capsys):
    assert main(["convert", str(SOURCE), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    written, source = HMM.load(tmp_path / "half"), HMM.from_pyjuice(SOURCE)
    assert written.emission.compact
    ids = torch.arange(8)[None]
    torch.testing.assert_close(written.log_prob(ids), source.log_prob(ids), atol=8 * 0.004, rtol=0)


def test_bfloat16_rows_that_round_badly_load_again(tmp_path, monkeypatch):
    thirds = torch.tensor([[1 / 3, 2 / 3]])
    found = HMM(torch.zeros(1), torch.zeros(1, 1), thirds.log())
    monkeypatch.setattr(HMM, "from_pyjuice", lambda path: found)
    assert main(["convert", str(SOURCE), str(tmp_path), "--dtype", "bfloat16"]) == 0
    assert HMM.load(tmp_path).vocab_size == 2


@pytest.mark.parametrize("path", sorted((FIXTURES / "malicious").glob("*.jpc")), ids=lambda path: path.stem)
def test_a_malicious_file_creates_nothing(path, tmp_path, capsys):
    assert refused(capsys, "convert", path, tmp_path / "out").startswith(f"codd: {path}")
    assert names(tmp_path) == []


@pytest.mark.parametrize("content", [None, b"", b"garbage", SOURCE.read_bytes()[:3000]])
def test_missing_and_damaged_files(content, tmp_path, capsys):
    source = tmp_path / "model.jpc"
    if content is not None:
        source.write_bytes(content)
    assert refused(capsys, "convert", source, tmp_path / "out").startswith(f"codd: {source}")
    assert not (tmp_path / "out").exists()


def test_an_existing_circuit_is_replaced_only_when_told(tmp_path, capsys):
    old = HMM.random(2, 3)
    old.save(tmp_path)
    assert "--force" in refused(capsys, "convert", SOURCE, tmp_path)
    assert HMM.load(tmp_path).num_states == 2
    assert main(["convert", str(SOURCE), str(tmp_path), "--force"]) == 0
    assert HMM.load(tmp_path).num_states == 16
    assert names(tmp_path) == ["circuit.safetensors", "config.json"]


def test_a_damaged_circuit_can_be_replaced(tmp_path):
    HMM.random(2, 3).save(tmp_path)
    (tmp_path / "config.json").write_text('{"format": ')
    assert main(["convert", str(SOURCE), str(tmp_path), "--force"]) == 0
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert HMM.load(tmp_path).log_partition(Evidence(tokens=ids)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "content", "out", "words"),
    [("config.json", '{"model_type": "llama"}', "", "not a circuit"), ("file", "mine", "file", "is a file")],
)
def test_what_is_something_else_is_never_replaced(tmp_path, capsys, name, content, out, words):
    (tmp_path / name).write_text(content)
    assert words in refused(capsys, "convert", SOURCE, tmp_path / out, "--force")
    assert (tmp_path / name).read_text() == content
