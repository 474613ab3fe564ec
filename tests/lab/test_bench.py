import pytest
import torch

from codd.backbones.loading import BUNDLED
from codd.cli import main
from tests.support.cli import printed_json, refused

SMALL = ["--gen-length", "2", "--steps", "1", "--rounds", "2", "--device", "cpu", "--circuit", "static"]


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_json(capsys):
    report = printed_json(capsys, "bench", "--seed", "3", "--threads", "1", *SMALL)
    assert set(report["samplers"]) == {"network alone", "latent sampler", "any-order sampler"}
    for name, row in report["samplers"].items():
        assert 0 < row["ms_a_step"]["low"] <= row["ms_a_step"]["median"] <= row["ms_a_step"]["high"]
        if name == "network alone":
            assert row["ratio"] is None
        else:
            assert 0 < row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    chosen = report["settings"]
    assert (chosen["steps"], chosen["gen_length"], chosen["rounds"], chosen["seed"]) == (1, 2, 2, 3)
    assert "HMM(num_states=1024" in chosen["circuit"]
    assert (report["provenance"]["device"], report["provenance"]["threads"]) == ("cpu", 1)


def test_int8_weights(int8_cpu, capsys):
    report = printed_json(capsys, "bench", "--quantize", "int8", *SMALL, "--rounds", "1")
    assert report["provenance"]["dtype"] == "float32 and int8"


def test_table(capsys):
    assert main(["bench", *SMALL, "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    words = ("network alone", "latent sampler", "any-order sampler", "ms a step", "times")
    assert all(word in printed for word in words)
    assert "2 tokens in 1 steps, 1 rounds" in printed


def test_a_model_without_circuit(tmp_path, capsys):
    for file in BUNDLED.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    message = refused(capsys, "bench", "--model", tmp_path, "--device", "cpu")
    assert f"{tmp_path} has no circuit of its own: name one with --circuit" in message


@pytest.mark.parametrize("argument", ["--steps", "--rounds", "--threads", "--gen-length"])
def test_counts_are_positive(argument, capsys):
    assert main(["bench", argument, "0"]) == 2
    assert "must be at least 1, found 0" in capsys.readouterr().err
