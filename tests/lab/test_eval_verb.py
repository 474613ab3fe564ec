import json

import pytest

from codd.backbones import adapters, load_checkpoint
from codd.cli import main
from codd.training.circuit.joint import trainable
from codd_lab.runs import Run

pytest.importorskip("lm_eval")
QUICK = ["--tasks", "word_problems", "--problems", "3", "--gen-length", "16", "--block-length", "16", "--steps", "2"]


def test_a_grid_with_its_control(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["eval", *QUICK, "--circuit", "static", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "word_problems, 3 problems" in shown
    assert "null circuit" in shown
    assert [result.config.circuit for result in Run(out).results()] == ["null", "static"]
    assert main(["eval", *QUICK, "--circuit", "static", "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    [pair] = found["comparisons"]
    assert (pair["circuit"], pair["problems"]) == ("static", 3)
    assert {entry["circuit"] for entry in found["measures"]["aup"]} == {"null", "static"}
    for entry, result in zip(found["measures"]["speed"], Run(out).results(), strict=True):
        assert entry["tokens_per_forward"] == pytest.approx(result.tokens / result.calls)
        assert entry["tokens_per_second"] > 0
    assert main(["report", str(out), "--no-png"]) == 0
    assert "word_problems" in (out / "report.html").read_text()


def test_tuning_chooses_on_validation_and_reports_on_test(tmp_path):
    out = tmp_path / "run"
    extra = ["--circuit", "null", "--circuit-temperature", "1,0.5", "--tune", "2"]
    assert main(["eval", *QUICK, *extra, "--out", str(out)]) == 0
    splits = [(result.config.split, result.problems) for result in Run(out).results()]
    assert sorted(splits) == [("test", 3), ("validation", 2), ("validation", 2)]


def test_stages_of_a_model_with_an_adapter(tmp_path, capsys):
    network = load_checkpoint(device="cpu").backbone
    trainable(network, "lora", 2, 0)
    folder = str(adapters.save(network, tmp_path / "adapter", "bundled"))
    out = ["--adapter", folder, "--out", str(tmp_path / "run")]
    assert main(["eval", *QUICK, "--circuit", "none", "--stage", "prepare", "--device", "cpu", *out]) == 0
    assert Run(tmp_path / "run").results() == []
    assert main(["eval", "--stage", "answer", "--device", "cpu", *out]) == 0
    assert main(["eval", "--stage", "score", *out]) == 0
    [result] = Run(tmp_path / "run").results()
    assert (result.problems, result.config.model) == (3, f"bundled + {folder}")
    assert "network alone" in capsys.readouterr().out


def test_a_model_with_int8_weights(int8_cpu, tmp_path):
    out = ["--quantize", "int8", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(["eval", *QUICK, "--circuit", "none", "--stage", "prepare", *out]) == 0
    [config] = Run(tmp_path / "run").configs()
    assert (config.model, config.dtype) == ("bundled + int8", "float32 and int8")


def test_one_latent_path_is_run_by_steps_only(tmp_path, capsys):
    ways = ["--circuit", "null", "--sampler", "latent,any_order", "--threshold", "0.9", "--stage", "prepare"]
    assert main(["eval", *QUICK, *ways, "--out", str(tmp_path / "run")]) == 0
    assert "sampler latent is left out but by steps" in " ".join(capsys.readouterr().err.split())
    configs = [(config.options["sampler"], config.budget) for config in Run(tmp_path / "run").configs()]
    assert sorted(configs) == [("any_order", "2 steps"), ("any_order", "threshold 0.9"), ("latent", "2 steps")]


def test_cost_heeds_mode_and_activation(tmp_path):
    """One step cannot fill two blocks, but everything at once."""
    small = ["--steps", "1", "--circuit", "static", "--gen-length", "8", "--block-length", "4", "--studies", "cost"]
    assert main(["eval", *small, "--out", str(tmp_path / "blocks")]) == 1
    full = ["--mode", "full", "--activation", "0.5", "--sampler", "any_order"]
    assert main(["eval", *small, *full, "--out", str(tmp_path / "full")]) == 0
    found = Run(tmp_path / "full").studies()["cost"]
    assert found["settings"]["options"] == {"mode": "full", "activation": 0.5, "block_length": 4}
    assert [row["way"] for row in found["data"]["rows"]] == ["factorized", "any order"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "there is nothing to do"),
        (["--studies", "cost", "--threshold", "0.9"], "give --steps, not --threshold"),
        (["--studies", "cost", "--mode", "full,block"], "one value of --mode, found 2"),
        (["--studies", "gap", "--text", "no/such.txt"], "'no/such.txt' is not a corpus of this study"),
        (["--studies", "weather"], "there is no study 'weather'"),
        (["--studies", "gap"], "give their folder with --data"),
        (["--tasks", "gsm8k", "--data", "/no/such"], "there is no such folder"),
        (["--tasks", "books_text", "--circuit", "none", "--steps", "1"], "need its texts"),
        (["--tasks", "word_problems", "--sampler", "latent", "--threshold", "0.9"], "or give steps."),
        (["--tasks", "word_problems", "--dtype", "int3"], "dtype must be a floating-point type (float32,"),
        (["--stage", "answer"], "no folder of an evaluation"),
        (["--tasks", "../../../evil", "--circuit", "none"], "the task '../../../evil' can be no folder's name"),
        (["--tasks", "word_problems", "--templates", "rude"], "there is no template 'rude'"),
        (["--tasks", "word_problems", "--templates", "plain,plain"], "two templates have the name 'plain'"),
        (["--tasks", "word_problems", "--templates", "no/such.yaml"], "no/such.yaml"),
        (["--tasks", "books_text", "--templates", "plain"], "asks no question"),
        (["--studies", "cost", "--templates", "plain"], "--templates are for questions"),
        (["--task-file", "none.jsonl"], "none.jsonl"),
        (["--task-file", "gsm8k.jsonl"], "gsm8k is the name of another task"),
        (["--tasks", "word_problems", "--answer-rule", "exact"], "--answer-rule is for a --task-file"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, extra, message):
    assert main(["eval", *extra, "--out", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--steps", "8,many"], "steps"),
        (["--seed", "-3"], "--seed: must be from 0 to 9223372036854775807, found -3"),
        (["--seed", str(2**63)], f"--seed: must be from 0 to 9223372036854775807, found {2**63}"),
    ],
)
def test_values_are_checked_while_they_are_read(tmp_path, capsys, wrong, said):
    out = tmp_path / "run"
    assert main(["eval", *QUICK, "--circuit", "none", *wrong, "--out", str(out)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()
