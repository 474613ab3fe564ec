import json
from typing import Any

import pytest
import torch

from codd import files
from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated, storage
from codd.cli import main
from tests.support import FIXTURES, cli
from tests.support.cli import printed_json


def described(capsys, *arguments: object, code: int = 0) -> dict[str, Any]:
    return printed_json(capsys, "info", *arguments, code=code)


def refused(capsys, *arguments: object) -> str:
    return cli.refused(capsys, "info", *arguments)


def test_a_circuit(tmp_path, capsys):
    HMM.random(4, 7).save(tmp_path)
    found = described(capsys, tmp_path)
    assert found == {
        "path": str(tmp_path),
        "kind": "hmm",
        "num_states": 4,
        "vocab_size": 7,
        "window": None,
        "homogeneous": True,
        "parameters": 4 + 16 + 28,
        "tables": {
            "log_emission": "float32 4x7",
            "log_initial": "float32 4",
            "log_transition": "float32 4x4",
        },
        "bytes": sum(path.stat().st_size for path in tmp_path.iterdir()),
        "format_version": 1,
        "sha256": json.loads((tmp_path / "config.json").read_text())["sha256"],
        "sha256_matches": True,
    }
    assert main(["info", str(tmp_path)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert lines["tables"] == "log_emission float32 4x7, log_initial float32 4, log_transition float32 4x4"
    assert (lines["num_states"], lines["window"], lines["homogeneous"]) == ("4", "none", "yes")


THIN = HMM.from_factors(Factors.near_neutral(4, 7, transition_rank=2, emission_rank=3), window=8)
MODULATED = Modulated(
    HMM.from_factors(Factors.near_neutral(4, 7, inner_states=2), window=8), Head(HeadConfig(6, 4, 2, 5))
)
HEAD = {"features": 6, "states": 4, "inner_states": 2, "hidden": 5, "dropout": 0.0}
WEIGHTS = sum(x.numel() for x in (*MODULATED.head.state_dict().values(), *MODULATED.hmm.stored().values()))
LAYOUTS = {
    "positions": (HMM.random(4, 7, rank=2, length=3), {"window": 3, "homogeneous": False}),
    "thin": (THIN, {"kind": "hmm", "num_states": 4, "window": 8, "parameters": 4 + 2 * (4 + 4) + 3 * (4 + 7) + 7}),
    "modulated": (MODULATED, {"kind": "modulated", "num_states": 4, "head": HEAD, "parameters": WEIGHTS}),
    "graph": (HMM.random(2, 3, seed=1).as_circuit(4), {"kind": "graph", "vocab_size": 3, "window": 4}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_other_layouts(name, tmp_path, capsys):
    circuit, stated = LAYOUTS[name]
    circuit.save(tmp_path)
    found = described(capsys, tmp_path, "--check")
    assert found.items() >= stated.items()
    assert found["checked"] is True
    assert found["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_the_types_of_tables(tmp_path, capsys):
    HMM.random(4, 300).to(emission=torch.bfloat16).save(tmp_path)
    assert described(capsys, tmp_path)["tables"]["emission"] == "bfloat16 4x300"
    THIN.save(tmp_path, half=True)
    assert {shape.split()[0] for shape in described(capsys, tmp_path)["tables"].values()} == {"float16"}
    config, tensors = storage.read_folder(tmp_path)
    storage.write_folder(tmp_path, config, {**tensors, "emission_bias": torch.zeros(6)})
    assert "emission_bias must be (7,), found (6,)" in refused(capsys, tmp_path)


def test_a_jpc(capsys):
    path = FIXTURES / "hmm" / "hmm_nonhom.jpc"
    found = described(capsys, path)
    assert found == {
        "path": str(path),
        "kind": "pyjuice-hmm",
        "num_states": 8,
        "vocab_size": 30,
        "window": 5,
        "homogeneous": False,
        "leaf_class": "Categorical",
        "parameters": 8 + 4 * 64 + 5 * 240,
        "tables": {"initial": "float32 8", "transition": "float32 4x8x8", "emission": "float32 5x8x30"},
        "bytes": path.stat().st_size,
    }
    assert described(capsys, path, "--check") == {**found, "checked": True}


def test_weights_that_do_not_belong_to_the_configuration(tmp_path, capsys):
    HMM.random(4, 7, seed=0).save(tmp_path / "a")
    HMM.random(4, 7, seed=1).save(tmp_path / "b")
    (tmp_path / "b" / "circuit.safetensors").replace(tmp_path / "a" / "circuit.safetensors")
    assert described(capsys, tmp_path / "a", code=1)["sha256_matches"] is False
    assert main(["info", str(tmp_path / "a")]) == 1
    assert "DOES NOT MATCH" in capsys.readouterr().out


def test_a_hub_id_is_asked_for_its_configuration_first(tmp_path, capsys, monkeypatch):
    HMM.random(4, 7).save(tmp_path)
    asked = []
    monkeypatch.setattr(files, "_download", lambda repo_id, wanted, revision: asked.append(wanted) or tmp_path)
    found = described(capsys, "someone/circuit")
    assert (found["path"], found["num_states"], found["sha256_matches"]) == ("someone/circuit", 4, True)
    assert asked == [
        ("config.json", "adapter_config.json"),
        ("config.json", "circuit.safetensors", *storage.PYJUICE_FILES),
    ]


def test_check_of_a_circuit(tmp_path, capsys):
    HMM.random(4, 7).save(tmp_path)
    assert described(capsys, tmp_path, "--check")["checked"] is True
    config, tensors = storage.read_folder(tmp_path)
    tensors["log_emission"][2, 3] = float("nan")
    storage.write_folder(tmp_path, config, tensors)
    message = refused(capsys, tmp_path)
    assert f"{tmp_path / 'circuit.safetensors'}: row 2 of log_emission holds NaN" in message
    assert "save or download" in message


def test_something_else(tmp_path, capsys):
    assert "there is no such folder" in refused(capsys, tmp_path / "nowhere")
    assert "No such file" in refused(capsys, "some/where.jpc")
    (tmp_path / "notes.txt").write_text("notes")
    assert "is a file; expected a circuit folder" in refused(capsys, tmp_path / "notes.txt")
    assert "is a folder, but not of a circuit" in refused(capsys, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llada\\u001b[2J"}')
    assert "model_type 'llada\\x1b[2J' is of no family that codd knows" in refused(capsys, tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    assert f"{tmp_path / 'config.json'}: expected a JSON object" in refused(capsys, tmp_path)


def test_beside_a_circuit_it_is_said_where_it_is(tmp_path, capsys):
    HMM.random(4, 7).save(tmp_path / "inner")
    assert f"give one inside it: codd info {tmp_path / 'inner'}" in refused(capsys, tmp_path)
    file = tmp_path / "inner" / "circuit.safetensors"
    assert f"give the folder: codd info {tmp_path / 'inner'}" in refused(capsys, file)


def test_an_adapter(tmp_path, capsys):
    from safetensors.torch import save_file

    module = "base_model.model.model.layers.0.self_attn.q_proj."
    tensors = {module + "lora_A.weight": torch.ones(4, 6), module + "lora_B.weight": torch.ones(5, 4)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "use_rslora": True}
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**stated, "base_model_name_or_path": "GSAI-ML/LLaDA-8B-Instruct"}))
    found = described(capsys, tmp_path, "--check")
    assert (found["kind"], found["base"]) == ("adapter", "GSAI-ML/LLaDA-8B-Instruct")
    assert (found["rank"], found["alpha"], found["rank_stabilised"], found["dora"]) == (4, 8.0, True, False)
    assert (found["tensors"], found["parameters"], found["checked"]) == (2, 44, True)
    assert found["target_modules"] == ["v_proj", "q_proj"]
    save_file(
        {**tensors, module + "lora_A.weight": torch.full((4, 6), torch.nan)}, tmp_path / "adapter_model.safetensors"
    )
    assert "q_proj.lora_A.weight has NaN" in refused(capsys, tmp_path, "--check")
    config.write_text(json.dumps({**stated, "peft_type": "LOHA"}))
    assert "not peft_type 'LOHA'" in refused(capsys, tmp_path)
